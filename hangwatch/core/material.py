"""Lays old logs out in virtual time: when did each line arrive?

Theory of operation
===================

Nobody saw these lines arrive, so their own stamps stand in, unless arrival times are given. Stamps
are wall time, and wall time steps. A stamp that lies before the one above it is a step back of the
clock. A lone leap forward between two beats with literally unchanged numbers is a step, too: an
engine that stood still in between does not come back with the same throughput to the decimal.
What lies behind a step is moved so that the lines go on as they went before, and the whole is
anchored at the last line.

A line without a stamp arrived some time between the stamped lines around it. One that announces
something (asleep, awake, restarted) is put at the beginning of that time, for what it announces
must not come too late; requests that were answered are spread evenly, for they are progress for as
long as they come. After the last stamp that is until the evaluation ends, or until the file was
written for the last time, where that is known: a server that hangs answers nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from itertools import pairwise
from typing import Final

from hangwatch.core import parsing, stamps
from hangwatch.core.framing import peel
from hangwatch.model.heartbeat import Heartbeat, Line, Peeled
from hangwatch.model.observation import (
    BeatSeen,
    Observation,
    SignalArrived,
    SourceFound,
    SourceGrew,
    SourceRetired,
)
from hangwatch.model.profile import EngineProfile, Signal
from hangwatch.model.replay import LogMaterial
from hangwatch.model.time import Epoch, Instant

BACK: Final = 2.0
"""Seconds by which stamps may decrease without a step: several writers share one stream."""

LEAP: Final = 60.0
"""Seconds of a gap that may be a step of the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A candidate line of an old log.

    Attributes:
        text: The line, envelope and all.
        offset: Byte offset in its file.
        number: Line of the file, from 1, or ``None``.
        above: Latest stamp of the lines between the candidate before and this one, or ``None``.
        arrival: Second at which it arrived, where somebody wrote that down.
    """

    text: bytes
    offset: int = 0
    number: int | None = None
    above: datetime | None = None
    arrival: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One old log.

    Attributes:
        name: What to call it.
        records: Its candidates, in order.
        pid: Process that wrote it, where its name says so.
        actor: Task or actor that wrote it, where its header says so.
        first: Stamp of its first stamped line, candidate or not.
        last: Stamp of its last stamped line, candidate or not.
        retired: Whether it ceased to be followed, right after its last record.
        empty: Whether nothing at all stands in it.
        oddities: What its reader had to survive.
        written: When its file was written for the last time, where that is known.
        near: A moment not far from its first line, for stamps without a year.
        ended: Second at which its last line arrived, candidate or not, where somebody wrote that
            down; a line about a GET aside, which may be our own.
    """

    name: str
    records: tuple[Record, ...]
    pid: int | None = None
    actor: str = ""
    first: datetime | None = None
    last: datetime | None = None
    retired: bool = False
    empty: bool = False
    oddities: frozenset[str] = frozenset()
    written: datetime | None = None
    near: datetime | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLog:
    """A log, or the end of one, in memory.

    Attributes:
        data: What stands in it.
        pid: Process that wrote it, where that is known.
        written: When it was written for the last time, where that is known.
    """

    data: bytes
    pid: int | None = None
    written: datetime | None = None


