"""Days of fleets whose truth is known, in virtual time.

The histories are those of the published figures (``python -m benchmarks verdicts``), fewer of them.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks._histories.fleet import HANGS, Plan
from benchmarks._histories.trial import WITNESSES, Result, run
from benchmarks._histories.world import World

ALL = {"all": WITNESSES["all"]}
REGIMES = ("serving", "colocated", "disaggregated", "agentic", "batch")

EXCLUDED = tuple(kind for kind in HANGS if kind != "lost-request")
"""Hangs in which a witness excludes a long prefill."""


def told(result: Result, name: str = "all") -> list[str]:
    return [
        f"{alarm.at:.0f} {alarm.instance.name} {alarm.word} {alarm.cause} {alarm.because}"
        for alarm in result.outcomes[name].false
    ]


@cache
def planted(kind: str, *, servers: int = 2, together: bool = False) -> Result:
    """Return a history in which *kind* happens; the next seed where it found no moment for it."""
    for seed in range(20, 40):
        plan = Plan(
            seed=seed,
            servers=servers,
            days=0.05,
            regime="batch",
            plant=kind,
            together=together,
            layout="files",
            settled=True,
        )
        result = run(plan, ALL)
        if result.planted is not None:
            return result
    raise AssertionError("no moment with work in twenty histories")


@pytest.mark.parametrize("regime", REGIMES)
def test_an_honest_fleet_raises_no_alarm_where_everything_can_be_asked(regime: str):
    result = run(Plan(seed=11, servers=3, days=0.2, regime=regime), ALL)

    assert [] == told(result)


def test_silence_alone_alarms_of_engines_that_sleep_and_the_detector_does_not():
    result = run(Plan(seed=11, servers=1, days=0.2, regime="colocated"), ALL)

    assert [] == told(result)
    assert len(told(result, "silence 120 s")) > 3


def test_the_same_seed_tells_the_same_history():
    plan = Plan(seed=5, servers=2, days=0.02, regime="batch")

    assert list(World(5).run(1.0)) == list(World(5).run(1.0))
    assert run(plan, ALL).beats == run(plan, ALL).beats > 0


@pytest.mark.parametrize("kind", HANGS)
def test_every_hang_is_found(kind: str):
    assert None not in planted(kind).outcomes["all"].found


# A residual beat takes back for seconds what a line said of a dead task.
@pytest.mark.parametrize("kind", sorted(set(HANGS) - {"task-dead"}))
def test_a_hang_is_captured_once(kind: str):
    assert 1 == planted(kind).outcomes["all"].incidents


@pytest.mark.parametrize("kind", EXCLUDED)
def test_a_hang_is_certain_within_a_minute_where_a_witness_excludes_a_prefill(kind: str):
    (late,) = planted(kind).outcomes["all"].sure

    # The beat that is missing first comes up to ten seconds after the stop.
    assert late is not None
    assert late <= 10 + 60


@pytest.mark.parametrize("kind", ["store", "kernel"])
def test_servers_that_hang_at_once_are_one_incident(kind: str):
    outcome = planted(kind, servers=8, together=True).outcomes["all"]

    assert None not in outcome.found
    assert 1 == outcome.incidents


def test_hundreds_of_servers_are_watched_at_once():
    result = run(Plan(seed=51, servers=200, days=0.01, regime="batch"), {"log": ()})

    assert [] == told(result, "log")
    assert result.beats > 1000
