"""What an idle daemon with eight logs costs: a share of one core, and resident memory.

Eight laboratory servers beat every ten seconds, as LMDeploy does while it works. The daemon and
its children are measured by the kernel's own counters over ``SECONDS``, after ``WARM_UP``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hangwatch.lab.launch import Fleet

SERVERS = 8
WARM_UP = 45.0
SECONDS = 60.0


def measure(seconds: float = SECONDS, warm_up: float = WARM_UP) -> list[dict[str, Any]]:
    """Return one row a process, the daemon first, and one for all of them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(Path(folder, "ray"), servers=SERVERS, interval=10.0) as fleet,
    ):
        fleet.wait_ready()
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "hangwatch", "watch", "--log", fleet.logs),
                *("--output", f"{folder}/out", "--state", f"{folder}/state"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as daemon:
            time.sleep(warm_up)
            before = {pid: cpu(pid) for pid in family(daemon.pid)}
            began = time.monotonic()
            time.sleep(seconds)
            elapsed = time.monotonic() - began
            rows = [
                {
                    "process": name_of(pid, daemon.pid),
                    "cpu_pct": round((cpu(pid) - before.get(pid, 0.0)) / elapsed * 100, 3),
                    "rss_mib": round(rss(pid), 1),
                }
                for pid in family(daemon.pid)
            ]
            daemon.terminate()
    total = {
        "process": "all together",
        "cpu_pct": round(sum(row["cpu_pct"] for row in rows), 3),
        "rss_mib": round(sum(row["rss_mib"] for row in rows), 1),
    }
    return [*rows, total]


def family(pid: int) -> list[int]:
    """Return a process and its children, all generations."""
    found = [pid]
    for parent in found:
        found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found


def cpu(pid: int) -> float:
    """Return the seconds of CPU that a process used, threads that have ended among them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss(pid: int) -> float:
    """Return resident memory in MiB; pages shared with others count in full."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def name_of(pid: int, daemon: int) -> str:
    """Return what a process of ours is called."""
    if pid == daemon:
        return "daemon"
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return next((w.rsplit(".", 1)[-1] for w in words if w.startswith("hangwatch.")), "other")


if __name__ == "__main__":
    print(json.dumps(measure(*map(float, sys.argv[1:])), indent=2))
