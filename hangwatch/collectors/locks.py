"""File locks that the processes hold or wait for, with everybody who has a share in one.

A lock by ``flock`` outlives the process that took it in whoever inherited the file: such a holder
is looked for among all processes that we may read, as far as time allows.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator
from typing import Final

from hangwatch.core import descriptors, locks
from hangwatch.core.objects import page
from hangwatch.model.capture import (
    CaptureKind,
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.system import procfs
from hangwatch.system.calls import calls

MAX_SEARCH: Final = 2.0
"""Seconds for the search among processes that are not of the capture."""

_INODE: Final = re.compile(r"^ino:\s*(\d+)", re.MULTILINE)


def _collect(step: Step, room: Room) -> None:
    pids = [t.process.pid for t in step.targets if procfs.is_same(t.process)]
    closed = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if procfs.has_hidden_links(pid):
                closed.append(pid)
    lines = locks.parse(procfs.locks())
    waits = [wait for pid in pids for wait in _waits(pid)]
    holds = [hold for pid in pids for hold in _holds(pid)]
    wanted = {wait.path for wait in waits} - {hold.path for hold in holds}
    searched = True
    if wanted:
        more, searched = _search(wanted, set(pids))
        holds += more
    takers = {line.pid for line in (*lines, *(hold.lock for hold in holds)) if line.pid > 0}
    head = {
        "schema": "hangwatch.locks/1",
        "monotonic": time.monotonic(),
        "searched_all": searched,
        "not_readable": closed,
    }
    table = locks.table(lines, holds, waits, _living(takers))
    room.write("locks.json", page(head, {"locks": table}))
    if closed:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            f"the descriptors of {len(closed)} processes may not be read",
            procfs.PERMISSION_HINT,
        )


def _waits(pid: int) -> Iterator[locks.Wait]:
    """Yield each thread that waits for a lock."""
    with contextlib.suppress(OSError):
        for tid, call in calls(pid):
            operation = call.detail.get("operation", "")
            if call.fds and operation in locks.WAITS:
                (fd, *_) = call.fds
                path, inode = "", 0
                with contextlib.suppress(OSError):
                    path = procfs.read_link(pid, f"fd/{fd}")
                    match = _INODE.search(procfs.read_descriptor(pid, fd))
                    inode = int(match[1]) if match else 0
                yield locks.Wait(
                    pid=pid, tid=tid, fd=fd, path=path, inode=inode, operation=operation
                )


def _holds(pid: int, paths: Collection[str] = ()) -> Iterator[locks.Hold]:
    """Yield each lock in an open file of a process, of those at *paths* if any are given."""
    for fd, path in procfs.links(pid).items():
        if descriptors.kind(path) == "file" and (not paths or path in paths):
            with contextlib.suppress(OSError):
                for line in descriptors.locks(procfs.read_descriptor(pid, fd)):
                    for lock in locks.parse(line):
                        yield locks.Hold(pid=pid, fd=fd, path=path, lock=lock)


def _search(paths: Collection[str], known: Collection[int]) -> tuple[list[locks.Hold], bool]:
    """Return who else holds locks on these files, and whether everybody was looked at."""
    end = time.monotonic() + MAX_SEARCH
    found: list[locks.Hold] = []
    for pid in procfs.pids():
        if time.monotonic() > end:
            return found, False
        if pid not in known:
            with contextlib.suppress(OSError):
                found += list(_holds(pid, paths))
    return found, True


def _living(pids: Collection[int]) -> dict[int, str]:
    living = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            living[pid] = procfs.read_row(pid).comm
    return living


COLLECTOR: Final = Collector(
    name="locks",
    title="File locks with their holders and with who waits for them",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    timeout=8.0,
    needs="the right to read the processes: same user, or SYS_PTRACE",
    unhurried=True,
    kinds=frozenset({CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN}),
    collect=_collect,
)
