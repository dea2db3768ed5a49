"""What state probes come to without any process: plain data, marks, text, documents."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import jsonschema
import pytest

from hangwatch.core.codec import to_plain
from hangwatch.model.profile import ProbeKind, StateProbe
from hangwatch.model.profile import StateTable as ProfileTable
from hangwatch.remote import Probe, Snapshot, StateRow, StateTable, Table, text
from hangwatch.remote.document import document
from hangwatch.remote.probes import tables

SCHEDULER = StateTable(
    name="scheduler",
    where="Engine.loop:self.scheduler",
    rows=(
        StateRow(
            id=100,
            task=7,
            values={
                "tick": 17,
                "by status": {"WAITING": 2, "STOPPED": 0},
                "asleep": False,
                "age": 12.345,
                "limit": None,
            },
            absent={"leases": "a Scheduler has no leases"},
        ),
    ),
)


def sequences(count: int, left_out: int = 0) -> StateTable:
    return StateTable(
        name="sequence",
        where="Engine.loop:self.scheduler.sequences.*",
        rows=tuple(
            StateRow(id=i, values={"id": i, "state": "RunningState", "generated": 10 * i})
            for i in range(count)
        ),
        left_out=left_out,
    )


def snapshot(*state: StateTable) -> Snapshot:
    return Snapshot(pid=1, python="3.12.1", state=state)


def test_a_profiles_tables_become_the_readers():
    declared = ProfileTable(
        name="pool",
        where=("Engine.loop:self.pool",),
        probes=(
            StateProbe(name="free", kind=ProbeKind.LENGTH, path="queue"),
            StateProbe(name="in use", path="size", minus="free"),
        ),
        source="pool.py",
    )

    assert (
        Table(
            name="pool",
            where=("Engine.loop:self.pool",),
            probes=(
                Probe(name="free", kind="length", path="queue"),
                Probe(name="in use", kind="int", path="size", minus="free"),
            ),
        ),
    ) == tables(json.loads(json.dumps(to_plain([declared]))))


def test_an_unknown_kind_of_probe_is_refused():
    with pytest.raises(ValueError, match="'text' is of the unknown kind 'str'"):
        tables([{"name": "t", "where": ["f"], "probes": [{"name": "text", "kind": "str"}]}])


def test_a_value_that_differs_between_two_looks_is_marked():
    before = {("scheduler", 100): SCHEDULER.rows[0]}
    changed = dataclasses.replace(
        SCHEDULER.rows[0],
        values={**SCHEDULER.rows[0].values, "tick": 18},
        absent={"limit of time": "gone"},
    )
    after = dataclasses.replace(SCHEDULER, rows=(changed,))

    assert ("tick",) == after.marked(before).rows[0].moved
    assert () == SCHEDULER.marked(before).rows[0].moved
    assert set(changed.values) == set(after.marked({}).rows[0].moved)


def test_one_object_is_one_line_of_text():
    assert [
        "",
        "state",
        "  scheduler: tick 17, by status (WAITING 2), asleep no, age 12.3, limit None",
        "  scheduler, absent: leases",
    ] == list(text.state(snapshot(SCHEDULER)))


def test_many_objects_are_columns_without_what_they_have_in_common():
    assert [
        "",
        "state",
        "  3 x sequence: state RunningState",
        "      id  generated",
        "      0   0",
        "      1   10",
        "      2   20",
    ] == list(text.state(snapshot(sequences(3))))


def test_a_crowd_of_objects_is_cut_and_counted():
    shown = list(text.state(snapshot(sequences(20, left_out=300))))

    assert "  320 x sequence: state RunningState" == shown[2]
    assert "      and 312 more" == shown[-1]
    assert 13 == len(shown)


def test_a_moving_number_is_marked_in_the_text():
    row = dataclasses.replace(SCHEDULER.rows[0], values={"tick": 17}, absent={}, moved=("tick",))
    one = dataclasses.replace(SCHEDULER, rows=(row,))
    two = dataclasses.replace(SCHEDULER, rows=(row, StateRow(id=5, values={"tick": 3})))

    assert "  scheduler: tick 17 (moving)" == list(text.state(snapshot(one)))[-1]
    assert "      17~" in list(text.state(snapshot(two)))


def test_without_tables_there_is_no_text():
    assert [] == list(text.state(Snapshot(pid=1, python="3.12.1")))
    assert [] == list(text.state(snapshot(StateTable(name="sequence", where="f:self.*"))))


def test_a_table_that_leads_nowhere_says_why():
    lost = StateTable(name="pool", absent="there is None\x1b[31m")

    assert "  pool: absent: there is None\\x1b[31m" == list(text.state(snapshot(lost)))[-1]


def test_two_readings_tell_which_numbers_changed():
    row = dataclasses.replace(
        SCHEDULER.rows[0], values={**SCHEDULER.rows[0].values, "tick": 19, "age": 14.5}
    )
    later = dataclasses.replace(SCHEDULER, rows=(row,))

    assert ["  scheduler: tick 17 -> 19"] == list(
        text.state_difference(snapshot(SCHEDULER), snapshot(later))
    )
    assert ["  state: no number changed"] == list(
        text.state_difference(snapshot(later), snapshot(later))
    )


def test_the_document_carries_the_numbers_and_keeps_to_its_schema():
    found = document(snapshot(SCHEDULER, sequences(2), StateTable(name="pool", absent="gone")))
    schema = json.loads((resources.files("hangwatch") / "schemas/tasks-1.json").read_text())

    jsonschema.validate(found, schema)
    assert {
        "name": "scheduler",
        "where": "Engine.loop:self.scheduler",
        "rows": [
            {
                "id": 100,
                "task_id": 7,
                "values": {
                    "tick": 17,
                    "by status": {"WAITING": 2, "STOPPED": 0},
                    "asleep": False,
                    "age": 12.345,
                    "limit": None,
                },
                "absent": {"leases": "a Scheduler has no leases"},
                "moved": [],
            }
        ],
        "left_out": 0,
        "absent": None,
    } == found["state"][0]
    assert "state" not in document(Snapshot(pid=1, python="3.12.1"))
