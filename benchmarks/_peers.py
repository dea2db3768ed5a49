"""The tools that hangwatch is measured against, as anyone would call them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A tool that is started for one process.

    Attributes:
        name: As people type it.
        command: Makes its arguments, given a pid.
    """

    name: str
    command: Callable[[int], list[str]]

    @property
    def available(self) -> bool:
        """Whether its program is here."""
        return shutil.which(self.command(1)[0]) is not None


@dataclass(frozen=True)
class Cost:
    """What one call cost.

    Attributes:
        seconds: By the clock.
        cpu: Seconds of CPU.
        rss: Peak memory of one process, MiB.
        failed: Whether it ended with an error.
    """

    seconds: float
    cpu: float
    rss: float
    failed: bool


def beside(program: str) -> str:
    """Return a program that was installed with this Python, else its name."""
    here = Path(sys.executable).with_name(program)
    return str(here) if here.exists() else program


PYSPY = beside("py-spy")
NONBLOCKING = Peer(
    "py-spy dump --nonblocking --json",
    lambda pid: [PYSPY, "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(pid)],
)
PEERS = (
    NONBLOCKING,
    Peer("py-spy dump", lambda pid: [PYSPY, "dump", "--pid", str(pid)]),
    Peer("py-spy dump --native", lambda pid: [PYSPY, "dump", "--native", "--pid", str(pid)]),
    Peer("pystack remote", lambda pid: [beside("pystack"), "remote", str(pid)]),
    Peer(
        "pystack remote --no-block",
        lambda pid: [beside("pystack"), "remote", "--no-block", str(pid)],
    ),
    Peer(
        "gdb: thread apply all bt",
        lambda pid: ["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all bt 30"],
    ),
)


def call(peer: Peer, pid: int, limit: float = 60.0) -> Cost:
    """Run a tool on one process; it is killed at the *limit* in seconds."""
    began = time.monotonic()
    process = subprocess.Popen(
        peer.command(pid),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = began + limit
    peak = 0.0
    while True:
        peak = max(peak, _peak(process.pid))
        found, status, used = os.wait4(process.pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            process.kill()
            deadline = float("inf")
        time.sleep(0.0005)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(
        seconds=time.monotonic() - began,
        cpu=used.ru_utime + used.ru_stime,
        rss=peak,
        failed=process.returncode != 0,
    )


def _peak(pid: int) -> float:
    """Return the peak of a program's memory so far, MiB; 0 while it is still a copy of us.

    The kernel's own sum for a child that has ended begins with the memory of its parent.
    """
    with contextlib.suppress(OSError):
        folder = Path("/proc", str(pid))
        if folder.joinpath("cmdline").read_bytes() != Path("/proc/self/cmdline").read_bytes():
            for line in folder.joinpath("status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    return 0.0


def call_all(peer: Peer, pids: Sequence[int], width: int) -> tuple[float, list[Cost]]:
    """Run a tool on each process, *width* at a time; return the seconds for all, and each cost."""
    began = time.monotonic()
    with ThreadPoolExecutor(width) as threads:
        costs = list(threads.map(lambda pid: call(peer, pid), pids))
    return time.monotonic() - began, costs
