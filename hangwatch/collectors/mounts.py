"""Which network file systems of the processes answer, and how fast.

Whoever asks one that does not answer may wait for ever, and not even a kill may end that. So a
child asks, each file system in a thread of its own, and is left behind if it must be. Nothing is
opened on any of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Final

from hangwatch.core import mountinfo, mounts
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
from hangwatch.system import mountprobe, procfs

DEADLINE: Final = 3.0
"""Seconds for all; a file system of a busy machine answers within a tenth."""


def _collect(step: Step, room: Room) -> None:
    seen: dict[int, tuple[mountinfo.Mount, ...]] = {}
    for target in step.targets:
        if procfs.is_same(target.process):
            with contextlib.suppress(OSError):
                pid = target.process.pid
                seen[pid] = tuple(mountinfo.parse(procfs.mounts(pid)))
    ours = tuple(mountinfo.parse(procfs.mounts(os.getpid())))
    asked, more = mounts.chosen(ours, seen, f"{procfs.PROC}/{{pid}}/root")
    most = step.timeout - mountprobe.START - 2.0  # for its own start, and for its end
    timeout = min(float(step.options.get("deadline") or DEADLINE), most)
    answers, ended = mountprobe.ask([each.path for each in asked], timeout) if asked else ({}, True)
    records = []
    refused = False
    for number, each in enumerate(asked):
        said: dict[str, Any] = {"answered": None}
        if number in answers:
            answer = answers[number]
            if answer is None:
                said = {"answered": False, "after_s": timeout}
            else:
                said = {"answered": None if answer.refused else True, "ms": answer.milliseconds}
                said |= {"error": answer.error} if answer.error else {}
        refused |= said.get("error") is not None and said["answered"] is None
        records.append({**mounts.record(each), **said})
    head = {
        "schema": "hangwatch.mounts/1",
        "monotonic": time.monotonic(),
        "not_asked": more,
        "probe_ended": ended,
    }
    room.write("mounts.json", page(head, {"mounts": records}))
    if refused:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            "some file systems may not be asked",
            procfs.PERMISSION_HINT,
        )


COLLECTOR: Final = Collector(
    name="mounts",
    title="Network file systems of the processes: which answer, and how fast",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    timeout=10.0,
    needs="the mounts of the processes, here or through /proc/PID/root",
    waits=True,
    unhurried=True,
    kinds=frozenset({CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN}),
    options={"deadline": "seconds that a file system may take to answer"},
    collect=_collect,
)
