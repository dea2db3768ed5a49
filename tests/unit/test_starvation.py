"""A fleet without work while a job lives that should bring some."""

from __future__ import annotations

from dataclasses import replace

from scripted import HOUR, POLICY, Run, beat, beats, key

from hangwatch.core.fleet import begin, remember
from hangwatch.model.identity import Role
from hangwatch.model.incident import IncidentState
from hangwatch.model.observation import (
    BeatSeen,
    CaptureEnded,
    CloseIncident,
    Observation,
    ProcessesSeen,
    StartCapture,
)
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Idle
from hangwatch.model.vitals import ProcessVital
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import FakeClock

FLEET = tuple(key(number) for number in range(4))
JOB = replace(POLICY, job_running=True)


def work(first: float, until: float) -> list[BeatSeen]:
    """Return beats of the whole fleet, the last of each without work."""
    seen = []
    for instance in FLEET:
        seen += [*beats(first, until, instance=instance), beat(until, instance=instance, running=0)]
    return sorted(seen, key=lambda one: one.at)


def driver(at: float, state: str = "S") -> list[ProcessesSeen]:
    there = ProcessVital(
        pid=9, role=Role.DRIVER, state=state, since=Instant(0.0), at=Instant(at), needed=False
    )
    return [ProcessesSeen(instance=FLEET[0], processes=(there,), at=Instant(at))]


def notices(run: Run) -> list[StartCapture]:
    return [a for a in run.actions if isinstance(a, StartCapture) and a.incident.notice]


def test_a_fleet_that_is_idle_for_half_an_hour_while_its_job_lives_is_worth_a_notice():
    run = Run(JOB).over(work(0, 600), until=3 * HOUR)

    assert [600 + 1800.0] == [notice.incident.detected_at for notice in notices(run)]
    assert {("idle", "starved-upstream")} == {
        (verdict.word, verdict.cause) for verdict in run.state.verdicts.values()
    }
    assert [] == run.alarms()


def test_a_driver_that_is_seen_is_a_job_and_one_that_ended_is_none():
    alive = Run().over(work(0, 600), driver(100), until=3 * HOUR)
    ended = Run().over(work(0, 600), driver(100), driver(700, ""), until=3 * HOUR)

    assert (1, 0) == (len(notices(alive)), len(notices(ended)))


def test_without_a_job_an_idle_fleet_is_left_alone():
    assert [] == notices(Run().over(work(0, 600), until=100 * HOUR))


def test_one_engine_that_works_keeps_the_fleet_from_starving():
    busy = beats(600, 3 * HOUR, instance=FLEET[0])

    assert [] == notices(Run(JOB).over(work(0, 600), busy, until=3 * HOUR))


def test_a_training_step_that_was_seen_before_is_given_three_times_its_length():
    steps: list[Observation] = [*work(0, 600), *work(600 + 1500, 4000)]

    run = Run(JOB).over(steps, until=4000 + 4 * 1500)

    assert [4000 + 3 * 1500.0] == [notice.incident.detected_at for notice in notices(run)]


def test_an_episode_brings_one_notice_and_ends_with_the_next_work():
    run = Run(JOB).over(work(0, 600), until=10 * HOUR)
    ident = notices(run)[0].incident.id
    run.over(
        [CaptureEnded(incident=ident, at=Instant(10 * HOUR + 1), bundle="b.tar.gz")],
        work(10 * HOUR + 60, 10 * HOUR + 120),
        until=10 * HOUR + 200,
    )

    assert 1 == len(notices(run))
    assert [ident] == [a.incident.id for a in run.actions if isinstance(a, CloseIncident)]
    assert IncidentState.CLOSED is run.state.incidents[0].state
    assert {"not-a-hang:idle"} == {v.cause for v in run.state.verdicts.values()}


def test_a_hang_after_a_notice_is_captured_at_once():
    run = Run(JOB).over(work(0, 600), until=3000)
    ident = notices(run)[0].incident.id
    stuck = [seen for instance in FLEET for seen in beats(3100, 3200, instance=instance)]
    run.over(
        [CaptureEnded(incident=ident, at=Instant(3001), bundle="b.tar.gz")],
        sorted(stuck, key=lambda seen: seen.at),
        until=3400,
    )

    captured = [a.incident for a in run.actions if isinstance(a, StartCapture)]

    assert [True, False] == [incident.notice for incident in captured]


def test_a_restart_in_the_middle_of_an_episode_brings_no_second_notice():
    run = Run(JOB).over(work(0, 600), until=3 * HOUR)
    clock = FakeClock(3 * HOUR)
    again = begin(
        JOB, {"lmdeploy": PROFILE}, clock.epoch(), clock.now(), memory=remember(run.state)
    )
    old = [beat(3 * HOUR + 1, instance=i, running=0, fresh=False) for i in FLEET]

    resumed = Run(state=again).over(old, until=9 * HOUR)

    assert all(isinstance(v, Idle) for v in resumed.state.verdicts.values())
    assert [] == notices(resumed)
