"""Who belongs together: instances that fall silent together are one incident.

An incident takes the strongest verdict of its members. It is opened by the first alarm, joined by
every later one whose progress stopped within a few intervals of the others', and closed when its
last member has recovered or is gone. A member that alarms again soon after a capture opens a new
incident, but starts no new capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Final

from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, IncidentState, Member
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import (
    ALARMS,
    Blind,
    Blocked,
    Confidence,
    Dead,
    Gone,
    Hung,
    Idle,
    Loading,
    LogStalled,
    Ok,
    Paused,
    Slow,
    StopWindow,
    SuspectedHang,
    Verdict,
)

TOGETHER: Final = "simultaneous-silence"

_STRENGTH: Final[tuple[type[Verdict], ...]] = (
    Gone,
    Loading,
    Paused,
    Idle,
    Ok,
    Blind,
    Slow,
    LogStalled,
    SuspectedHang,
    Blocked,
    Hung,
    Dead,
)
"""Weakest first: an ``ok`` beats an ``idle``, for an idle engine is no news beside a busy one."""


_SURE: Final = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)


def strength(verdict: Verdict) -> int:
    """Return the rank of *verdict*: the higher, the more it says of the whole."""
    return _STRENGTH.index(type(verdict))


def strongest(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the strongest verdict; among equals the surest, then the oldest; ``None`` of none."""
    return max(
        verdicts, key=lambda v: (strength(v), _SURE.index(v.confidence), -v.since), default=None
    )


def ascribed(verdict: Verdict, name: str) -> Verdict:
    """Return *verdict* with sentences that say whose heartbeat and gauges they are about."""
    because = tuple(
        f"{name}'s {sentence[4:]}" if sentence.startswith("its ") else sentence
        for sentence in verdict.because
    )
    return replace(verdict, because=because)


def is_alarm(verdict: Verdict | None) -> bool:
    """Say whether *verdict* starts a capture."""
    return isinstance(verdict, ALARMS)


def onset(windows: Iterable[StopWindow | None]) -> StopWindow | None:
    """Return between which instants the first of several instances stopped; ``None`` of none.

    It had not stopped before the earliest of all windows began, and it had when the first of them
    ended. So this is never wider than one window, however far apart the beats of the servers are;
    if all stopped at one instant, that instant is in it.
    """
    known = [window for window in windows if window is not None]
    if not known:
        return None
    return StopWindow(
        earliest=min(window.earliest for window in known),
        latest=min(window.latest for window in known),
        residual=any(window.residual for window in known),
    )


def incident_id(epoch: Epoch, at: Instant, serial: int) -> str:
    """Return a name that is unique on one state directory and sorts by time."""
    return f"{epoch.wall_of(at).astimezone(UTC):%Y%m%dT%H%M%S}-{serial}"


def home(incidents: Sequence[Incident], member: Member, seconds: float, at: Instant) -> int | None:
    """Return the index of the open incident that *member* belongs to, or ``None``.

    Args:
        incidents: All of them.
        member: Who alarmed.
        seconds: How far apart the stops of one incident may lie; where nothing says when somebody
            stopped, how far apart the alarms may.
        at: When *member* alarmed.
    """
    for i, incident in enumerate(incidents):
        if incident.state is IncidentState.CLOSED or incident.notice:
            continue
        if any(other.instance == member.instance for other in incident.members):
            return i
    for i, incident in enumerate(incidents):
        if incident.state is IncidentState.CLOSED or incident.notice:
            continue
        stopped_at = member.window.earliest if member.window else member.verdict.since
        window = incident.window
        first = window.earliest if window else incident.verdict.since
        last = max(m.window.earliest if m.window else m.verdict.since for m in incident.members)
        if first - seconds <= stopped_at <= last + seconds:
            return i
        if member.window is None and at - incident.detected_at <= seconds:
            return i
    return None


def enroll(incident: Incident, member: Member, *, confirmed: bool) -> Incident:
    """Return *incident* with *member* in it, new or as it stands now."""
    others = [other for other in incident.members if other.instance != member.instance]
    members = sorted((*others, member), key=_stopped_at)
    return _settled(replace(incident, members=tuple(members)), confirmed=confirmed)


def _stopped_at(member: Member) -> tuple[float, str, int, str]:
    moment = member.window.earliest if member.window else member.verdict.since
    key = member.instance
    return (moment, key.host, key.pid or 0, key.tag)


def _settled(incident: Incident, *, confirmed: bool) -> Incident:
    alarms = [m for m in incident.members if is_alarm(m.verdict) and m.recovered_at is None]
    verdict = strongest(member.verdict for member in alarms) or incident.verdict
    return replace(
        incident,
        verdict=verdict,
        window=onset(member.window for member in incident.members),
        confirmed=incident.confirmed or confirmed,
    )


def discharge(incident: Incident, instance: InstanceKey, after: Verdict, at: Instant) -> Incident:
    """Return *incident* after a member ceased to alarm; closed with the last one."""
    members = tuple(
        replace(member, verdict=after, recovered_at=at)
        if member.instance == instance and member.recovered_at is None
        else member
        for member in incident.members
    )
    incident = replace(incident, members=members)
    if all(member.recovered_at is not None for member in members):
        return replace(incident, state=IncidentState.CLOSED, closed_at=at)
    return _settled(incident, confirmed=False)
