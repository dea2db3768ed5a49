"""Instances that fell silent together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hangwatch.model.identity import InstanceKey
from hangwatch.model.time import Instant
from hangwatch.model.verdict import StopWindow, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One instance's verdict changed.

    Attributes:
        instance: Whose.
        before: The verdict until now; ``None`` for the first one.
        after: The verdict from now on.
        at: When it was reached.
    """

    instance: InstanceKey
    before: Verdict | None
    after: Verdict
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance of an incident, as it stands.

    Attributes:
        instance: Whose.
        verdict: Its latest alarm, or what followed it.
        window: When its progress stopped, where that can be said.
        last_beat_at: Its last beat.
        recovered_at: When it beat again, or ``None``.
    """

    instance: InstanceKey
    verdict: Verdict
    window: StopWindow | None = None
    last_beat_at: Instant | None = None
    recovered_at: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What is still to be learned of an incident whose bundle is written.

    Attributes:
        incident: Its id.
        bundle: Path of the bundle.
        captured_at: When it was written.
        looked_at: When the last look afterwards ended; at first as ``captured_at``.
        taken: Looks that have ended.
        running: Whether one is under way.
        last: Whether that is the last one: the incident is over.
        dead: Whether every member had died before it was captured.
    """

    incident: str
    bundle: str
    captured_at: Instant
    looked_at: Instant
    taken: int = 0
    running: bool = False
    last: bool = False
    dead: bool = False


class IncidentState(StrEnum):
    """Where an incident stands."""

    OPEN = "open"
    CAPTURING = "capturing"
    CAPTURED = "captured"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Instances that stopped within a few seconds of each other.

    Attributes:
        id: Short and unique on this state directory: ``20260304T054459-1``.
        members: Who stopped; in order of their windows.
        watched: How many instances were watched when it began: ``k of n``.
        verdict: The strongest of the members'.
        detected_at: When the first alarm was raised.
        window: When the first of the members stopped.
        state: Where it stands.
        confirmed: ``False`` where only the log was there to ask.
        bundle: Path of the bundle, once written.
        closed_at: When the last member recovered or went.
        notice: Whether nothing is wrong with the engines: worth a light capture, and no alarm.
    """

    id: str
    members: tuple[Member, ...]
    watched: int
    verdict: Verdict
    detected_at: Instant
    window: StopWindow | None = None
    state: IncidentState = IncidentState.OPEN
    confirmed: bool = False
    bundle: str = ""
    closed_at: Instant | None = None
    notice: bool = False
