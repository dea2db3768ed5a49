"""The logs that Ray itself keeps: raylet, cluster state, dashboard, monitors, and core workers.

What no process of the capture has open for writing, or may be read by us, is found in the folder of
the session, through the root of its raylet: the path may lead nowhere from here. A log that another
step takes is not taken twice, and no link is followed. Of each its end is kept, and what surrounds
the beginning of the incident where that lies before it.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Final

from hangwatch.core import raystate
from hangwatch.model.capture import Collector, CollectorError, FailureKind, Room, Scope, Stage, Step
from hangwatch.model.identity import Role
from hangwatch.system import logfiles, procfs, raysessions

MAX_BYTES: Final = 8 << 20
"""Bytes of all logs together; the most telling come first."""


def _collect(step: Step, room: Room) -> None:
    sessions = raysessions.find(step.targets)
    if not sessions:
        raise CollectorError(FailureKind.NOT_AVAILABLE, "no session of Ray is seen")
    pids = [target.process.pid for target in step.targets]
    taken = {log for target in step.targets for log in target.logs}
    onset = step.options.get("onset", "")
    around = datetime.fromisoformat(onset).astimezone() if onset else None
    left = MAX_BYTES
    problems = []
    for number, session in enumerate(sessions, start=1):
        prefix = f"{number}-" if number > 1 else ""
        try:
            names = procfs.list_inside(session.reader.pid, session.logs)
        except OSError as error:
            problems.append(f"{session.logs}: {(error.strerror or '').lower()}")
            continue
        for name in raystate.telling_logs(names, pids):
            path = f"{session.logs}/{name}"
            if path in taken or left <= 0:
                continue
            try:
                with os.fdopen(
                    procfs.open_inside(session.reader.pid, path, follow=False), "rb"
                ) as file:
                    text = logfiles.excerpt(file, around=around, limit=min(left, logfiles.LIMIT))
            except OSError as error:
                problems.append(f"{name}: {(error.strerror or '').lower()}")
                continue
            left -= len(text)
            if text:
                room.write(f"ray/{prefix}{name}", text)
    if problems:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            f"not all of Ray's logs can be read: {'; '.join(problems)[:500]}",
            procfs.PERMISSION_HINT,
        )


COLLECTOR: Final = Collector(
    name="ray_logs",
    title="The logs of Ray itself: raylet, cluster state, dashboard, monitors",
    scope=Scope.NODE,
    rung=8,
    stage=Stage.B,
    timeout=10.0,
    needs="the right to read the raylet's files (Linux 5.6)",
    roles=frozenset({Role.RAY_SYSTEM, Role.RAY_WORKER}),
    collect=_collect,
)
