"""What the vitals of one instance support.

Theory of operation
===================

Silence is a question. An engine that prints its statistics only while tokens flow falls silent when
it idles, sleeps, loads, retires, loses its heartbeat task, or hangs. ``judge`` rules the innocent
explanations out one by one, in this order:

1. *Gone*: it shut down in order, its log was retired, or its Ray was shut down around it.
2. *Dead*: a needed process or task ended. A line that says so counts once the next beat is missing.
3. *Stopped*: a process in state T does nothing, whatever was asked of it.
4. *Ok*: tokens flowed within the last one and a half intervals. Fresh progress outranks whatever a
   slow health endpoint says.
5. *Paused*: asleep, every part that slept not yet woken.
6. *Stalled*: there is work (a) and no progress (b). With proof that the log's path lives or does
   not matter (c), or with the state of a process, stack or task (d), it is ``hung``, else a
   suspicion. Tasks stand still in an idle engine, too: they count only where work is known to be
   in flight and every needed process is seen to compute nothing.
7. *Loading*: no beat yet, or none since a restart.
8. *Blind*: nobody could look.
9. *Idle*: no work; or the engine's own monitor, which would have noticed, says healthy.
10. *Ok* for want of evidence: patience is not used up, or the heartbeat alone died.

The clock of silence starts at the last progress, or when we began to listen, or when the engine was
restarted, woken or updated, whichever is latest. It runs ``stall_after`` seconds, because a long
prefill prints nothing; or ``missed_beats`` intervals, where a witness excludes one. Output that
comes in blocks (stdout of a pipe that nobody flushes) stretches both by what one block covers.

Work is what the last beat had in flight, unless newer gauges, an abort, a sleep or a restart say
otherwise; ``/health`` speaks of a stuck scheduler only where requests were handed out.

``judge`` is total, pure and stateless; between two instants returned by ``due`` it does not change,
which is why no sentence of a verdict contains the present time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hangwatch.model.identity import Role
from hangwatch.model.policy import Policy
from hangwatch.model.profile import HealthMeaning
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
    Ok,
    Paused,
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
        demand: Whether there is work.
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
    demand: Demand
    log_speaks: bool
    lost: bool
    unhealthy: Health | None
    excused: bool
    flat: bool


def facts(vitals: Vitals, policy: Policy) -> Facts:
    """Return what follows from *vitals* whatever the time is."""
    interval = policy.heartbeat_interval or vitals.interval
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
            )
            if moment is not None
        )
    )
    stretch = min(vitals.buffered, MAX_STRETCH) if vitals.buffered > 2 * interval else 0.0
    quick = min(policy.missed_beats * interval, policy.stall_after)
    known_alive = any(process.state not in ("", "Z", "X") for process in vitals.processes)
    return Facts(
        interval=interval,
        progress_at=progress_at,
        clock=clock,
        missing_at=None if progress_at is None else Instant(progress_at + GRACE * interval),
        quick_at=Instant(clock + quick + stretch),
        limit_at=Instant(clock + policy.stall_after + stretch),
        demand=_demand(vitals, interval, unhealthy=unhealthy, voided_at=voided_at, lost=lost),
        log_speaks=not lost
        and voided_at is None
        and (vitals.armed_at is not None or (last is not None and known_alive)),
        lost=lost,
        unhealthy=unhealthy,
        excused=_excuse(vitals, progress_at),
        flat=_flat(vitals, policy),
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
        or _paused(vitals, known)
        or _stalled(vitals, policy, known, now)
        or _loading(vitals, known)
        or _blind(vitals, policy, known, now)
        or _idle(vitals, known)
        or _patient(vitals, known)
    )


def _due(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Instant | None:
    moments = [known.missing_at, known.quick_at, known.limit_at, _died_due(vitals, known)]
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
    if last is None or last.in_flight is None:
        return Demand.UNKNOWN
    return Demand.SOME if last.in_flight > 0 else Demand.NONE


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


def _flat(vitals: Vitals, policy: Policy) -> bool:
    counters = vitals.counters
    if counters is None or counters.tokens is None:
        return False
    since = max(counters.since, counters.tokens_moved_at or counters.since)
    if vitals.last_progress is not None:
        since = max(since, vitals.last_progress.at)
    return counters.at - since >= policy.stall_after


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
        return _heartbeat_lost(known)
    if vitals.last is None:
        return _never_beats(known.progress_at)
    return Ok(
        since=known.progress_at,
        cause="not-a-hang:busy",
        confidence=Confidence.HIGH,
        because=("tokens flowed within the last interval",),
    )


def _paused(vitals: Vitals, known: Facts) -> Verdict | None:
    health = vitals.health
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
    if (
        health is not None
        and health.meaning is HealthMeaning.SLEEPING
        and (known.progress_at is None or health.at > known.progress_at)
    ):
        return Paused(
            since=health.since or health.at,
            cause="not-a-hang:paused",
            confidence=Confidence.HIGH,
            because=(f"/health says “{health.message or health.status}”",),
        )
    return None


def _stalled(  # noqa: PLR0911  # one return a verdict
    vitals: Vitals, policy: Policy, known: Facts, now: Instant
) -> Verdict | None:
    if disk := _d_state(vitals, policy, known, now):
        return disk
    blocked = known.unhealthy is not None and known.unhealthy.meaning is HealthMeaning.LOOP_BLOCKED
    if known.excused or (known.demand is Demand.NONE and not blocked):
        return None
    stacks = vitals.stacks
    if stacks is not None and known.progress_at is not None and stacks.at <= known.progress_at:
        stacks = None
    frozen = stacks is not None and stacks.motion is Motion.FROZEN
    suspended = _suspended(vitals, known, stacks)
    excluded = (
        frozen
        or bool(suspended)
        or (known.unhealthy is not None and known.unhealthy.meaning in _QUICK)
    )
    silent = known.log_speaks and now >= (known.quick_at if excluded else known.limit_at)
    # The engine's own monitor waited before it spoke; two witnesses need no further patience.
    accused = known.unhealthy is not None and (now >= known.quick_at or frozen or bool(suspended))
    flat = known.flat and known.demand is Demand.SOME
    # Nobody could look: silence is no evidence then, but other witnesses are.
    if not (silent and not _unseen(vitals, policy, now)) and not accused and not flat:
        return None
    because = [*_work(vitals, known), *_no_progress(vitals, policy, known, excluded=excluded)]
    since = known.progress_at or known.clock
    if stacks is not None and stacks.motion is Motion.BUSY:
        return Blocked(
            since=since,
            cause="event-loop-blocked-by-cpu",
            confidence=Confidence.HIGH,
            because=(*because, f"the loop's thread runs: {stacks.frame or stacks.thread}"),
        )
    if burner := _burner(vitals):
        return Blocked(
            since=since,
            cause="event-loop-blocked-by-cpu",
            confidence=Confidence.MEDIUM,
            because=(
                *because,
                f"HTTP does not answer while process {burner.pid} computes without a pause",
            ),
        )
    path = _path_lives(vitals, known)
    if frozen and stacks is not None:
        path.append(f"two samples of its stacks did not move: {stacks.frame or stacks.thread}")
    if flat:
        path.append("its metrics endpoint answers, so the path of the log does not matter")
    if suspended:
        path.append(f"two readings of its tasks did not move, and nothing computes: {suspended}")
    cause = _cause(vitals, known, frozen=frozen, suspended=bool(suspended))
    if not path:
        return SuspectedHang(
            since=since,
            cause=cause,
            confidence=Confidence.LOW,
            because=(*because, *_not_asked(vitals)),
        )
    return Hung(
        since=since,
        cause=cause,
        confidence=Confidence.HIGH if frozen or known.unhealthy else Confidence.MEDIUM,
        because=(*because, *path, *_not_asked(vitals)),
    )


def _loading(vitals: Vitals, known: Facts) -> Verdict | None:
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
        return _heartbeat_lost(known)
    since = known.progress_at or known.clock
    words = "a heartbeat is missing; a long prefill looks the same until the limit"
    if vitals.armed_at is None:
        words = "no heartbeat has come while we listened"
    return Ok(since=since, cause="not-a-hang:busy", confidence=Confidence.LOW, because=(words,))


def _heartbeat_lost(known: Facts) -> Verdict:
    return Ok(
        since=known.progress_at or known.clock,
        cause="not-a-hang:heartbeat-lost",
        confidence=Confidence.HIGH,
        because=(
            "the heartbeat is lost: requests still complete, or tokens still flow, without one",
        ),
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
        said.append(f"its token counters stood still for {policy.stall_after:g} s")
    if known.log_speaks:
        limit = policy.missed_beats * known.interval if excluded else policy.stall_after
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
    health = vitals.health
    if (
        health is not None
        and health.outcome is Outcome.TIMED_OUT
        and (known.progress_at is None or health.at > known.progress_at)
    ):
        found.append("its port accepts connections, and HTTP does not answer on them")
    return found


def _burner(vitals: Vitals) -> ProcessVital | None:
    """Return the process that computes while HTTP does not answer: its loop is blocked by work."""
    health = vitals.health
    if health is None or health.outcome is not Outcome.TIMED_OUT:
        return None
    for process in vitals.processes:
        if (
            process.needed
            and process.role is not Role.ENGINE_WORKER
            and process.state == "R"
            and (process.cpu_pct or 0.0) >= BUSY_CPU
        ):
            return process
    return None


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


def _cause(vitals: Vitals, known: Facts, *, frozen: bool, suspended: bool) -> str:
    meaning = known.unhealthy.meaning if known.unhealthy else None
    if frozen or meaning is HealthMeaning.LOOP_BLOCKED:
        return LOOP_BLOCKED
    if meaning is HealthMeaning.LOST_REQUEST:
        return "lost-request"
    waiting = vitals.stacks is not None and vitals.stacks.motion is Motion.WAITING
    if suspended:
        return "await-never-completes"
    if meaning is HealthMeaning.NO_PROGRESS and waiting:
        rates = [p.vol_ctxt_per_s for p in vitals.processes if p.vol_ctxt_per_s is not None]
        if rates:
            return "gpu-kernel-stuck" if max(rates) >= POLLING else "await-never-completes"
    if vitals.last is not None and vitals.last.tps == 0:
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
        Instant(quiet_since + policy.stall_after),
        Instant(quiet_since + min(policy.missed_beats * known.interval, policy.stall_after)),
    ]


def _not_asked(vitals: Vitals) -> tuple[str, ...]:
    missing = [
        name
        for name, value in (
            ("/health", vitals.health),
            ("/metrics", vitals.counters),
            ("process states", vitals.processes),
            ("stacks", vitals.stacks),
        )
        if not value
    ]
    return (f"not available: {', '.join(missing)}",) if missing else ()
