"""A log laid out in virtual time, and what the detector made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from hangwatch.model.dossier import InstanceRecord
from hangwatch.model.heartbeat import Line
from hangwatch.model.incident import Incident, Transition
from hangwatch.model.observation import Observation, RecordStall
from hangwatch.model.policy import Policy
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import ALARMS, StopWindow, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMaterial:
    """Logs as they arrived, in virtual time.

    Instants are seconds from the first line. ``epoch`` is anchored at the last one, so that a
    step of the wall clock in the middle does not move the end.

    Attributes:
        lines: Candidates of all logs, in the order of their arrival.
        observations: What befell the logs themselves: found, grew, retired.
        epoch: Maps instants to wall time.
        ends_at: When the last line arrived, candidate or not.
        sources: Names of the logs, relative to what was asked for.
        notes: What had to be assumed: clock steps, lines without a stamp.
        problems: What could not be read, one sentence each, naming the file.
        oddities: What a parser had to survive: ``nul``, ``long-line``, ``rotation`` …
    """

    lines: tuple[Line, ...]
    observations: tuple[Observation, ...]
    epoch: Epoch
    ends_at: Instant
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    oddities: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What the detector would have said, and when.

    Attributes:
        heartbeats: Lines that counted as beats.
        instances: Every engine as of the end, those that stopped first.
        transitions: Every change of a verdict.
        incidents: Every incident, closed ones too, in order of detection.
        verdict: Of the whole, as of the end.
        window: When the first of the alarmed instances stopped, or ``None``.
        stalls: Stalls that ended by themselves.
        until: When the evaluation ended.
        epoch: Maps instants to wall time.
        policy: The limits that were used.
        notes: What had to be assumed.
        problems: What could not be read.
    """

    heartbeats: int
    instances: tuple[InstanceRecord, ...]
    transitions: tuple[Transition, ...]
    incidents: tuple[Incident, ...]
    verdict: Verdict
    until: Instant
    epoch: Epoch
    policy: Policy
    window: StopWindow | None = None
    stalls: tuple[RecordStall, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def alarmed(self) -> bool:
        """Whether the verdict as of the end is an alarm."""
        return isinstance(self.verdict, ALARMS)

    @property
    def now(self) -> datetime:
        """The wall time of the end."""
        return self.epoch.wall_of(self.until)
