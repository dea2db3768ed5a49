"""What a report says, in what order; renderers only decide how it looks.

The first sentence is for somebody who was woken up: how many of how many servers stopped, within
how long, when, and with how much work; the second says what they are doing now. Then come the six
parts of the first screen, as far as there is evidence for them. No sentence says more than a
finding or a number in the dossier bears, and a part without evidence is left out rather than
filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any, Final

from hangwatch.core import awaiting, loose, motion
from hangwatch.core.diagnosis import ALARM_WORDS, explanations, remarks, rivals
from hangwatch.core.loose import role_of
from hangwatch.core.questions import (
    CAUSE_FIRST,
    alarmed,
    health_of,
    in_flight,
    interval,
    listed,
    number_of,
    owners,
    present,
    process,
    process_of_actor,
    roles,
    seconds,
    shared_processes,
    spread,
    tasks_of,
    thread_of,
    wall,
)
from hangwatch.core.starvation import STARVED
from hangwatch.model.capture import Failure, FailureKind
from hangwatch.model.dossier import (
    Citation,
    Diagnosis,
    Dossier,
    EngineNumbers,
    Finding,
    InstanceRecord,
    MetricSample,
    TaskMotion,
    ThreadMotion,
)
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import Role
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence

MAX_SHAPES: Final = 6
MAX_FRAMES: Final = 14
AWAITS: Final = "await-never-completes"
"""Rule whose findings are about tasks."""

MAX_ROWS: Final = 3
MAX_NUMBERS: Final = 24
"""Lines of the engines' own numbers, and rows in one of them; all stand in ``tasks.json``."""

MAX_BEATS: Final = 10

