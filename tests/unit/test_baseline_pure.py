"""The baseline: which looks are kept, when one is taken, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_children import Nursery

from hangwatch.core import baseline
from hangwatch.core.baseline import Look, Turn, condense, look_of, surplus
from hangwatch.core.fleet import State, Tracked, begin
from hangwatch.daemon.baseline import Baseline
from hangwatch.model.capture import CaptureKind, CaptureRequest
from hangwatch.model.identity import InstanceKey, ProcessId
from hangwatch.model.incident import Incident, IncidentState
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Idle, Ok, SuspectedHang, Verdict
from hangwatch.model.vitals import Vitals
from hangwatch.registry import profiles
from hangwatch.testing import FakeClock

ENGINE = ProcessId(4242, 991_532)
MINUTE = 60.0
ALARM = SuspectedHang(since=Instant(0.0), cause="silence", confidence=Confidence.LOW)


def looks(word: str, count: int, process: ProcessId = ENGINE, first: float = 0.0) -> list[Look]:
    return [
        Look(process=process, at=Instant(first + 600.0 * number), word=word)
        for number in range(count)
    ]


def test_the_last_six_looks_at_what_worked_are_kept_and_the_last_one_at_what_idled():
    worked, idled = looks("ok", 9), looks("idle", 3, first=90.0)

    assert {*worked[:3], *idled[:2]} == set(surplus([*worked, *idled]))


def test_each_process_has_looks_of_its_own_and_a_reused_number_is_another_process():
    reused = ProcessId(ENGINE.pid, ENGINE.start_ticks + 1)

    assert () == surplus([*looks("ok", 6), *looks("ok", 6, process=reused)])


def test_a_look_under_any_other_verdict_is_not_kept():
    assert tuple(looks("suspected_hang", 1)) == surplus(looks("suspected_hang", 1))


def test_the_name_of_a_file_says_which_look_it_keeps():
    look = Look(process=ENGINE, at=Instant(24901.834), word="ok")

    assert look == look_of(look.file)
    assert look_of("boot") is None
    assert look_of("4242-1.x.ok.json.gz") is None


def test_nothing_is_due_before_something_is_well_nor_without_an_interval():
    assert not Turn(interval=600.0).due(Instant(1e6))
    assert not Turn(interval=0.0, well_since=Instant(0.0)).due(Instant(1e6))


# ---------------------------------------------------------------------- the daemon's part


class Scene:
    """The part among fakes: one engine, and a loop that looks once a second."""

    def __init__(self, *, interval: float = 600.0, load: float = 0.1) -> None:
        self.clock = FakeClock()
        self.nursery = Nursery()
        self.load = load
        self.began: list[float] = []
        self.part = Baseline(
            clock=self.clock,
            interval=interval,
            request=self._request,
            start=self.nursery,
            load=lambda: self.load,
        )
        self.verdict: Verdict = Ok(since=self.clock.now(), cause="busy", confidence=Confidence.HIGH)
        self.incidents: tuple[Incident, ...] = ()

    def _request(self) -> CaptureRequest:
        self.began.append(self.clock.now())
        return CaptureRequest(
            id="baseline",
            kind=CaptureKind.BASELINE,
            output="/nowhere",
            profile="lmdeploy",
            policy=Policy(),
            epoch=self.clock.epoch(),
        )

    @property
    def state(self) -> State:
        known = profiles()
        empty = begin(Policy(), known, self.clock.epoch(), self.clock.now())
        key = InstanceKey(pid=4242)
        vitals = Vitals(instance=key, interval=10.0, listening_since=Instant(0.0))
        tracked = Tracked(vitals=vitals, verdict=self.verdict)
        return replace(empty, instances={key: tracked}, incidents=self.incidents)

    def pass_time(self, seconds: float, *, answers: bool = True) -> None:
        for _ in range(int(seconds)):
            self.clock.sleep(1.0)
            self.part.consider(self.state, capturing=False)
            if answers and self.nursery.children and self.nursery.last.alive:
                self.nursery.last.said.append({"kind": "baseline", "processes": 1})
            self.part.hear()


def test_the_first_look_comes_after_a_minute_and_then_one_every_ten():
    scene = Scene()
    start = scene.clock.now()

    scene.pass_time(31 * MINUTE)

    assert [61.0, 661.0, 1261.0] == [pytest.approx(at - start, abs=2.0) for at in scene.began]


def test_what_idles_is_looked_at_as_well():
    scene = Scene()
    scene.verdict = Idle(since=scene.clock.now(), cause="idle", confidence=Confidence.HIGH)

    scene.pass_time(2 * MINUTE)

    assert 1 == len(scene.began)


def test_nothing_is_looked_at_while_an_incident_is_open_and_a_look_that_runs_is_dropped():
    scene = Scene()
    scene.pass_time(61, answers=False)
    assert [True] == [child.alive for child in scene.nursery.children]

    scene.incidents = (
        Incident(id="x-1", members=(), watched=1, verdict=ALARM, detected_at=Instant(0.0)),
    )
    scene.pass_time(60 * MINUTE)

    assert [False] == [child.alive for child in scene.nursery.children]
    assert 1 == len(scene.began)

    scene.incidents = (replace(scene.incidents[0], state=IncidentState.CLOSED),)
    scene.pass_time(15 * MINUTE)

    assert len(scene.began) >= 2


def test_a_host_that_is_overloaded_is_not_looked_at_until_it_is_not():
    scene = Scene(load=baseline.CROWDED + 0.1)
    scene.pass_time(60 * MINUTE)
    assert [] == scene.began

    scene.load = baseline.CROWDED
    scene.pass_time(2 * MINUTE)

    assert 1 == len(scene.began)


def test_with_an_interval_of_zero_nothing_is_ever_looked_at():
    scene = Scene(interval=0.0)

    scene.pass_time(60 * MINUTE)

    assert [] == scene.began


def test_a_look_that_fails_is_no_reason_to_take_another_at_once():
    scene = Scene()
    scene.pass_time(61, answers=False)
    scene.nursery.last.said.append({"kind": "failed", "error": "the disk is full", "hint": ""})

    scene.pass_time(5 * MINUTE)

    assert 1 == len(scene.began)


def test_where_no_process_can_be_started_another_attempt_follows_a_minute_later():
    scene = Scene()
    scene.nursery.barren = True

    scene.pass_time(4 * MINUTE)

    assert 2 <= len(scene.began) <= 4


# ---------------------------------------------------------------------- what is kept

FRAME = {"function": "select", "file": "/lib/selectors.py", "line": 468, "kind": "function"}
AWAIT = {"function": "Engine.step", "file": "/srv/engine.py", "line": 12, "kind": "coroutine"}


def task(name: str, state: str = "pending") -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "chain": [AWAIT],
        "awaits": {"kind": "queue", "detail": "Queue.get: 0 items"},
    }


def test_tasks_at_the_same_place_are_counted_and_their_names_are_left_out():
    found = condense(None, {"tasks": [task(f"user asks {n}") for n in range(300)]}, None)

    (group,) = found["tasks"]
    assert 300 == group["count"]
    assert [AWAIT] == [found["frames"][place] for place in group["chain"]]
    assert "user asks" not in str(found)


def test_what_the_kernel_and_our_reader_say_of_a_thread_stands_together():
    kernel = {"threads": [{"tid": 7, "comm": "python", "state": "S", "vol_ctxt": 5, "wchan": ""}]}
    stacks = {
        "frames": [FRAME],
        "threads": [
            {"thread_id": 7, "name": "MainThread", "frames": [0], "holds_gil": False, "waits": None}
        ],
    }

    (thread,) = condense(kernel, None, stacks)["threads"]

    assert {
        "tid": 7,
        "comm": "python",
        "state": "S",
        "vol_ctxt": 5,
        "name": "MainThread",
        "frames": [0],
    } == thread


def test_of_countless_distinct_tasks_the_largest_groups_are_kept_and_the_rest_is_counted():
    many = [task("x", state=f"s{number}") for number in range(baseline.MAX_GROUPS + 50)]
    found = condense(None, {"tasks": [*many, *many[:1]]}, None)

    assert baseline.MAX_GROUPS == len(found["tasks"])
    assert 2 == found["tasks"][0]["count"]
    assert 50 == found["left_out"]


def test_a_shared_process_counts_as_working_when_any_instance_works():
    assert "ok" == baseline.shared_word(("idle", "ok", "hung"))
    assert "idle" == baseline.shared_word(("idle", "loading"))
    assert "" == baseline.shared_word(("loading",))
