"""Work that may block, in children of our own with a deadline.

A command line, a log on a network file system, the memory of a process that hangs in the kernel:
reading any of them can take for ever. Each is read in a fork that writes what it finds line by
line into a pipe. A child that is late is killed, and the lines that it finished count; one that
cannot even be killed, because it sleeps in the kernel, is left behind and ends when it wakes up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
BLOCK: Final = 1 << 16
AT_ONCE: Final = 2
"""Children at a time: an engine that still works wants the processors, and the memory."""

Job = Callable[[], Iterator[bytes]]
"""Yields lines without their ends."""


@dataclass(slots=True)
class Result:
    """What became of a job: the lines that it finished, and why there are no more, if so."""

    lines: list[bytes] = field(default_factory=list)
    problem: str = ""


@dataclass(slots=True)
class _Child:
    name: int
    pid: int
    until: float
    limit: float
    data: bytearray = field(default_factory=bytearray)


def run(jobs: Mapping[int, Job], *, limit: float, until: float) -> dict[int, Result]:
    """Run each job in a child, a few at a time, in their order.

    Args:
        jobs: By the number of the process that they are about.
        limit: Seconds that one job may take.
        until: Instant (monotonic) at which all of it ends.

    Returns:
        A result for every job.
    """
    results: dict[int, Result] = {}
    waiting = list(jobs.items())
    running: dict[int, _Child] = {}
    while waiting or running:
        now = time.monotonic()
        while waiting and len(running) < AT_ONCE and now < until:
            name, job = waiting.pop(0)
            fd, pid = _start(job)
            running[fd] = _Child(name=name, pid=pid, until=min(now + limit, until), limit=limit)
        if not running:
            break
        patience = max(0.0, min(child.until for child in running.values()) - now)
        ready, _, _ = select.select(list(running), [], [], patience)
        now = time.monotonic()
        for fd in list(running):
            child = running[fd]
            block = os.read(fd, BLOCK) if fd in ready else b""
            child.data += block
            if (fd in ready and not block) or now >= child.until:
                os.close(fd)
                results[child.name] = _end(running.pop(fd), late=now >= child.until)
    for name, _ in waiting:
        results[name] = Result(problem="the time was over before it was its turn")
    return results


def _start(job: Job) -> tuple[int, int]:
    """Fork; return the descriptor to read from, and the child."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(job, writing, parent)
    os.close(writing)
    return reading, pid


def _work(job: Job, fd: int, parent: int) -> NoReturn:
    """Be the child."""
    code = 1
    try:
        # Whoever reads our output waits until nobody can write to it any more, a child that cannot
        # be killed included.
        for stream in range(3):
            with contextlib.suppress(OSError):
                os.close(stream)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            for line in job():
                _write(fd, line + b"\n")
            code = 0
    except Exception as error:  # noqa: BLE001  # whatever it is, the others' evidence counts
        with contextlib.suppress(OSError):
            _write(fd, f"!{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        # Never back into the parent's code, not even on a signal.
        os._exit(code)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _end(child: _Child, *, late: bool) -> Result:
    """Take the child down if need be, and its finished lines."""
    *lines, _unfinished = bytes(child.data).split(b"\n")
    problem = ""
    if lines and lines[-1].startswith(b"!"):
        problem = lines.pop()[1:].decode("utf-8", "replace")[:500]
    if late:
        problem = f"not read within {child.limit:.1f} s"
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)  # our own fork
    for _ in range(50):
        if os.waitpid(child.pid, os.WNOHANG)[0]:
            break
        time.sleep(0.01)  # it sleeps in the kernel if that does not help
    return Result(lines=lines, problem=problem)
