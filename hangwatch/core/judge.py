"""What the vitals of one instance support.

Theory of operation
===================

Silence is a question. An engine that prints its statistics only while tokens flow falls silent when
it idles, sleeps, loads, retires, loses its heartbeat task, or hangs. ``judge`` rules the innocent
explanations out one by one, in this order:

1. *Gone*: it shut down in order, its log was retired, or its Ray was shut down around it.
2. *Dead*: a needed process or task ended. A line that says so counts once the next beat is missing.
3. *Stopped*: a process in state T does nothing, whatever was asked of it.
4. *Ok* or *slow*: tokens flowed within the last one and a half intervals. Fresh progress outranks
   whatever a slow health endpoint says. Where they flow without beats, the heartbeat alone died, or
   the path of the log did.
5. *Paused*: a lease; or asleep, every part that slept not yet woken. A sleep beyond its limit is
   suspicious.
6. *Idle* in spite of an accusing monitor, if what it misses is a client that does not read.
7. *Stalled*: there is work (a) and no progress (b). With proof that the log's path lives or does
   not matter (c), or with the state of a process, GPU, stack or task (d), it is ``hung``, else a
   suspicion. Much stands still in an idle engine, too: tasks, GPUs and switches count only where
   work is known to be in flight *now*, by something newer than the last beat.
8. *Mute*: a server that accepts connections and answers none is no idle one, whatever it printed.
9. *Loading*: no beat yet, or none since a restart; unless nothing moves any more.
10. *Blind*: nobody could look.
11. *Idle*: no work; or the engine's own monitor, which would have noticed, says healthy.
12. *Ok* for want of evidence: patience is not used up, or the heartbeat alone died.

The clock of silence starts at the last progress, or when we began to listen, or when the engine was
restarted, woken or updated, or when a lease ended, whichever is latest. It runs ``stall_after``
seconds, because a long prefill prints nothing: calibrated by the silences that ended by themselves,
and no less than the longest prefill that the context allows at the pace that was seen. Or it runs
``missed_beats`` intervals, where a witness excludes a prefill. Output that comes in blocks (stdout
of a pipe that nobody flushes) stretches both by what one block covers. An engine that has printed
only a few beats since it was started, woken or updated gets the longer time: it compiles, and
its loop is blocked meanwhile.

Work is what the last beat had in flight, unless newer gauges, an abort, a sleep or a restart say
otherwise; ``/health`` speaks of a stuck scheduler only where requests were handed out.

``judge`` is total, pure and stateless; between two instants returned by ``due`` it does not change,
which is why no sentence of a verdict contains the present time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final

from hangwatch.core import calibration
from hangwatch.core.vitals import computes, spins
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import Role
from hangwatch.model.policy import Policy
from hangwatch.model.profile import HealthMeaning, Signal
from hangwatch.model.time import Instant
from hangwatch.model.verdict import (
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
from hangwatch.model.vitals import Health, Motion, Outcome, ProcessVital, StackVital, Vitals

ONE_SILENT: Final = "one-instance-silent"
"""Cause of a stall that nothing but its silence describes; the fleet may say more."""

LOOP_BLOCKED: Final = "event-loop-blocked"
"""Cause of a stall in which a loop does not turn."""

GRACE: Final = 1.5
"""Intervals after which a beat is missing: it comes every interval plus an RPC plus loop lag."""

RESIDUAL: Final = 0.5
"""Share of the median below which the last beat counted an interval that was cut short."""

MAX_STRETCH: Final = 1800.0
"""Seconds by which buffered output may stretch the limits."""

SETTLED_D: Final = 10.0
"""Seconds of unbroken D state that are no ordinary read any more."""

QUIET_CPU: Final = 20.0
"""Percent of a core: less is too little for a prefill, whichever process does it."""

BUSY_CPU: Final = 80.0
"""Percent of a core: the loop's thread computes."""

WARM: Final = 3
"""Beats with tokens after which an engine has compiled what it needs, as a rule."""

SETTLED_WAIT: Final = 8.0
"""Seconds over which looks must agree that a GPU rests, or a thread waits for one thing."""

COMPUTES: Final = 3.0
"""Times the patience with an engine whose GPU is seen to compute."""

LONGER: Final = 1.5
"""Times the longest prefill by context and pace: the pace that beats show is an average."""

_PIPE_FULL: Final = re.compile(r"pipe_(?:write|wait_writable|wait)\b|pipe_w\b")
"""Wait channels of a thread that writes into a pipe which nobody empties."""

_LOOP_WAITS: Final = re.compile(r"(?:do_|sys_|ep_)?e?poll|ep_poll|do_epoll_wait|do_select")
"""Wait channels of an event loop that waits for its next event."""

_HOSTS: Final = (Role.RAY_SYSTEM, Role.DRIVER)
"""Under Ray nothing outlives these."""

_DRIVER: Final = re.compile(r"_?(?:nv|nvidia|uvm|rm_|os_acquire|os_pci)")
"""Wait channels of the GPU driver's kernel module: what waits there waits for no storage."""

