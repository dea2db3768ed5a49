"""Candidate lines to heartbeats and signals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, tzinfo
from typing import Final

from hangwatch.core import stamps
from hangwatch.core.framing import peel
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


def parse(
    line: Line,
    profiles: Iterable[EngineProfile],
    *,
    pid: int | None = None,
    actor: str = "",
    zone: tzinfo | None = None,
    peeled: Peeled | None = None,
) -> tuple[BeatSeen | SignalArrived, ...]:
    """Return what *line* says: at most one beat or one signal.

    Args:
        line: A candidate.
        profiles: The engines to look for; the first that knows the line is taken at its word.
        pid: Process that writes the log, where its name or its descriptor says so; a Ray prefix
            in the line itself goes first.
        actor: Task or actor that writes the log; not used for the instance's identity, because
            two followers of one file may know different halves of it.
        zone: Zone of naive stamps; ``None`` leaves them naive.
        peeled: The line out of its envelopes, where the caller has it already.
    """
    del actor
    if not line.text:
        return ()
    if peeled is None:
        peeled = peel(line.text)
    known = tuple(profiles)
    host, writer = peeled.host, peeled.pid if peeled.pid is not None else pid
    for profile in known:
        if not any(needle in peeled.body for needle in profile.needles):
            continue
        alive = profile.alive.search(peeled.body)
        if alive is not None:
            instance = InstanceKey(
                host=host, pid=writer, tag=alive["tag"].decode("ascii", "replace")
            )
            beat = _beat(peeled, alive, line=line, profile=profile, instance=instance, zone=zone)
            return (BeatSeen(beat=beat, fresh=line.fresh),)
    for profile in known:
        for pattern in profile.signals:
            if pattern.needle not in peeled.body:
                continue
            match = pattern.pattern.search(peeled.body)
            if match is not None:
                signal = SignalSeen(
                    instance=InstanceKey(host=host, pid=writer),
                    signal=pattern.signal,
                    at=line.at,
                    printed=_zoned(peeled.stamp or stamps.find(peeled.body), zone),
                    source=line.source,
                    text=peeled.body[:300].decode("utf-8", "replace"),
                    parts=_parts(pattern, match, profile),
                    profile=profile.name,
                )
                return (SignalArrived(signal=signal, fresh=line.fresh),)
    return ()


def _beat(
    peeled: Peeled,
    alive: re.Match[bytes],
    *,
    line: Line,
    profile: EngineProfile,
    instance: InstanceKey,
    zone: tzinfo | None,
) -> Heartbeat:
    groups: dict[str, bytes | None] = {}
    for family in profile.families:
        if match := family.search(peeled.body, alive.start()):
            groups = match.groupdict()
            break
    numbers: dict[str, float] = {
        name: float(text) for name in _FLOATS if (text := groups.get(name)) is not None
    }
    integers: dict[str, int] = {
        name: int(text) for name in _INTEGERS if (text := groups.get(name)) is not None
    }
    printed: datetime | None
    try:
        printed = datetime.fromisoformat(alive["stamp"].decode("ascii"))
    except ValueError:
        printed = None
    return Heartbeat(
        instance=instance,
        at=line.at,
        printed=_zoned(printed or peeled.stamp, zone),
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
        relayed=peeled.pid is not None,
        profile=profile.name,
    )


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
