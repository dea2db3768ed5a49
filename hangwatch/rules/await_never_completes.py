"""The engine's loop is free, requests are in flight, and a task awaits what never comes.

A thread dump cannot say which task and what; two readings of the tasks can. An idle engine's tasks
look the same, so the rule speaks only of engines that have work to do, and names an await that an
idle loop does not stand in. A deadlock needs no such care: it ends by itself under no load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hangwatch.core import awaiting
from hangwatch.core.loose import role_of
from hangwatch.core.questions import (
    StuckAwait,
    alarmed,
    health_of,
    in_flight,
    listed,
    number_of,
    process,
    process_of_actor,
    processes_of,
    stuck_await,
    tasks_of,
    thread_of,
)
from hangwatch.model.dossier import (
    Culprit,
    Dossier,
    Finding,
    InstanceRecord,
    Rule,
    TaskMotion,
    ThreadMotion,
)
from hangwatch.model.identity import Role
from hangwatch.model.verdict import Confidence

NAME = "await-never-completes"
DEADLOCK: Final = "lock-order-deadlock"

_ABOUT: Final = {
    "future": "a future that nobody resolves",
    "lock": "a lock that nobody gives back",
    "semaphore": "a semaphore that nobody releases",
    "event": "an event that nobody sets",
    "condition": "a condition that nobody notifies",
    "barrier": "others at a barrier",
    "ray": "the answer of a Ray task",
    "executor": "work in another thread",
    "process": "another process",
    "stream": "bytes from a connection",
    "sleep": "its time",
}


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the deadlocks, and the engines whose loop waits for something that does not come."""
    stopped = alarmed(dossier)
    cycles = _cycles(dossier, stopped)
    locked = {cycle[0].pid for cycle in cycles}
    groups: dict[str, list[StuckAwait]] = {}
    found = list(_deadlocks(dossier, cycles))
    for record in stopped:
        if any(task.pid in locked for task in tasks_of(dossier, record)):
            continue
        stuck = stuck_await(dossier, record)
        if stuck is not None:
            groups.setdefault(awaiting.told(stuck.task), []).append(stuck)
        elif record.verdict.cause == NAME:
            found.append(_unseen(dossier, record))
    return (*found, *(_named(dossier, group, len(stopped)) for group in groups.values()))


# --- what stands still ---------------------------------------------------------------------------


def _named(dossier: Dossier, group: Sequence[StuckAwait], stopped: int) -> Finding:
    first = group[0]
    task = first.task
    names = list(dict.fromkeys(stuck.record.instance.name for stuck in group))
    whose = list(dict.fromkeys(stuck.task.name for stuck in group))
    work = in_flight([stuck.record for stuck in group])
    requests = f"{number_of(work, 'request')} in flight" if work else "requests in flight"
    if len(names) == 1:
        loops, verb = f"The event loop of {names[0]}", "is"
    else:
        every = "both" if stopped == 2 else f"all {stopped}"
        of = every if len(names) == stopped else f"{len(names)} of {stopped}"
        loops, verb = f"The event loops of {of} stopped engines", "are"
    who = f"task {whose[0]}" if len(whose) == 1 else f"tasks {listed(whose, 3)}"
    caller = awaiting.caller(task)
    called = f", awaited by {caller}" if caller is not None else ""
    stood = "unmoved in both readings" if task.moved is False else "seen there once"
    others = ""
    if first.others:
        told = [f"task {other.name} at {awaiting.told(other)}" for other in first.others]
        others = f"; beside it {'stands' if len(told) == 1 else 'stand'} {' and '.join(told)}"
    return Finding(
        rule=NAME,
        sentence=(
            f"{loops} {verb} idle with {requests}, and {who} never gets past the await in "
            f"{awaiting.told(task)}: it waits for {_about(dossier, task)}{called}, {stood}{others}."
        ),
        confidence=min((s.confidence for s in group), key=list(Confidence).index),
        cause=NAME,
        verdict="hung",
        culprit=_culprit(dossier, task),
        citations=tuple(
            citation
            for stuck in group
            for citation in (
                stuck.task.citation,
                getattr(health_of(dossier, stuck.record), "citation", None),
            )
            if citation is not None
        )[:8],
        next_step=_next(dossier, task),
    )


def _about(dossier: Dossier, task: TaskMotion) -> str:
    """Return what a task waits for, in words, with what is known of it."""
    awaits = task.awaits
    actor = awaiting.awaited_actor(task)
    if actor:
        there = process_of_actor(dossier, actor)
        where = f" in process {there.pid} ({there.role})" if there is not None else ""
        return f"the answer of Ray actor {actor[:16]}…{where}"
    what = _ABOUT.get(awaits.kind, "")
    if awaits.kind == "queue":
        what = "the next item" if awaiting.waits_for_input(task) else "room in a full queue"
    if awaits.tasks:
        holders = [
            other.name
            for other in dossier.tasks
            if other.pid == task.pid and other.id in awaits.tasks
        ]
        if awaits.kind in ("lock", "semaphore") and holders:
            what = f"a {awaits.kind} that task {listed(holders, 3)} holds"
        elif holders:
            what = f"task {listed(holders, 3)}"
    detail = awaits.detail
    return f"{what} ({detail})" if what and detail else what or detail or "something"