def lay_out(
    streams: Sequence[Stream],
    *,
    profiles: Iterable[EngineProfile],
    zone: tzinfo,
    until: datetime | None = None,
    problems: tuple[str, ...] = (),
) -> LogMaterial:
    """Return the lines of *streams* in the order of their arrival.

    Args:
        streams: Old logs.
        profiles: Engines to look for.
        zone: Zone of naive stamps.
        until: When the evaluation will end: what follows the last stamp is spread until then.
        problems: What could not be read.
    """
    engines = tuple(profiles)
    laid = [_Layer(stream, engines, zone, until).lay() for stream in streams]
    seconds = [at for layer in laid for at, _ in layer.lines]
    seconds += [at for layer in laid for at in layer.growth]
    fallback = until.timestamp() if until is not None else 0.0
    first = min(seconds, default=fallback)
    last = max(seconds, default=fallback)
    lines = sorted(
        (
            (Instant(at - first), index, number, record)
            for index, layer in enumerate(laid)
            for number, (at, record) in enumerate(layer.lines)
        ),
        key=lambda entry: entry[:3],
    )
    observations: list[Observation] = []
    for layer in laid:
        stream = layer.stream
        beginning = Instant(layer.begins - first) if layer.begins is not None else Instant(0.0)
        observations.append(
            SourceFound(source=stream.name, at=beginning, pid=stream.pid, actor=stream.actor)
        )
        observations += [
            SourceGrew(source=stream.name, at=Instant(at - first)) for at in layer.growth
        ]
        if not layer.growth and not layer.lines and not stream.empty:
            observations.append(SourceGrew(source=stream.name, at=beginning))
        if stream.retired:
            ending = Instant(layer.ends - first) if layer.ends is not None else beginning
            observations.append(SourceRetired(source=stream.name, at=ending, reason="link moved"))
    return LogMaterial(
        lines=tuple(
            Line(
                source=laid[index].stream.name,
                text=record.text,
                at=at,
                offset=record.offset,
                number=record.number,
            )
            for at, index, _, record in lines
        ),
        observations=tuple(sorted(observations, key=lambda o: o.at)),
        epoch=Epoch(
            boot_id="replay",
            at=Instant(last - first),
            wall=datetime.fromtimestamp(last, tz=zone),
        ),
        ends_at=Instant(last - first),
        sources=tuple(layer.stream.name for layer in laid),
        notes=tuple(note for layer in laid for note in layer.notes),
        problems=problems,
        oddities=frozenset().union(*(layer.oddities for layer in laid)),
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A record, and what it says at first sight."""

    record: Record
    peeled: Peeled
    stamp: float | None
    answered: bool


class _Layer:
    """One stream, laid out in seconds of wall time."""

    def __init__(
        self,
        stream: Stream,
        profiles: Sequence[EngineProfile],
        zone: tzinfo,
        until: datetime | None,
    ) -> None:
        self.stream = stream
        self.lines: list[tuple[float, Record]] = []
        self.growth: list[float] = []
        self.notes: list[str] = []
        self.oddities = set(stream.oddities)
        self._profiles = profiles
        self._zone = zone
        ends = [moment.timestamp() for moment in (until, stream.written) if moment is not None]
        self._until = min(ends, default=None)
        self._interval = profiles[0].interval
        self._near = stream.near or until
        self._engine = ""

    @property
    def begins(self) -> float | None:
        """When its first line arrived."""
        return min([*(at for at, _ in self.lines[:1]), *self.growth], default=None)

    @property
    def ends(self) -> float | None:
        """When its last line arrived."""
        return max([*(at for at, _ in self.lines[-1:]), *self.growth], default=None)

    def lay(self) -> _Layer:
        """Find the time of every line; return this layer."""
        seen = [self._read(record) for record in self.stream.records]
        if any(entry.record.arrival is not None for entry in seen):
            self._by_arrival(seen)
        else:
            self._by_stamp(seen)
        return self

    def _read(self, record: Record) -> _Seen:
        peeled = peel(record.text)
        stamp = peeled.stamp or stamps.find(peeled.body, near=record.above or self._near)
        if stamp is not None:
            if self._near is not None and stamp.year != self._near.year and _lacks_year(peeled):
                self.oddities.add("clock")
            self._near = stamp
        answered = stamp is None and any(
            isinstance(found, SignalArrived) and found.signal.signal is Signal.COMPLETED
            for found in self._parse(record, peeled)
        )
        return _Seen(record, peeled, self._seconds(stamp), answered)

    def _parse(self, record: Record, peeled: Peeled) -> tuple[BeatSeen | SignalArrived, ...]:
        line = Line(source=self.stream.name, text=record.text, at=Instant(0.0))
        found = parsing.parse(
            line, self._profiles, known=self._engine, pid=self.stream.pid, peeled=peeled
        )
        self._engine = parsing.engine_of(found, self._engine)
        return found

    def _beat(self, seen: _Seen) -> Heartbeat | None:
        for found in self._parse(seen.record, seen.peeled):
            if isinstance(found, BeatSeen):
                return found.beat
        return None

    def _seconds(self, stamp: datetime | None) -> float | None:
        if stamp is None:
            return None
        return (stamp if stamp.tzinfo else stamp.replace(tzinfo=self._zone)).timestamp()

    def _by_arrival(self, seen: Sequence[_Seen]) -> None:
        """Arrival decides; the last stamp says what wall time it was."""
        told = [
            (e.record.arrival, e.stamp)
            for e in seen
            if e.record.arrival is not None and e.stamp is not None
        ]
        shift = told[-1][1] - told[-1][0] if told else 0.0
        if any(abs((stamp - arrival) - shift) > LEAP for arrival, stamp in told):
            self.oddities.add("clock")
        at = shift
        for entry in seen:
            if entry.record.arrival is not None:
                at = entry.record.arrival + shift
            self.lines.append((at, entry.record))
        if self.stream.ended is not None and self.lines:
            self.growth.append(self.stream.ended + shift)

    def _by_stamp(self, seen: Sequence[_Seen]) -> None:
        shift = 0.0
        now: float | None = None
        leaps = self._leaps(seen)
        undated: list[_Seen] = []
        for number, entry in enumerate(seen):
            for stamp, grown in ((self._seconds(entry.record.above), True), (entry.stamp, False)):
                if stamp is None:
                    continue
                at = stamp + shift
                if now is not None and at < now - BACK:
                    shift += now + self._interval - at
                    self._note_step(entry, "back")
                elif number == leaps and not grown and now is not None:
                    shift -= at - now - self._interval
                    self._note_step(entry, "forward")
                at = max(stamp + shift, now if now is not None else stamp + shift)
                self._spread(undated, now, at)
                undated = []
                now = at
                if grown:
                    self.growth.append(at)
            if entry.stamp is None:
                undated.append(entry)
            elif now is not None:
                self.lines.append((now, entry.record))
        if not seen and (first := self._seconds(self.stream.first)) is not None:
            self.growth.append(first)  # nothing else says when it began
        last = self._seconds(self.stream.last)
        end = None if last is None else last + shift
        if end is not None and (now is None or end > now):
            self._spread(undated, now, end)
            undated, now = [], end
            self.growth.append(end)
        trailing = now if self._until is None else max(now or 0.0, self._until + shift)
        self._spread(undated, now, trailing)
        # The last line keeps its printed time.
        self.lines = [(at - shift, record) for at, record in self.lines]
        self.growth = [at - shift for at in self.growth]

    def _spread(self, undated: Sequence[_Seen], start: float | None, end: float | None) -> None:
        """Place lines without a stamp between *start* and *end*."""
        if not undated:
            return
        begin = start if start is not None else end if end is not None else 0.0
        length = max(0.0, end - begin) if end is not None else 0.0
        step = length / (len(undated) + 1)
        placed = []
        for number, entry in enumerate(undated, 1):
            placed.append((begin + (number * step if entry.answered else 0.0), entry.record))
        self.lines += sorted(placed, key=lambda item: item[0])

    def _leaps(self, seen: Sequence[_Seen]) -> int | None:
        """Return the index of the one beat before which the clock stepped forward, or ``None``."""
        found = []
        for number, (before, after) in enumerate(pairwise(seen), 1):
            if before.stamp is None or after.stamp is None:
                continue
            if after.stamp - before.stamp > max(LEAP, 3 * self._interval):
                found.append((number, before, after))
        if len(found) != 1:
            return None
        number, before, after = found[0]
        left, right = self._beat(before), self._beat(after)
        if left is None or right is None or _numbers(left) != _numbers(right):
            return None
        return number if left.tps else None

    def _note_step(self, entry: _Seen, direction: str) -> None:
        self.oddities.add("clock")
        where = f" at line {entry.record.number}" if entry.record.number else ""
        self.notes.append(
            f"{self.stream.name}: the printed time steps {direction}{where}; taken for a step of "
            "the clock, so the lines behind it were moved"
        )


def _lacks_year(peeled: Peeled) -> bool:
    return peeled.stamp is None and stamps.find(peeled.body) is None


def _numbers(beat: Heartbeat) -> tuple[object, ...]:
    return (
        beat.instance,
        beat.in_tps,
        beat.out_tps,
        beat.running,
        beat.waiting,
        beat.routed,
        beat.kv_cache_pct,
    )
