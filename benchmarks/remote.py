"""What reading all tasks of a process costs, beside what other tools need for the same process.

A target runs N tasks on one loop, four frames deep each: a third wait in ``queue.get``, a third for
a lock that somebody holds, a third in ``sleep``. All readers take turns at it, in ROUNDS rounds;
medians are shown.

*First* is a fresh reader of ours: find the runtime, prove the layout, read everything, verify it,
explain it, and find the deadlocks. *Again* is a second reading by the same reader. Both exclude the
start of the interpreter, for inside a watchdog it runs already; *command* is ``hangwatch tasks
--json`` as it is typed, and comparable with the others, which are programs as well.

py-spy and pystack show threads, not tasks: their rows say what the price of a dump is, not that it
is the same. ``asyncio ps`` is the target's own, of Python 3.14, and shows tasks with their chains,
without what they wait for. A tool that is not on the PATH, and a Python 3.14 that
HANGWATCH_TEST_INTERPRETERS does not name, are left out, and that is said.

The *pause* is the longest time between two wake-ups of a thread in the target that sleeps 0.1 ms at
a time, with real-time priority where that is permitted. *Nobody* is the floor: the same without any
tool, for as long as our reader took. (The target collects no garbage meanwhile: with 50,000 tasks
that alone is a pause of 150 ms.) Peak memory is that of one more run, looked at every
millisecond.

HANGWATCH_PROOF_ROUNDS changes the number of rounds; for 50,000 tasks it is a fifth of it.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUNDS = int(os.environ.get("HANGWATCH_PROOF_ROUNDS", "5"))
OURS = (300, 5_000, 50_000)
THEIRS = (300, 5_000)
"""Sizes on Python 3.14."""
BASE = "py-spy dump --nonblocking"

TARGET = """
import asyncio, ctypes, gc, os, sys, threading, time

gap = 0.0

def meter():
    global gap
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: 1 ns
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except PermissionError:
        pass
    last = time.perf_counter()
    while True:
        time.sleep(0.0001)
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
    gc.disable()
    threading.Thread(target=meter, daemon=True).start()
    threading.Thread(target=answer, daemon=True).start()
    print("ready", flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main(int(sys.argv[1])))
"""

READER = """
import json, sys, time
from hangwatch import remote

def spent():
    return time.perf_counter(), time.process_time()

wall, cpu = spent()
# On a busy machine 50,000 tasks may take longer than the ten seconds of the default.
target = remote.attach(int(sys.argv[1]), limits=remote.Limits(seconds=60.0))
found = target.tasks()
first = [b - a for a, b in zip((wall, cpu), spent())]
wall, cpu = spent()
again = target.tasks()
second = [b - a for a, b in zip((wall, cpu), spent())]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"first": first, "again": second, "tasks": len(again.tasks),
                  "peak": int(status["VmHWM"].split()[0])}))
"""


@dataclass
class Samples:
    """What was seen of one reader: seconds, seconds, milliseconds, KiB."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    peak: int = 0


def ask(target: subprocess.Popen[str], question: str) -> float:
    assert target.stdin is not None
    assert target.stdout is not None
    target.stdin.write(question + "\n")
    target.stdin.flush()
    return float(target.stdout.readline())


def run(command: Sequence[str]) -> tuple[float, float]:
    """Run a program; return wall and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(f"{shlex.join(command[:-1])}: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def peak(command: Sequence[str]) -> int:
    """Run a program; return the most memory that was seen, in KiB.

    ``ru_maxrss`` would not do: a child inherits what its parent had before the ``exec``.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = Path("/proc", str(process.pid), "status")
    most = 0
    while process.poll() is None:
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                most = max(most, int(line.split()[1]))
        time.sleep(0.001)
    return most


