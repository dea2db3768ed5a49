"""The fleet at a glance: what somebody sees who looks on while it is watched.

``board(state, now)`` is one look. Whoever is in trouble stands first, those in equal trouble in
the order in which they came into it; what does not fit is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from hangwatch.core import grouping
from hangwatch.core.fleet import State, Tracked
from hangwatch.core.vitals import GRACE
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, IncidentState, Member
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Gone, Verdict
from hangwatch.model.vitals import Vitals

SETTLED: Final = 20.0
"""Seconds until whatever can be asked was asked once: before, nothing is called unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instance.

    Attributes:
        instance: Its name, and its own label where it shares the name with another.
        pid: Its process, or ``None`` where that is not known.
        engine: Name of its profile, or ``""`` before its first beat.
        silence: Seconds since its last beat, or ``None`` before the first.
        tps: Tokens a second of its latest beats, oldest first; empty if they do not say.
        missed: Beats that should have come since.
        running: Requests in the running batch, or ``None`` if nothing says.
        waiting: Requests queued in the engine, or ``None`` if nothing says.
        verdict: What is thought of it.
        since: Since when.
        incident: Id of the open incident that it belongs to, or ``""``.
    """

    instance: str
    verdict: Verdict
    since: datetime
    pid: int | None = None
    engine: str = ""
    silence: float | None = None
    tps: tuple[float, ...] = ()
    missed: int = 0
    running: int | None = None
    waiting: int | None = None
    incident: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """An open incident: who stopped, and in which order.

    Attributes:
        incident: Its id.
        verdict: The strongest of its members'.
        since: When the first of them fell silent.
        order: Each with the seconds by which it fell silent after the first.
        watched: How many instances were watched when it began.
        recovered: How many of them have recovered.
        bundle: Path of the bundle, or ``""`` while there is none.
        notice: Whether nothing is wrong with the engines.
    """

    incident: str
    verdict: Verdict
    since: datetime
    order: tuple[tuple[str, float], ...]
    watched: int
    recovered: int = 0
    bundle: str = ""
    notice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One look.

    Attributes:
        at: When.
        rows: Every instance, whoever is in trouble first.
        stops: Open incidents, oldest first.
        remarks: What else there is to know: pauses that were announced, logs that stand still,
            witnesses that are missing.
    """

    at: datetime
    rows: tuple[Row, ...] = ()
    stops: tuple[Stop, ...] = ()
    remarks: tuple[str, ...] = ()


def board(state: State, now: Instant) -> Board:
    """Return what there is to see at *now*."""
    labels = _labels(state.instances)
    incidents = [x for x in state.incidents if x.state is not IncidentState.CLOSED]
    homes = {
        member.instance: incident.id
        for incident in incidents
        for member in incident.members
        if member.recovered_at is None
    }
    rows = [
        _row(state, tracked, tracked.verdict, now, label=labels[key], incident=homes.get(key, ""))
        for key, tracked in state.instances.items()
        if tracked.verdict is not None
    ]
    return Board(
        at=state.epoch.wall_of(now),
        rows=tuple(sorted(rows, key=_urgency)),
        stops=tuple(_stop(state, incident, labels) for incident in incidents),
        remarks=(*_pauses(state, now), *_standing_logs(state), *_missing(state, now)),
    )


def fit(rows: Sequence[Row], lines: int) -> tuple[Sequence[Row], str]:
    """Return as many rows as *lines* can hold, and what to say of the others, or ``""``."""
    if len(rows) <= lines:
        return rows, ""
    shown = rows[: max(lines - 1, 0)]
    rest = rows[len(shown) :]
    return shown, f"… and {len(rest)} more: {tally(rest)}"


def tally(rows: Iterable[Row]) -> str:
    """Return how many there are of each verdict: ``3 hung, 5 ok``."""
    rows = sorted(rows, key=_urgency)
    counts = Counter(row.verdict.word for row in rows)
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def summary(seen: Board) -> str:
    """Return how many are watched, and how they are."""
    if not seen.rows:
        return "no engine seen yet"
    count = len(seen.rows)
    return f"{count} {'instance' if count == 1 else 'instances'}: {tally(seen.rows)}"


def sentences(stop: Stop) -> tuple[str, ...]:
    """Return who stopped, when, and in which order."""
    count = len(stop.order)
    began = f"{stop.since:%H:%M:%S}"
    apart = max((after for _, after in stop.order), default=0.0)
    if stop.notice:
        what = f"{count} of {stop.watched} without work since {began}"
    elif count == 1:
        what = f"1 of {stop.watched} stopped at {began}: {stop.order[0][0]}"
    else:
        within = f"within {seconds(max(apart, 0.1))}, the first at {began}"
        what = f"{count} of {stop.watched} stopped {within}"
    verdict = stop.verdict
    what += f"; {verdict.word} ({verdict.confidence.value}), {verdict.cause}"
    if stop.recovered:
        what += f"; {stop.recovered} recovered"
    if count == 1 or stop.notice:
        return (what,)
    first, *others = stop.order
    order = ", ".join((first[0], *(f"{name} +{_apart(after)}" for name, after in others)))
    return (what, f"they fell silent in this order: {order}")