POLLING: Final = 500.0
"""Voluntary context switches a second of a loop that polls the GPU; about 900 measured, an idle
loop makes at most about 110."""


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
        missing_at: When the next beat is missing, or ``None`` before the first progress.
        quick_at: When silence suffices with a witness that excludes a long prefill.
        limit_at: When silence suffices without one.
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
    missing_at: Instant | None
    quick_at: Instant
    limit_at: Instant
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
    beaten_at = _latest(
        vitals.last_progress.at if vitals.last_progress else None,
        *(source.last_line_at for source in vitals.sources if source.merged),
    )
    counted_at = counters.tokens_moved_at if counters else None
    moved_at = _latest(beaten_at, counted_at)
    unhealthy = _accusation(vitals.health, moved_at)
    # Streamed answers are logged when they begin, so an accusing monitor outranks them.
    progress_at = moved_at if unhealthy else _latest(moved_at, vitals.completed_at)
    voided_at = _latest(
        vitals.aborted_at,
        vitals.slept.at if vitals.slept else None,
        vitals.started.at if vitals.started and vitals.last else None,
    )
    worked_at = _latest(vitals.completed_at, counted_at)
    lost = last is not None and (
        vitals.beat_lost is not None
        or (worked_at is not None and worked_at >= last.at + policy.missed_beats * interval)
    )
    clock = Instant(
        max(
            moment
            for moment in (
                vitals.listening_since,
                progress_at,
                vitals.updated_at,
                vitals.started.at if vitals.started else None,
                vitals.slept.at if vitals.slept else None,
                vitals.lease.until if vitals.lease else None,
                counters.busy_since if counters and not _beaten_with_work(last) else None,
            )
            if moment is not None
        )
    )
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
        missing_at=None if progress_at is None else Instant(progress_at + GRACE * interval),
        quick_at=Instant(clock + quick + stretch),
        limit_at=Instant(clock + patience + stretch),
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


def judge(vitals: Vitals, policy: Policy, now: Instant) -> Verdict:
    """Return what *vitals* support at *now*."""
    return _judge(vitals, policy, facts(vitals, policy), now)


