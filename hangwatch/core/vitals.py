"""Folds what was seen into the vitals of one instance.

Each function takes vitals and one observation and returns the vitals after it. They remember since
when things are so; what that amounts to is for ``judge``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median
from typing import Final

from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.observation import (
    CountersSeen,
    GpusSeen,
    HealthSeen,
    ProcessesSeen,
    StacksSeen,
)
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, GpuVital, Health, ProcessVital, Vitals

GRACE: Final = 1.5
"""Intervals after which a beat is missing: it comes every interval plus an RPC plus loop lag."""

RECENT: Final = 16
"""Beats whose tokens make up the running median: under three minutes of LMDeploy."""

RESIDUAL: Final = 0.5
"""Share of the median below which the last beat counted an interval that was cut short."""

PACE: Final = 48
"""Beats whose pace is remembered: eight minutes of LMDeploy."""

REFERENCE: Final = 8
"""Beats that say what the usual pace is, at least."""

SLOW_BEATS: Final = 3
"""Beats in a row below the usual pace that are slow."""

SLOW: Final = 0.2
"""Share of the usual generated tokens a second below which a beat is slow."""

UNBEATEN: Final = 3.0
"""Intervals in which tokens flow, or answers come, without a beat, after which the heartbeat is
lost. A single move proves nothing: after a time without work the first beat is still to come."""

DRAIN: Final = 3.0
"""Intervals after the last beat in which the requests that it counted may be answered; an answer
that comes later may be one of a new request."""

TOGETHER: Final = 0.2
"""Share of an interval within which beats count as having arrived in one piece."""

_LOOP_WAITS: Final = re.compile(r"(?:do_|sys_|ep_)?e?poll|ep_poll|do_epoll_wait|do_select")
"""Wait channels of an event loop that waits for its next event."""


def beat(vitals: Vitals, seen: Heartbeat, *, fresh: bool) -> Vitals:
    """Return the vitals after a heartbeat.

    A beat ends what earlier lines announced: a failed task did not matter, an abort is over, a
    restart is complete. Sleep it ends only if it cannot be of the interval before: one late beat
    counts tokens from before the sleep.
    """
    last = vitals.last
    tokens = seen.tps
    progress = tokens is None or tokens > 0
    recent = vitals.recent_tps
    if tokens is not None and tokens > 0:
        recent = (*recent[1 - RECENT :], tokens)
    asleep, slept = vitals.asleep, vitals.slept
    if slept is not None and (not asleep or seen.at > slept.at + vitals.interval):
        asleep, slept = (), None
    gap = seen.at - last.at if last is not None and fresh and vitals.armed_at is not None else 0.0
    pace = vitals.pace
    if progress and seen.in_tps is not None and seen.out_tps is not None:
        pace = (*pace[1 - PACE :], (seen.in_tps, seen.out_tps, seen.in_flight or 0))
    slow_since = vitals.slow_since or seen.at if progress and _is_slow(pace) else None
    if slow_since is not None and vitals.slow_since is not None:
        # What is slow does not become the usual pace.
        pace = (*pace[: -SLOW_BEATS - 1], *pace[-SLOW_BEATS:])
    return replace(
        vitals,
        armed_at=seen.at if fresh and vitals.armed_at is None else vitals.armed_at,
        last=seen,
        last_progress=seen if progress else vitals.last_progress,
        recent_tps=recent,
        median_tps=median(recent[:-1]) if progress and len(recent) > 3 else vitals.median_tps,
        buffered=_buffered(vitals, seen),
        recent_gaps=(*vitals.recent_gaps[1 - RECENT :], gap) if gap > 0 else vitals.recent_gaps,
        peak_in_tps=max(vitals.peak_in_tps, seen.in_tps or 0.0),
        warm=vitals.warm + 1 if progress else vitals.warm,
        drained=0,
        completing_since=None,
        unbeaten_at=None,
        pace=pace,
        slow_since=slow_since if progress else vitals.slow_since,
        started=None,
        slept=slept,
        asleep=asleep,
        updated_at=None,
        aborted_at=None,
        beat_lost=None,
        died=vitals.died if _is_residual(vitals, seen) else None,
        stopped=None,
    )


def _is_residual(vitals: Vitals, seen: Heartbeat) -> bool:
    """Say whether a beat right after the line that says that a task died is of before that line."""
    died, usual, tokens = vitals.died, vitals.median_tps, seen.tps
    if died is None or usual is None or tokens is None:
        return False
    return seen.at <= died.at + GRACE * vitals.interval and tokens < RESIDUAL * usual


def _is_slow(pace: tuple[tuple[float, float, int], ...]) -> bool:
    """Say whether the latest beats show far fewer tokens than those before, for as much work.

    A phase of prefills generates few tokens as well; it is told by its prompt tokens: they are more
    than usual, by more than the generated ones are less.
    """
    older, latest = pace[:-SLOW_BEATS], pace[-SLOW_BEATS:]
    if len(older) < REFERENCE:
        return False
    in_tps, out_tps, in_flight = (median(column) for column in zip(*older, strict=True))
    reads, generates, _ = (median(column) for column in zip(*latest, strict=True))
    return reads - in_tps <= out_tps - generates and all(
        generated < SLOW * out_tps and requests >= in_flight / 2
        for _, generated, requests in latest
    )


def _buffered(vitals: Vitals, seen: Heartbeat) -> float:
    """Return the printed time that this beat and those that came in one piece with it cover."""
    last = vitals.last
    if last is None or seen.at - last.at > TOGETHER * vitals.interval:
        return 0.0
    if seen.printed is None or last.printed is None:
        return vitals.buffered
    if (seen.printed.tzinfo is None) != (last.printed.tzinfo is None):
        return vitals.buffered
    return vitals.buffered + max(0.0, (seen.printed - last.printed).total_seconds())


def signal(vitals: Vitals, seen: SignalSeen, parts: tuple[str, ...]) -> Vitals:  # noqa: PLR0911
    """Return the vitals after another line that matters.

    Args:
        vitals: Before it.
        seen: The line.
        parts: All parts that a sleep puts to sleep.
    """
    match seen.signal:
        case Signal.STARTING | Signal.READY:
            return replace(
                vitals,
                started=seen,
                stopped=None,
                died=None,
                asleep=(),
                slept=None,
                warm=0,
                unbeaten_at=None,
                completing_since=None,
            )
        case Signal.SLEEP:
            return replace(vitals, slept=seen, asleep=seen.parts or parts or ("engine",))
        case Signal.WAKE:
            left = tuple(p for p in vitals.asleep if seen.parts and p not in seen.parts)
            pause = seen.at - vitals.slept.at if vitals.slept is not None and vitals.asleep else 0.0
            return replace(
                vitals,
                slept=seen,
                asleep=left,
                warm=0,
                longest_pause=max(vitals.longest_pause, pause),
            )
        case Signal.UPDATED:
            return replace(vitals, updated_at=seen.at, warm=0)
        case Signal.ABORTED:
            return replace(vitals, aborted_at=seen.at)
        case Signal.COMPLETED:
            soon = vitals.last is not None and seen.at <= vitals.last.at + DRAIN * vitals.interval
            since = vitals.completing_since or seen.at
            counted = vitals.counters is not None and vitals.counters.tokens is not None
            return replace(
                vitals,
                completed_at=seen.at,
                completing_since=since,
                # Streamed answers are logged when they begin: counters know better.
                unbeaten_at=vitals.unbeaten_at if counted else _unbeaten(vitals, since, seen.at),
                aborted_at=None,
                drained=vitals.drained + 1 if soon else vitals.drained,
            )
        case Signal.BEAT_LOST:
            return replace(vitals, beat_lost=seen)
        case Signal.ENGINE_DEAD:
            return vitals if vitals.died is not None else replace(vitals, died=seen)
        case Signal.STOPPED:
            return replace(vitals, stopped=vitals.stopped or seen)


def look(
    vitals: Vitals, seen: HealthSeen | CountersSeen | ProcessesSeen | GpusSeen | StacksSeen
) -> Vitals:
    """Return the vitals after a look at the instance itself, whatever was looked at."""
    match seen:
        case HealthSeen():
            return health(vitals, seen.health)
        case CountersSeen():
            return counters(vitals, seen.counters)
        case ProcessesSeen():
            return processes(vitals, seen)
        case GpusSeen():
            return gpus(vitals, seen)
        case StacksSeen():
            return replace(vitals, stacks=seen.stacks)


def health(vitals: Vitals, seen: Health) -> Vitals:
    """Return the vitals after an answer of the health endpoint, or its absence."""
    before = vitals.health
    same = before is not None and before.outcome is seen.outcome and before.meaning is seen.meaning
    since = before.since if same and before is not None else seen.at
    return replace(vitals, health=replace(seen, since=since))


def counters(vitals: Vitals, seen: Counters) -> Vitals:
    """Return the vitals after a look at the metrics."""
    before = vitals.counters
    if before is None:
        return replace(vitals, counters=seen)
    moved = seen.tokens is not None and before.tokens is not None and seen.tokens != before.tokens
    moving_since = (before.moving_since or before.at) if moved else None
    return replace(
        vitals,
        counters=replace(
            seen,
            since=before.since,
            tokens_moved_at=seen.at if moved else before.tokens_moved_at,
            tokens_moved_after=before.at if moved else before.tokens_moved_after,
            moving_since=moving_since,
            risen_at=seen.at if seen.in_flight and before.in_flight == 0 else before.risen_at,
        ),
        unbeaten_at=vitals.unbeaten_at
        if moving_since is None
        else _unbeaten(vitals, moving_since, seen.at),
    )


def _unbeaten(vitals: Vitals, since: Instant, at: Instant) -> Instant | None:
    """Return when the heartbeat is known to be lost, if work has gone on from *since* to *at*."""
    if vitals.last is None or vitals.unbeaten_at is not None:
        return vitals.unbeaten_at
    announced = (vitals.slept, vitals.started)
    begun_at = max(since, vitals.last.at, *(seen.at for seen in announced if seen is not None))
    return at if at >= begun_at + UNBEATEN * vitals.interval else None


def processes(vitals: Vitals, seen: ProcessesSeen) -> Vitals:
    """Return the vitals after a look at the processes; one that is not listed any more is gone."""
    before = {process.pid: process for process in vitals.processes}
    now: dict[int, ProcessVital] = {}
    for process in seen.processes:
        old = before.get(process.pid)
        since = old.since if old is not None and old.state == process.state else process.since
        waits = old is not None and old.wchan == process.wchan and old.waits_since is not None
        now[process.pid] = replace(
            process,
            since=since,
            waits_since=old.waits_since if old is not None and waits else process.at,
            polled_at=process.at
            if _LOOP_WAITS.match(process.wchan)
            else old.polled_at
            if old is not None
            else None,
        )
    for pid, old in before.items():
        if pid not in now and old.needed:
            since = old.since if old.state == "" else seen.at
            now[pid] = replace(old, state="", since=since, at=seen.at)
    return replace(vitals, processes=tuple(now.values()))


COMPUTING: Final = 5.0
"""Percent of memory activity from which on a busy GPU computes: a kernel that spins touches no
memory, and the reports of stuck ones say 0 to 1."""

SPINNING: Final = 90.0
"""Percent of utilisation from which on a GPU without memory activity spins. A small model that
computes shows less than 20."""

POWERFUL: Final = 0.45
"""Share of the power limit from which on a GPU computes, whatever else is known of it. Spinning
kernels were reported at 12 to 42 percent (25 of 60 W on an A2, 86 of 700 W on an H800)."""

RESTING: Final = 1.0
"""Percent of utilisation below which a GPU does nothing. On an H200 that only holds memory it is 0,
small kernels at a hundred a second make it 4."""


def computes(gpu: GpuVital) -> bool | None:
    """Return whether a GPU computes, or ``None`` where its numbers do not say."""
    used, memory = gpu.utilization_pct, gpu.memory_activity_pct
    if used is None:
        return None
    if used < RESTING:
        return False
    if gpu.power_w is not None and gpu.power_limit_w and gpu.power_w > POWERFUL * gpu.power_limit_w:
        return True
    if memory is None:
        return None
    return True if memory >= COMPUTING else False if used >= SPINNING else None


def spins(gpu: GpuVital) -> bool:
    """Say whether a GPU runs a kernel that computes nothing."""
    return computes(gpu) is False and (gpu.utilization_pct or 0.0) >= SPINNING


def rests(gpu: GpuVital) -> bool:
    """Say whether a GPU runs nothing."""
    return gpu.utilization_pct is not None and gpu.utilization_pct < RESTING


def gpus(vitals: Vitals, seen: GpusSeen) -> Vitals:
    """Return the vitals after a look at the GPUs."""
    rest = bool(seen.gpus) and all(computes(gpu) is False for gpu in seen.gpus)
    since = (vitals.gpus_rest_since or seen.at) if rest else None
    return replace(vitals, gpus=seen.gpus, gpus_rest_since=since)


def relisten(vitals: Vitals, at: Instant) -> Vitals:
    """Return the vitals after a time in which nobody listened: silence counts from *at*."""
    return replace(vitals, listening_since=Instant(max(vitals.listening_since, at)))
