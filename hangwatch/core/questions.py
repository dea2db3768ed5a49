"""Questions that several rules and renderers ask of a dossier, each answered in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from hangwatch.core import awaiting, blackbox, motion
from hangwatch.core.loose import family, role_of
from hangwatch.core.witnesses import POLLING, QUIET_CPU
from hangwatch.model.dossier import (
    Citation,
    Dossier,
    Frame,
    HealthRecord,
    InstanceRecord,
    ProcessRecord,
    ProcessStop,
    TaskMotion,
    ThreadMotion,
)
from hangwatch.model.identity import Role
from hangwatch.model.time import Instant
from hangwatch.model.verdict import ALARMS, Confidence, Gone
from hangwatch.model.vitals import Motion, StackVital

MOST_OTHERS: Final = 2
"""Awaits that are named beside the one that explains most."""

LEAD: Final = 60.0
"""Seconds from a stop to the stop of those that wait for it, at most: they may have work left."""

ENGINES: Final = frozenset((Role.ENGINE, Role.ENGINE_WORKER, Role.RAY_WORKER))

CAUSE_FIRST: Final = (Role.ENGINE, Role.ENGINE_WORKER, Role.RAY_WORKER, Role.API_SERVER)
"""Whose loop is shown first: a server that waits for its engine is a consequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A loop's thread that is in a call and not back in its loop.

    Attributes:
        instance: Whose it is, or ``None`` for a process that several share.
        thread: It.
        frame: The innermost telling frame.
        frozen: Whether it was there, unmoved, in both samples.
        process: Its process, if the table has it.
    """

    instance: InstanceRecord | None
    thread: ThreadMotion
    frame: Frame
    frozen: bool
    process: ProcessRecord | None = None


def alarmed(dossier: Dossier) -> tuple[InstanceRecord, ...]:
    """Return the instances whose verdict is an alarm, those that stopped first first."""
    return tuple(record for record in dossier.instances if isinstance(record.verdict, ALARMS))


def alarmed_by(dossier: Dossier, cause: str) -> tuple[InstanceRecord, ...]:
    """Return those of them that alarm for this cause."""
    return tuple(record for record in alarmed(dossier) if record.verdict.cause == cause)


def present(dossier: Dossier) -> tuple[InstanceRecord, ...]:
    """Return the instances that were not retired."""
    return tuple(record for record in dossier.instances if not isinstance(record.verdict, Gone))


def stopped_at(record: InstanceRecord) -> Instant | None:
    """Return the last moment at which an instance was known to make progress."""
    if record.window is not None:
        return record.window.earliest
    return record.last_beat.at if record.last_beat is not None else None


def spread(records: Iterable[InstanceRecord]) -> float | None:
    """Return within how many seconds the instances stopped; ``None`` if it cannot be said."""
    moments = [stopped_at(record) for record in records]
    known = [moment for moment in moments if moment is not None]
    return max(known) - min(known) if known and len(known) == len(moments) else None


def in_flight(records: Iterable[InstanceRecord]) -> int | None:
    """Return the requests in flight by the last beats; ``None`` if no beat says."""
    known = [
        record.last_beat.in_flight
        for record in records
        if record.last_beat is not None and record.last_beat.in_flight is not None
    ]
    return sum(known) if known else None


def together(dossier: Dossier, records: Sequence[InstanceRecord]) -> bool:
    """Say whether several instances stopped within the time that makes them one incident."""
    apart = spread(records)
    return len(records) > 1 and apart is not None and apart <= together_within(dossier)


def together_within(dossier: Dossier) -> float:
    """Return within how many seconds instances that stop count as stopped together."""
    return dossier.policy.together * interval(dossier)


def rank_of(record: InstanceRecord) -> int | None:
    """Return the rank that an engine's label names (``DP5``), or ``None``."""
    digits = record.instance.tag[len(record.instance.tag.rstrip("0123456789")) :]
    return int(digits) if digits else None


def collective(dossier: Dossier, records: Sequence[InstanceRecord]) -> str:
    """Return the name of a group of ranks that compute together and hold all of *records*.

    ``topology.json`` names such groups: ``{"ep_group": [0, 1, 2, 3]}``. ``""`` if none does.
    """
    ranks = {rank_of(record) for record in records}
    topology = dossier.extra.get("topology.json")
    for name, members in topology.items() if isinstance(topology, Mapping) else ():
        if len(ranks) > 1 and isinstance(members, list) and ranks <= set(members):
            return str(name)
    return ""


def interval(dossier: Dossier) -> float:
    """Return the seconds between beats that the limits were made from."""
    return dossier.policy.heartbeat_interval or 10.0


def wall(dossier: Dossier, at: Instant) -> datetime:
    """Return the wall time of an instant, in the zone of the evaluation."""
    return dossier.epoch.wall_of(at)


