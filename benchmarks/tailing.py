"""How fast one core follows a log, beside what anyone would script: ``tail -F | grep``.

The log is one file of 1 GB: engine log lines, and a heartbeat every 26th line, many times more than
a busy server prints. Further rows give the worst case, a log of nothing but heartbeats.
Each reader starts at the first byte and is timed until it has told of the last line. The follower
is the real one, with the needles of every built-in profile; its time is the CPU time of its one
thread. ``grep`` looks for the heartbeat only; its time is the CPU time of both programs. The file
is in the page cache for all of them, and the runs are interleaved.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from hangwatch import registry
from hangwatch.core import parsing
from hangwatch.model.following import FollowRequest
from hangwatch.model.heartbeat import Line
from hangwatch.system.clock import SystemClock
from hangwatch.system.tail import Tailer

SIZE = 1 << 30
ROUNDS = 5

BEAT = (
    b"[2026-03-04 13:30:00 DP0] Avg thr (in/out): 7264.6 / 501.6 tokens/s, Server (succeeded/"
    b"failed/routed/waiting): 120 / 0 / 6 / 0, Engine (running/waiting): 6 / 0, KV cache: 30.9%, \n"
)
OTHER = (
    b"2026-03-04 13:30:00,123 - lmdeploy - INFO - engine.py:1034 - prefill finished: batch of "
    b"17 sequences, 43210 tokens, 12345 free blocks\n"
)
LAST = b"Avg thr the last one\n"


def measure(size: int = SIZE, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return one row a reader; medians over interleaved rounds."""
    rows = []
    for log, unit in (("mixed", OTHER * 25 + BEAT), ("heartbeats only", BEAT)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "server.log")
            written = write(path, unit, size)
            readers: dict[str, Callable[[Path], float]] = {
                "hangwatch": follow,
                "tail -F | grep -F": tail_and_grep,
            }
            times: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(rounds):
                for name, read in readers.items():
                    times[name].append(read(path))
            peer = statistics.median(times["tail -F | grep -F"])
            for name, seconds in times.items():
                middle = statistics.median(seconds)
                rows.append(
                    {
                        "log": log,
                        "reader": name,
                        "MB/s of one core": round(written / middle / 1e6),
                        "best": round(written / min(seconds) / 1e6),
                        "CPU time of the peer's": round(middle / peer, 2),
                    }
                )
    return rows


def write(path: Path, unit: bytes, size: int) -> int:
    """Write the log; return its length."""
    block = unit * max(1, (4 << 20) // len(unit))
    with path.open("wb") as log:
        while log.tell() < size:
            log.write(block)
        log.write(LAST)
        return log.tell()


def follow(path: Path) -> float:
    """Return the CPU seconds that our follower takes for the whole file."""
    needles = parsing.needles(tuple(registry.profiles().values()))
    request = FollowRequest(patterns=(str(path),), needles=needles)
    aside = path.with_name("aside")
    path.rename(aside)
    tailer = Tailer(request, clock=SystemClock())
    tailer.poll()
    aside.rename(path)  # born while we listen: read from its first byte
    os.utime(path)
    before = time.thread_time()
    events = tailer.poll()
    while not any(isinstance(event, Line) and event.text == LAST[:-1] for event in events[-3:]):
        events = tailer.read()
    seconds = time.thread_time() - before
    tailer.close()
    return seconds


def tail_and_grep(path: Path) -> float:
    """Return the CPU seconds that ``tail -n +1 -F | grep`` takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    tail = subprocess.Popen(
        ["tail", "-n", "+1", "-F", str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    grep = subprocess.Popen(
        ["grep", "-F", "--line-buffered", "Avg thr"],
        stdin=tail.stdout,
        stdout=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert tail.stdout is not None
    assert isinstance(grep.stdout, BufferedReader)
    tail.stdout.close()
    rest = b""
    while not rest.endswith(LAST):
        rest = (rest + grep.stdout.read1(1 << 20))[-len(LAST) :]
    tail.kill()
    tail.wait()
    grep.wait()
    grep.stdout.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
