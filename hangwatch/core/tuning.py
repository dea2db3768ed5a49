"""Which patience fits the logs of a user: false alarms against latency.

Theory of operation
===================

A longer limit never sees a silence that a shorter one does not. So one run of the detector with the
shortest limit finds every silence with work, with all that excuses one (idleness, sleep, restarts,
time in which nobody could read); what a longer limit would have made of each follows from its
length. What ended by itself is a false alarm of every limit that is shorter; what never ended is a
stop, and is noticed as many seconds after it began as the limit has.

A log does not say whether a silence that never ended was a hang, or a job that was killed. Such
stops are listed with their times, so that who was there can tell.

Recommended is the shortest limit that keeps clear of what was seen: half as long again as the
longest silence that ended by itself; or as the second longest, if the longest stands alone and far
off, for one such alarm is cheaper than minutes of latency at every hang. Silences are the rarer the
longer they are, so logs with little work in them recommend nothing below the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from heapq import nlargest
from typing import Final

from hangwatch.core import calibration, grouping
from hangwatch.core.advance import advance
from hangwatch.core.calibration import Calibration
from hangwatch.core.facts import Demand
from hangwatch.core.fleet import State, begin, due
from hangwatch.core.replay import batches
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Transition
from hangwatch.model.observation import BeatSeen, Observation, Report
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.replay import LogMaterial
from hangwatch.model.time import Instant
from hangwatch.model.tuning import Setting, Silence, Tuning
from hangwatch.model.verdict import Dead, Gone, Loading

SETTINGS: Final = (30.0, 45.0, 60.0, 90.0, 120.0, 150.0, 180.0, 240.0, 300.0, 450.0, 600.0)
"""Limits that are tried, in seconds: three intervals of LMDeploy to the ceiling of calibration."""

MARGIN: Final = 1.5
"""Times the longest silence that ended by itself."""

ALONE: Final = 2.0
"""Times the second longest silence from which on the longest is an outlier."""


def tune(
    material: LogMaterial,
    *,
    profiles: Mapping[str, EngineProfile],
    policy: Policy,
    until: Instant,
    settings: tuple[float, ...] = SETTINGS,
) -> Tuning:
    """Return what each of *settings* would have meant for *material*.

    Args:
        material: Logs in virtual time.
        profiles: Engines to look for, by name.
        policy: The limits as they are set.
        until: When the evaluation ends.
        settings: Limits to try, in seconds, shortest first.
    """
    run = _Run(profiles, replace(policy, stall_after=settings[0], calibrate=False), material)
    for at, batch in batches(material, profiles=profiles, until=until):
        run.take(batch, at)
    run.take((), until)
    silences = run.silences(until)
    known = reduce(calibration.observe, run.gaps, Calibration())
    enough = len(run.gaps) >= calibration.ENOUGH
    recommended, reason = _recommend(run.gaps, settings, policy.stall_after, enough=enough)
    together = policy.together * run.interval
    return Tuning(
        epoch=material.epoch,
        instances=len(run.beaten),
        heartbeats=run.heartbeats,
        hours=sum(last - first for first, last in run.beaten.values()) / 3600,
        gaps=len(run.gaps),
        silences=silences,
        settings=tuple(_setting(limit, silences, together) for limit in settings),
        present=policy.stall_after,
        calibrated=calibration.patience(known, policy.stall_after),
        recommended=recommended,
        enough=enough,
        reason=reason,
    )


class _Run:
    """The detector at the shortest limit, and what it passed by."""

    def __init__(
        self, profiles: Mapping[str, EngineProfile], policy: Policy, material: LogMaterial
    ) -> None:
        self.gaps: list[float] = []
        self.heartbeats = 0
        self.beaten: dict[InstanceKey, tuple[Instant, Instant]] = {}
        self.interval = policy.heartbeat_interval or max(p.interval for p in profiles.values())
        self._limit = policy.stall_after
        self._state: State = begin(policy, profiles, material.epoch, Instant(0.0))
        self._silent: dict[InstanceKey, Instant] = {}
        self._over: list[Silence] = []

    def take(self, batch: Iterable[Observation], at: Instant) -> None:
        """Judge what falls due before *at*, then what is seen then."""
        while (moment := due(self._state)) is not None and moment < at:
            self._advance((), moment)
        for seen in batch:
            if isinstance(seen, BeatSeen):
                self._note(seen)
        self._advance(batch, at)

    def silences(self, until: Instant) -> tuple[Silence, ...]:
        """Return every silence, those that go on among them, in the order of their beginnings."""
        going_on = [
            Silence(instance=key, since=since, seconds=until - since, ended=False)
            for key, since in self._silent.items()
        ]
        return tuple(sorted((*self._over, *going_on), key=lambda s: (s.since, s.instance.name)))

    def _note(self, seen: BeatSeen) -> None:
        key = self._state.aliases.get(seen.beat.instance, seen.beat.instance)
        tracked = self._state.instances.get(key)
        self.heartbeats += 1
        first, _ = self.beaten.get(key, (seen.at, seen.at))
        self.beaten[key] = (first, seen.at)
        known = tracked.facts if tracked is not None else None
        if known is None or known.progress_at is None or known.demand is Demand.NONE:
            return
        # What calibration learns from, too; a second copy of a beat is no gap.
        gap = seen.at - known.clock
        if known.log_speaks and gap >= known.interval / 2 and seen.beat.tps:
            self.gaps.append(gap)

    def _advance(self, batch: Iterable[Observation], at: Instant) -> None:
        self._state, actions = advance(self._state, batch, at)
        for action in actions:
            if isinstance(action, Report):
                self._follow(action.transition)

    def _follow(self, change: Transition) -> None:
        key, after = change.instance, change.after
        if grouping.is_alarm(after) and not isinstance(after, Dead):
            self._silent.setdefault(key, Instant(change.at - self._limit))
        elif key in self._silent:
            since = self._silent.pop(key)
            # A restart, a shutdown or a log that was let go of is how a stop ends.
            ended = not isinstance(after, Loading | Gone | Dead)
            self._over.append(
                Silence(instance=key, since=since, seconds=change.at - since, ended=ended)
            )


def _setting(limit: float, silences: Iterable[Silence], together: float) -> Setting:
    long = [silence for silence in silences if silence.seconds >= limit]
    stops = [silence for silence in silences if not silence.ended]
    found = _moments([silence for silence in long if not silence.ended], together)
    return Setting(
        stall_after=limit,
        false=_moments([silence for silence in long if silence.ended], together),
        found=found,
        missed=_moments(stops, together) - found,
    )


def _moments(silences: list[Silence], together: float) -> int:
    """Return how many incidents silences make: those that begin together are one."""
    count, before = 0, float("-inf")
    for silence in silences:
        if silence.since - before > together:
            count += 1
        before = silence.since
    return count


def _recommend(
    gaps: Sequence[float], settings: tuple[float, ...], present: float, *, enough: bool
) -> tuple[float, str]:
    longest = nlargest(2, gaps)
    if len(longest) < 2:
        return present, "there are too few heartbeats with work to say anything; keep what is set"
    first, second = longest[0], longest[1]
    alone = first > ALONE * second and first > settings[0]
    measure = second if alone else first
    clear = [limit for limit in settings if limit >= MARGIN * measure]
    limit = clear[0] if clear else settings[-1]
    words = f"the longest silence with work that ended by itself took {first:.0f} s"
    if alone:
        words += f", an outlier: the second longest took {second:.0f} s"
    if not enough:
        words += f"; {len(gaps)} gaps are too few to go below the present setting"
        limit = max(limit, present)
    if not clear:
        words += "; no setting keeps clear of that, so let endpoints and processes be asked, too"
    return limit, words
