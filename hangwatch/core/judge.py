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
   suspicion. Much stands still in an idle engine, too: GPUs and switches count only where work is
   known to be in flight *now*, by something newer than the last beat; tasks, which are read once
   somebody is suspected, where any is.
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
from statistics import median
from typing import Final

from hangwatch.core.facts import WARM, Demand, Facts, facts, latest
from hangwatch.core.vitals import GRACE, RESIDUAL
from hangwatch.core.witnesses import (
    QUICK,
    QUIET_CPU,
    busy_loop,
    cause_of,
    is_lost,
    no_progress,
    not_asked,
    path_lives,
    stacks_of,
    still_of,
    unanswered,
    unseen,
    work,
)
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
from hangwatch.model.vitals import Motion, Outcome, ProcessVital, Vitals

SETTLED_D: Final = 10.0
"""Seconds of unbroken D state that are no ordinary read any more."""

UNUSED: Final = 2.5
"""Times the patience with a loop that is blocked while it has no work: nobody waits for it."""

LAST_WORDS: Final = 2.0
"""Intervals after its end within which the last lines of a server arrive."""

LONGEST_PAUSE: Final = 86_400.0
"""Seconds beyond which a sleep is suspicious, however long those before it were."""

PLANNED: Final = 900.0
"""Seconds that an update of the weights or a compilation may block a loop."""

_HOSTS: Final = (Role.RAY_SYSTEM, Role.DRIVER)
"""Under Ray nothing outlives these."""

_DRIVER: Final = re.compile(r"_?(?:nv|nvidia|uvm|rm_|os_acquire|os_pci)")
"""Wait channels of the GPU driver's kernel module: what waits there waits for no storage."""


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
        or _patient(vitals, known, now)
    )


