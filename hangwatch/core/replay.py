"""Runs the detector over old logs in virtual time.

The same ``advance`` as in the daemon, stepped by events: at every instant at which a line arrived,
and at every instant at which a verdict was due to change. Hours of silence cost nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from typing import Final

from hangwatch.core import grouping, judge, parsing
from hangwatch.core.advance import advance
from hangwatch.core.fleet import State, begin, due, overall, view
from hangwatch.core.naming import Names
from hangwatch.model.dossier import Citation, InstanceRecord
from hangwatch.model.heartbeat import Heartbeat, Line
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, Transition
from hangwatch.model.observation import (
    Action,
    BeatSeen,
    CloseIncident,
    CountersSeen,
    GpusSeen,
    HealthSeen,
    Observation,
    ProcessesSeen,
    RecordStall,
    Report,
    SourceFound,
    SourceGrew,
    StacksSeen,
    StartCapture,
    TakeAftermath,
    UpdateCapture,
)
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.replay import LogMaterial, ReplayResult
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Gone, Idle, Loading, Ok, Verdict

KEPT_BEATS: Final = 360
"""Beats of an instance that a record keeps: an hour of LMDeploy."""

_ODDITIES: Final = {
    "clock": "not-a-hang:clock",
    "rotation": "not-a-hang:rotation",
    "format": "not-a-hang:format",
}
"""What a naive reader would have taken for a stall, most telling first, and its cause."""


@dataclass(slots=True)
class _Log:
    """What happened so far."""

    transitions: list[Transition] = field(default_factory=list)
    incidents: dict[str, Incident] = field(default_factory=dict)
    stalls: list[RecordStall] = field(default_factory=list)
    beats: dict[InstanceKey, deque[Heartbeat]] = field(default_factory=dict)
    cited: dict[InstanceKey, Citation] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # log -> name of its profile
    names: Names = field(default_factory=Names)
    heartbeats: int = 0

    def note(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Report(transition=transition):
                    self.transitions.append(transition)
                case RecordStall():
                    self.stalls.append(action)
                case (
                    StartCapture(incident=i) | UpdateCapture(incident=i) | CloseIncident(incident=i)
                ):
                    self.incidents[i.id] = i
                case TakeAftermath():
                    pass  # no capture is played


def replay(
    material: LogMaterial,
    *,
    profiles: Mapping[str, EngineProfile],
    policy: Policy,
    until: Instant,
    snapshots: Sequence[Observation] = (),
) -> ReplayResult:
    """Return what the detector would have said of *material*.

    Args:
        material: Logs in virtual time.
        profiles: Engines to look for, by name.
        policy: The limits.
        until: When the evaluation ends; lines after it do not count.
        snapshots: What endpoints and process tables said; they count at *until* only.
    """
    log = _Log()
    state = begin(policy, profiles, material.epoch, Instant(0.0))
    if any(seen.instance == InstanceKey() for seen in snapshots if isinstance(seen, _SNAPSHOTS)):
        # What a log without beats is about has been there from its beginning.
        there = ProcessesSeen(instance=InstanceKey(), processes=(), at=Instant(0.0))
        state, _ = advance(state, (there,), Instant(0.0))
    for at, batch in _batches(material, tuple(profiles.values()), until, log):
        state = _run_to(state, at, log)
        state, actions = advance(state, batch, at)
        log.note(actions)
    state = _run_to(state, until, log)
    state, actions = advance(state, _about(state, snapshots), until)
    log.note(actions)
    for incident in state.incidents:
        log.incidents[incident.id] = incident
    records = tuple(
        sorted(
            (_record(state, key, until, log) for key in state.instances if _is_real(state, key)),
            key=lambda record: (
                not grouping.is_alarm(record.verdict),
                record.window.earliest if record.window else float("inf"),
                record.instance.name,
            ),
        )
    )
    verdict = _explained(overall(state, until), material, log)
    return ReplayResult(
        heartbeats=log.heartbeats,
        instances=records,
        transitions=tuple(log.transitions),
        incidents=tuple(sorted(log.incidents.values(), key=lambda i: (i.detected_at, i.id))),
        verdict=verdict,
        window=grouping.onset(r.window for r in records if grouping.is_alarm(r.verdict)),
        stalls=tuple(log.stalls),
        until=until,
        epoch=material.epoch,
        policy=policy,
        notes=material.notes,
        problems=material.problems,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Who speaks in logs.

    Attributes:
        instances: Whose beats there are. Without any there may still be an engine, one that starts,
            say: nameless, and the only one.
        engine: Name of the profile that most of the logs are of, or ``""``.
    """

    instances: tuple[InstanceKey, ...]
    engine: str


def heard(material: LogMaterial, *, profiles: Mapping[str, EngineProfile]) -> Heard:
    """Return who speaks in *material*, so that snapshots can be told whose they are."""
    log = _Log()
    end = material.ends_at
    for _ in _batches(material, tuple(profiles.values()), end, log):
        pass
    engines = Counter(name for name in log.engines.values() if name)
    most = engines.most_common(1)
    return Heard(instances=tuple(log.beats) or (InstanceKey(),), engine=most[0][0] if most else "")


def batches(
    material: LogMaterial, *, profiles: Mapping[str, EngineProfile], until: Instant
) -> Iterator[tuple[Instant, list[Observation]]]:
    """Yield what *material* shows, instant by instant, for who steps a detector by himself."""
    return _batches(material, tuple(profiles.values()), until, _Log())


