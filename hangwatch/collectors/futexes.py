"""Threads that wait for a futex, grouped by where it is, over all processes.

Where a shared futex is says the memory map of a process, which can block for as long as the
process does: maps are read last, and only of processes that wait for a shared one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from hangwatch.core import futexes
from hangwatch.core.futexes import Place, Waiter
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


def _collect(step: Step, room: Room) -> None:
    closed: list[int] = []
    waiters: list[Waiter] = []
    for target in step.targets:
        if procfs.is_same(target.process):
            try:
                waiters += _waiters(target.process.pid)
            except PermissionError:
                closed.append(target.process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
    head = {
        "schema": "hangwatch.futexes/1",
        "monotonic": time.monotonic(),
        "threads": len(waiters),
        "not_readable": closed,
        "groups": [],
    }
    private = futexes.groups((waiter, None) for waiter in waiters if not waiter.shared)
    with room.create("futexes.json") as out:
        out.write(json.dumps(head).removesuffix("]}").encode())
        out.write(_lines(private, first=True))
        shared = futexes.groups(_placed(waiter for waiter in waiters if waiter.shared))
        out.write(_lines(shared, first=not private))
        out.write(b"\n]}\n")
    if closed:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            f"the system calls of {len(closed)} processes may not be read",
            procfs.PERMISSION_HINT,
        )


def _lines(groups: Iterable[dict[str, Any]], *, first: bool) -> bytes:
    lines = ",\n ".join(json.dumps(group, ensure_ascii=False) for group in groups)
    text = f"{'' if first else ','}\n {lines}" if lines else ""
    return text.encode("utf-8", "replace")


def _waiters(pid: int) -> Iterator[Waiter]:
    for tid, call in calls(pid):
        if "address" in call.detail:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield Waiter(
                    pid=pid,
                    tid=tid,
                    comm=procfs.read_name(pid, tid),
                    address=int(call.detail["address"], 16),
                    shared=call.detail["shared"],
                    operation=call.detail["operation"],
                    limited=bool(call.limited),
                )


def _placed(waiters: Iterable[Waiter]) -> Iterator[tuple[Waiter, Place | None]]:
    maps: dict[int, str] = {}
    for waiter in waiters:
        if waiter.pid not in maps:
            maps[waiter.pid] = ""
            with contextlib.suppress(OSError):
                maps[waiter.pid] = procfs.mappings(waiter.pid)
        yield futexes.placed(waiter, maps[waiter.pid])


COLLECTOR: Final = Collector(
    name="futexes",
    title="Threads that wait for the same lock, by its address",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    timeout=8.0,
    needs="the right to read the processes: same user, or SYS_PTRACE",
    unhurried=True,
    kinds=frozenset({CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN}),
    collect=_collect,
)