def _apart(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else seconds(value)


def seconds(value: float) -> str:
    """Return a duration as people say it: ``0.4 s``, ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    if value < 9.95:
        return f"{value:.1f} s"
    for limit, unit, name in ((119.5, 1, "s"), (7170, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / unit:.0f} {name}"
    return f"{value / 86_400:.0f} d"


def _labels(instances: Iterable[InstanceKey]) -> Mapping[InstanceKey, str]:
    keys = tuple(instances)
    names = Counter(key.name for key in keys)
    return {key: f"{key.name} {key.tag}" if names[key.name] > 1 else key.name for key in keys}


def _urgency(row: Row) -> tuple[int, datetime, str]:
    return (-grouping.strength(row.verdict), row.since, row.instance)


def _row(
    state: State, tracked: Tracked, verdict: Verdict, now: Instant, *, label: str, incident: str
) -> Row:
    vitals = tracked.vitals
    silence = None if vitals.last is None else max(0.0, now - vitals.last.at)
    interval = state.policy.heartbeat_interval or vitals.interval
    running, waiting = _in_flight(vitals)
    pids = (process.pid for process in vitals.processes if process.needed)
    return Row(
        instance=label,
        pid=vitals.instance.pid or next(pids, None),
        engine=vitals.last.profile if vitals.last is not None else "",
        silence=silence,
        tps=_tps(vitals),
        missed=int(silence / interval) if silence and silence >= GRACE * interval else 0,
        running=running,
        waiting=waiting,
        verdict=verdict,
        since=state.epoch.wall_of(verdict.since),
        incident=incident,
    )


def _tps(vitals: Vitals) -> tuple[float, ...]:
    if vitals.last is None or vitals.last.tps is None:
        return ()
    return vitals.recent_tps if vitals.last.tps else (*vitals.recent_tps, 0.0)


def _in_flight(vitals: Vitals) -> tuple[int | None, int | None]:
    """Return running and waiting of whichever spoke last: the beat or the gauges."""
    last, counters = vitals.last, vitals.counters
    if counters is not None and (last is None or counters.at > last.at):
        gauges = (counters.running, counters.waiting)
        if gauges != (None, None):
            return gauges
    return (last.running, last.waiting) if last is not None else (None, None)


def _stop(state: State, incident: Incident, labels: Mapping[InstanceKey, str]) -> Stop:
    members = sorted(incident.members, key=_fell_silent)
    first = _fell_silent(members[0])
    return Stop(
        incident=incident.id,
        verdict=incident.verdict,
        since=state.epoch.wall_of(first),
        order=tuple(
            (labels.get(m.instance, m.instance.name), _fell_silent(m) - first) for m in members
        ),
        watched=max(incident.watched, len(members)),
        recovered=sum(member.recovered_at is not None for member in members),
        bundle=incident.bundle,
        notice=incident.notice,
    )


def _fell_silent(member: Member) -> Instant:
    """Return its last beat, or what comes nearest to it."""
    if member.last_beat_at is not None:
        return member.last_beat_at
    return member.window.earliest if member.window else member.verdict.since


def _pauses(state: State, now: Instant) -> Iterable[str]:
    for lease in state.leases.values():
        if now < lease.until:
            until = f"{state.epoch.wall_of(lease.until):%H:%M:%S}"
            reason = f": {lease.reason}" if lease.reason else ""
            yield f"{lease.holder or 'somebody'} announced a pause until {until}{reason}"


def _standing_logs(state: State) -> Iterable[str]:
    for name, source in state.sources.items():
        if source.stalled_since is not None:
            since = state.epoch.wall_of(source.stalled_since)
            yield f"{name} stands still since {since:%H:%M:%S}; its engines beat elsewhere"


def _missing(state: State, now: Instant) -> Iterable[str]:
    if now < state.begun_at + SETTLED:
        return
    there = [t.vitals for t in state.instances.values() if not isinstance(t.verdict, Gone)]
    missing = {
        "/health": sum(vitals.health is None for vitals in there),
        "/metrics": sum(vitals.counters is None for vitals in there),
        "process states": sum(not vitals.processes for vitals in there),
        "GPUs": sum(not vitals.gpus for vitals in there),
    }
    words = [
        name if count == len(there) else f"{name} of {count}"
        for name, count in missing.items()
        if count
    ]
    if words:
        yield f"not available: {', '.join(words)}"
