"""What attaching did to a process, and when it is told to go on: decisions, and arithmetic."""

import pytest

from hangwatch.core.attaching import Pause, Repair, repair

RUNNING = "SSR"


@pytest.mark.parametrize("now", ["T", "TTT", "TSD", "TZ"])
def test_a_process_that_was_left_stopped_is_told_to_go_on(now):
    assert Repair.CONTINUE == repair(RUNNING, now, traced=False)


@pytest.mark.parametrize("now", ["S", "SSR", "D", "Z", ""])
def test_a_process_that_runs_gets_no_signal(now):
    assert Repair.NOTHING == repair(RUNNING, now, traced=False)


@pytest.mark.parametrize("before", ["T", "ST", "t", "St"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_process_that_was_stopped_before_is_left_alone(before, traced):
    assert Repair.NOTHING == repair(before, "TT", traced=traced)


@pytest.mark.parametrize(
    ("now", "traced"), [("T", True), ("S", True), ("tt", False), ("Tt", False)]
)
def test_a_process_that_is_still_traced_is_looked_at_again(now, traced):
    assert Repair.WAIT == repair(RUNNING, now, traced=traced)


def test_a_process_that_is_about_to_stop_is_looked_at_again():
    assert Repair.WAIT == repair(RUNNING, "SSR", traced=False, stopping=True)
    assert Repair.CONTINUE == repair(RUNNING, "TSR", traced=False, stopping=True)
    assert Repair.NOTHING == repair("T", "TTT", traced=False, stopping=True)


def seen(*looks):
    pause = Pause(ran_at=0.0)
    for at, stopped in looks:
        pause = pause.seen(at, stopped=stopped)
    return pause


def test_a_pause_is_told_too_long_rather_than_too_short():
    pause = seen((1.0, False), (2.0, True), (3.0, True), (4.0, False), (5.0, False))

    assert 3.0 == pause.seconds(9.0)  # from the last look that saw it run to the first again


def test_a_process_that_stands_still_has_stood_until_now():
    assert 8.0 == seen((1.0, False), (2.0, True)).seconds(9.0)


def test_a_process_that_stopped_twice_stood_still_from_the_first_to_the_last():
    assert 5.0 == seen((1.0, True), (2.0, False), (4.0, True), (5.0, False)).seconds(9.0)


def test_a_process_that_never_stopped_has_no_pause():
    assert 0.0 == seen((1.0, False), (2.0, False)).seconds(9.0)