def _culprit(dossier: Dossier, task: TaskMotion) -> Culprit:
    frame = awaiting.innermost(task)
    row = process(dossier, task.pid)
    thread = thread_of(dossier, task)
    return Culprit(
        pid=task.pid,
        rank=row.rank if row is not None else None,
        thread=(thread.name or None) if thread is not None else None,
        frame=frame.function if frame is not None else None,
    )


def _next(dossier: Dossier, task: TaskMotion) -> str:
    actor = awaiting.awaited_actor(task)
    there = process_of_actor(dossier, actor)
    if there is not None:
        return f"look at process {there.pid}: it has not answered"
    if actor:
        return f"find that actor's process and look there: ray get actors {actor}"
    return "find what should have completed that await, and whether it ran: the other tasks say"


# --- deadlocks -----------------------------------------------------------------------------------


def _deadlocks(dossier: Dossier, cycles: Sequence[tuple[TaskMotion, ...]]) -> tuple[Finding, ...]:
    """Return one finding for each distinct cycle."""
    groups: dict[tuple[str, ...], list[tuple[TaskMotion, ...]]] = {}
    for cycle in cycles:
        groups.setdefault(tuple(sorted(awaiting.told(task) for task in cycle)), []).append(cycle)
    return tuple(_deadlock(dossier, same) for same in groups.values())


def _cycles(dossier: Dossier, stopped: Sequence[InstanceRecord]) -> list[tuple[TaskMotion, ...]]:
    """Return the cycles of tasks, in processes of stopped engines, that did not move."""
    by_id = {(task.pid, task.id): task for record in stopped for task in tasks_of(dossier, record)}
    last = {
        pid: max(r.sample for r in dossier.task_readings if r.pid == pid)
        for pid in {pid for pid, _ in by_id}
        if any(r.pid == pid for r in dossier.task_readings)
    }
    found = []
    for reading in dossier.task_readings:
        if last.get(reading.pid) != reading.sample:
            continue
        for ids in reading.cycles:
            members = tuple(by_id[reading.pid, id_] for id_ in ids if (reading.pid, id_) in by_id)
            if members and len(members) == len(ids) and not any(m.moved for m in members):
                found.append(members)
    return found


def _deadlock(dossier: Dossier, same: Sequence[tuple[TaskMotion, ...]]) -> Finding:
    members = same[0]
    locks = all(task.awaits.kind in ("lock", "semaphore", "condition") for task in members)
    pids = [str(cycle[0].pid) for cycle in same]
    where = f"process {pids[0]}" if len(pids) == 1 else f"processes {listed(pids, 5)}"
    names = listed([task.name for task in members], 5)
    steps = [
        f"{task.name} stands at {awaiting.told(task)} and waits for {_held(task, behind)}"
        for task, behind in zip(members, (*members[1:], members[0]), strict=True)
    ]
    return Finding(
        rule=NAME,
        sentence=(
            f"Tasks {names} of {where} wait for each other and never end, a deadlock: "
            f"{'; '.join(steps[:5])}."
        ),
        confidence=Confidence.HIGH if members[0].moved is False else Confidence.MEDIUM,
        cause=DEADLOCK if locks and len(members) > 1 else NAME,
        verdict="hung",
        culprit=_culprit(dossier, members[0]),
        citations=tuple(t.citation for t in members if t.citation is not None)[:8],
        next_step="take these locks in one order everywhere" if locks else "break the circle",
    )


def _held(task: TaskMotion, behind: TaskMotion) -> str:
    if task.awaits.kind in ("lock", "semaphore", "condition"):
        return f"the {task.awaits.kind} that {behind.name} holds"
    return f"{behind.name} ({task.awaits.detail})" if task.awaits.detail else behind.name


# --- without tasks -------------------------------------------------------------------------------


def _unseen(dossier: Dossier, record: InstanceRecord) -> Finding:
    """Return what can be said where no task was read, or none that stands out."""
    thread = _loop_thread(dossier, record)
    work = in_flight([record])
    requests = f"{number_of(work, 'request')} in flight" if work else "requests in flight"
    answer = health_of(dossier, record)
    citations = [item.citation for item in (thread, answer) if item is not None and item.citation]
    why = (
        "none of the tasks that were read stands out"
        if tasks_of(dossier, record)
        else "A thread dump by py-spy does not show pending asyncio tasks, so it cannot say which"
    )
    return Finding(
        rule=NAME,
        sentence=(
            f"The event loop of {record.instance.name} is idle with {requests}: something that a "
            f"task awaits never completes. {why[:1].upper()}{why[1:]}."
        ),
        confidence=Confidence.MEDIUM,
        cause=NAME,
        verdict="hung",
        culprit=_parked(dossier, thread),
        citations=tuple(citations),
        next_step="read the suspended tasks: hangwatch tasks --pid PID",
    )


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


def _parked(dossier: Dossier, thread: ThreadMotion | None) -> Culprit | None:
    if thread is None:
        return None
    row = process(dossier, thread.pid)
    return Culprit(
        pid=thread.pid,
        rank=row.rank if row is not None else None,
        thread=thread.name or None,
        frame=thread.frames[0].function if thread.frames else None,
    )


RULE = Rule(name=NAME, title="an await never completes", examine=examine)