def due(vitals: Vitals, policy: Policy, now: Instant) -> Instant | None:
    """Return the earliest instant after *now* at which ``judge`` may change by itself.

    Never later than the true change; ``None`` if only a new observation can change it.
    """
    return _due(vitals, policy, facts(vitals, policy), now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """``judge``, ``due`` and ``facts`` in one go: they share most of their work."""

    verdict: Verdict
    due: Instant | None
    facts: Facts


def examine(vitals: Vitals, policy: Policy, now: Instant) -> Examined:
    """Return the verdict at *now*, when it may change by itself, and what it rests on."""
    known = facts(vitals, policy)
    return Examined(
        verdict=_judge(vitals, policy, known, now),
        due=_due(vitals, policy, known, now),
        facts=known,
    )


def _judge(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict:
    return (
        _gone(vitals)
        or _dead(vitals, known, now)
        or _stopped(vitals, known, now)
        or _fresh(vitals, known, now)
        or _paused(vitals, policy, known, now)
        or _stalled_client(vitals, known)
        or _stalled(vitals, policy, known, now)
        or _mute(vitals, known)
        or _loading(vitals, known, now)
        or _blind(vitals, policy, known, now)
        or _idle(vitals, known)
        or _patient(vitals, known)
    )


def _due(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Instant | None:
    moments = [known.missing_at, known.quick_at, known.limit_at, _died_due(vitals, known)]
    if vitals.lease is not None:
        moments.append(vitals.lease.until)
    if vitals.slept is not None or vitals.health is not None:
        moments.append(_pause_ends(vitals, policy, known))
    if vitals.last is None:
        moments.append(_start_limit(vitals, known))
    if any(process.state == "D" for process in vitals.processes):
        moments += _d_state_limits(vitals, policy, known)
    moments += [
        Instant(source.unreadable_since + policy.child_silence)
        for source in vitals.sources
        if source.unreadable_since is not None
    ]
    later = [moment for moment in moments if moment is not None and moment > now]
    return min(later) if later else None


def stop_window(vitals: Vitals, policy: Policy) -> StopWindow | None:
    """Return between which instants the progress stopped; ``None`` if there was none to stop.

    The last beat tells of the interval before it. If it carries less than half of the usual tokens,
    the engine stopped within that interval, and the beat was printed for what came before.
    """
    known = facts(vitals, policy)
    last = vitals.last_progress
    if known.progress_at is None:
        return None
    if last is None or known.progress_at > last.at:
        return _window_past_the_beats(vitals, known, known.progress_at)
    tokens, usual = last.tps, vitals.median_tps
    if tokens is not None and usual is not None and tokens < RESIDUAL * usual:
        return StopWindow(earliest=Instant(last.at - known.interval), latest=last.at, residual=True)
    return StopWindow(earliest=last.at, latest=Instant(last.at + known.interval))


def _window_past_the_beats(vitals: Vitals, known: Facts, progress_at: Instant) -> StopWindow:
    """Return the window where a request or a counter moved after the last beat.

    A counter is looked at now and then: what a look finds grew somewhere since the look before,
    and the stop may lie there too. A beat that was due and did not come bounds it from above.
    """
    last, counters = vitals.last_progress, vitals.counters
    earliest = progress_at
    if counters is not None and counters.tokens_moved_at == progress_at:
        looked_at = counters.tokens_moved_after or progress_at
        earliest = looked_at if last is None else Instant(max(last.at, looked_at))
    if last is not None and not known.lost and last.at + GRACE * known.interval >= progress_at:
        due_at = Instant(last.at + known.interval)
        return StopWindow(earliest=earliest, latest=max(due_at, progress_at))
    return StopWindow(earliest=earliest, latest=Instant(progress_at + known.interval))


# --- what the vitals amount to -------------------------------------------------------------------


def _beaten_with_work(last: Heartbeat | None) -> bool:
    return last is not None and bool(last.in_flight)


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
    return vitals.says_idle and voided_at is None and bool(last.in_flight)


def _latest(*moments: Instant | None) -> Instant | None:
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
    set_after = _latest(
        last.at if last else None,
        None if voided_at is None else Instant(voided_at + interval),
    )
    if counters is not None and (set_after is None or counters.at > set_after):
        gauge = counters.in_flight
        if gauge == 0:
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

    An answer without words is as old as HTTP itself and proves only that HTTP lives.
    """
    health, proof = vitals.health, vitals.healthy_is_proof_after
    return (
        health is not None
        and proof is not None
        and health.meaning is HealthMeaning.HEALTHY
        and bool(health.message)
        and (progress_at is None or health.at - progress_at >= proof)
    )


def _flat(vitals: Vitals, patience: float) -> bool:
    counters = vitals.counters
    if counters is None or counters.tokens is None:
        return False
    if counters.busy_since is None:
        return False
    since = max(counters.since, counters.busy_since, counters.tokens_moved_at or counters.since)
    if vitals.last_progress is not None:
        since = max(since, vitals.last_progress.at)
    return counters.at - since >= patience


# --- the rules, in the order of the theory of operation ------------------------------------------


def _gone(vitals: Vitals) -> Verdict | None:
    if vitals.sources and all(source.retired_at is not None for source in vitals.sources):
        since = max(source.retired_at or vitals.listening_since for source in vitals.sources)
        return Gone(
            since=since,
            cause="retired",
            confidence=Confidence.HIGH,
            because=("its log is not followed any more: the link moved on or the file is gone",),
        )
    if vitals.stopped is not None:
        return Gone(
            since=vitals.stopped.at,
            cause="shut-down",
            confidence=Confidence.HIGH,
            because=(f"it shut down in order: “{vitals.stopped.text[:120]}”",),
        )
    return None


def _dead(vitals: Vitals, known: Facts, now: Instant) -> Verdict | None:
    needed = [process for process in vitals.processes if process.needed]
    missing = [process for process in needed if process.ended]
    if missing:
        hosts = [p for p in vitals.processes if p.ended and p.role in _HOSTS]
        whole = all(p.state == "" for p in needed)
        return _ended_with(hosts) if hosts else _ended(missing, known, whole=whole)
    health = vitals.health
    if health is not None and (known.progress_at is None or health.at > known.progress_at):
        if health.meaning is HealthMeaning.DEAD:
            return Dead(
                since=known.progress_at or health.since or health.at,
                cause="engine-task-dead",
                confidence=Confidence.HIGH,
                because=(f"/health says “{health.message}”",),
            )
        if health.outcome is Outcome.REFUSED and not needed and now >= known.quick_at:
            if known.demand is Demand.NONE:
                return Gone(
                    since=health.since or health.at,
                    cause="ended",
                    confidence=Confidence.MEDIUM,
                    because=("nobody listens on its port any more, and it had no work",),
                )
            return Dead(
                since=known.progress_at or health.since or health.at,
                cause="child-dead",
                confidence=Confidence.MEDIUM,
                because=("nobody listens on its port any more, and it had work",),
            )
    told_at = _died_due(vitals, known)
    if vitals.died is not None and told_at is not None and now >= told_at:
        return Dead(
            since=known.progress_at or vitals.died.at,
            cause="engine-task-dead",
            confidence=Confidence.HIGH,
            because=(
                f"its log says “{vitals.died.text[:160]}”",
                "no heartbeat has come since that line",
            ),
        )
    return None


def _ended_with(hosts: list[ProcessVital]) -> Verdict:
    words = ", ".join(
        f"{'driver' if host.role is Role.DRIVER else 'raylet'} {host.pid}" for host in hosts
    )
    return Gone(
        since=min(host.since for host in hosts),
        cause="ended",
        confidence=Confidence.MEDIUM,
        because=(f"it ended together with the Ray job that it belonged to: {words} ended, too",),
    )


def _ended(missing: list[ProcessVital], known: Facts, *, whole: bool) -> Verdict:
    first = min(missing, key=lambda process: process.since)
    words = ", ".join(
        f"{process.role} {process.pid} {'is a zombie' if process.state else 'is gone'}"
        for process in missing
    )
    if whole and known.demand is Demand.NONE:
        return Gone(
            since=first.since,
            cause="ended",
            confidence=Confidence.MEDIUM,
            because=(f"its processes ended while it had no work: {words}",),
        )
    return Dead(
        since=known.progress_at or first.since,
        cause="child-dead",
        confidence=Confidence.HIGH,
        because=(f"a process that it needs ended: {words}",),
    )


def _died_due(vitals: Vitals, known: Facts) -> Instant | None:
    """A line about a failed task is believed when the next beat is missing."""
    if vitals.died is None:
        return None
    if vitals.last is None:
        return vitals.died.at
    return Instant(max(vitals.died.at, vitals.last.at + GRACE * known.interval))


def _stopped(vitals: Vitals, known: Facts, now: Instant) -> Verdict | None:
    stopped = [p for p in vitals.processes if p.needed and p.state in ("T", "t")]
    if not stopped or now < known.quick_at:
        return None
    words = "; ".join(
        f"{process.role} {process.pid} is in state {process.state}"
        + ("" if process.tracer_pid is None else f", traced by {process.tracer_pid or 'nobody'}")
        for process in stopped
    )
    return Hung(
        since=known.progress_at or known.clock,
        cause="stopped-by-tracer",
        confidence=Confidence.HIGH,
        because=(
            f"{words}: it was stopped from outside and does nothing until SIGCONT",
            "no heartbeat since",
        ),
    )


def _fresh(vitals: Vitals, known: Facts, now: Instant) -> Verdict | None:
    if known.progress_at is None or known.missing_at is None or now >= known.missing_at:
        return None
    if known.lost:
        return _without_beats(vitals, known)
    if vitals.last is None:
        return _never_beats(known.progress_at)
    if vitals.slow_since is not None:
        return Slow(
            since=vitals.slow_since,
            cause="not-a-hang:slow",
            confidence=Confidence.MEDIUM,
            because=(
                "tokens flow, but the latest heartbeats show less than a fifth of the usual ones",
                "as many requests are in flight as before",
            ),
        )
    return Ok(
        since=known.progress_at,
        cause="not-a-hang:busy",
        confidence=Confidence.HIGH,
        because=("tokens flowed within the last interval",),
    )


def _paused(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict | None:
    health, lease = vitals.health, vitals.lease
    if lease is not None and now < lease.until:
        reason = f": “{lease.reason[:120]}”" if lease.reason else ""
        return Paused(
            since=lease.at,
            cause="not-a-hang:lease",
            confidence=Confidence.HIGH,
            because=(f"{lease.holder or 'somebody'} announced a pause{reason}",),
        )
    ends_at = _pause_ends(vitals, policy, known)
    if ends_at is not None and now >= ends_at:
        began_at = _pause_began(vitals, known)
        assert began_at is not None
        return SuspectedHang(
            since=began_at,
            cause="pause-outlived",
            confidence=Confidence.LOW,
            because=(
                f"it has slept for more than {ends_at - began_at:g} s, longer than pauses take",
                "what should wake it may hang",
            ),
        )
    if vitals.asleep and vitals.slept is not None:
        return Paused(
            since=vitals.slept.at,
            cause="not-a-hang:paused",
            confidence=Confidence.HIGH,
            because=(
                f"it was put to sleep, and not woken since: {', '.join(vitals.asleep)}",
                f"last word: “{vitals.slept.text[:120]}”",
            ),
        )
    if health is not None and _says_asleep(vitals, known):
        return Paused(
            since=health.since or health.at,
            cause="not-a-hang:paused",
            confidence=Confidence.HIGH,
            because=(f"/health says “{health.message or health.status}”",),
        )
    return None


def _says_asleep(vitals: Vitals, known: Facts) -> bool:
    health = vitals.health
    return (
        health is not None
        and health.meaning is HealthMeaning.SLEEPING
        and (known.progress_at is None or health.at > known.progress_at)
    )


def _pause_began(vitals: Vitals, known: Facts) -> Instant | None:
    if vitals.asleep and vitals.slept is not None:
        return vitals.slept.at
    if vitals.health is not None and _says_asleep(vitals, known):
        return vitals.health.since or vitals.health.at
    return None


def _pause_ends(vitals: Vitals, policy: Policy, known: Facts) -> Instant | None:
    """Return when a sleep has lasted longer than pauses take; ``None`` while awake."""
    began_at = _pause_began(vitals, known)
    if began_at is None:
        return None
    return Instant(began_at + max(policy.pause_limit, 2 * vitals.longest_pause))


def _stalled_client(vitals: Vitals, known: Facts) -> Verdict | None:
    """A request that the engine has finished and whose client does not read looks lost."""
    if not _is_lost(vitals, known):
        return None
    unsent = sum(process.unsent_bytes or 0 for process in vitals.processes)
    if not unsent:
        return None
    return Idle(
        since=known.progress_at or known.clock,
        cause="stalled-client",
        confidence=Confidence.MEDIUM,
        because=(
            f"{unsent:,} bytes of answers lie in its connections, and a client does not read them",
            "its engine has no request any more, and its server still has some",
        ),
    )


def _is_lost(vitals: Vitals, known: Facts) -> bool:
    """Say whether requests were handed out that the engine does not know (any more)."""
    if known.unhealthy is not None:
        return known.unhealthy.meaning is HealthMeaning.LOST_REQUEST
    counters = vitals.counters
    return (
        counters is not None
        and known.firm
        and counters.running == 0
        and not counters.waiting
        and bool(counters.routed)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Still:
    """What stands still in an engine that has work, in words.

    ``""`` where it does not, or is not known to.

    Attributes:
        stacks: Two samples of stacks, in a call.
        tasks: Two readings of tasks, and nothing computes.
        gpus: No GPU computes.
        gpus_settled: Whether looks at the GPUs agreed on that for long enough.
        switches: No process computes or polls a GPU.
        pipe: A full pipe holds its server.
    """

    stacks: str = ""
    tasks: str = ""
    gpus: str = ""
    gpus_settled: bool = False
    switches: str = ""
    pipe: str = ""

    @property
    def excludes_prefill(self) -> bool:
        """Whether nothing can be computed."""
        gpus = bool(self.gpus) and self.gpus_settled
        return gpus or bool(self.stacks or self.tasks or self.switches or self.pipe)

    @property
    def words(self) -> tuple[str, ...]:
        """What is known, strongest first."""
        every = (self.pipe, self.stacks, self.tasks, self.gpus, self.switches)
        return tuple(word for word in every if word)


def _still(vitals: Vitals, known: Facts) -> _Still:
    stacks = _stacks(vitals, known)
    frozen = stacks is not None and stacks.motion is Motion.FROZEN
    suspended = _suspended(vitals, known, stacks)
    words = settled = ""
    if stacks is not None and frozen:
        words = f"two samples of its stacks did not move: {stacks.frame or stacks.thread}"
    if suspended:
        settled = f"two readings of its tasks did not move, and nothing computes: {suspended}"
    rest_since, newest = vitals.gpus_rest_since, max((gpu.at for gpu in vitals.gpus), default=None)
    return _Still(
        stacks=words,
        tasks=settled,
        gpus=_gpus_rest(vitals, known),
        gpus_settled=rest_since is not None
        and newest is not None
        and newest - rest_since >= SETTLED_WAIT,
        switches=_nothing_polls(vitals, known),
        pipe=_pipe_full(vitals, known),
    )


def _stacks(vitals: Vitals, known: Facts) -> StackVital | None:
    """Return what the stacks say, unless they are older than the last progress."""
    stacks = vitals.stacks
    if stacks is None or (known.progress_at is not None and stacks.at <= known.progress_at):
        return None
    return stacks


def _stalled(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict | None:
    if disk := _d_state(vitals, policy, known, now):
        return disk
    still = _still(vitals, known)
    if known.excused or not (_has_work(vitals, known) or still.pipe):
        return None
    busy = _busy(vitals, known)
    excluded = still.excludes_prefill or (
        known.unhealthy is not None and known.unhealthy.meaning in _QUICK and not busy
    )
    # A loop that is blocked may compile, capture a graph or load weights; a process shows that.
    patient = bool(busy) or not known.warm
    quick_at = known.limit_at if patient and not still.stacks else known.quick_at
    silent = known.log_speaks and now >= (quick_at if excluded else known.limit_at)
    # The engine's own monitor waited before it spoke; two witnesses need no further patience.
    accused = known.unhealthy is not None and (now >= quick_at or bool(still.stacks or still.tasks))
    flat = known.flat and known.demand is Demand.SOME
    held = bool(still.pipe) and now >= known.quick_at
    # Nobody could look: silence is no evidence then, but other witnesses are.
    if not (silent and not _unseen(vitals, policy, now)) and not (accused or flat or held):
        return None
    because = (*_work(vitals, known), *_no_progress(vitals, policy, known, excluded=excluded))
    since = known.progress_at or known.clock
    if busy:
        return Blocked(
            since=since,
            cause="event-loop-blocked-by-cpu",
            confidence=Confidence.HIGH if vitals.stacks is not None else Confidence.MEDIUM,
            because=(*because, busy),
        )
    path = [*_path_lives(vitals, known), *still.words]
    if flat:
        path.append("its metrics endpoint answers, so the path of the log does not matter")
    cause = _cause(vitals, known, still)
    if not path:
        return SuspectedHang(
            since=since,
            cause=cause,
            confidence=Confidence.LOW,
            because=(*because, *_not_asked(vitals)),
        )
    sure = still.stacks or still.pipe or known.unhealthy
    return Hung(
        since=since,
        cause=cause,
        confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
        because=(*because, *path, *_not_asked(vitals)),
    )


def _has_work(vitals: Vitals, known: Facts) -> bool:
    """Say whether work is known, or may be, in flight.

    A loop that does not answer its monitor counts in an engine without work, too, once it has
    lasted and nothing computes: an update of the weights blocks it for some time.
    """
    if known.demand is not Demand.NONE:
        return True
    health = known.unhealthy
    return (
        health is not None
        and health.meaning is HealthMeaning.LOOP_BLOCKED
        and health.at - (health.since or health.at) >= known.patience
        and not _busy(vitals, known)
    )


def _mute(vitals: Vitals, known: Facts) -> Verdict | None:
    """A server that takes connections and answers none for long hangs, whatever work it printed."""
    health, started = vitals.health, vitals.started
    if health is None or not _unanswered(vitals, known) or health.since is None:
        return None
    if vitals.last is None and (started is None or started.signal is not Signal.READY):
        return None
    if health.at - health.since < known.patience:
        return None
    told = "its port accepts connections, and HTTP has not answered on them for"
    because: tuple[str, ...] = (f"{told} {known.patience:g} s",)
    if busy := _busy(vitals, known):
        return Blocked(
            since=health.since,
            cause="event-loop-blocked-by-cpu",
            confidence=Confidence.MEDIUM,
            because=(*because, busy),
        )
    return Hung(
        since=known.progress_at or health.since,
        cause=_cause(vitals, known, _still(vitals, known)),
        confidence=Confidence.MEDIUM,
        because=(*because, *_not_asked(vitals)),
    )


def _unanswered(vitals: Vitals, known: Facts) -> bool:
    """Say whether HTTP did not answer the last time, although TCP did."""
    health = vitals.health
    return (
        health is not None
        and health.outcome is Outcome.TIMED_OUT
        and (known.progress_at is None or health.at > known.progress_at)
    )


def _loading(vitals: Vitals, known: Facts, now: Instant) -> Verdict | None:
    if stuck := _stuck_start(vitals, known, now):
        return stuck
    health, started = vitals.health, vitals.started
    restarting = started is not None and vitals.last is not None
    starting = (
        health is not None
        and health.meaning is HealthMeaning.STARTING
        and (known.progress_at is None or health.at > known.progress_at)
    )
    if vitals.last is None and vitals.completed_at is not None:
        return _never_beats(vitals.completed_at)
    if vitals.last is not None and not restarting and not starting:
        return None
    words = "no heartbeat has come yet"
    if starting and health is not None:
        words = f"/health says “{health.message or health.status}”"
    elif started is not None:
        words = f"it starts: “{started.text[:120]}”"
    return Loading(
        since=started.at if started else vitals.listening_since,
        cause="not-a-hang:startup",
        confidence=Confidence.MEDIUM if starting or started else Confidence.LOW,
        because=(words,),
    )


def _stuck_start(vitals: Vitals, known: Facts, now: Instant) -> Verdict | None:
    """A start that has taken long, whose log says nothing new and whose stacks do not move."""
    stacks = vitals.stacks
    if vitals.last is not None or stacks is None or now < _start_limit(vitals, known):
        return None
    frame = stacks.frame if stacks.motion is Motion.FROZEN else stacks.stuck
    busy = any(p.needed and (p.cpu_pct or 0.0) >= QUIET_CPU for p in vitals.processes)
    reads = any(p.read_bytes_per_s for p in vitals.processes)
    if not frame or busy or reads:
        return None
    return Hung(
        since=known.clock,
        cause="startup-hang",
        confidence=Confidence.MEDIUM,
        because=(
            f"no heartbeat has come yet, and two samples of its stacks did not move: {frame}",
            "its log says nothing new, and nothing computes or reads",
        ),
    )


def _start_limit(vitals: Vitals, known: Facts) -> Instant:
    """Return from when on a start that does not move is stuck."""
    grown_at = _latest(*(source.grew_at for source in vitals.sources))
    quiet_at = known.clock if grown_at is None else grown_at + GRACE * known.interval
    return Instant(max(known.clock + known.patience, quiet_at))


def _never_beats(since: Instant) -> Verdict:
    return Ok(
        since=since,
        cause="not-a-hang:no-heartbeat-configured",
        confidence=Confidence.MEDIUM,
        because=("no heartbeat was ever printed, yet requests are answered or tokens flow",),
    )


def _blind(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict | None:
    if not _unseen(vitals, policy, now) or known.excused:
        return None
    reasons = {source.unreadable_reason for source in vitals.sources if source.unreadable_reason}
    since = [s.unreadable_since for s in vitals.sources if s.unreadable_since is not None]
    if vitals.blind_since is not None:
        since.append(vitals.blind_since)
    return Blind(
        since=min(since),
        cause="unreadable",
        confidence=Confidence.HIGH,
        because=(vitals.blind_reason or "; ".join(sorted(reasons)) or "its log cannot be read",),
    )


def _idle(vitals: Vitals, known: Facts) -> Verdict | None:
    if known.lost and not known.excused and known.demand is not Demand.NONE:
        return None
    since = known.progress_at or known.clock
    if known.excused and vitals.health is not None:
        return Idle(
            since=since,
            cause="not-a-hang:idle",
            confidence=Confidence.HIGH,
            because=(
                f"/health said “{vitals.health.message}” long after the last progress",
                "its monitor would have noticed requests that make none",
            ),
        )
    if known.demand is not Demand.NONE:
        return None
    cause = "not-a-hang:idle"
    if vitals.slept is not None or vitals.aborted_at is not None:
        cause = "not-a-hang:paused"
        words = "its requests were given up or put to sleep, and none has come since"
    elif vitals.last is not None and vitals.last.in_flight == 0:
        words = "its last heartbeat had no request in flight"
    else:
        words = "its gauges show no request in flight"
    health = vitals.health
    content = health is not None and health.meaning is HealthMeaning.HEALTHY
    return Idle(
        since=since,
        cause=cause,
        confidence=Confidence.HIGH if content else Confidence.MEDIUM,
        because=(words,),
    )


def _patient(vitals: Vitals, known: Facts) -> Verdict:
    if known.lost:
        return _without_beats(vitals, known)
    since = known.progress_at or known.clock
    words = "a heartbeat is missing; a long prefill looks the same until the limit"
    if vitals.armed_at is None:
        words = "no heartbeat has come while we listened"
    return Ok(since=since, cause="not-a-hang:busy", confidence=Confidence.LOW, because=(words,))


def _without_beats(vitals: Vitals, known: Facts) -> Verdict:
    if _log_is_dead(vitals, known):
        return LogStalled(
            since=vitals.last.at if vitals.last is not None else known.clock,
            cause="not-a-hang:log-pipeline",
            confidence=Confidence.MEDIUM,
            because=(
                "its token counters move, and nothing comes on its log any more",
                "that log carried more than heartbeats before, so it is not the heartbeat alone",
            ),
        )
    return Ok(
        since=known.progress_at or known.clock,
        cause="not-a-hang:heartbeat-lost",
        confidence=Confidence.HIGH,
        because=(
            "the heartbeat is lost: requests still complete, or tokens still flow, without one",
        ),
    )


def _log_is_dead(vitals: Vitals, known: Facts) -> bool:
    """Say whether the log stopped as a whole: access lines came on it before, and none come now."""
    last, counters, completed_at = vitals.last, vitals.counters, vitals.completed_at
    if last is None or counters is None or counters.tokens_moved_at is None:
        return False
    ended_at = last.at + GRACE * known.interval
    followed = [source for source in vitals.sources if source.retired_at is None]
    return (
        completed_at is not None
        and completed_at <= ended_at < counters.tokens_moved_at
        and bool(followed)
        and all(source.grew_at is not None and source.grew_at <= ended_at for source in followed)
    )


# --- witnesses -----------------------------------------------------------------------------------

_QUICK: Final = frozenset(
    {HealthMeaning.LOOP_BLOCKED, HealthMeaning.NO_PROGRESS, HealthMeaning.LOST_REQUEST}
)
"""Words of a monitor that exclude a long prefill: it ticks for each chunk."""


def _unseen(vitals: Vitals, policy: Policy, now: Instant) -> bool:
    """Say whether nobody can look at any of its logs."""
    followed = [source for source in vitals.sources if source.retired_at is None]
    unreadable = [
        source
        for source in followed
        if source.unreadable_since is not None
        and now >= source.unreadable_since + policy.child_silence
    ]
    if followed:
        return len(unreadable) == len(followed)
    return vitals.blind_since is not None


def _work(vitals: Vitals, known: Facts) -> tuple[str, ...]:
    last, counters = vitals.last, vitals.counters
    if known.demand is Demand.UNKNOWN:
        return ("whether there is work is not known: no number says so",)
    if last is not None and last.in_flight:
        numbers = f"running {_number(last.running)}, waiting {_number(last.waiting)}"
        if last.routed is not None:
            numbers += f"; {last.routed} in its server"
        return (f"its last heartbeat had {last.in_flight} requests in flight ({numbers})",)
    if counters is not None and counters.in_flight:
        return (f"its gauges show {counters.in_flight} requests in flight",)
    return ()


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _no_progress(
    vitals: Vitals, policy: Policy, known: Facts, *, excluded: bool
) -> tuple[str, ...]:
    said = []
    if known.unhealthy is not None:
        said.append(f"/health says “{known.unhealthy.message or known.unhealthy.status}”")
    if known.flat:
        said.append(f"its token counters stood still for {known.patience:g} s")
    if known.log_speaks:
        limit = policy.missed_beats * known.interval if excluded else known.patience
        if vitals.last is not None and vitals.last.tps == 0:
            said.append("its heartbeats go on and show 0 tokens/s with requests in flight")
        else:
            said.append(
                f"no heartbeat for {limit:g} s, one was due every {known.interval:g} s"
                " while there is work"
            )
    return tuple(said)


def _path_lives(vitals: Vitals, known: Facts) -> list[str]:
    """Return why the silence cannot be the log's fault."""
    last = vitals.last
    found = []
    if last is not None and vitals.last_progress is not None and last.at > vitals.last_progress.at:
        found.append("its own later lines arrive, so the path of its log lives")
    if last is not None:
        proof_at = last.at + GRACE * known.interval
        if vitals.siblings_at is not None and vitals.siblings_at >= proof_at:
            found.append("other engines still print on the same log, so the path of its log lives")
        else:
            # A driver prints lines of its own; they prove nothing of the way from its workers.
            found += [
                f"{source.name} still grows, so its path lives"
                for source in vitals.sources
                if not source.relayed and source.grew_at is not None and source.grew_at >= proof_at
            ]
    if known.unhealthy is not None:
        found.append("the engine's own monitor was reached, so the path of the log does not matter")
    if _unanswered(vitals, known):
        found.append("its port accepts connections, and HTTP does not answer on them")
    return found


def _busy(vitals: Vitals, known: Facts) -> str:
    """Return which loop is blocked by work, in words; ``""`` if none is known to be."""
    stacks = _stacks(vitals, known)
    if stacks is not None and stacks.motion is Motion.BUSY:
        return f"the loop's thread runs: {stacks.frame or stacks.thread}"
    blocked = known.unhealthy is not None and known.unhealthy.meaning is HealthMeaning.LOOP_BLOCKED
    unanswered = _unanswered(vitals, known)
    for process in vitals.processes:
        # Engines that do not poll their GPU spin while they wait for it.
        engine = process.role is Role.ENGINE
        asked = (blocked and vitals.polls_gpu) if engine else unanswered
        cpu = max(process.cpu_pct or 0.0, process.busiest_cpu_pct or 0.0)
        if not process.needed or process.role is Role.ENGINE_WORKER or not asked:
            continue
        if cpu >= BUSY_CPU and (process.state == "R" or process.busiest_cpu_pct is not None):
            who = "its loop does not answer" if engine else "HTTP does not answer"
            return f"{who} while process {process.pid} computes without a pause"
    return ""


def _suspended(vitals: Vitals, known: Facts, stacks: StackVital | None) -> str:
    """Return the await that never completes, where nothing else explains the silence."""
    if stacks is None or not stacks.suspended or known.demand is not Demand.SOME:
        return ""
    needed = [process for process in vitals.processes if process.needed]
    quiet = all(
        process.cpu_pct is not None
        and process.vol_ctxt_per_s is not None
        and process.cpu_pct < QUIET_CPU
        and process.vol_ctxt_per_s < POLLING
        for process in needed
    )
    return stacks.suspended if needed and quiet else ""


def _gpus_rest(vitals: Vitals, known: Facts) -> str:
    """Say that no GPU computes although there is work; ``""`` if that is not known."""
    gpus = vitals.gpus
    newest = max((gpu.at for gpu in gpus), default=None)
    if newest is None or not known.firm or not all(computes(gpu) is False for gpu in gpus):
        return ""
    if known.progress_at is not None and newest <= known.progress_at:
        return ""
    spinning = [gpu for gpu in gpus if spins(gpu)]
    if spinning:
        one = spinning[0]
        power = "" if one.power_w is None else f", {one.power_w:.0f} W"
        limit = "" if one.power_limit_w is None else f" of {one.power_limit_w:.0f} W"
        return (
            f"GPU {one.index} runs a kernel that computes nothing: {one.utilization_pct:.0f} %"
            f" utilisation, memory activity {one.memory_activity_pct or 0:.0f} %{power}{limit}"
        )
    most = max(gpu.utilization_pct or 0.0 for gpu in gpus)
    return f"its GPUs do nothing: {most:.0f} % utilisation at most"


def _nothing_polls(vitals: Vitals, known: Facts) -> str:
    """Say that no process computes, or waits for a GPU; ``""`` if that is not known."""
    needed = [process for process in vitals.processes if process.needed]
    if not known.firm or not vitals.polls_gpu or not needed:
        return ""
    for process in needed:
        switches, cpu = process.switches_per_s, process.cpu_pct
        if switches is None or cpu is None or switches >= POLLING or cpu >= QUIET_CPU:
            return ""
        if known.progress_at is not None and process.at <= known.progress_at:
            return ""
    most = max(process.switches_per_s or 0.0 for process in needed)
    return (
        "no process of it computes or polls its GPU: "
        f"{most:.0f} context switches a second at most, a polling one makes about 900"
    )


def _pipe_full(vitals: Vitals, known: Facts) -> str:
    """Say that its server is held by a pipe that nobody reads; ``""`` if that is not known.

    An idle server may be seen in the middle of a line that it writes: it counts if it has work, and
    stood there for some time or has been silent for long.
    """
    for process in vitals.processes:
        since = process.waits_since or process.at
        if process.role is not Role.API_SERVER or not process.needed:
            continue
        if not _PIPE_FULL.match(process.wchan):
            continue
        stood = process.at - since >= SETTLED_WAIT
        silent = process.at >= known.limit_at and known.demand is not Demand.NONE
        if stood or silent:
            what = "its standard output is one that" if process.stdout_pipe else "it is one that"
            return (
                f"{process.role} {process.pid} waits in {process.wchan} for room in a pipe: {what}"
                " nobody empties"
            )
    return ""


def _loop_is_idle(vitals: Vitals) -> bool:
    """Say whether the server's main thread waits for its next event, as an idle loop does."""
    servers = [p for p in vitals.processes if p.role is Role.API_SERVER and p.needed]
    return bool(servers) and all(
        p.state == "S" and _LOOP_WAITS.match(p.wchan) is not None for p in servers
    )


def _cause(vitals: Vitals, known: Facts, still: _Still) -> str:  # noqa: PLR0911  # one a cause
    meaning = known.unhealthy.meaning if known.unhealthy else None
    stacks = _stacks(vitals, known)
    if still.pipe:
        return "stdout-pipe-full"
    if still.gpus and all(spins(gpu) for gpu in vitals.gpus):
        return "gpu-kernel-stuck"
    if still.stacks or meaning is HealthMeaning.LOOP_BLOCKED:
        return LOOP_BLOCKED
    if _is_lost(vitals, known):
        return "lost-request"
    if still.tasks or still.switches:
        return "await-never-completes"
    waiting = stacks is not None and stacks.motion is Motion.WAITING
    if waiting and still.gpus:
        return "await-never-completes"
    if meaning is HealthMeaning.NO_PROGRESS and (waiting or vitals.polls_gpu):
        rates = [
            rate
            for p in vitals.processes
            if (rate := p.vol_ctxt_per_s if p.switches_per_s is None else p.switches_per_s)
            is not None
            and (waiting or p.switches_per_s is not None)
        ]
        if rates:
            return "gpu-kernel-stuck" if max(rates) >= POLLING else "await-never-completes"
    if _unanswered(vitals, known):
        return "concurrency-limit" if _loop_is_idle(vitals) else LOOP_BLOCKED
    last = vitals.last
    if last is not None and last.tps == 0 and not last.running and last.waiting:
        return "scheduler-stuck"
    return ONE_SILENT


def _d_state(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict | None:
    if known.demand is Demand.NONE or known.excused:
        return None
    long_at, settled_at = _d_state_limits(vitals, policy, known)
    for process in vitals.processes:
        if not process.needed or process.state != "D" or process.read_bytes_per_s:
            continue  # slow storage that still delivers is no hang
        settled = process.at - process.since >= SETTLED_D and now >= settled_at
        if now >= long_at or settled:
            wchan = f" in {process.wchan}" if process.wchan else ""
            return Hung(
                since=known.progress_at or known.clock,
                cause="node-fault" if _DRIVER.match(process.wchan) else "storage-d-state",
                confidence=Confidence.HIGH,
                because=(
                    f"{process.role} {process.pid} is in uninterruptible sleep{wchan}",
                    "its log stands still",
                ),
            )
    return None


def _d_state_limits(vitals: Vitals, policy: Policy, known: Facts) -> list[Instant]:
    """Before the first beat it is the log's own growth that counts."""
    quiet_since = known.clock
    if vitals.last is None:
        quiet_since = (
            _latest(
                known.clock,
                *(s.last_line_at for s in vitals.sources),
                *(s.grew_at for s in vitals.sources),
            )
            or known.clock
        )
    return [
        Instant(quiet_since + known.patience),
        Instant(quiet_since + min(policy.missed_beats * known.interval, known.patience)),
    ]


def _not_asked(vitals: Vitals) -> tuple[str, ...]:
    missing = [
        name
        for name, value in (
            ("/health", vitals.health),
            ("/metrics", vitals.counters),
            ("process states", vitals.processes),
            ("GPUs", vitals.gpus),
            ("stacks", vitals.stacks),
        )
        if not value
    ]
    return (f"not available: {', '.join(missing)}",) if missing else ()