def processes_of(dossier: Dossier, record: InstanceRecord) -> tuple[ProcessRecord, ...]:
    """Return the processes of an instance; all of them where there is one without a pid."""
    key = record.instance
    members = family(key.pid, key.name, dossier.processes)
    if not members and key.pid is None and len(dossier.instances) == 1:
        return dossier.processes
    return members


def server_pid(dossier: Dossier, record: InstanceRecord) -> int | None:
    """Return the process that prints an instance's beats, where anything says which."""
    if record.instance.pid is not None:
        return record.instance.pid
    rows = processes_of(dossier, record)
    servers = [row for row in rows if role_of(row.role) is Role.API_SERVER] or list(rows)
    return servers[0].pid if len(servers) == 1 else None


def owners(dossier: Dossier) -> dict[int, InstanceRecord]:
    """Return by pid which instance a process belongs to; shared and unknown ones are missing."""
    found: dict[int, InstanceRecord] = {}
    if len(dossier.instances) == 1:
        pids = {thread.pid for thread in dossier.threads} | {row.pid for row in dossier.processes}
        found = dict.fromkeys(pids, dossier.instances[0])
    for record in dossier.instances:
        for row in processes_of(dossier, record):
            found.setdefault(row.pid, record)
        if record.instance.pid is not None:
            found.setdefault(record.instance.pid, record)
    return found


def process(dossier: Dossier, pid: int) -> ProcessRecord | None:
    """Return a row of the process table."""
    return next((row for row in dossier.processes if row.pid == pid), None)


