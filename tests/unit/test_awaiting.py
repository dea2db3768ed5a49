"""What two readings of asyncio tasks say."""

from __future__ import annotations

from typing import Any

import pytest
from dossiers import BLOCKED, PARKED, dump, thread
from hypothesis import given
from hypothesis import strategies as st
from task_files import FORWARD, GET, IDLE, LOOP, MAIN, STUCK, reading, task

from hangwatch.core import awaiting, motion
from hangwatch.core.redaction import Redactor
from hangwatch.model.dossier import TaskMotion
from hangwatch.model.identity import Role
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Motion, StackVital

ROLES = {11: Role.ENGINE}


def over(*samples: bytes) -> tuple[TaskMotion, ...]:
    records, readings = [], []
    for sample, data in enumerate(samples, start=1):
        found, beside = awaiting.parse(data, None, sample, f"tasks{sample}.json")
        records += found
        readings.append(beside)
    return awaiting.tasks(records, readings)


def moved(*samples: bytes) -> dict[str, bool | None]:
    return {found.name: found.moved for found in over(*samples)}


# --- moved or not --------------------------------------------------------------------------------


def test_a_task_that_is_the_same_twice_did_not_move():
    assert {"ModelAgentLoop": False} == moved(reading(STUCK), reading(STUCK))


def test_one_reading_says_nothing_of_motion():
    assert {"ModelAgentLoop": None} == moved(reading(STUCK))


@pytest.mark.parametrize(
    "change",
    [
        {"chain": (LOOP, (*FORWARD[:2], 121))},
        {"state": "running"},
        {"waiter": 6},
        {"detail": "Event.wait: set, 1 waiter"},
        {"torn": "its frame changed"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_a_step_changes_is_motion(change: dict[str, Any]):
    assert {"ModelAgentLoop": True} == moved(
        reading(STUCK), reading(task("ModelAgentLoop", **change))
    )


def test_a_task_that_is_new_moved_and_an_address_with_a_new_tenant_is_new():
    assert {"request-2": True} == moved(reading(task("request-1")), reading(task("request-2")))


def test_a_sleep_is_the_same_one_as_long_as_its_time_runs_down():
    naps = [
        reading(task("health", kind="sleep", detail=f"sleep(10), {left}", due_in_s=left))
        for left in (9.0, 4.0, 8.0)
    ]

    assert {"health": False} == moved(naps[0], naps[1])
    assert {"health": True} == moved(naps[1], naps[2])


# --- reading -------------------------------------------------------------------------------------


def test_a_task_is_cited_by_its_own_line():
    data = reading(IDLE, STUCK)
    (citation,) = [found.citation for found in over(data) if found.name == "ModelAgentLoop"]
    assert citation is not None

    assert "ModelAgentLoop" in data.decode().splitlines()[(citation.line or 0) - 1]


def test_a_reading_that_was_cut_short_gives_its_whole_tasks():
    data = reading(IDLE, STUCK)
    cut = data[: data.index(b"ModelAgentLoop") + 30]

    assert {"MainLoopSendResponse"} == set(moved(cut))


def test_several_readings_behind_each_other_are_read_as_one():
    both = reading(STUCK) + reading(IDLE, pid=12)
    pieces = list(awaiting.documents(both))

    found = [awaiting.parse(data, None, 1, "tasks.json", line) for data, line in pieces]

    assert [11, 12] == [beside.pid for _, beside in found]
    ((record,), _) = found[1]
    assert record.citation is not None
    assert b"MainLoopSendResponse" in both.splitlines()[(record.citation.line or 0) - 1]


def test_what_is_no_reading_is_an_error():
    with pytest.raises(ValueError, match="no reading"):
        list(awaiting.documents(b"ModelAgentLoop is stuck"))


@given(st.binary(max_size=300), st.integers(0, 4000))
def test_no_file_is_too_broken(noise: bytes, at: int):
    data = reading(IDLE, STUCK)

    awaiting.parse(data[:at] + noise + data[at:], 1, 1, "tasks.json")


# --- which await is odd --------------------------------------------------------------------------


def first(*tasks: dict[str, Any], **more: Any) -> str:
    data = reading(*tasks, **more)
    return awaiting.suspects(over(data, data), ROLES)[0].name


def test_an_await_in_the_middle_of_work_explains_more_than_one_for_input():
    assert "ModelAgentLoop" == first(IDLE, STUCK)


def test_a_task_that_waits_for_another_explains_less_than_the_other():
    holder = task("holder", (MAIN, FORWARD), kind="future", detail="a Future", number=3)
    waiter = task("waiter", kind="lock", detail="Lock.acquire: locked", number=4, on=[3])

    assert "holder" == first(waiter, holder)


def test_a_deadlock_explains_most():
    a = task("a", kind="lock", detail="Lock.acquire: locked", number=3, on=[4])
    b = task("b", kind="lock", detail="Lock.acquire: locked", number=4, on=[3])

    assert first(STUCK, a, b, cycles=[[3, 4]]) in ("a", "b")


def test_a_full_queue_is_no_wait_for_input():
    put = task("producer", (MAIN, GET), kind="queue", detail="Queue.put: 8 of 8 items", number=3)

    assert "producer" == first(IDLE, put)


# --- what it proves ------------------------------------------------------------------------------


def suspended(*tasks: dict[str, Any], frames: Any = PARKED, later: Any = None) -> str:
    data = reading(*tasks)
    stacks = [
        stack
        for sample in (1, 2)
        for stack in motion.parse_threads(dump(thread(11, frames)), 11, sample)
    ]
    found = over(data, later or data)
    vital = awaiting.with_tasks(
        StackVital(at=Instant(0.0), motion=Motion.WAITING), found, motion.threads(stacks), ROLES
    )
    return vital.suspended


def test_an_unmoved_await_beside_waiting_threads_excludes_a_long_prefill():
    assert "ModelAgent.forward (lmdeploy/pytorch/engine/model_agent.py:120)" == (
        suspended(IDLE, STUCK)
    )


def test_tasks_that_wait_for_input_prove_nothing():
    assert not suspended(IDLE)


@pytest.mark.parametrize("kind", ["executor", "ray", "ready", "running", "unknown"])
def test_an_await_of_what_may_be_computed_proves_nothing(kind: str):
    assert not suspended(STUCK, task("forward", kind=kind, detail="", number=3))


def test_a_loop_that_polls_proves_nothing():
    poll = task("poll", kind="sleep", detail="sleep(0.001)", due_in_s=0.0005, number=3)

    assert not suspended(STUCK, poll)


def test_a_thread_in_a_call_may_compute_what_is_awaited():
    assert not suspended(STUCK, frames=BLOCKED)


def test_tasks_that_move_prove_nothing():
    assert not suspended(STUCK, later=reading(task("ModelAgentLoop", waiter=6)))


# --- privacy -------------------------------------------------------------------------------------


def test_what_users_asked_is_withheld_from_names_of_tasks_and_lines_stay():
    data = reading(IDLE, task("generate prompt='the recipe of the cake', id=7", number=3))

    kept = Redactor().file("processes/engine-11/tasks.json", data)

    assert b"recipe" not in kept
    assert data.count(b"\n") == kept.count(b"\n")
    assert {"MainLoopSendResponse"} < set(moved(kept))
