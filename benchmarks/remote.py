"""What reading all tasks of a process costs, beside thread dumps of the same process by py-spy.

A target runs N tasks on one loop, four frames deep each: a third wait in ``queue.get``, a third for
a lock that somebody holds, a third in ``sleep``. *First* is a fresh reader: find the runtime, prove
the layout, read everything, verify it, explain it, and find the deadlocks. *Again* is a second
reading by the same reader. CPU and wall time exclude the start of the interpreter for ours and
include that of the program for py-spy, as each is used. The *gap* is the longest time between two
wake-ups of a thread in the target that sleeps half a millisecond at a time: *nobody* is the floor.

py-spy shows threads, not tasks: its rows say what the price of a dump is, not that it is the same.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

SIZES = (300, 5_000, 50_000)
ROUNDS = 5

TARGET = """
import asyncio, sys, threading, time

gap = 0.0

def meter():
    global gap
    last = time.perf_counter()
    while True:
        time.sleep(0.0005)
        now = time.perf_counter()
        gap = max(gap, now - last)
        last = now

def answer():
    global gap
    for line in sys.stdin:
        if line == "reset\\n":
            gap = 0.0
        print(gap * 1000, flush=True)

async def down(depth, leaf):
    if depth:
        await down(depth - 1, leaf)
    else:
        await leaf()

async def main(count):
    queue, lock = asyncio.Queue(), asyncio.Lock()

    async def hold():
        async with lock:
            await asyncio.sleep(1e6)

    async def nap():
        await asyncio.sleep(1e6)

    leaves = (queue.get, hold, nap)
    tasks = [asyncio.create_task(down(2, leaves[i % 3])) for i in range(count)]
    await asyncio.sleep(1)
    threading.Thread(target=meter, daemon=True).start()
    threading.Thread(target=answer, daemon=True).start()
    print("ready", flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main(int(sys.argv[1])))
"""

READER = """
import json, resource, sys, time
from hangwatch import remote

def spent():
    return time.perf_counter(), time.process_time()

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
wall, cpu = spent()
target = remote.attach(int(sys.argv[1]))
found = target.tasks()
first = [b - a for a, b in zip((wall, cpu), spent())]
wall, cpu = spent()
again = target.tasks()
second = [b - a for a, b in zip((wall, cpu), spent())]
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"first": first, "again": second, "rss": rss, "own": before,
                  "tasks": len(again.tasks), "problems": len(again.problems)}))
"""


def ask(target: subprocess.Popen[str], question: str) -> float:
    assert target.stdin is not None
    assert target.stdout is not None
    target.stdin.write(question + "\n")
    target.stdin.flush()
    return float(target.stdout.readline())


def reader(pid: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READER, str(pid)], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def program(*command: str) -> tuple[float, float, int]:
    """Run a program; return wall seconds, CPU seconds and peak memory in KiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=False, capture_output=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss


def measure(sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return one row for each size and reader; medians over interleaved rounds."""
    rows = []
    for size in sizes:
        target = subprocess.Popen(
            [sys.executable, "-c", TARGET, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert target.stdout is not None
            target.stdout.readline()
            rows += _measure(target, size, rounds)
        finally:
            target.kill()
            target.wait()
    return rows


def _measure(target: subprocess.Popen[str], size: int, rounds: int) -> list[dict[str, Any]]:
    peers = {
        "py-spy dump --nonblocking": ("py-spy", "dump", "--nonblocking", "--json", "-p"),
        "py-spy dump": ("py-spy", "dump", "--json", "-p"),
    }
    times: dict[str, list[tuple[float, float]]] = {}
    gaps: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    for _ in range(rounds):
        ask(target, "reset")
        time.sleep(0.3)
        gaps.setdefault("nobody", []).append(ask(target, "get"))
        ask(target, "reset")
        found = reader(target.pid)
        assert found["tasks"] >= size, found
        gaps.setdefault("hangwatch, first", []).append(ask(target, "get"))
        for name in ("first", "again"):
            wall, cpu = found[name]
            times.setdefault(f"hangwatch, {name}", []).append((wall, cpu))
        memory["hangwatch, first"] = max(found["rss"], memory.get("hangwatch, first", 0))
        for name, command in peers.items():
            ask(target, "reset")
            wall, cpu, _ = program(*command, str(target.pid))
            times.setdefault(name, []).append((wall, cpu))
            gaps.setdefault(name, []).append(ask(target, "get"))
    rows = []
    base = statistics.median(cpu for _, cpu in times["py-spy dump --nonblocking"])
    for name in ("nobody", *times):
        walls = [wall for wall, _ in times.get(name, ())]
        cpus = [cpu for _, cpu in times.get(name, ())]
        rows.append(
            {
                "tasks": size,
                "reader": name,
                "wall ms": f"{1000 * statistics.median(walls):.0f}" if walls else "",
                "CPU ms": f"{1000 * statistics.median(cpus):.0f}" if cpus else "",
                "CPU / py-spy nonblocking": (
                    f"{statistics.median(cpus) / base:.2f}" if cpus else ""
                ),
                "peak MB": f"{memory[name] // 1024}" if name in memory else "",
                "gap ms": f"{statistics.median(gaps[name]):.1f}" if name in gaps else "",
            }
        )
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
