"""What a longer or a shorter patience would have meant for logs that are there."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.identity import InstanceKey
from hangwatch.model.time import Epoch, Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Time without progress although there was work, or may have been.

    Attributes:
        instance: Whose.
        since: From when on it counted.
        seconds: How long it lasted, as far as the log reaches.
        ended: Whether it ended by itself; ``False`` if nothing came any more but a restart or the
            end of the log.
    """

    instance: InstanceKey
    since: Instant
    seconds: float
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one limit would have done.

    Attributes:
        stall_after: The limit, in seconds.
        false: Alarms about silences that ended by themselves; those of one moment count once.
        found: Stops that would have been noticed.
        missed: Stops that the log shows for a shorter time than the limit.
    """

    stall_after: float
    false: int
    found: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The trade-off between false alarms and latency over logs that are there.

    Attributes:
        epoch: Maps instants to wall time.
        instances: Engines that beat.
        heartbeats: Beats that were read.
        hours: Engine hours from the first beat to the last, those of all engines together.
        gaps: Gaps between beats with work in between that ended by themselves.
        silences: Those of them that are longer than the shortest setting, and the stops.
        settings: One for each limit that was tried, shortest first.
        present: The limit as it is set.
        calibrated: What calibration would have made of it by the end.
        recommended: The limit to choose.
        enough: Whether the logs are long enough to say.
        reason: Why that limit, in a sentence.
    """

    epoch: Epoch
    instances: int
    heartbeats: int
    hours: float
    gaps: int
    silences: tuple[Silence, ...]
    settings: tuple[Setting, ...]
    present: float
    calibrated: float
    recommended: float
    enough: bool
    reason: str

    @property
    def stops(self) -> tuple[Silence, ...]:
        """Silences that never ended by themselves."""
        return tuple(silence for silence in self.silences if not silence.ended)