def python_3_14() -> list[str]:
    """Return the command of a Python 3.14, or nothing."""
    named = os.environ.get("HANGWATCH_TEST_INTERPRETERS", "").split(":")
    for command in (shlex.split(each) for each in named if each):
        done = subprocess.run(
            [*command, "-c", "import sys; print(sys.version_info[:2] == (3, 14))"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.stdout.strip() == "True":
            return command
    found = shutil.which("python3.14")
    return [found] if found else []


def peers(python: Sequence[str]) -> dict[str, list[str]]:
    """Return the commands that a process id completes."""
    ours = [sys.executable, "-m", "hangwatch", "tasks", "--json", "--pid"]
    found = {"hangwatch tasks, command": ours}
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name, arguments in {
        BASE: "dump --nonblocking --json --full-filenames --pid",
        "py-spy dump (stops it)": "dump --json --full-filenames --pid",
        "pystack remote --no-block": "remote --no-block",
    }.items():
        program = shutil.which(name.split()[0], path=beside)
        if program:
            found[name] = [program, *arguments.split()]
        else:
            print(f"Left out: {name}, which is not installed.\n")
    if python:
        found["python -m asyncio ps"] = [*python, "-m", "asyncio", "ps"]
    return found


def measure() -> list[dict[str, Any]]:
    """Return one row for each target and reader."""
    rows = []
    for size in OURS:
        rounds = max(1, ROUNDS // 5) if size > 10_000 else ROUNDS
        rows += _target([sys.executable], size, rounds, peers([]))
    python = python_3_14()
    if not python:
        print("Left out: python -m asyncio ps, for there is no Python 3.14.\n")
        return rows
    for size in THEIRS:
        rows += _target(python, size, ROUNDS, peers(python))
    return rows


def _target(
    python: Sequence[str], size: int, rounds: int, commands: dict[str, list[str]]
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*python, "-c", "import platform; print(platform.python_version())"],
        check=True,
        capture_output=True,
        text=True,
    )
    target = subprocess.Popen(
        [*python, "-c", TARGET, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert target.stdout is not None
        assert target.stdout.readline() == "ready\n"
        seen = _take_turns(target, size, rounds, commands)
    finally:
        target.kill()
        target.wait()
    return _rows(done.stdout.strip(), size, seen)


def _take_turns(
    target: subprocess.Popen[str], size: int, rounds: int, commands: dict[str, list[str]]
) -> dict[str, Samples]:
    names = ("nobody", "hangwatch, first", "hangwatch, again", *commands)
    seen = {name: Samples() for name in names}
    for _ in range(rounds):
        ask(target, "reset")
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", READER, str(target.pid)],
            check=True,
            capture_output=True,
            text=True,
        )
        wall = time.perf_counter() - started
        pause = ask(target, "get")
        ask(target, "reset")
        time.sleep(wall)
        seen["nobody"].pause.append(ask(target, "get"))
        found = json.loads(done.stdout)
        assert found["tasks"] >= size, found
        for name in ("first", "again"):
            samples = seen[f"hangwatch, {name}"]
            samples.wall.append(found[name][0])
            samples.cpu.append(found[name][1])
            samples.pause.append(pause)
            samples.peak = max(samples.peak, found["peak"])
        for name, command in commands.items():
            ask(target, "reset")
            wall, cpu = run([*command, str(target.pid)])
            seen[name].pause.append(ask(target, "get"))
            seen[name].wall.append(wall)
            seen[name].cpu.append(cpu)
    for name, command in commands.items():
        seen[name].peak = peak([*command, str(target.pid)])
    return seen


def _rows(python: str, size: int, seen: dict[str, Samples]) -> list[dict[str, Any]]:
    base = seen.get(BASE)
    rows = []
    for name, samples in seen.items():
        wall = statistics.median(samples.wall) if samples.wall else 0.0
        cpu = statistics.median(samples.cpu) if samples.cpu else 0.0
        pause = statistics.median(samples.pause)
        ratio = f"{cpu / statistics.median(base.cpu):.1f}" if base and cpu else ""
        rows.append(
            {
                "Python": python,
                "tasks": f"{size:,}",
                "reader": name,
                "wall ms": f"{1000 * wall:.0f}" if wall else "",
                "CPU ms": f"{1000 * cpu:.0f}" if cpu else "",
                "CPU / py-spy": ratio,
                "peak MB": f"{samples.peak / 1024:.0f}" if samples.peak else "",
                "pause ms, median (most)": f"{pause:.1f} ({max(samples.pause):.1f})",
            }
        )
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
