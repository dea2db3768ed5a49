"""How long a silence must be to be suspicious, learned from those that ended by themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from scripted import HOUR, KEY, POLICY, Run, beat, beats

from hangwatch.core import calibration
from hangwatch.core.calibration import ENOUGH, WINDOW, Calibration
from hangwatch.core.fleet import begin, remember
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import FakeClock

CALIBRATED = Policy(calibrate=True)


def after(*gaps: float, known: Calibration | None = None) -> Calibration:
    known = known or Calibration()
    for gap in gaps:
        known = calibration.observe(known, gap)
    return known


def test_what_was_never_seen_leaves_the_default():
    assert 120.0 == calibration.patience(Calibration(), 120.0)


def test_one_outlier_teaches_nothing_and_two_long_silences_are_a_habit():
    usual = after(*[10.0] * 100, 400.0)

    assert 120.0 == calibration.patience(usual, 120.0)
    assert 300.0 == calibration.patience(after(150.0, known=usual), 120.0)


def test_the_limit_falls_below_the_default_only_after_hours_of_work():
    few, many = after(*[10.0] * (ENOUGH - 1)), after(*[10.0] * ENOUGH)

    assert 120.0 == calibration.patience(few, 120.0)
    assert 90.0 == calibration.patience(many, 120.0)


def test_long_silences_of_long_ago_are_forgotten():
    once = after(200.0, 200.0)
    week = after(*[10.0] * (2 * WINDOW), known=once)

    assert 400.0 == calibration.patience(once, 120.0)
    assert 90.0 == calibration.patience(week, 120.0)


@given(st.lists(st.floats(0.1, 1e6), max_size=200), st.floats(1.0, 1e4))
def test_the_limit_never_leaves_its_bounds(gaps: list[float], configured: float):
    limit = calibration.patience(after(*gaps), configured)

    assert 0.75 * configured <= limit <= 5.0 * configured


def test_an_engine_that_was_silent_for_long_twice_is_given_the_time_from_then_on():
    script = [*beats(0, 600), *beats(690, 1200), *beats(1290, 1800), *beats(1960, 2400)]

    assert [] == Run(CALIBRATED).over(script, until=2405).alarms()
    assert [1910.0] == [t.at for t in Run(POLICY).over(script, until=2405).alarms()]


def test_silences_without_work_teach_nothing():
    idle = [*beats(0, 600), beat(600, running=0), *beats(3 * HOUR, 3 * HOUR + 60)]

    run = Run(CALIBRATED).over(idle, until=3 * HOUR + 65)

    assert 11 > max(run.state.calibrations["lmdeploy"].longest)


def test_what_was_learned_survives_a_restart():
    run = Run(CALIBRATED).over([*beats(0, 600), *beats(690, 1200), *beats(1290, 1800)], until=1801)

    clock = FakeClock(1900.0)
    profiles = {"lmdeploy": PROFILE}
    again = begin(CALIBRATED, profiles, clock.epoch(), Instant(1900.0), memory=remember(run.state))
    resumed = Run(state=again).over(beats(1910, 2000), until=2149)

    assert [] == resumed.alarms()
    assert ["suspected_hang"] == resumed.over([], until=2200).words(KEY)[-1:]
