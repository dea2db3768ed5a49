"""What is to be said of a capture once its evidence is in.

The daemon judged with what it had at the time; the capture brings stacks, processes and health of
the same moment. Both are asked, and the stronger verdict of each instance stands: evidence that
came later confirms an alarm, and never takes it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from hangwatch.core import grouping, judge
from hangwatch.core.advance import advance
from hangwatch.core.fleet import begin, overall, view
from hangwatch.model.capture import CaptureRequest
from hangwatch.model.dossier import InstanceRecord
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, Member
from hangwatch.model.observation import BeatSeen, Observation, SourceFound
from hangwatch.model.profile import EngineProfile
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Instant
from hangwatch.model.verdict import (
    Blocked,
    Confidence,
    Dead,
    Hung,
    StopWindow,
    SuspectedHang,
    Verdict,
)

_STRENGTH: Final[Mapping[str, int]] = {"suspected_hang": 1, "blocked": 2, "hung": 3, "dead": 4}
_ALARMS: Final[Mapping[str, type[SuspectedHang | Blocked | Hung | Dead]]] = {
    kind.word: kind for kind in (SuspectedHang, Blocked, Hung, Dead)
}


def judgement(
    request: CaptureRequest,
    snapshots: Iterable[Observation],
    *,
    until: Instant,
    profile: EngineProfile,
    word: str = "",
) -> ReplayResult:
    """Return what the beats, the incident and the snapshots amount to.

    Args:
        request: Brings beats, transitions, the incident and the limits.
        snapshots: What the capture's files say.
        until: When the capture ended.
        profile: The engine.
        word: The daemon's verdict after stage A, or ``""``.
    """
    recounted, whole = _recount(request, snapshots, until, profile)
    told = {change.instance: change.after for change in request.transitions}
    members = {m.instance: m for m in request.incident.members} if request.incident else {}
    keys = dict.fromkeys((*members, *(i.instance for i in request.instances), *recounted))
    records = [
        _record(
            key,
            recounted=recounted.get(key),
            member=members.get(key),
            told=told.get(key),
            word=word,
            beats=tuple(beat for beat in request.beats if beat.instance == key)[-360:],
        )
        for key in keys
        if key in recounted or key in members or key in told
    ]
    records.sort(key=_order)
    return ReplayResult(
        heartbeats=len(request.beats),
        instances=tuple(records),
        transitions=request.transitions,
        incidents=(request.incident,) if request.incident is not None else (),
        verdict=_whole(whole, records, request.incident, word),
        window=onset(records) or (request.incident.window if request.incident else None),
        until=until,
        epoch=request.epoch,
        policy=request.policy,
    )


def _recount(
    request: CaptureRequest,
    snapshots: Iterable[Observation],
    until: Instant,
    profile: EngineProfile,
) -> tuple[dict[InstanceKey, InstanceRecord], Verdict]:
    """Judge beats and snapshots as if the daemon had seen them all."""
    beats = sorted(request.beats, key=lambda beat: beat.at)
    first = beats[0].at if beats else until
    state = begin(request.policy, {profile.name: profile}, request.epoch, first)
    sources = tuple(
        SourceFound(source=source, at=first)
        for source in dict.fromkeys(beat.source for beat in beats if beat.source)
    )
    state, _ = advance(state, sources, first)
    for beat in beats:
        state, _ = advance(state, (BeatSeen(beat=beat),), beat.at)
    state, _ = advance(state, tuple(snapshots), until)
    records = {}
    for key, tracked in state.instances.items():
        if tracked.verdict is None:
            continue
        vitals = view(state, key)
        alarm = grouping.is_alarm(tracked.verdict)
        records[key] = InstanceRecord(
            instance=key,
            verdict=tracked.verdict,
            last_beat=vitals.last,
            window=judge.stop_window(vitals, state.policy) if alarm else None,
        )
    return records, overall(state, until)


def _record(
    key: InstanceKey,
    *,
    recounted: InstanceRecord | None,
    member: Member | None,
    told: Verdict | None,
    word: str,
    beats: tuple[Heartbeat, ...],
) -> InstanceRecord:
    verdicts = [v for v in (member.verdict if member else None, told) if v is not None]
    if member is not None:
        verdicts = [_at_least(verdict, word) for verdict in verdicts[:1]]
    if recounted is not None:
        verdicts.append(recounted.verdict)
    verdict = max(verdicts, key=_strength)
    window = member.window if member is not None and member.window is not None else None
    if window is None and recounted is not None and _strength(verdict):
        window = recounted.window
    last = recounted.last_beat if recounted is not None else None
    return InstanceRecord(
        instance=key,
        verdict=verdict,
        last_beat=last or (beats[-1] if beats else None),
        window=window,
        beats=beats,
    )


def _strength(verdict: Verdict) -> int:
    return _STRENGTH.get(verdict.word, 0)


def _at_least(verdict: Verdict, word: str) -> Verdict:
    """Raise an alarm to the daemon's later word."""
    kind = _ALARMS.get(word)
    if kind is None or not _strength(verdict) or _STRENGTH[word] <= _strength(verdict):
        return verdict
    return kind(
        since=verdict.since,
        cause=verdict.cause,
        confidence=max(verdict.confidence, Confidence.MEDIUM, key=list(Confidence).index),
        because=verdict.because,
    )


def _whole(
    recounted: Verdict, records: Iterable[InstanceRecord], incident: Incident | None, word: str
) -> Verdict:
    records = tuple(records)
    several = len(records) > 1
    verdicts = [
        grouping.ascribed(r.verdict, r.instance.name) if several else r.verdict for r in records
    ]
    if incident is not None:
        said = incident.verdict
        for member in incident.members:
            if several and member.verdict == said:
                said = grouping.ascribed(said, member.instance.name)
                break
        verdicts = [_at_least(said, word), *verdicts]
    strongest = max(verdicts, key=_strength, default=recounted)
    if not _strength(strongest):
        return recounted
    alike = [v for v in verdicts if v.word == strongest.word]
    since = min(verdict.since for verdict in alike)
    return replace(strongest, since=since)


def onset(records: Iterable[InstanceRecord]) -> StopWindow | None:
    """Return between which instants the first of the alarmed instances stopped."""
    return grouping.onset(r.window for r in records if grouping.is_alarm(r.verdict))


def _order(record: InstanceRecord) -> tuple[bool, float, str]:
    at = record.window.earliest if record.window is not None else float("inf")
    return (not grouping.is_alarm(record.verdict), at, record.instance.name)
