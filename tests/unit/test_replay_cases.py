"""Real hang reports, turned into inputs, through the detector."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hangwatch.core import contracts, loose
from hangwatch.core.layout import Kind, place
from hangwatch.core.replay import heard, replay
from hangwatch.model.policy import Policy
from hangwatch.model.replay import ReplayResult
from hangwatch.model.verdict import ALARMS
from hangwatch.registry import profiles
from hangwatch.system import logmaterial

CASES = Path(__file__).parent.parent / "fixtures" / "cases"
PROFILES = profiles()
DECIDED = (
    "001",
    "004",
    "018",
    "028",
    "030",
    "017",
    "019",
    "031",
    "101",
    "103",
    "106",
    "107",
    "108",
    "109",
    "112",
    "113",
    "114",
    "115",
    "117",
    "118",
    "119",
    "123",
    "125",
    "126",
    "127",
    "130",
    "131",
)
NEGATIVES = tuple(number for number in (*DECIDED, "122", "128") if number.startswith("1"))


class Case(NamedTuple):
    expected: dict[str, Any]
    result: ReplayResult


def evaluate(number: str) -> Case:
    (folder,) = CASES.glob(f"{number}-*")
    expected = json.loads((folder / "expect.json").read_text())
    now = datetime.fromisoformat(expected["clock"]["now"])
    assert now.tzinfo is not None
    policy = Policy(
        heartbeat_interval=expected["policy"]["interval_s"],
        stall_after=expected["policy"]["stall_after_s"],
    )
    material = logmaterial.read([folder], profiles=PROFILES.values(), zone=now.tzinfo, until=now)
    until = material.epoch.instant_of(now)
    files = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and place(path.name).kind not in (Kind.LOG, Kind.EXPECTATION)
    }
    said = heard(material, profiles=PROFILES)
    snapshots = loose.snapshots(
        files,
        profile=loose.engine(files, PROFILES, heard=said.engine),
        at=until,
        instances=said.instances,
    )
    return Case(
        expected,
        replay(material, profiles=PROFILES, policy=policy, until=until, snapshots=snapshots),
    )


@pytest.fixture(scope="module", params=DECIDED)
def case(request: pytest.FixtureRequest) -> Case:
    return evaluate(request.param)


def test_the_verdict_is_the_expected_one(case: Case):
    assert case.expected["verdict"] == case.result.verdict.word


def test_the_cause_is_the_expected_one(case: Case):
    assert case.expected["class"] == case.result.verdict.cause


def test_every_instance_is_told_by_name_with_its_own_verdict_and_last_heartbeat(case: Case):
    expected: set[tuple[Any, ...]] = {
        (e["pid"] or e["name"], e["verdict"], e["last_heartbeat"])
        for e in case.expected["instances"]
    }

    document = contracts.replayed(case.result)
    found: set[tuple[Any, ...]] = {
        (i["pid"] or i["name"], i["verdict"], i["last_heartbeat"]) for i in document["instances"]
    }
    if not case.expected["engine"].startswith("lmdeploy") or case.result.verdict.cause in (
        "stopped-by-tracer",
        "not-a-hang:idle",
    ):
        # The expectation knows from elsewhere what the log does not say: the pid of the engine.
        expected = {(e["verdict"], e["last_heartbeat"]) for e in case.expected["instances"]}
        found = {(i["verdict"], i["last_heartbeat"]) for i in document["instances"]}

    assert expected == found


def test_the_stop_lies_in_the_expected_window(case: Case):
    assert case.expected["hang_window"] == contracts.window(case.result.epoch, case.result.window)


def test_as_many_heartbeats_count_as_expected(case: Case):
    beats = case.expected.get("beats", case.result.heartbeats)

    assert case.result.heartbeats in (beats if isinstance(beats, list) else [beats])


@pytest.mark.parametrize("number", NEGATIVES)
def test_what_is_no_hang_raises_no_alarm_at_any_moment(number: str):
    found = evaluate(number).result.transitions

    assert [] == [change for change in found if isinstance(change.after, ALARMS)]


def test_an_engine_that_never_beats_is_well_and_said_to_have_no_heartbeat():
    verdict = evaluate("122").result.verdict

    assert ("ok", "not-a-hang:no-heartbeat-configured") == (verdict.word, verdict.cause)
    assert "no heartbeat" in verdict.because[0]