def shared_processes(dossier: Dossier) -> tuple[ProcessRecord, ...]:
    """Return processes that serve several engines: stores, session servers, the driver."""
    roles = (Role.STORE, Role.SESSION_SERVER, Role.DRIVER)
    return tuple(
        row
        for row in dossier.processes
        if role_of(row.role) in roles and not row.extra.get("instance")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """Who stopped before all others whose pattern changed, by the black box.

    Attributes:
        lead: Who, and by how much.
        shared: Whether all of the first serve several instances, and others of these stopped.
        who: The first, for a sentence: ``store 4242``.
        before: By how much, for a sentence: ``0.25 to 0.75 s``.
    """

    lead: blackbox.Lead
    shared: bool
    who: str
    before: str


def precedence(dossier: Dossier) -> Precedence | None:
    """Return which processes of the hang stopped first; ``None`` where no order can be told.

    Only changes count that came about when progress stopped: who fell quiet long before that had
    no part in it, or has its own story.
    """
    owner = owners(dossier)
    stopped = alarmed(dossier)
    names = {record.instance.name for record in stopped}

    def whose(stop: ProcessStop) -> str:
        return stop.instance or (owner[stop.pid].instance.name if stop.pid in owner else "")

    since = None if dossier.window is None else dossier.window.earliest - LEAD
    concerned = [
        stop
        for stop in dossier.stops
        if (whose(stop) in names or not whose(stop))
        and role_of(stop.role) is not Role.RAY_SYSTEM
        and (since is None or stop.latest is None or stop.latest >= since)
    ]
    for stop in concerned:
        found = blackbox.ahead(stop, concerned) if not whose(stop) else None
        if found is not None and len(found.later) > len(found.unsure):
            waiting = {whose(other) for other in found.later} - {""}
            if len(waiting) > 1:
                return _precedence(found, shared=True)
    found = blackbox.lead(concerned)
    return None if found is None else _precedence(found, shared=False)


def _precedence(found: blackbox.Lead, *, shared: bool) -> Precedence:
    kinds = list(dict.fromkeys((stop.role or "process").replace("_", " ") for stop in found.first))
    pids = [str(stop.pid) for stop in found.first]
    plural = "s" if len(pids) > 1 else ""
    return Precedence(
        lead=found,
        shared=shared,
        who=f"{kinds[0] if len(kinds) == 1 else 'process'}{plural} {listed(pids, 4)}",
        before=(
            f"{found.least:.2f} to {found.most:.2f} s"
            if found.least > 0
            else f"up to {found.most:.2f} s"
        ),
    )


def health_of(dossier: Dossier, record: InstanceRecord) -> HealthRecord | None:
    """Return the last answer of an instance's health endpoint."""
    pids = {row.pid for row in processes_of(dossier, record)} | {record.instance.pid}
    own = [
        answer
        for answer in dossier.health
        if answer.pid in pids or (answer.pid is None and len(dossier.instances) == 1)
    ]
    return max(own, key=lambda answer: answer.sample, default=None)


def calls(dossier: Dossier, *, boring: Sequence[str] = ()) -> tuple[Call, ...]:
    """Return every loop's thread that is in a call, those of alarmed instances first."""
    found = []
    owner = owners(dossier)
    for thread in dossier.threads:
        frames = motion.call_in_loop(thread)
        if not frames or thread.idle or thread.name in boring:
            continue
        frame = motion.telling_frame(frames)
        if frame is None:
            continue
        found.append(
            Call(
                instance=owner.get(thread.pid),
                thread=thread,
                frame=frame,
                frozen=motion.is_frozen(thread),
                process=process(dossier, thread.pid),
            )
        )
    return tuple(sorted(found, key=lambda call: _rank(dossier, call)))


def _rank(dossier: Dossier, call: Call) -> int:
    record = call.instance
    if record is None or not isinstance(record.verdict, ALARMS):
        return len(dossier.instances)
    return dossier.instances.index(record)


def roles(dossier: Dossier) -> dict[int, Role]:
    """Return by pid what each process of the table does."""
    return {row.pid: role_of(row.role) for row in dossier.processes}


def tasks_of(dossier: Dossier, record: InstanceRecord) -> tuple[TaskMotion, ...]:
    """Return the tasks of an instance that are not over.

    Where nothing says which engine works for it, those of all engines that nothing claims.
    """
    owner, role = owners(dossier), roles(dossier)
    there = awaiting.pending(dossier.tasks)
    own = tuple(task for task in there if owner.get(task.pid) is record)
    if any(role.get(task.pid) in ENGINES for task in own):
        return own
    return own + tuple(t for t in there if t.pid not in owner and role.get(t.pid) in ENGINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckAwait:
    """The await that explains why an instance with work stands still.

    Attributes:
        record: The instance.
        task: The task that stands at it.
        others: Further ones of its process that stand where an idle engine's tasks do not.
        confidence: How sure that it is this one.
    """

    record: InstanceRecord
    task: TaskMotion
    others: tuple[TaskMotion, ...]
    confidence: Confidence


def stuck_await(dossier: Dossier, record: InstanceRecord) -> StuckAwait | None:
    """Return the await at which an instance stands, ``None`` if no await explains its silence."""
    tasks = tasks_of(dossier, record)
    odd = [t for t in awaiting.suspects(tasks, roles(dossier)) if not awaiting.waits_for_input(t)]
    if not odd:
        return None
    if record.verdict.cause == "await-never-completes":
        certain = odd[0].moved is False and not awaiting.may_be_computed(tasks, roles(dossier))
        sure = Confidence.HIGH if certain else Confidence.MEDIUM
    elif _nothing_else(dossier, record, tasks):
        rows = [row for row in dossier.processes if row.pid in {task.pid for task in tasks}]
        known = bool(rows) and all(row.cpu_pct is not None for row in rows)
        sure = Confidence.MEDIUM if known else Confidence.LOW
    else:
        return None
    beside = tuple(task for task in odd[1:] if task.pid == odd[0].pid)
    return StuckAwait(record=record, task=odd[0], others=beside[:MOST_OTHERS], confidence=sure)


def _nothing_else(dossier: Dossier, record: InstanceRecord, tasks: Sequence[TaskMotion]) -> bool:
    """Say whether work is in flight, every thread waits, and nothing computes what is awaited."""
    pids = {task.pid for task in tasks}
    threads = [thread for thread in dossier.threads if thread.pid in pids]
    if not in_flight([record]) or not threads:
        return False
    if any(call.instance is record for call in calls(dossier)):
        return False
    if any(
        (row.cpu_pct or 0.0) >= QUIET_CPU or (row.vol_ctxt_per_s or 0.0) >= POLLING
        for row in dossier.processes
        if row.pid in pids
    ):
        return False
    waiting = StackVital(at=Instant(0.0), motion=Motion.WAITING)
    return bool(awaiting.with_tasks(waiting, tasks, threads, roles(dossier)).suspended)


def thread_of(dossier: Dossier, task: TaskMotion) -> ThreadMotion | None:
    """Return the thread that runs the event loop of a task, as far as anything says which."""
    ids = [
        reading.threads.get(task.loop)
        for reading in dossier.task_readings
        if reading.pid == task.pid
    ]
    return next(
        (t for t in dossier.threads if t.pid == task.pid and t.tid is not None and t.tid in ids),
        None,
    )


def process_of_actor(dossier: Dossier, actor: str) -> ProcessRecord | None:
    """Return the process in which a Ray actor lives, where the evidence names it."""
    if not actor:
        return None
    pids = {reading.pid for reading in dossier.task_readings if actor in reading.actors}
    for row in dossier.processes:
        if row.pid in pids or row.extra.get("actor_id") == actor:
            return row
    return None


def beat_citation(record: InstanceRecord) -> tuple[Citation, ...]:
    """Return the citation of an instance's last beat, as far as there is one."""
    return (record.citation,) if record.citation is not None else ()


def number_of(count: int, thing: str) -> str:
    """Return ``1 request``, ``2 requests``, ``2 processes``."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{count} {thing if count == 1 else plural}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return ``a, b and c``; ``a, b and 6 more`` when there are too many."""
    if len(names) <= 1:
        return "".join(names)
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def seconds(value: float) -> str:
    """Return a duration for people: ``0.4 s``, ``97 s``, ``12 min``, ``3.5 h``."""
    if value < 9.95 and value != int(value):
        return f"{value:.1f} s"
    if value < 300:
        return f"{value:.0f} s"
    if value < 3 * 3600:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"
