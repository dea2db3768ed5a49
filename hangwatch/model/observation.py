"""What the children saw: the inputs of ``advance``; and what it decides: its actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, Transition
from hangwatch.model.lease import Lease
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, GpuVital, Health, ProcessVital, StackVital


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatSeen:
    """A heartbeat arrived (``beat.at`` says when).

    Attributes:
        beat: It.
        fresh: ``False`` for a beat that lay in the file before we listened: it tells who is
            there and what work there was, and starts no clock.
    """

    beat: Heartbeat
    fresh: bool = True

    @property
    def at(self) -> Instant:
        """When."""
        return self.beat.at


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalArrived:
    """A line that changes what silence means."""

    signal: SignalSeen
    fresh: bool = True

    @property
    def at(self) -> Instant:
        """When."""
        return self.signal.at


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGrew:
    """A log grew, whatever was written."""

    source: str
    at: Instant
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFound:
    """A log is followed from now on.

    Attributes:
        source: Its name.
        at: When.
        pid: Process that writes it, where the file name or a descriptor says so.
        actor: Task or actor that writes it, where its header says so.
    """

    source: str
    at: Instant
    pid: int | None = None
    actor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRetired:
    """A log is no longer followed: its link moved on, or it is gone for good."""

    source: str
    at: Instant
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUnreadable:
    """A log cannot be read since then; it may come back."""

    source: str
    at: Instant
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReadable:
    """A log can be read again."""

    source: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSeen:
    """A health endpoint answered, or did not."""

    instance: InstanceKey
    health: Health

    @property
    def at(self) -> Instant:
        """When."""
        return self.health.at


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersSeen:
    """A metrics endpoint answered; ``since`` and ``…_at`` are filled in by ``advance``."""

    instance: InstanceKey
    counters: Counters

    @property
    def at(self) -> Instant:
        """When."""
        return self.counters.at


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesSeen:
    """A look at the processes of an instance; one that is not listed any more is gone."""

    instance: InstanceKey
    processes: tuple[ProcessVital, ...]
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusSeen:
    """A look at the GPUs of an instance."""

    instance: InstanceKey
    gpus: tuple[GpuVital, ...]
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken:
    """A pause was announced."""

    lease: Lease

    @property
    def at(self) -> Instant:
        """When."""
        return self.lease.at


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReturned:
    """The pause with this id is over, before its time."""

    id: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksSeen:
    """Stage A of a capture was evaluated for an instance."""

    instance: InstanceKey
    stacks: StackVital

    @property
    def at(self) -> Instant:
        """When."""
        return self.stacks.at


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSilent:
    """A child has said nothing for too long.

    Attributes:
        sources: Logs that it follows.
        instances: Instances that it probes.
        at: Since when.
        reason: ``follower of /data: no answer for 5 s``.
    """

    at: Instant
    reason: str
    sources: tuple[str, ...] = ()
    instances: tuple[InstanceKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildBack:
    """A child speaks again; silence counts from here."""

    at: Instant
    sources: tuple[str, ...] = ()
    instances: tuple[InstanceKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPaused:
    """We did not listen: our own loop, or the machine, stood still until ``at``."""

    at: Instant
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEnded:
    """The capture of an incident ended."""

    incident: str
    at: Instant
    bundle: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AftermathEnded:
    """A look at what became of an incident ended, with or without a file."""

    incident: str
    at: Instant


SourceEvent: TypeAlias = (
    SourceGrew | SourceFound | SourceRetired | SourceUnreadable | SourceReadable
)

Observation: TypeAlias = (
    BeatSeen
    | SignalArrived
    | SourceEvent
    | HealthSeen
    | CountersSeen
    | ProcessesSeen
    | GpusSeen
    | StacksSeen
    | LeaseTaken
    | LeaseReturned
    | ChildSilent
    | ChildBack
    | LoopPaused
    | CaptureEnded
    | AftermathEnded
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Say that a verdict changed."""

    transition: Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCapture:
    """Capture this incident: it is new."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCapture:
    """The running capture of this incident should know that it changed."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseIncident:
    """Every member recovered or went."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStall:
    """A stall ended by itself before it became an incident."""

    instance: InstanceKey
    since: Instant
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAftermath:
    """Look at what became of an incident since its bundle was written.

    Attributes:
        incident: As it stands.
        bundle: Path of the bundle.
        number: Of the look, from 1.
        captured_at: When the bundle was written.
        last: Whether the incident is over.
    """

    incident: Incident
    bundle: str
    number: int
    captured_at: Instant
    last: bool


Action: TypeAlias = (
    Report | StartCapture | UpdateCapture | CloseIncident | RecordStall | TakeAftermath
)
