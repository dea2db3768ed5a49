"""One history, and what several detectors say of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks._histories.fleet import DAY, Fleet, Plan, Planted
from benchmarks._histories.world import World
from hangwatch.core import grouping
from hangwatch.core.advance import advance
from hangwatch.core.fleet import State, begin, due, remember
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, Transition
from hangwatch.model.observation import (
    BeatSeen,
    CaptureEnded,
    CountersSeen,
    GpusSeen,
    HealthSeen,
    LoopPaused,
    Observation,
    ProcessesSeen,
    Report,
    SourceFound,
    SourceRetired,
    StartCapture,
)
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import SuspectedHang
from hangwatch.profiles import lmdeploy, vllm
from hangwatch.testing import FakeClock

PROFILES: Final = {found.name: found for found in (lmdeploy.PROFILE, vllm.PROFILE)}

_OUTSIDE: Final = (ProcessesSeen, HealthSeen, CountersSeen, GpusSeen)

WITNESSES: Final[Mapping[str, tuple[type, ...]]] = {
    "log": (),
    "log, /proc": (ProcessesSeen,),
    "log, /health": (HealthSeen,),
    "log, /metrics": (CountersSeen,),
    "log, /proc, GPU": (ProcessesSeen, GpusSeen),
    "all": _OUTSIDE,
}

BASELINES: Final = (60.0, 120.0)
"""Seconds of silence after which the rule that knows nothing else alarms."""

CAPTURE: Final = 20.0
"""Seconds that a capture takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An instance began to alarm, or was said to hang for certain.

    Attributes:
        at: When.
        instance: Which.
        word: The verdict.
        cause: Its cause.
        because: Its sentences.
    """

    at: float
    instance: InstanceKey
    word: str
    cause: str
    because: tuple[str, ...] = ()


class Detector:
    """The real thing, in virtual time, with some of its senses."""

    def __init__(self, senses: tuple[type, ...], policy: Policy) -> None:
        self.deaf_to = tuple(kind for kind in _OUTSIDE if kind not in senses)
        self.state: State = begin(policy, PROFILES, FakeClock().epoch(), Instant(0.0))
        self.alarms: list[Alarm] = []
        self.confirmed: list[Alarm] = []
        self.transitions: list[Transition] = []
        self.incidents: list[Incident] = []
        self._ends: list[tuple[float, str]] = []

    def feed(self, at: float, seen: list[Observation]) -> None:
        if not isinstance(seen[0], LoopPaused):
            self.wait(at)  # while our loop stands still nothing is judged
        heard = [o for o in seen if not isinstance(o, self.deaf_to)] if self.deaf_to else seen
        if heard:
            self._advance(heard, at)

    def restart(self, at: float, logs: list[Observation]) -> None:
        """End and begin anew: memory survives, and what lies in the logs is read once more."""
        self.wait(at)
        memory = remember(self.state)
        self.state = begin(
            self.state.policy, PROFILES, FakeClock().epoch(), Instant(at), memory=memory
        )
        self._ends.clear()
        self._advance(logs, at)

    def wait(self, at: float) -> None:
        """Judge whatever falls due before *at*, and end captures."""
        while True:
            moment = due(self.state)
            if self._ends and self._ends[0][0] < at and (not moment or self._ends[0][0] < moment):
                ended_at, ident = self._ends.pop(0)
                self._advance([CaptureEnded(incident=ident, at=Instant(ended_at))], ended_at)
            elif moment is not None and moment < at:
                self._advance([], moment)
            else:
                return

    def _advance(self, seen: list[Observation], at: float) -> None:
        self.state, actions = advance(self.state, seen, Instant(at))
        for action in actions:
            match action:
                case Report(transition=change):
                    self._note(change)
                case StartCapture(incident=incident):
                    self.incidents.append(incident)
                    self._ends.append((at + CAPTURE, incident.id))
                case _:
                    pass

    def _note(self, change: Transition) -> None:
        self.transitions.append(change)
        after = change.after
        if not grouping.is_alarm(after):
            return
        alarm = Alarm(
            at=change.at,
            instance=change.instance,
            word=after.word,
            cause=after.cause,
            because=after.because,
        )
        if not grouping.is_alarm(change.before):
            self.alarms.append(alarm)
        if not isinstance(after, SuspectedHang):
            self.confirmed.append(alarm)


class Logs:
    """What lies in the logs that are followed: what somebody reads who begins to listen."""

    def __init__(self) -> None:
        self._found: dict[str, SourceFound] = {}
        self._last: dict[tuple[str, InstanceKey], BeatSeen] = {}

    def take(self, seen: list[Observation]) -> None:
        for one in seen:
            match one:
                case SourceFound(source=name):
                    self._found[name] = one
                case SourceRetired(source=name):
                    self._found.pop(name, None)
                case BeatSeen(beat=beat):
                    self._last[beat.source, beat.instance] = one
                case _:
                    pass

    def read(self, at: float) -> list[Observation]:
        found = [replace(one, at=Instant(at)) for one in self._found.values()]
        lasts = [one for (name, _), one in self._last.items() if name in self._found]
        return [*found, *(replace(one, fresh=False) for one in sorted(lasts, key=lambda b: b.at))]


class SilenceOnly:
    """The rule with one line: no beat for so long, so it hangs."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.alarms: list[Alarm] = []
        self._last: dict[InstanceKey, float] = {}
        self._sources: dict[InstanceKey, str] = {}

    def feed(self, seen: list[Observation]) -> None:
        for one in seen:
            if isinstance(one, BeatSeen):
                self._ask(one.beat.instance, one.beat.at)
                self._last[one.beat.instance] = one.beat.at
                self._sources[one.beat.instance] = one.beat.source
            elif isinstance(one, SourceRetired):
                for key in [k for k, name in self._sources.items() if name == one.source]:
                    self._ask(key, one.at)
                    self._last.pop(key, None)

    def end(self, at: float) -> None:
        for key in self._last:
            self._ask(key, at)

    def _ask(self, key: InstanceKey, at: float) -> None:
        last = self._last.get(key)
        if last is not None and at - last > self.limit:
            self.alarms.append(
                Alarm(at=last + self.limit, instance=key, word="hung", cause="silence")
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one set of witnesses made of one history.

    Attributes:
        false: Alarms of whom nothing was planted, or before it was.
        found: Seconds from the planted hang to the first alarm, by instance; ``None`` if missed.
        sure: The same to the first verdict that is more than a suspicion.
        incidents: Captures that were started after the onset.
    """

    false: tuple[Alarm, ...]
    found: tuple[float | None, ...] = ()
    sure: tuple[float | None, ...] = ()
    incidents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One history.

    Attributes:
        plan: What it was made of.
        regime: Who sent work.
        layout: Where beats were printed.
        instance_days: Instances times their days.
        planted: What was planted, or ``None``.
        outcomes: By set of witnesses; baselines are called ``silence 60 s``.
        beats: Beats that were seen.
    """

    plan: Plan
    regime: str
    layout: str
    instance_days: float
    planted: Planted | None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    beats: int = 0


def begins(world: World, plan: Plan) -> Fleet:
    """Return the fleet of *plan*, at the beginning of its history."""
    fleet = Fleet(world, plan)
    fleet.begin()
    return fleet


def run(
    plan: Plan,
    witnesses: Mapping[str, tuple[type, ...]] = WITNESSES,
    policy: Policy | None = None,
) -> Result:
    """Return what was made of the history of *plan*."""
    world = World(plan.seed)
    fleet = begins(world, plan)
    policy = policy or Policy(calibrate=True)
    detectors = {name: Detector(senses, policy) for name, senses in witnesses.items()}
    baselines = {f"silence {limit:g} s": SilenceOnly(limit) for limit in BASELINES}
    logs, beats = Logs(), 0
    restarts = fleet.restarts
    for at, seen in world.run(plan.until):
        while restarts and restarts[0] <= at:
            began_at = restarts.pop(0)
            for detector in detectors.values():
                detector.restart(began_at, logs.read(began_at))
        logs.take(seen)
        beats += sum(isinstance(one, BeatSeen) for one in seen)
        for detector in detectors.values():
            detector.feed(at, seen)
        for baseline in baselines.values():
            baseline.feed(seen)
    for detector in detectors.values():
        detector.wait(world.now)
    for baseline in baselines.values():
        baseline.end(world.now)
    planted = fleet.planted
    outcomes = {
        name: outcome(d.alarms, d.confirmed, planted, d.incidents) for name, d in detectors.items()
    } | {name: outcome(b.alarms, b.alarms, planted, []) for name, b in baselines.items()}
    return Result(
        plan=plan,
        regime=fleet.regime,
        layout=fleet.layout,
        instance_days=plan.servers * world.now / DAY,
        planted=planted,
        outcomes=outcomes,
        beats=beats,
    )


def outcome(
    alarms: list[Alarm],
    confirmed: list[Alarm],
    planted: Planted | None,
    incidents: list[Incident],
) -> Outcome:
    if planted is None:
        return Outcome(false=tuple(alarms))
    pids = {key.pid for key in planted.keys}
    first: dict[int | None, float] = {}
    sure: dict[int | None, float] = {}
    false = []
    for alarm in alarms:
        if alarm.instance.pid in pids and alarm.at >= planted.at:
            first.setdefault(alarm.instance.pid, alarm.at - planted.at)
        else:
            false.append(alarm)
    for alarm in confirmed:
        if alarm.instance.pid in pids and alarm.at >= planted.at:
            sure.setdefault(alarm.instance.pid, alarm.at - planted.at)
    return Outcome(
        false=tuple(false),
        found=tuple(first.get(pid) for pid in pids),
        sure=tuple(sure.get(pid) for pid in pids),
        incidents=sum(incident.detected_at >= planted.at for incident in incidents),
    )