def _due(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Instant | None:
    moments = [known.missing_at, known.quick_at, known.limit_at, _died_due(vitals, known)]
    moments.append(_last_words(vitals, known))
    if vitals.lease is not None:
        moments.append(vitals.lease.until)
    if vitals.slept or vitals.health or vitals.stacks:
        moments.append(_pause_ends(vitals, policy, known))
    if vitals.last is None:
        moments.append(_start_limit(vitals, known))
    if known.lost:
        moments.append(_moves_until(vitals, known))
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
    risen_at = vitals.counters.risen_at if vitals.counters is not None else None
    if risen_at is not None and risen_at > last.at + known.interval:
        # It was idle; the gauges that told of new work may be an interval old.
        return StopWindow(
            earliest=Instant(risen_at - known.interval), latest=Instant(risen_at + known.interval)
        )
    tokens, usual = last.tps, vitals.median_tps
    generates = _generates_as_usual(vitals)
    if tokens is not None and usual is not None and tokens < RESIDUAL * usual and not generates:
        return StopWindow(earliest=Instant(last.at - known.interval), latest=last.at, residual=True)
    return StopWindow(earliest=last.at, latest=Instant(last.at + known.interval))


def _generates_as_usual(vitals: Vitals) -> bool:
    """Say whether the last beat counts as many generated tokens as those before.

    Prompt tokens come in bursts: few of them do not make an interval that was cut short.
    """
    if len(vitals.pace) < WARM + 1:
        return False
    *older, latest = (generated for _, generated, _ in vitals.pace)
    return latest > 0 and latest >= RESIDUAL * median(older)


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
    if missing := [p for p in needed if p.ended and not _is_refuted(p, vitals, known)]:
        return _missed(vitals, missing, known, now)
    health = vitals.health
    if health is not None and (known.progress_at is None or health.at > known.progress_at):
        if health.meaning is HealthMeaning.DEAD:
            return Dead(
                since=known.progress_at or health.since or health.at,
                cause="engine-task-dead",
                confidence=Confidence.HIGH,
                because=(f"/health says “{health.message}”",),
            )
        refused = health.outcome is Outcome.REFUSED and _has_served(vitals)
        if refused and not needed and now >= known.quick_at:
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


def _missed(
    vitals: Vitals, missing: list[ProcessVital], known: Facts, now: Instant
) -> Verdict | None:
    hosts = [p for p in vitals.processes if p.ended and p.role in _HOSTS]
    if hosts:
        return _ended_with(hosts)
    whole = all(p.state == "" for p in vitals.processes if p.needed)
    said_at = _last_words(vitals, known)
    if whole and known.demand is not Demand.NONE and said_at is not None and now < said_at:
        return None
    return _ended(missing, known, whole=whole)


def _last_words(vitals: Vitals, known: Facts) -> Instant | None:
    """Return when all that a server said before it ended has arrived; ``None`` if nobody can tell.

    One that is shut down in order says so, and its last beat shows no work. Nothing is left to be
    captured, so waiting costs nothing.
    """
    ended = [p for p in vitals.processes if p.needed and p.ended and p.at > p.since]
    if not ended:
        return None
    first = min(process.since for process in ended)
    return Instant(first + LAST_WORDS * known.interval + known.late_by)


def _is_refuted(ended: ProcessVital, vitals: Vitals, known: Facts) -> bool:
    """Say whether a server beats on long after it ended: then it was somebody else who did."""
    last = vitals.last
    return (
        ended.role is Role.API_SERVER
        and last is not None
        and not last.relayed
        and last.at >= ended.since + known.interval
    )


def _has_served(vitals: Vitals) -> bool:
    """Say whether its port was open since it was started: it opens once everything is loaded."""
    if vitals.started is not None:
        return vitals.started.signal is Signal.READY
    return vitals.last is not None or vitals.completed_at is not None


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
    if vitals.last is None or vitals.last.at > vitals.died.at:
        return vitals.died.at  # a beat that came after it was of before it, or would have ended it
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
        return _without_beats(vitals, known, now)
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
                f"its pause has lasted {ends_at - began_at:g} s, longer than such pauses take",
                "what should end it may hang",
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
    if (stacks := stacks_of(vitals, known)) is not None and stacks.planned:
        return Paused(
            since=known.progress_at or known.clock,
            cause="not-a-hang:paused",
            confidence=Confidence.MEDIUM,
            because=(f"its loop is blocked as planned, by {stacks.planned}",),
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
    if (stacks := stacks_of(vitals, known)) is not None and stacks.planned:
        return known.progress_at or known.clock
    if vitals.health is not None and _says_asleep(vitals, known):
        return vitals.health.since or vitals.health.at
    return None


def _pause_ends(vitals: Vitals, policy: Policy, known: Facts) -> Instant | None:
    """Return when a pause has lasted longer than pauses take; ``None`` while there is none."""
    began_at = _pause_began(vitals, known)
    if began_at is None:
        return None
    stacks = stacks_of(vitals, known)
    if not vitals.asleep and stacks is not None and stacks.planned:
        return Instant(began_at + PLANNED)
    return Instant(began_at + max(policy.pause_limit, min(2 * vitals.longest_pause, LONGEST_PAUSE)))


def _stalled_client(vitals: Vitals, known: Facts) -> Verdict | None:
    """A request that the engine has finished and whose client does not read looks lost."""
    if not is_lost(vitals, known):
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


def _stalled(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict | None:
    if disk := _d_state(vitals, policy, known, now):
        return disk
    still = still_of(vitals, known)
    if known.excused or not (_has_work(vitals, known) or still.pipe):
        return None
    busy = busy_loop(vitals, known)
    excluded = still.excludes_prefill or (
        known.unhealthy is not None and known.unhealthy.meaning in QUICK and not busy
    )
    # A loop that is blocked may compile, capture a graph or load weights; a process shows that.
    patient = (bool(busy) or not known.warm) and not still.stacks
    quick_at = known.limit_at if patient else known.quick_at
    silent = known.log_speaks and now >= (quick_at if excluded else known.limit_at)
    # The engine's own monitor waited before it spoke; two witnesses need no further patience.
    health = known.unhealthy
    lasted = health is not None and health.at - (health.since or health.at) >= known.patience
    accused = health is not None and (
        bool(still.stacks or still.tasks) or (now >= quick_at and (lasted or not patient))
    )
    flat = known.flat and known.demand is Demand.SOME
    held = bool(still.pipe) and now >= known.quick_at
    # Nobody could look: silence is no evidence then, but other witnesses are.
    if not (silent and not unseen(vitals, policy, now)) and not (accused or flat or held):
        return None
    because = (*no_progress(vitals, policy, known, excluded=excluded), *work(vitals, known))
    since = known.stalled_at or known.clock
    if busy:
        return Blocked(
            since=since,
            cause="event-loop-blocked-by-cpu",
            confidence=Confidence.HIGH if vitals.stacks is not None else Confidence.MEDIUM,
            because=(*because, busy),
        )
    path = [*path_lives(vitals, known), *still.words]
    if flat:
        path.append("its metrics endpoint answers, so the path of the log does not matter")
    cause = cause_of(vitals, known, still)
    if not path:
        return SuspectedHang(
            since=since,
            cause=cause,
            confidence=Confidence.LOW,
            because=(*because, *not_asked(vitals)),
        )
    sure = still.stacks or still.pipe or known.unhealthy
    return Hung(
        since=since,
        cause=cause,
        confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
        because=(*because, *path, *not_asked(vitals)),
    )


def _has_work(vitals: Vitals, known: Facts) -> bool:
    """Say whether work is known, or may be, in flight.

    A loop that does not answer its monitor counts in an engine without work, too, if it is seen to
    stand in a call, or once it has lasted and nothing computes: an update of the weights blocks it
    for some time. The gauges that say that there is no work stand still with it.
    """
    if known.demand is not Demand.NONE:
        return True
    health, stacks = known.unhealthy, stacks_of(vitals, known)
    if health is None or health.meaning is not HealthMeaning.LOOP_BLOCKED:
        return False
    if stacks is not None and stacks.motion is Motion.FROZEN:
        return True
    lasted = health.at - (health.since or health.at)
    return lasted >= UNUSED * known.patience and not busy_loop(vitals, known)


def _mute(vitals: Vitals, known: Facts) -> Verdict | None:
    """A server that takes connections and answers none for long hangs, whatever work it printed."""
    health, started = vitals.health, vitals.started
    if health is None or not unanswered(vitals, known) or health.since is None:
        return None
    if vitals.last is None and (started is None or started.signal is not Signal.READY):
        return None
    if health.at - health.since < known.patience:
        return None
    told = "its port accepts connections, and HTTP has not answered on them for"
    because: tuple[str, ...] = (f"{told} {known.patience:g} s",)
    if busy := busy_loop(vitals, known):
        return Blocked(
            since=health.since,
            cause="event-loop-blocked-by-cpu",
            confidence=Confidence.MEDIUM,
            because=(*because, busy),
        )
    return Hung(
        since=known.progress_at or health.since,
        cause=cause_of(vitals, known, still_of(vitals, known)),
        confidence=Confidence.MEDIUM,
        because=(*because, *not_asked(vitals)),
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
    grown_at = latest(*(source.grew_at for source in vitals.sources))
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
    if not unseen(vitals, policy, now) or known.excused:
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


def _patient(vitals: Vitals, known: Facts, now: Instant) -> Verdict:
    if known.lost:
        return _without_beats(vitals, known, now)
    since = known.progress_at or known.clock
    words = "a heartbeat is missing; a long prefill looks the same until the limit"
    if vitals.armed_at is None:
        words = "no heartbeat has come while we listened"
    return Ok(since=since, cause="not-a-hang:busy", confidence=Confidence.LOW, because=(words,))


def _without_beats(vitals: Vitals, known: Facts, now: Instant) -> Verdict:
    if _log_is_dead(vitals, known, now):
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


def _log_is_dead(vitals: Vitals, known: Facts, now: Instant) -> bool:
    """Say whether the log stopped as a whole while tokens go on.

    Access lines came on it before, and none come now.
    """
    last, counters, completed_at = vitals.last, vitals.counters, vitals.completed_at
    if last is None or counters is None or counters.tokens_moved_at is None:
        return False
    ended_at = last.at + GRACE * known.interval
    followed = [source for source in vitals.sources if source.retired_at is None]
    return (
        now < _moves_until(vitals, known)
        and completed_at is not None
        and completed_at <= ended_at < counters.tokens_moved_at
        and bool(followed)
        and all(source.grew_at is not None and source.grew_at <= ended_at for source in followed)
    )


def _moves_until(vitals: Vitals, known: Facts) -> Instant:
    """Return until when tokens count as moving: looks at them come once an interval."""
    moved_at = vitals.counters.tokens_moved_at if vitals.counters is not None else None
    return known.clock if moved_at is None else Instant(moved_at + 2 * known.interval)


def _d_state(vitals: Vitals, policy: Policy, known: Facts, now: Instant) -> Verdict | None:
    if known.excused:
        return None
    idle = known.demand is Demand.NONE and known.unhealthy is None
    long_at, settled_at = _d_state_limits(vitals, policy, known)
    for process in vitals.processes:
        if not process.needed or process.state != "D" or process.read_bytes_per_s:
            continue  # slow storage that still delivers is no hang
        lasted = process.at - process.since
        settled = lasted >= SETTLED_D and now >= settled_at
        # Work may have come after the last beat: what stays like this hangs, work or none.
        if lasted >= known.patience if idle else now >= long_at or settled:
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
            latest(
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
