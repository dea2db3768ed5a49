"""Scripted engines for tests of the detector, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import merge

from hangwatch.core.advance import advance
from hangwatch.core.fleet import State, begin, due
from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Transition
from hangwatch.model.observation import Action, BeatSeen, Observation, Report, SignalArrived
from hangwatch.model.policy import Policy
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import FakeClock

PROFILES = {"lmdeploy": PROFILE}
POLICY = Policy()
KEY = InstanceKey(pid=100, tag="DP0")
HOUR = 3600.0


def key(number: int) -> InstanceKey:
    return InstanceKey(pid=100 + number, tag="DP0")


def beat(
    at: float,
    *,
    instance: InstanceKey = KEY,
    running: int = 6,
    tps: float = 5000.0,
    source: str = "",
    fresh: bool = True,
    relayed: bool = False,
    repeated: int = 1,
) -> BeatSeen:
    return BeatSeen(
        beat=Heartbeat(
            instance=instance,
            at=Instant(at),
            source=source or f"worker-{instance.pid}.out",
            in_tps=tps * 0.9,
            out_tps=tps * 0.1,
            running=running,
            waiting=0,
            routed=running,
            api_waiting=0,
            relayed=relayed,
            repeated=repeated,
            profile="lmdeploy",
        ),
        fresh=fresh,
    )


def beats(first: float, until: float, *, every: float = 10.0, **options: object) -> list[BeatSeen]:
    found = []
    at = first
    while at < until:
        found.append(beat(at, **options))  # type: ignore[arg-type]
        at += every
    return found


def line(
    at: float, signal: Signal, *, instance: InstanceKey = KEY, parts: tuple[str, ...] = ()
) -> SignalArrived:
    return SignalArrived(
        signal=SignalSeen(
            instance=InstanceKey(host=instance.host, pid=instance.pid),
            signal=signal,
            at=Instant(at),
            source=f"worker-{instance.pid}.out",
            text=f"a line that says {signal}",
            parts=parts,
            profile="lmdeploy",
        )
    )


def instant_of(seen: Observation) -> float:
    match seen:
        case BeatSeen():
            return seen.beat.at
        case SignalArrived():
            return seen.signal.at
        case _:
            for name in ("at", "health", "counters", "stacks"):
                value = getattr(seen, name, None)
                if isinstance(value, int | float):
                    return value
                if value is not None:
                    return float(value.at)
    raise TypeError(type(seen).__name__)


class Run:
    """One run of the detector over scripts."""

    def __init__(self, policy: Policy = POLICY, state: State | None = None) -> None:
        clock = FakeClock()
        self.state = state or begin(policy, PROFILES, clock.epoch(), Instant(0.0))
        self.actions: list[Action] = []
        self.judged_at: list[float] = []

    def over(self, *scripts: Iterable[Observation], until: float) -> Run:
        for seen in merge(*scripts, key=instant_of):
            at = instant_of(seen)
            if at > until:
                break
            self._wait(at)
            self._advance((seen,), at)
        self._wait(until)
        self._advance((), until)
        return self

    def _wait(self, at: float) -> None:
        while (moment := due(self.state)) is not None and moment < at:
            self._advance((), moment)

    def _advance(self, seen: tuple[Observation, ...], at: float) -> None:
        self.state, actions = advance(self.state, seen, Instant(at))
        self.actions += actions
        self.judged_at.append(at)

    @property
    def transitions(self) -> list[Transition]:
        return [a.transition for a in self.actions if isinstance(a, Report)]

    def of(self, kind: type | Callable[[Action], bool]) -> list[Action]:
        if isinstance(kind, type):
            return [action for action in self.actions if isinstance(action, kind)]
        return [action for action in self.actions if kind(action)]

    def words(self, instance: InstanceKey = KEY) -> list[str]:
        return [t.after.word for t in self.transitions if t.instance == instance]

    def alarms(self) -> list[Transition]:
        alarming = ("suspected_hang", "hung", "blocked", "dead")
        return [t for t in self.transitions if t.after.word in alarming]
