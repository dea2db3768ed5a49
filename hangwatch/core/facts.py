"""What the vitals of one instance amount to, whatever the time is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final

from hangwatch.core import calibration
from hangwatch.core.vitals import GRACE, computes
from hangwatch.model.policy import Policy
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, Health, Vitals

MAX_STRETCH: Final = 1800.0
"""Seconds by which buffered output may stretch the limits."""

WARM: Final = 3
"""Beats with tokens after which an engine has compiled what it needs, as a rule."""

COMPUTES: Final = 3.0
"""Times the patience with an engine whose GPU is seen to compute."""

LONGER: Final = 1.5
"""Times the longest prefill by context and pace: the pace that beats show is an average."""


class Demand(StrEnum):
    """Whether there is work."""

    NONE = "none"
    SOME = "some"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What follows from the vitals whatever the time is.

    Attributes:
        interval: Seconds between beats.
        progress_at: Last moment with progress, or ``None``.
        clock: Silence counts from here.
        stalled_at: From when on progress was due and did not come: the last progress, or what gave
            it work, or woke it, after that; ``None`` before any of these.
        missing_at: When the next beat is missing, or ``None`` before the first progress.
        quick_at: When silence suffices with a witness that excludes a long prefill.
        limit_at: When silence suffices without one.
        late_by: Seconds by which what its log carries may be late.
        patience: How long a silence is, in seconds, at ``limit_at``.
        demand: Whether there is work.
        firm: Whether work is known to be in flight by something newer than the last beat, or by a
            beat that would not have been the last one of an engine that went idle.
        warm: Whether it has worked long enough to be judged by the shorter limit.
        log_speaks: Whether silence of the log means anything.
        lost: Whether the engine is known to work, or to have worked, without beats.
        unhealthy: An answer of the health endpoint that accuses the engine, newer than the last
            beat.
        excused: Whether the engine's own monitor excludes a hang.
        flat: Whether the token counters stood still for the longer limit.
    """

    interval: float
    progress_at: Instant | None
    clock: Instant
    stalled_at: Instant | None
    missing_at: Instant | None
    quick_at: Instant
    limit_at: Instant
    late_by: float
    patience: float
    demand: Demand
    firm: bool
    warm: bool
    log_speaks: bool
    lost: bool
    unhealthy: Health | None
    excused: bool
    flat: bool


def facts(vitals: Vitals, policy: Policy) -> Facts:
    """Return what follows from *vitals* whatever the time is."""
    interval = policy.heartbeat_interval or _interval(vitals)
    last, counters = vitals.last, vitals.counters
    beaten_at = latest(
        vitals.last_progress.at if vitals.last_progress else None,
        *(source.last_line_at for source in vitals.sources if source.merged),
    )
    counted_at = counters.tokens_moved_at if counters else None
    moved_at = latest(beaten_at, counted_at)
    unhealthy = _accusation(vitals.health, moved_at)
    # Streamed answers are logged when they begin, so an accusing monitor outranks them, and so do
    # token counters that were looked at since.
    counts = counters is not None and counters.tokens is not None
    answered_at = vitals.completed_at
    if counts and counters is not None and answered_at is not None and counters.at > answered_at:
        answered_at = None
    progress_at = moved_at if unhealthy else latest(moved_at, answered_at)
    voided_at = latest(
        vitals.aborted_at,
        vitals.slept.at if vitals.slept else None,
        vitals.started.at if vitals.started and vitals.last else None,
    )
    lost = last is not None and (vitals.beat_lost is not None or vitals.unbeaten_at is not None)
    stalled_at = latest(
        progress_at,
        vitals.updated_at,
        vitals.started.at if vitals.started else None,
        vitals.slept.at if vitals.slept else None,
        vitals.lease.until if vitals.lease else None,
        counters.risen_at if counters else None,
    )
    clock = latest(vitals.listening_since, stalled_at) or vitals.listening_since
    stretch = min(vitals.buffered, MAX_STRETCH) if vitals.buffered > 2 * interval else 0.0
    patience = _patience(vitals, policy, interval)
    if _gpu_computes(vitals, progress_at):
        patience *= COMPUTES
    quick = min(policy.missed_beats * interval, patience)
    demand = _demand(vitals, interval, unhealthy=unhealthy, voided_at=voided_at, lost=lost)
    known_alive = any(process.state not in ("", "Z", "X") for process in vitals.processes)
    return Facts(
        interval=interval,
        progress_at=progress_at,
        clock=clock,
        stalled_at=stalled_at,
        missing_at=None if progress_at is None else Instant(progress_at + GRACE * interval),
        quick_at=Instant(clock + quick + stretch),
        limit_at=Instant(clock + patience + stretch),
        late_by=stretch,
        patience=patience,
        demand=demand,
        firm=demand is Demand.SOME
        and _is_firm(vitals, interval, unhealthy=unhealthy, voided_at=voided_at),
        warm=vitals.warm >= WARM,
        log_speaks=not lost
        and voided_at is None
        and (vitals.armed_at is not None or (last is not None and known_alive)),
        lost=lost,
        unhealthy=unhealthy,
        excused=_excuse(vitals, progress_at),
        flat=_flat(vitals, patience),
    )


def _interval(vitals: Vitals) -> float:
    """Return the seconds between beats; those of a step-driven engine are as long as its steps."""
    if not vitals.step_driven or len(vitals.recent_gaps) < WARM:
        return vitals.interval
    return max(vitals.interval, 2 * median(vitals.recent_gaps))


def _gpu_computes(vitals: Vitals, progress_at: Instant | None) -> bool:
    """Say whether a GPU of it was seen to compute since the last progress: a long prefill, say."""
    return any(
        computes(gpu) and (progress_at is None or gpu.at > progress_at) for gpu in vitals.gpus
    )


