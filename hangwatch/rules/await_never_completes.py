"""The engine's loop is free, requests are in flight, and nothing is dispatched."""

from __future__ import annotations

from hangwatch.core.loose import role_of
from hangwatch.core.questions import (
    alarmed,
    health_of,
    in_flight,
    number_of,
    processes_of,
)
from hangwatch.model.dossier import Culprit, Dossier, Finding, InstanceRecord, Rule, ThreadMotion
from hangwatch.model.identity import Role
from hangwatch.model.verdict import Confidence

NAME = "await-never-completes"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the engines whose loop waits for something that does not come."""
    found = []
    for record in alarmed(dossier):
        if record.verdict.cause != NAME:
            continue
        thread = _loop_thread(dossier, record)
        work = in_flight([record])
        requests = f"{number_of(work, 'request')} in flight" if work else "requests in flight"
        answer = health_of(dossier, record)
        citations = [
            item.citation for item in (thread, answer) if item is not None and item.citation
        ]
        found.append(
            Finding(
                rule=NAME,
                sentence=(
                    f"The event loop of {record.instance.name} is idle with {requests}: something "
                    "that a task awaits never completes. A thread dump by py-spy does not show "
                    "pending asyncio tasks, so it cannot say which."
                ),
                confidence=Confidence.MEDIUM,
                cause=NAME,
                verdict="hung",
                culprit=_culprit(dossier, thread),
                citations=tuple(citations),
                next_step="read the suspended tasks: hangwatch tasks --pid PID",
            )
        )
    return tuple(found)


def _loop_thread(dossier: Dossier, record: InstanceRecord) -> ThreadMotion | None:
    """Return the parked loop of the process that is nearest to the model."""
    order = (Role.ENGINE_WORKER, Role.ENGINE, Role.API_SERVER)
    rows = sorted(
        processes_of(dossier, record),
        key=lambda row: order.index(role) if (role := role_of(row.role)) in order else len(order),
    )
    pids = [row.pid for row in rows]
    loops = [
        thread
        for thread in dossier.threads
        if thread.pid in pids and any(frame.name == "_run_once" for frame in thread.frames)
    ]
    return min(
        loops,
        key=lambda thread: (pids.index(thread.pid), "_ray_system" in thread.name),
        default=None,
    )


def _culprit(dossier: Dossier, thread: ThreadMotion | None) -> Culprit | None:
    if thread is None:
        return None
    row = next((row for row in dossier.processes if row.pid == thread.pid), None)
    return Culprit(
        pid=thread.pid,
        rank=row.rank if row is not None else None,
        thread=thread.name or None,
        frame=thread.frames[0].function if thread.frames else None,
    )


RULE = Rule(name=NAME, title="an await never completes", examine=examine)