VERDICT_WORDS: Final = {
    "ok": "working",
    "loading": "starting",
    "idle": "idle",
    "paused": "paused",
    "slow": "slow",
    "log_stalled": "log stalled",
    "suspected_hang": "suspected hang",
    "blocked": "blocked",
    "hung": "hung",
    "dead": "dead",
    "gone": "retired",
    "blind": "not visible",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One distinct way in which threads or tasks stand, and who stands so.

    Attributes:
        title: Whose stack it is: ``engine: pid 4242 and 7 more, thread MainThread``.
        state: ``frozen``, ``moving`` or ``seen once``; of tasks ``deadlocked``, ``did not move``,
            ``moving`` or ``seen once``.
        frames: Innermost first, as text.
        more: Frames left out at the outer end.
        facts: What else is known of these processes.
        citation: Where the first one stands.
    """

    title: str
    state: str
    frames: tuple[str, ...]
    more: int = 0
    facts: tuple[str, ...] = ()
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A report before it has a form. Empty parts have no evidence.

    Attributes:
        alarm: Whether something is wrong.
        headline: The first sentence.
        now: What they are doing now, or why that is not known.
        label: ``hung, high confidence: event-loop-blocked``.
        explanations: Findings that argue for a cause, the surest first.
        rivals: Explanations that remain, with their facts.
        remarks: Other findings.
        tasks: Distinct await chains, equal ones counted, the odd ones first.
        more_tasks: How many distinct await chains were left out.
        numbers: What the engines' own numbers were, one line a process and table.
        shapes: Distinct stacks of threads.
        lead: The one of all these that a single screen shows, or ``None``.
        shared: Processes that serve several engines, and who waits in them.
        instances: Rows of a table, its head first.
        beats: Rows of the last beats, their head first.
        provenance: Lines on versions, machine and limits.
        missing: What was not had, why, and what to do about it: what failed first.
        captured: How the capture went and who stood still for it, or ``""``.
        caveats: What could not be read, and what was assumed.
    """

    alarm: bool
    headline: str
    now: str
    label: str
    explanations: tuple[Finding, ...] = ()
    rivals: tuple[Finding, ...] = ()
    remarks: tuple[Finding, ...] = ()
    tasks: tuple[Shape, ...] = ()
    more_tasks: int = 0
    numbers: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    lead: Shape | None = None
    shared: tuple[str, ...] = ()
    instances: tuple[tuple[str, ...], ...] = ()
    beats: tuple[tuple[str, ...], ...] = ()
    provenance: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    captured: str = ""
    caveats: tuple[str, ...] = ()


def tell(diagnosis: Diagnosis) -> Story:
    """Return what the report of *diagnosis* says."""
    dossier = diagnosis.dossier
    alarm = diagnosis.verdict in ALARM_WORDS
    # Where no log says who works, what all of them do is all that can be told.
    shown = alarm or not dossier.instances or diagnosis.cause == STARVED
    chains, more_chains = _chains(dossier) if shown else ((), 0)
    shapes = _shapes(dossier) if shown else ()
    told = explanations(diagnosis)
    about_tasks = chains and (not shapes or (told and told[0].rule == AWAITS))
    return Story(
        alarm=alarm,
        headline=headline(diagnosis),
        now=_now(diagnosis) if alarm else "",
        label=(
            f"{VERDICT_WORDS.get(diagnosis.verdict, diagnosis.verdict)} "
            f"({diagnosis.confidence} confidence): {diagnosis.cause}"
        ),
        explanations=told,
        rivals=rivals(diagnosis) if alarm else (),
        remarks=remarks(diagnosis),
        tasks=chains,
        more_tasks=more_chains,
        numbers=_numbers(dossier) if shown else (),
        shapes=shapes,
        lead=next(iter(chains if about_tasks else shapes), None),
        shared=_shared(dossier) if alarm else (),
        instances=_instances(dossier),
        beats=_beats(dossier),
        provenance=_provenance(dossier),
        missing=_missing(dossier),
        captured=_captured(dossier),
        caveats=(*warnings(diagnosis), *dossier.notes, *dossier.problems, *diagnosis.problems),
    )


def warnings(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return why this should not be reported upstream, if it should not."""
    starved = (
        ("nothing is wrong with the engines: this is for whoever runs the job, not for upstream",)
        if diagnosis.cause == STARVED
        else ()
    )
    calm = (
        ("this is the record of a run: no incident was open, and there is nothing to report",)
        if diagnosis.dossier.manifest.get("kind") == "run" and diagnosis.verdict not in ALARM_WORDS
        else ()
    )
    return (*laboratory(diagnosis.dossier), *starved, *calm)


def laboratory(dossier: Dossier) -> tuple[str, ...]:
    """Return the warning that these are the servers of our own demo, if they are."""
    frames = (frame for thread in dossier.threads for frame in thread.frames)
    ours = any("hangwatch/lab/" in frame.file for frame in frames)
    return (
        ("these are servers of hangwatch's demo, made to hang: do not report it",) if ours else ()
    )


# ---------------------------------------------------------------------- the first sentence


def headline(diagnosis: Diagnosis) -> str:
    """Return what happened, in one sentence of plain words."""
    dossier = diagnosis.dossier
    stopped, there = alarmed(dossier), present(dossier)
    if diagnosis.verdict in ALARM_WORDS and stopped:
        return _stopped_sentence(diagnosis, stopped, len(there))
    since = stamp(dossier, dossier.verdict.since)
    reason = next(iter(dossier.verdict.because), "")
    if not there and reason and diagnosis.verdict == "ok":
        return f"{reason[:1].upper()}{reason[1:]}."
    who = _servers(len(there), len(there)) if there else "The server"
    words = f"{who} {'is' if len(there) <= 1 else 'are'}"
    if diagnosis.verdict == "ok":
        last = _last_beat(there)
        sure = dossier.verdict.confidence is Confidence.HIGH
        if reason and not (sure and diagnosis.cause == "not-a-hang:busy"):
            return f"{words} working: {reason}."
        beat = f"; the last heartbeat came at {stamp(dossier, last)}" if last is not None else ""
        return f"{words} working{beat}."
    unheard = diagnosis.verdict == "loading" and dossier.verdict.confidence is Confidence.LOW
    way = "unheard" if unheard else diagnosis.cause if diagnosis.cause in _CALM else None
    template = _CALM.get(way or diagnosis.verdict, "{words} {verdict} since {since}: {reason}.")
    verdict = VERDICT_WORDS.get(diagnosis.verdict, diagnosis.verdict)
    reason = reason or "no more is known"
    return template.format(words=words, verdict=verdict, since=since, reason=reason)


_CALM: Final = {
    "loading": "{words} still in start-up or warm-up since {since}: {reason}.",
    "unheard": "No heartbeat was seen yet: it may still start, print none, or print it elsewhere.",
    loose.NO_LOG: "Nothing can be said: {reason}.",
    STARVED: "{words} without work since {since}, while the job that should bring some lives.",
    "slow": "{words} slower than usual since {since}: {reason}.",
    "log_stalled": "A log has stalled since {since}, the engines have not: {reason}.",
    "blind": "Nothing can be said since {since}: {reason}.",
    "gone": "Every server was retired, the last one at {since}: {reason}.",
}


def _stopped_sentence(diagnosis: Diagnosis, stopped: Sequence[InstanceRecord], there: int) -> str:
    dossier = diagnosis.dossier
    did = {
        "suspected_hang": "fell silent",
        "dead": "died" if len(stopped) == 1 else "stopped",
    }.get(diagnosis.verdict, "stopped answering work")
    parts = [f"{_servers(len(stopped), there)} {did}"]
    apart = spread(stopped)
    if len(stopped) > 1 and apart is not None:
        parts.append(f"within {seconds(max(apart, 1.0))} of each other")
    parts.append(_when(dossier))
    work = in_flight(stopped)
    if work:
        parts.append(f"with {number_of(work, 'request')} in flight")
    elif work == 0:
        parts.append("with no request in flight by the last heartbeats")
    else:
        parts.append("with an unknown number of requests in flight")
    return f"{' '.join(parts[:-1])}, {parts[-1]}."


def _when(dossier: Dossier) -> str:
    window = dossier.window
    if window is None:
        return f"at {stamp(dossier, dossier.verdict.since)}"
    earliest, latest = wall(dossier, window.earliest), wall(dossier, window.latest)
    if int(window.latest - window.earliest) == 0:
        return f"at {stamp(dossier, window.earliest)}"
    return f"between {earliest:%Y-%m-%d %H:%M:%S} and {latest:%H:%M:%S} ({_zone(latest)})"


def _servers(count: int, of: int) -> str:
    if of == 1:
        return "The server"
    return f"{count} of {of} servers"


def stamp(dossier: Dossier, at: Instant) -> str:
    """Return a wall time with its zone."""
    moment = wall(dossier, at)
    return f"{moment:%Y-%m-%d %H:%M:%S} ({_zone(moment)})"


def _zone(moment: datetime) -> str:
    text = f"{moment:%z}"
    return f"{text[:3]}:{text[3:5]}" if text else "no zone"


def _last_beat(records: Iterable[InstanceRecord]) -> Instant | None:
    moments = [record.last_beat.at for record in records if record.last_beat is not None]
    return max(moments, default=None)


# ---------------------------------------------------------------------- what they do now


def _now(diagnosis: Diagnosis) -> str:
    told = next((f for f in explanations(diagnosis) if f.cause == diagnosis.cause), None)
    if told is not None and told.culprit is not None:
        # Up to the first colon stands what is; behind it, how that is known.
        what = told.sentence.split(": ")[0].rstrip(".")
        return f"Now: {what[:1].lower()}{what[1:]}."
    unknown = next((f for f in remarks(diagnosis) if f.rule == "cannot-tell"), None)
    if unknown is not None:
        return unknown.sentence
    return told.sentence if told is not None else ""


# ---------------------------------------------------------------------- tasks


def _chains(dossier: Dossier) -> tuple[tuple[Shape, ...], int]:
    """Return the await chains of stopped engines' tasks, equal ones counted, the telling first.

    Without engines, those of every process.

    The number is of those that were left out.
    """
    role = roles(dossier)
    there = dict.fromkeys(task for record in alarmed(dossier) for task in tasks_of(dossier, record))
    if not dossier.instances:
        there = dict.fromkeys(dossier.tasks)
    still = awaiting.suspects(there, role)
    rank = {task: i for i, task in enumerate(still)}
    groups: dict[tuple[object, ...], list[TaskMotion]] = {}
    for task in (*still, *(task for task in there if task not in rank)):
        key = (role.get(task.pid), task.chain, task.awaits.kind, _task_state(task))
        groups.setdefault(key, []).append(task)
    # As the suspects stand, but a crowd that waits for its input behind what is rare.
    ordered = sorted(
        groups.values(),
        key=lambda group: (
            group[0] not in rank,
            _a_process(group) if awaiting.waits_for_input(group[0]) else 0.0,
        ),
    )
    shown, left = ordered[: MAX_SHAPES - 1], ordered[MAX_SHAPES - 1 :]
    # The last place is the crowd's: what most tasks do says what the process is for.
    shown += [max(left, key=len)] if left else []
    return (
        tuple(_chain(dossier, group, role.get(group[0].pid)) for group in shown),
        len(ordered) - len(shown),
    )


def _numbers(dossier: Dossier) -> tuple[str, ...]:
    """Return the engines' own numbers, of both samples where they differ."""
    role = roles(dossier)
    samples: dict[tuple[int, str], list[tuple[int, EngineNumbers]]] = {}
    for reading in dossier.task_readings:
        for found in reading.numbers:
            samples.setdefault((reading.pid, found.name), []).append((reading.sample, found))
    alike: dict[tuple[str, str, str], list[int]] = {}
    for (pid, name), read in samples.items():
        read.sort(key=lambda pair: pair[0])
        before, after = read[0][1], read[-1][1]
        told = [_row(row, old) for row, old in _pairs(after.rows[:MAX_ROWS], before.rows)]
        more = len(after.rows) - len(told) + after.left_out
        told += [f"{more} more"] if more else []
        key = (role.get(pid) or "process", name, "; ".join(told))
        alike.setdefault(key, []).append(pid)
    lines = [
        f"{who} {listed([str(pid) for pid in sorted(pids)], 4)}, {name}: {what}"
        for (who, name, what), pids in alike.items()
    ]
    more = len(lines) - MAX_NUMBERS
    return (*lines[:MAX_NUMBERS], *([f"{more} more, in tasks.json"] if more > 0 else []))


def _pairs(
    rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each row with the same row of the first sample, where the rows can be told apart."""
    for number, row in enumerate(rows):
        yield row, before[number] if len(before) == len(rows) else row


def _row(row: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {_number(old[name])} → {_number(value)}"
        if name in old and old[name] != value
        else f"{name} {_number(value)}"
        for name, value in row.items()
    )


def _number(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _a_process(group: Sequence[TaskMotion]) -> float:
    return len(group) / len({task.pid for task in group})


def _task_state(task: TaskMotion) -> str:
    if task.deadlocked and not task.moved:
        return "deadlocked"
    if task.moved is None:
        return "seen once"
    return "moving" if task.moved else "did not move"


def _chain(dossier: Dossier, group: Sequence[TaskMotion], role: Role | None) -> Shape:
    pids = sorted({task.pid for task in group})
    who = f"pid {pids[0]}" if len(pids) == 1 else f"pids {listed([str(p) for p in pids], 5)}"
    names = list(dict.fromkeys(task.name for task in group))
    count = f"{len(group)} × " if len(group) > 1 else ""
    first = group[0]
    thread = thread_of(dossier, first)
    on = f", on thread {thread.name}" if thread is not None and thread.name else ""
    frames = [str(frame) for frame in reversed(first.chain)]
    awaits = first.awaits
    facts = [f"awaits {awaits.detail or awaits.kind}"] if awaits.kind else []
    holders = [t.name for t in dossier.tasks if t.pid == first.pid and t.id in awaits.tasks]
    if holders:
        facts.append(f"waits for task {listed(list(dict.fromkeys(holders)), 3)}")
    return Shape(
        title=(
            f"{count}{str(role or 'process').replace('_', ' ')} {who}, task {listed(names, 3)}{on}"
        ),
        state=_task_state(first),
        frames=tuple(frames[:MAX_FRAMES]),
        more=max(0, len(frames) - MAX_FRAMES),
        facts=tuple(facts),
        citation=first.citation,
    )


# ---------------------------------------------------------------------- stacks


def _shapes(dossier: Dossier) -> tuple[Shape, ...]:
    """Return the loops' threads of stopped engines, alike ones together, the telling first.

    Without engines, those of every process.
    """
    stopped = {record.instance for record in alarmed(dossier)}
    owns = owners(dossier)
    groups: dict[tuple[str, str, tuple[str, ...]], list[ThreadMotion]] = {}
    for thread in dossier.threads:
        owner = owns.get(thread.pid)
        whose = None if owner is None else owner.instance
        if (dossier.instances and whose not in stopped) or not _tells(thread):
            continue
        row = process(dossier, thread.pid)
        role = str(role_of(row.role)) if row is not None else ""
        frames = tuple(str(frame) for frame in thread.frames)
        groups.setdefault((role, _state(thread), frames), []).append(thread)
    ordered = sorted(groups.items(), key=lambda item: _shape_order(item[0], item[1]))
    return tuple(
        _shape(dossier, role, state, threads) for (role, state, _), threads in ordered[:MAX_SHAPES]
    )


def _tells(thread: ThreadMotion) -> bool:
    """Say whether a thread is a loop's, or is somewhere an idle one would not be."""
    return bool(
        motion.call_in_loop(thread)
        or not thread.idle
        or any(frame.name == "_run_once" for frame in thread.frames)
    )


def _state(thread: ThreadMotion) -> str:
    if thread.moved is None:
        return "seen once"
    if thread.moved or (thread.active and not motion.is_frozen(thread)):
        return "moving"
    return "waiting in its loop" if thread.idle else "frozen"


def _shape_order(
    key: tuple[str, str, tuple[str, ...]], threads: list[ThreadMotion]
) -> tuple[Any, ...]:
    role, state, _ = key
    states = ("frozen", "moving", "seen once", "waiting in its loop")
    return (
        states.index(state),
        CAUSE_FIRST.index(Role(role)) if role in CAUSE_FIRST else len(CAUSE_FIRST),
        -len(threads),
    )


def _shape(dossier: Dossier, role: str, state: str, threads: Sequence[ThreadMotion]) -> Shape:
    pids = sorted({thread.pid for thread in threads})
    names = list(dict.fromkeys(thread.name for thread in threads if thread.name))
    who = f"pid {pids[0]}" if len(pids) == 1 else f"pids {listed([str(p) for p in pids], 5)}"
    title = f"{role.replace('_', ' ') or 'process'} {who}"
    if names:
        title += f", thread {listed(names, 3)}"
    first = threads[0]
    frames = [str(frame) for frame in first.frames]
    return Shape(
        title=title,
        state=state,
        frames=tuple(frames[:MAX_FRAMES]),
        more=max(0, len(frames) - MAX_FRAMES),
        facts=_facts(dossier, pids),
        citation=first.citation,
    )


def _facts(dossier: Dossier, pids: Sequence[int]) -> tuple[str, ...]:
    facts = []
    owns = owners(dossier)
    whose = {owns[pid].instance: owns[pid] for pid in pids if pid in owns}
    answers = [a for record in whose.values() if (a := health_of(dossier, record)) is not None]
    words = list(dict.fromkeys(a.health.message or a.health.status for a in answers))
    if words:
        facts.append(
            f"/health: “{words[0]}”" + (f" and {len(words) - 1} more" if words[1:] else "")
        )
    if grown := _token_growth(dossier.metrics, pids):
        some = None not in grown and len(grown) < len(whose)
        asked = f" of {len(grown)} of them" if some else ""
        facts.append(f"tokens between the two samples{asked}: {sum(grown.values()):.0f}")
    gpus = {row.gpu for pid in pids if (row := process(dossier, pid)) is not None}
    last = max((row.sample for row in dossier.gpus), default=1)
    for gpu in dossier.gpus:
        if gpu.index in gpus and gpu.sample == last and gpu.utilization_pct is not None:
            power = f", {gpu.power_w:.0f} W" if gpu.power_w is not None else ""
            facts.append(f"GPU {gpu.index}: {gpu.utilization_pct:.0f} %{power}")
            break
    cpu = [row.cpu_pct for pid in pids if (row := process(dossier, pid)) is not None]
    known = [value for value in cpu if value is not None]
    if known:
        facts.append(f"CPU: {max(known):.0f} % of a core")
    return tuple(facts)


def _token_growth(metrics: Iterable[MetricSample], pids: Sequence[int]) -> dict[int | None, float]:
    """Return by how much the token counters of each server grew between the samples.

    A server that was well at first is asked once, so only counters that were read twice count.
    """
    read: dict[tuple[object, ...], dict[int, MetricSample]] = {}
    for found in metrics:
        if found.name.endswith("tokens_total") and (found.pid is None or found.pid in pids):
            key = (found.pid, found.name, *sorted(found.labels.items()))
            read.setdefault(key, {})[found.sample] = found
    grown: dict[int | None, float] = {}
    for samples in read.values():
        if 1 in samples and 2 in samples:
            first, second = samples[1], samples[2]
            grown[first.pid] = grown.get(first.pid, 0.0) + second.value - first.value
    return grown


def _shared(dossier: Dossier) -> tuple[str, ...]:
    lines = []
    for row in shared_processes(dossier):
        threads = [thread for thread in dossier.threads if thread.pid == row.pid]
        telling = [t for t in threads if not t.idle] or [
            t for t in threads if motion.call_served(t)
        ]
        frame = motion.telling_frame(telling[0].frames) if telling else None
        if frame is not None:
            does = f"{'waiting' if telling[0].idle else _state(telling[0])} in {frame}"
        else:
            does = "all threads wait for work" if threads else "no stack of it"
        state = f", state {row.state}" if row.state else ""
        lines.append(f"{row.role.replace('_', ' ')} {row.pid} ({row.title[:60]}){state}: {does}")
    return (*lines, *_actors(dossier))


def _actors(dossier: Dossier) -> Iterator[str]:
    """Yield the Ray actors whose answer is awaited, those that most tasks wait for first."""
    waiting: dict[str, list[TaskMotion]] = {}
    for task in awaiting.pending(dossier.tasks):
        if not task.moved and (actor := awaiting.awaited_actor(task)):
            waiting.setdefault(actor, []).append(task)
    for actor, found in sorted(waiting.items(), key=lambda item: -len(item[1]))[:MAX_SHAPES]:
        there = process_of_actor(dossier, actor)
        where = f" (process {there.pid}, {there.role})" if there is not None else ""
        wait = "task waits" if len(found) == 1 else "tasks wait"
        pids = len({task.pid for task in found})
        yield (
            f"Ray actor {actor}{where}: {len(found)} {wait} for its answer, in "
            f"{pids} {'process' if pids == 1 else 'processes'}"
        )


# ---------------------------------------------------------------------- tables


def _instances(dossier: Dossier) -> tuple[tuple[str, ...], ...]:
    """Return one row a server, in the order in which they fell silent."""
    if not dossier.instances:
        return ()
    head = ("server", "engine", "verdict", "last heartbeat", "in flight")
    rows = [
        (
            record.instance.name,
            record.instance.tag,
            VERDICT_WORDS[record.verdict.word],
            f"{wall(dossier, record.last_beat.at):%Y-%m-%d %H:%M:%S}"
            if record.last_beat
            else "none",
            _count(record.last_beat.in_flight if record.last_beat else None),
        )
        for record in sorted(dossier.instances, key=_last_heard)
    ]
    return (head, *rows)


def _last_heard(record: InstanceRecord) -> tuple[bool, float]:
    beat = record.last_beat
    return beat is None, 0.0 if beat is None else beat.at


def _beats(dossier: Dossier) -> tuple[tuple[str, ...], ...]:
    """Return the last beats over all servers, the latest first."""
    records = alarmed(dossier) or present(dossier) or dossier.instances
    beats = sorted((beat for record in records for beat in record.beats), key=lambda b: -b.at)
    if not beats:
        return ()
    head = ("time", "server", "in tok/s", "out tok/s", "running", "waiting", "in flight")
    return (head, *(_beat_row(dossier, beat) for beat in beats[:MAX_BEATS]))


def _beat_row(dossier: Dossier, beat: Heartbeat) -> tuple[str, ...]:
    return (
        f"{wall(dossier, beat.at):%H:%M:%S}",
        beat.instance.name,
        _rate(beat.in_tps),
        _rate(beat.out_tps),
        _count(beat.running),
        _count(beat.waiting),
        _count(beat.in_flight),
    )


def _rate(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


# ---------------------------------------------------------------------- where it comes from


def _provenance(dossier: Dossier) -> tuple[str, ...]:
    lines = []
    versions: dict[str, list[str]] = {}
    machines = []
    for path, data in dossier.extra.items():
        if path.endswith("versions.json") and isinstance(data, Mapping):
            for name, facts in (data.get("packages") or {}).items():
                told = _version(facts)
                if told not in versions.setdefault(name, []):
                    versions[name].append(told)
        elif path.endswith("machine.json") and isinstance(data, Mapping):
            machines.append(data)
    first = [
        name
        for name in ("lmdeploy", "vllm", "sglang", "xtuner", "ray", "torch")
        if name in versions
    ]
    rest = sorted(name for name in versions if name not in first)
    lines += [f"{name} {', '.join(versions[name])}" for name in (*first, *rest)]
    if pythons := sorted({reading.python for reading in dossier.task_readings if reading.python}):
        lines.append(f"Python {', '.join(pythons)}")
    for machine in machines[:1]:
        lines.append(
            f"Linux {machine.get('kernel', '?')} {machine.get('machine', '')}, "
            f"{machine.get('cores', '?')} cores"
        )
    names = sorted({f"{gpu.name}" for gpu in dossier.gpus if gpu.name})
    if names:
        count = len({gpu.index for gpu in dossier.gpus})
        lines.append(f"{number_of(count, 'GPU')}: {listed(names)}")
    lines.append(
        f"limits: a heartbeat every {interval(dossier):g} s, "
        f"stalled after {dossier.policy.stall_after:g} s"
    )
    return tuple(lines)


def _version(facts: Any) -> str:
    if not isinstance(facts, Mapping):
        return str(facts)
    told = str(facts.get("version", "?"))
    if facts.get("commit"):
        told += f" at commit {str(facts['commit'])[:12]}"
    return told + (" (editable)" if facts.get("editable") else "")


class _Lack(IntEnum):
    """In what way a step has less than it should: the worst first."""

    FAILED = 0
    STOOD_IN = 1
    LEFT_OUT = 2
    NOT_HERE = 3

    @classmethod
    def of(cls, failure: Failure) -> _Lack:
        if failure.stand_in:
            return cls.STOOD_IN
        if failure.kind is FailureKind.GATED:
            return cls.LEFT_OUT
        return cls.NOT_HERE if failure.kind is FailureKind.NOT_AVAILABLE else cls.FAILED


_LACKS: Final = {
    _Lack.FAILED: ("failed", ""),
    _Lack.STOOD_IN: ("made up for", ""),
    _Lack.LEFT_OUT: ("left out", "left out: "),
    _Lack.NOT_HERE: ("found nothing to read", "not here: "),
}
"""What becomes of such steps, in a sentence that counts them and before what is said of them."""


def _missing(dossier: Dossier) -> tuple[str, ...]:
    """Return why steps have less than they should, those with one remedy together; then notes."""
    groups: dict[tuple[_Lack, str], Counter[str]] = {}
    for evidence in dossier.evidence:
        failure = evidence.failure
        if failure is not None:
            message = (failure.message.strip().splitlines() or [""])[-1] or str(failure.kind)
            # Without a remedy that they share, each stands for itself.
            key = (_Lack.of(failure), failure.hint or f"{evidence.collector}: {message}")
            groups.setdefault(key, Counter())[f"{evidence.collector}: {message}"] += 1
    told = []
    for (lack, hint), messages in sorted(groups.items(), key=lambda item: item[0][0]):
        each = [
            message.replace(":", f" ({count} times):", 1) if count > 1 else message
            for message, count in messages.items()
        ]
        remedy = "" if hint in messages else f" [to do: {hint}]"
        told.append(f"{_LACKS[lack][1]}{'; '.join(each)}{remedy}")
    notes = dossier.manifest.get("notes")
    return (*told, *(str(note) for note in (notes if isinstance(notes, list) else ())))


def _captured(dossier: Dossier) -> str:
    if not dossier.evidence:
        return ""
    lacks = Counter(_Lack.of(each.failure) for each in dossier.evidence if each.failure)
    capture = dossier.manifest.get("capture") or {}
    elapsed = capture.get("elapsed_s")
    took = f" in {seconds(float(elapsed))}" if isinstance(elapsed, int | float) else ""
    lost = listed([f"{lacks[lack]} {_LACKS[lack][0]}" for lack in _Lack if lacks[lack]])
    return (
        f"{number_of(len(dossier.processes), 'process')} captured in "
        f"{number_of(len(dossier.evidence), 'step')}{took}{f': {lost}' if lost else ''}. "
        f"{_stood_still(dossier)}{_before(dossier)}"
    )


def _before(dossier: Dossier) -> str:
    """Say what there is of the processes from before, to compare with."""
    looks = [look for look in dossier.manifest.get("baseline") or () if look.get("pid")]
    moments = [str(sample.get("at", "")) for look in looks for sample in look.get("samples", ())]
    if not moments:
        return ""
    last = max(moments).replace("T", " ").partition(".")[0]
    return (
        f" Under baseline/ is how {number_of(len(looks), 'process')} looked before, last at {last}."
    )


def _stood_still(dossier: Dossier) -> str:
    pauses: Counter[int] = Counter()
    for evidence in dossier.evidence:
        if evidence.target is not None and evidence.pause_ms:
            pauses[evidence.target.pid] += round(evidence.pause_ms)
    if not pauses:
        return "No process was seen to stand still for it."
    each = [f"{pid} for {pause} ms" for pid, pause in pauses.most_common()]
    return f"Processes that stood still for it: {listed(each)}."
