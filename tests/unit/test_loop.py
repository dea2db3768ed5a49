"""The loop around ``advance``, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hangwatch.core import fleet
from hangwatch.daemon.loop import Loop
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import (
    Action,
    BeatSeen,
    Observation,
    Report,
    StartCapture,
)
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import SuspectedHang
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import FakeClock

HOUR = 3600.0


@dataclass
class Script:
    """Senses that see what was scripted, when it was scripted."""

    clock: FakeClock
    events: list[Observation]
    pauses: dict[int, float] = field(default_factory=dict)
    looks: int = 0

    def listen(self, timeout: float) -> tuple[Observation, ...]:
        self.looks += 1
        self.clock.sleep(self.pauses.get(self.looks, 0.0))
        until = self.clock.now() + timeout
        heard: list[Observation] = []
        while self.events and at(self.events[0]) <= until:
            event = self.events[0]
            if heard and at(event) > self.clock.now():
                break
            self.clock.sleep(max(0.0, at(event) - self.clock.now()))
            heard.append(self.events.pop(0))
        if not heard:
            self.clock.sleep(until - self.clock.now())
        return tuple(heard)


def at(observation: Observation) -> float:
    assert isinstance(observation, BeatSeen)
    return observation.beat.at


def beat(pid: int, second: float, *, running: int = 4) -> BeatSeen:
    return BeatSeen(
        beat=Heartbeat(
            instance=InstanceKey(pid=pid, tag="DP0"),
            at=Instant(second),
            source=f"worker-{pid}.out",
            in_tps=10.0,
            out_tps=100.0,
            running=running,
            waiting=0,
        )
    )


def beats(servers: int, until: float, *, last_running: int = 4) -> list[Observation]:
    found: list[Observation] = [
        beat(pid, 10.0 * number)
        for number in range(1, int(until / 10) + 1)
        for pid in range(1, servers + 1)
    ]
    found[-servers:] = [
        replace(seen, beat=replace(seen.beat, running=last_running))
        for seen in found[-servers:]
        if isinstance(seen, BeatSeen)
    ]
    return found


def play(
    events: list[Observation], until: float, policy: Policy | None = None, **script: object
) -> tuple[Loop, Script, list[tuple[float, Action]]]:
    limits = policy or Policy()
    clock = FakeClock()
    done: list[tuple[float, Action]] = []
    senses = Script(clock, events, **script)  # type: ignore[arg-type]
    loop = Loop(
        fleet.begin(limits, {PROFILE.name: PROFILE}, clock.epoch(), clock.now()),
        clock=clock,
        policy=limits,
        senses=senses,
        act=lambda action: done.append((clock.now(), action)),
    )
    loop.run(lambda: clock.now() >= until)
    return loop, senses, done


def alarms(done: list[tuple[float, Action]]) -> list[tuple[float, int | None]]:
    return [
        (now, action.transition.instance.pid)
        for now, action in done
        if isinstance(action, Report) and isinstance(action.transition.after, SuspectedHang)
    ]


def test_an_hour_of_idleness_raises_nothing():
    _, _, done = play(beats(8, 600.0, last_running=0), until=600.0 + HOUR)

    assert [] == alarms(done)
    assert [] == [a for _, a in done if isinstance(a, StartCapture)]


def test_a_stall_is_suspected_in_the_moment_in_which_silence_passes_its_limit():
    _, _, done = play(beats(1, 600.0), until=900.0)

    assert [(720.0, 1)] == alarms(done)


def test_eight_servers_that_fall_silent_together_are_one_incident_and_one_capture():
    _, _, done = play(beats(8, 3.5 * HOUR), until=3.5 * HOUR + 600.0)

    captures = [action.incident for _, action in done if isinstance(action, StartCapture)]
    assert {(3.5 * HOUR + 120.0, pid) for pid in range(1, 9)} == set(alarms(done))
    assert 1 == len(captures)


def test_silence_counts_from_the_end_of_a_pause_of_our_own():
    _, _, done = play(beats(1, 600.0), until=1200.0, pauses={650: 90.0})

    ((alarm, _),) = alarms(done)
    assert alarm > 800.0


def test_the_loop_sleeps_until_something_is_seen_or_a_poll_has_passed():
    _, senses, _ = play(beats(8, 600.0), until=600.0)

    # One look a second, and one for each of the 60 rounds of beats.
    assert senses.looks <= 600 + 60 + 5


def test_nothing_due_and_nothing_seen_costs_no_judgement():
    loop, _, done = play([], until=100.0)

    assert [] == done
    assert 100 == loop.turns