def continued(
    material: LogMaterial,
    *,
    profiles: Mapping[str, EngineProfile],
    policy: Policy,
    until: Instant,
) -> tuple[Transition, ...]:
    """Return which alarms a silence that goes on after *until* would raise, and when."""
    last = Instant(until + 2 * policy.stall_after)
    result = replay(material, profiles=profiles, policy=policy, until=last)
    return tuple(t for t in result.transitions if t.at > until and grouping.is_alarm(t.after))


def _run_to(state: State, at: Instant, log: _Log) -> State:
    """Judge whatever falls due before *at*."""
    while (moment := due(state)) is not None and moment < at:
        state, actions = advance(state, (), moment)
        log.note(actions)
    return state


def _batches(
    material: LogMaterial, profiles: Sequence[EngineProfile], until: Instant, log: _Log
) -> Iterator[tuple[Instant, list[Observation]]]:
    """Yield what was seen, instant by instant."""
    pids = {o.source: o.pid for o in material.observations if isinstance(o, SourceFound)}
    before: Instant | None = None
    batch: list[Observation] = []
    logs = ((o.at, 0, o) for o in material.observations if not isinstance(o, _SNAPSHOTS))
    lines = ((line.at, 1, line) for line in material.lines)
    for at, _, event in merge(logs, lines, key=lambda entry: entry[:2]):
        if at > until:
            break
        if before is not None and at > before:
            yield before, batch
            batch = []
        before = at
        if isinstance(event, Line):
            batch += _read(event, profiles, pids.get(event.source), material, log)
        else:
            batch.append(event)
    if before is not None:
        yield before, batch


_SNAPSHOTS: Final = (HealthSeen, CountersSeen, ProcessesSeen, GpusSeen, StacksSeen)


def _read(
    line: Line,
    profiles: Sequence[EngineProfile],
    pid: int | None,
    material: LogMaterial,
    log: _Log,
) -> tuple[Observation, ...]:
    known = log.engines.get(line.source, "")
    found = parsing.parse(
        line,
        profiles,
        known=known,
        pid=pid,
        zone=material.epoch.wall.tzinfo,
        near=material.epoch.wall_of(line.at),
    )
    log.engines[line.source] = parsing.engine_of(found, known)
    found = tuple(map(log.names.told, found))
    for item in found:
        if isinstance(item, BeatSeen):
            key = item.beat.instance
            log.heartbeats += 1
            kept = log.beats.setdefault(key, deque(maxlen=KEPT_BEATS))
            # A driver's copy of a beat is no second beat.
            if not kept or kept[-1].printed != item.beat.printed:
                kept.append(item.beat)
            log.cited[key] = Citation(
                path=line.source,
                line=line.number,
                text=line.text[:200].decode("utf-8", "replace"),
            )
    # A line that says nothing proves all the same that its log still took one.
    return found or (SourceGrew(source=line.source, at=line.at),)


def _about(state: State, snapshots: Sequence[Observation]) -> tuple[Observation, ...]:
    """Give snapshots that name no instance to the only one there is."""
    known = list(state.instances)
    if len(known) != 1:
        return tuple(snapshots)
    return tuple(
        replace(seen, instance=known[0])
        if isinstance(seen, _SNAPSHOTS)
        and seen.instance not in state.instances
        and (seen.instance.pid is None or known[0].pid is None)
        else seen
        for seen in snapshots
    )


def _is_real(state: State, key: InstanceKey) -> bool:
    """Leave out what was introduced by a line and never beat, unless something is wrong with it."""
    tracked = state.instances[key]
    if isinstance(tracked.verdict, Loading):
        return tracked.vitals.started is not None
    outside = (tracked.vitals.health, tracked.vitals.counters, tracked.vitals.processes)
    return tracked.vitals.last is not None or any(outside) or grouping.is_alarm(tracked.verdict)


def _record(state: State, key: InstanceKey, until: Instant, log: _Log) -> InstanceRecord:
    vitals = view(state, key, until)
    verdict = state.instances[key].verdict
    assert verdict is not None
    names = [key, *(alias for alias, name in state.aliases.items() if name == key)]
    written = max(
        (name for name in names if name in log.beats),
        key=lambda n: log.beats[n][-1].at,
        default=key,
    )
    return InstanceRecord(
        instance=key,
        verdict=verdict,
        last_beat=vitals.last,
        window=judge.stop_window(vitals, state.policy) if grouping.is_alarm(verdict) else None,
        beats=tuple(log.beats.get(written, ())),
        citation=log.cited.get(written),
    )


def _explained(verdict: Verdict, material: LogMaterial, log: _Log) -> Verdict:
    """Say of a good end what might have looked like a stall on the way."""
    if not isinstance(verdict, Ok) or verdict.cause != "not-a-hang:busy":
        return verdict
    cause = next((c for oddity, c in _ODDITIES.items() if oddity in material.oddities), "")
    if not cause and any(isinstance(t.after, Idle) for t in log.transitions):
        cause = "not-a-hang:idle"
    if any(isinstance(t.after, Gone) for t in log.transitions):
        cause = "not-a-hang:rotation"
    if log.stalls or log.incidents:
        cause = "not-a-hang:transient-stall"
    if any(t.after.cause == "not-a-hang:paused" for t in log.transitions):
        cause = "not-a-hang:paused"
    return replace(verdict, cause=cause) if cause else verdict