def _patience(vitals: Vitals, policy: Policy, interval: float) -> float:
    """Return how long a silence must be to be suspicious by itself."""
    if not policy.calibrate:
        return policy.stall_after
    known = policy.stall_after if vitals.patience is None else vitals.patience
    contexts = [p.context for p in vitals.processes if p.context is not None]
    if contexts and vitals.peak_in_tps > 0:
        prefill = LONGER * max(contexts) / vitals.peak_in_tps + interval
        known = max(known, min(prefill, calibration.CEILING * policy.stall_after))
    return known


def _is_firm(
    vitals: Vitals, interval: float, *, unhealthy: Health | None, voided_at: Instant | None
) -> bool:
    last, counters = vitals.last, vitals.counters
    if unhealthy is not None and unhealthy.meaning is not HealthMeaning.UNHEALTHY:
        return True
    if last is None:
        return counters is not None
    if counters is not None and counters.in_flight:
        # The task that prints beats also sets the gauges: not before its next turn are they newer.
        return counters.at >= last.at + GRACE * interval
    late = any(source.relayed for source in vitals.sources)  # what it says may be on its way
    return vitals.says_idle and not late and voided_at is None and bool(last.in_flight)


def latest(*moments: Instant | None) -> Instant | None:
    """Return the latest of the moments that are known, or ``None``."""
    known = [moment for moment in moments if moment is not None]
    return max(known) if known else None


_ACCUSING: Final = frozenset(
    {
        HealthMeaning.LOOP_BLOCKED,
        HealthMeaning.NO_PROGRESS,
        HealthMeaning.LOST_REQUEST,
        HealthMeaning.UNHEALTHY,
    }
)


def _accusation(health: Health | None, moved_at: Instant | None) -> Health | None:
    if health is None or health.meaning not in _ACCUSING:
        return None
    return health if moved_at is None or health.at > moved_at else None


def _demand(
    vitals: Vitals,
    interval: float,
    *,
    unhealthy: Health | None,
    voided_at: Instant | None,
    lost: bool,
) -> Demand:
    """Return whether there is work.

    Args:
        vitals: All that is known.
        interval: Seconds between beats, and between two looks of the engine at its gauges.
        unhealthy: What the engine's monitor accuses it of.
        voided_at: When something after the last beat ended the work that it counted.
        lost: Whether beats, and with them gauges, are known to have ceased by themselves.
    """
    if unhealthy is not None and unhealthy.meaning in (
        HealthMeaning.NO_PROGRESS,
        HealthMeaning.LOST_REQUEST,
    ):
        return Demand.SOME
    counters, last = vitals.counters, vitals.last
    set_after = latest(
        last.at if last else None,
        None if voided_at is None else Instant(voided_at + interval),
    )
    blocked = unhealthy is not None and unhealthy.meaning is HealthMeaning.LOOP_BLOCKED
    if counters is not None and (set_after is None or counters.at > set_after):
        gauge = counters.in_flight
        # Gauges freeze with the loop; tokens that moved right before that were somebody's.
        frozen = blocked and not lost and _worked_until_blocked(counters, unhealthy, interval)
        if gauge == 0 and not frozen:
            return Demand.NONE
        if gauge is not None:
            # The task that prints beats also sets the gauges: without it they show old work.
            return Demand.UNKNOWN if lost else Demand.SOME
    if voided_at is not None:
        return Demand.NONE
    in_flight = _last_in_flight(vitals)
    if in_flight is None:
        return Demand.UNKNOWN
    # A step-driven engine prints nothing when its last request is done: the answers tell.
    answered = vitals.drained if vitals.step_driven else 0
    return Demand.SOME if in_flight > answered else Demand.NONE


def _worked_until_blocked(counters: Counters, health: Health | None, interval: float) -> bool:
    """Say whether tokens moved so shortly before the loop was blocked that no gauge tells of it.

    The monitor speaks of a blocked loop up to two intervals late, and gauges are one interval old.
    """
    moved_at = counters.tokens_moved_at
    if health is None or moved_at is None:
        return False
    return moved_at >= (health.since or health.at) - 3 * interval


def _last_in_flight(vitals: Vitals) -> int | None:
    """Return how many requests the last beat counted.

    Where de-duplication leaves one line of many, an engine's own last line may be minutes older
    than its last beat: the last line of the stream says more.
    """
    followed = [source for source in vitals.sources if source.retired_at is None]
    if followed and all(source.merged for source in followed):
        newest = max(followed, key=lambda source: source.last_line_at or 0.0)
        if newest.in_flight is not None:
            return newest.in_flight
    return vitals.last.in_flight if vitals.last is not None else None


def _excuse(vitals: Vitals, progress_at: Instant | None) -> bool:
    """Say whether the engine's own monitor looked long after the last progress and was content.

    An answer without the words of a monitor, a mere ``OK``, is as old as HTTP itself and proves
    only that HTTP lives.
    """
    health, proof = vitals.health, vitals.healthy_is_proof_after
    return (
        health is not None
        and proof is not None
        and health.meaning is HealthMeaning.HEALTHY
        and bool(health.status and health.message)
        and (progress_at is None or health.at - progress_at >= proof)
    )


def _flat(vitals: Vitals, patience: float) -> bool:
    counters = vitals.counters
    if counters is None or counters.tokens is None:
        return False
    last = vitals.last_progress
    since = latest(
        counters.since,
        counters.tokens_moved_at,
        counters.risen_at,
        last.at if last is not None else None,
    )
    return since is not None and counters.at - since >= patience
