"""What the black box costs: a share of one core, memory, and bytes in a bundle.

Forty processes with 20 threads each, of which one runs an event loop that wakes up fifty times a
second while the main thread wakes up ten times, are recorded by a child as the daemon has one. It
is measured by the kernel's own counters over ``SECONDS``, after ``WARM_UP``: choosing the threads
is over by then, and comes again every five minutes. At the end its record is what a capture would
take.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.idle import rss
from hangwatch.core import blackbox
from hangwatch.system import ring
from hangwatch.system.clock import SystemClock, boot_id
from hangwatch.system.spawn import Child

PROCESSES = 40
WARM_UP = 15.0
SECONDS = 180.0

PROGRAM = """
import asyncio, threading, time

async def beat(seconds):
    while True:
        await asyncio.sleep(seconds)

threading.Thread(target=lambda: asyncio.run(beat(0.02)), daemon=True).start()
for _ in range(18):
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
asyncio.run(beat(0.1))
"""


def measure(seconds: float = SECONDS, warm_up: float = WARM_UP) -> list[dict[str, Any]]:
    """Return one row."""
    watched = [subprocess.Popen([sys.executable, "-c", PROGRAM]) for _ in range(PROCESSES)]
    try:
        time.sleep(5.0)
        with (
            tempfile.TemporaryDirectory() as folder,
            Child("hangwatch.daemon.recorder", name="recorder") as child,
        ):
            path = Path(folder, blackbox.RING)
            processes = [[each.pid, 0] for each in watched]
            child.channel.send({"kind": "watch", "ring": str(path), "processes": processes})
            time.sleep(warm_up)
            before, began = run_time(child.pid), time.monotonic()
            time.sleep(seconds)
            cpu = (run_time(child.pid) - before) / (time.monotonic() - began)
            recording = ring.read(path, boot_id())
            assert recording is not None
            counters = blackbox.counters_document(recording, SystemClock().epoch())
            share = len(recording.at) / ring.ROWS
            return [
                {
                    "processes": PROCESSES,
                    "threads": len(recording.tracks),
                    "cpu_pct": round(100 * cpu, 3),
                    "rss_mib": round(rss(child.pid), 1),
                    "ring_mib": round(path.stat().st_size / 2**20, 1),
                    "ten_minutes_packed_kib": round(len(gzip.compress(counters, 6)) / share / 1024),
                }
            ]
    finally:
        for each in watched:
            each.kill()
            each.wait()


def run_time(pid: int) -> float:
    """Return the seconds that a process with one thread was on a CPU."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


if __name__ == "__main__":
    print(*measure(*map(float, sys.argv[1:])), sep=os.linesep)
