"""When a tool that keeps failing is left alone, and when it is tried again."""

import pytest

from hangwatch.core.breaker import FAILURES, REST, Breaker
from hangwatch.model.capture import Failure, FailureKind
from hangwatch.model.time import Instant

HUNG = Failure(kind=FailureKind.TIMED_OUT, message="it hung")
CRASHED = Failure(kind=FailureKind.TOOL_FAILED, message="it crashed")
NOW = Instant(100.0)
LATER = Instant(NOW + REST)


def after(*failures, at=NOW):
    breaker = Breaker()
    for failure in failures:
        breaker = breaker.after(failure, at)
    return breaker


def test_three_failures_of_one_kind_in_a_row_open_it():
    assert after(*[HUNG] * FAILURES).is_open(NOW)
    assert not after(*[HUNG] * (FAILURES - 1)).is_open(NOW)


def test_failures_of_several_kinds_do_not_open_it():
    assert not after(HUNG, HUNG, CRASHED, HUNG, HUNG).is_open(NOW)


def test_a_success_between_failures_closes_it():
    assert not after(HUNG, HUNG, None, HUNG, HUNG).is_open(NOW)


@pytest.mark.parametrize("kind", [FailureKind.TARGET_GONE, FailureKind.GATED])
def test_what_is_the_targets_own_says_nothing_of_the_tool(kind):
    own = Failure(kind=kind, message="")

    assert not after(own, own, own, own).is_open(NOW)
    assert after(HUNG, HUNG, own, HUNG).is_open(NOW)


def test_a_tool_whose_work_another_one_does_is_tried_for_every_process():
    torn = Failure(kind=FailureKind.TOOL_FAILED, message="torn", stand_in="a reader")

    assert not after(*[torn] * 9).is_open(NOW)


def test_after_a_rest_one_step_is_tried_and_the_others_wait_for_it():
    opened = after(*[HUNG] * FAILURES)
    trying = opened.tried(LATER)

    assert not opened.is_open(LATER)
    assert trying.is_open(LATER)
    assert not trying.after(None, LATER).is_open(LATER)
    assert trying.after(HUNG, LATER).is_open(LATER)
    assert not trying.after(HUNG, LATER).is_open(Instant(LATER + REST))


def test_a_step_that_begins_changes_nothing_while_it_is_closed():
    assert after(HUNG) == after(HUNG).tried(LATER)
