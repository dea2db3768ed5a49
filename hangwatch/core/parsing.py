"""Candidate lines to heartbeats and signals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from typing import Final

from hangwatch.core import stamps
from hangwatch.core.framing import peel
from hangwatch.model.following import Dialect
from hangwatch.model.heartbeat import Heartbeat, Line, Peeled, SignalSeen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import BeatSeen, SignalArrived
from hangwatch.model.profile import EngineProfile, SignalPattern

_FLOATS: Final = ("in_tps", "out_tps", "kv_cache_pct", "prefix_hit_pct", "draft_acceptance_pct")
_INTEGERS: Final = ("running", "waiting", "routed", "api_waiting", "finished", "failed")


def needles(profiles: Iterable[EngineProfile]) -> tuple[bytes, ...]:
    """Return the literals, one of which every line of interest contains."""
    found: dict[bytes, None] = {}
    for profile in profiles:
        for needle in (*profile.needles, *(pattern.needle for pattern in profile.signals)):
            found[needle] = None
    return tuple(found)


def dialects(profiles: Iterable[EngineProfile]) -> tuple[Dialect, ...]:
    """Return the same literals, engine by engine."""
    return tuple(
        Dialect(beats=profile.needles, others=tuple(p.needle for p in profile.signals))
        for profile in profiles
    )


def parse(
    line: Line,
    profiles: Iterable[EngineProfile],
    *,
    known: str = "",
    pid: int | None = None,
    actor: str = "",
    zone: tzinfo | None = None,
    near: datetime | None = None,
    peeled: Peeled | None = None,
) -> tuple[BeatSeen | SignalArrived, ...]:
    """Return what *line* says: at most one beat or one signal.

    Args:
        line: A candidate.
        profiles: The engines to look for.
        known: Name of the engine that the log was found to be of, by ``engine_of`` an earlier line.
        pid: Process that writes the log, where its name or its descriptor says so; a Ray prefix
            in the line itself goes first.
        actor: Task or actor that writes the log; not used for the instance's identity, because
            two followers of one file may know different halves of it.
        zone: Zone of naive stamps; ``None`` leaves them naive.
        near: A moment not far from the line's, for a stamp without a year.
        peeled: The line out of its envelopes, where the caller has it already.
    """
    del actor
    if not line.text:
        return ()
    if peeled is None:
        peeled = peel(line.text)
    engines = tuple(profiles)
    for profile in engines:
        if not any(needle in peeled.body for needle in profile.needles):
            continue
        alive = profile.alive.search(peeled.body)
        if alive is not None:
            beat = _beat(peeled, alive, line=line, profile=profile, writer=pid, near=near)
            return (
                BeatSeen(beat=replace(beat, printed=_zoned(beat.printed, zone)), fresh=line.fresh),
            )
    found = [
        (profile, pattern, match)
        for profile in engines
        if known in ("", profile.name) and (signal := _signal(peeled.body, profile)) is not None
        for pattern, match in (signal,)
    ]
    if not found:
        return ()
    profile, pattern, match = found[0]
    writer = _writer(peeled, profile, pid)
    seen = SignalSeen(
        instance=InstanceKey(host=writer.host, pid=writer.pid),
        signal=pattern.signal,
        at=line.at,
        printed=_zoned(peeled.stamp or stamps.find(peeled.body, near=near), zone),
        source=line.source,
        text=peeled.body[:300].decode("utf-8", "replace"),
        parts=_parts(pattern, match, profile),
        # What several engines print alike tells none of them.
        profile=profile.name if len(found) == 1 else "",
    )
    return (SignalArrived(signal=seen, fresh=line.fresh),)


def engine_of(found: tuple[BeatSeen | SignalArrived, ...], known: str = "") -> str:
    """Return the name of the engine that a log is of, after a line of it was parsed."""
    for item in found:
        name = item.beat.profile if isinstance(item, BeatSeen) else item.signal.profile
        known = name or known
    return known


def _signal(body: bytes, profile: EngineProfile) -> tuple[SignalPattern, re.Match[bytes]] | None:
    for pattern in profile.signals:
        if pattern.needle in body:
            match = pattern.pattern.search(body)
            if match is not None:
                return pattern, match
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Who wrote a line: see the fields of the same names of ``InstanceKey`` and ``Heartbeat``."""

    host: str
    pid: int | None
    relayed: bool = False
    claimed: bool = False


def _writer(peeled: Peeled, profile: EngineProfile, pid: int | None) -> _Writer:
    own = profile.prefix.fullmatch(peeled.actor) if profile.prefix is not None else None
    if peeled.pid is None:
        # A stream of several pods is written by nobody in them.
        return _Writer(host=peeled.host, pid=None if peeled.host else pid)
    if own is None:
        return _Writer(host=peeled.host, pid=peeled.pid, relayed=True)
    # Every container has a process 1: that number tells nobody from anybody.
    if pid is not None or peeled.pid == 1 or own["server"] is None:
        return _Writer(host=peeled.host, pid=pid)
    return _Writer(host=peeled.host, pid=peeled.pid, claimed=True)


def _beat(
    peeled: Peeled,
    alive: re.Match[bytes],
    *,
    line: Line,
    profile: EngineProfile,
    writer: int | None,
    near: datetime | None,
) -> Heartbeat:
    groups: dict[str, bytes | None] = {}
    for family in profile.families:
        if match := family.search(peeled.body, alive.start()):
            groups = match.groupdict()
            break
    numbers = {name: _number(groups.get(name)) for name in (*_FLOATS, *_INTEGERS)}
    integers = {name: _whole(numbers[name]) for name in _INTEGERS}
    own = alive.groupdict()
    stamp = peeled.body if own.get("stamp") is None else own["stamp"]
    tag = own.get("tag") or b""
    who = _writer(peeled, profile, writer)
    return Heartbeat(
        instance=InstanceKey(host=who.host, pid=who.pid, tag=tag.decode("ascii", "replace")),
        at=line.at,
        printed=stamps.find(stamp, near=near) or peeled.stamp,
        source=line.source,
        in_tps=numbers.get("in_tps"),
        out_tps=numbers.get("out_tps"),
        running=integers.get("running"),
        waiting=integers.get("waiting"),
        routed=integers.get("routed"),
        api_waiting=integers.get("api_waiting"),
        finished=integers.get("finished"),
        failed=integers.get("failed"),
        kv_cache_pct=numbers.get("kv_cache_pct"),
        prefix_hit_pct=numbers.get("prefix_hit_pct"),
        draft_acceptance_pct=numbers.get("draft_acceptance_pct"),
        repeated=peeled.repeated,
        relayed=who.relayed,
        claimed=who.claimed,
        profile=profile.name,
    )


def _number(text: bytes | None) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        return None  # a configured expression may call anything a number
    return number if number is not None and math.isfinite(number) else None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _zoned(stamp: datetime | None, zone: tzinfo | None) -> datetime | None:
    if stamp is None or stamp.tzinfo is not None or zone is None:
        return stamp
    return stamp.replace(tzinfo=zone)


def _parts(
    pattern: SignalPattern, match: re.Match[bytes], profile: EngineProfile
) -> tuple[str, ...]:
    if "part" not in pattern.pattern.groupindex or not match["part"]:
        return ()
    text = match["part"].decode("utf-8", "replace")
    return tuple(part for part in profile.parts if part in text)
