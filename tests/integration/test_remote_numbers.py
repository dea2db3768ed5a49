"""State probes on real processes: numbers of every kind, at rest, at full speed, and in garbage."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from remote_targets import Interpreter, interpreters, running
from test_remote_garbage import corrupt

from hangwatch import remote
from hangwatch.remote import Probe, Snapshot, StateRow, StateTable, Table, procfs, runtime
from hangwatch.remote.document import document
from hangwatch.remote.memory import ImageSource, Limits, Memory, ProcessSource, Recorder
from hangwatch.remote.probes import MAX_ROWS, ProbeKind
from hangwatch.remote.process import RemotePython

pytestmark = pytest.mark.needs_ptrace

FOUND = interpreters()
ONE = next(each for each in FOUND if each.is_ours)
SECRET = "the-prompt-of-somebody"
READINGS = int(os.environ.get("HANGWATCH_PROOF_READINGS", "20"))

EXPECTED: dict[tuple[str, ProbeKind], object] = {
    ("zero", "int"): 0,
    ("one", "int"): 1,
    ("negative", "int"): -77,
    ("large", "int"): 2**62 + 5,
    ("huge", "int"): 2**200,
    ("whole", "float"): 17,
    ("real", "float"): 3.25,
    ("yes", "bool"): True,
    ("no", "bool"): False,
    ("nothing", "int"): None,
    ("nothing", "length"): None,
    ("nothing", "enum"): None,
    ("nothing", "is_none"): True,
    ("text", "is_none"): False,
    ("list", "length"): 5,
    ("tuple", "length"): 6,
    ("set", "length"): 100,
    ("frozen", "length"): 2,
    ("dict", "length"): 50,
    ("default", "length"): 2,
    ("ordered", "length"): 4,
    ("deque", "length"): 3,
    ("queue", "length"): 2,
    ("status", "enum"): "RUNNING",
    ("code", "enum"): "OK",
    ("choice", "enum"): "FINE",
    ("by_status", "lengths"): {"WAITING": 1, "RUNNING": 2, "STOPPED": 0},
    ("slotted", "type"): "Derived",
    ("deque", "type"): "collections.deque",
    ("slotted.count", "int"): 41,
    ("slotted.flag", "bool"): True,
    ("slotted.more", "float"): 2.5,
}
ABSENT: dict[tuple[str, ProbeKind], str] = {
    ("gone", "int"): "a Engine has no gone",
    ("later.on", "int"): "there is None instead of something with on",
    ("slotted.empty", "int"): "a Derived has no empty",
    ("slotted.none", "int"): "a Derived has no none",
    ("text", "int"): "it is a str",
    ("text", "length"): "it is a str, no container",
    ("data", "length"): "it is a bytes, no container",
    ("text", "enum"): "it is a str, no enum member",
    ("dict", "lengths"): "it is a str, no enum member",
    ("own_int", "int"): "it is a OwnInt",
    ("yes", "int"): "it is a bool",
    ("one", "bool"): "it is a int",
    ("code", "int"): "it is a Code",
    ("infinite", "float"): "it is not finite",
    ("undefined", "float"): "it is not finite",
    ("items.*", "int"): "its path leads to many objects, or to none",
    ("none_yet.*", "int"): "its path leads to many objects, or to none",
}


def probe(path: str, kind: ProbeKind) -> Probe:
    return Probe(name=f"{kind} {path}", kind=kind, path=path)


KINDS = Table(
    name="kinds",
    where=("Engine.nowhere:self", "Engine.loop:self.missing", "Engine.loop:self"),
    probes=tuple(probe(path, kind) for path, kind in (*EXPECTED, *ABSENT)),
)
ITEM = (
    Probe(name="number", kind="int", path="number"),
    Probe(name="state", kind="type", path="state"),
    Probe(name="begin", kind="int", path="begin"),
    Probe(name="length", kind="int", path="end", minus="begin"),
)
TABLES = (
    KINDS,
    Table(name="item", where=("Engine.loop:self.items.*",), probes=ITEM),
    Table(name="listed", where=("Engine.loop:self.item_list.*",), probes=ITEM),
    Table(name="many", where=("Engine.loop:self.many.*",), probes=ITEM[:1]),
    Table(name="empty", where=("Engine.loop:self.none_yet.*",), probes=ITEM),
    Table(name="broken", where=("Engine.loop:self.later.on",), probes=ITEM),
    Table(name="nowhere", where=("Nobody.loop:self",), probes=ITEM),
    Table(
        name="cell",
        where=("maker.<locals>.inside",),
        probes=(probe("engine.one", "int"), probe("level", "int"), probe("unset", "int")),
    ),
    Table(name="nested", where=("nested",), probes=(probe("number", "int"), probe("width", "int"))),
    Table(name="stream", where=("stream:engine",), probes=(probe("one", "int"),)),
    Table(name="thread", where=("Engine.step",), probes=(probe("count", "int"),)),
    Table(
        name="age", where=("Engine.loop:self",), probes=(probe("since", "age"), probe("one", "age"))
    ),
)


@pytest.fixture(scope="module", params=FOUND, ids=str)
def reading(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Snapshot, dict[str, object], float]]:
    folder = tmp_path_factory.mktemp("numbers")
    with running(request.param, "numbers_of", "rest", folder=folder) as (process, truth):
        target = remote.attach(process.pid)
        yield target.tasks(state=TABLES), truth, time.monotonic()


def table(snapshot: Snapshot, name: str) -> StateTable:
    assert snapshot.state is not None
    return next(each for each in snapshot.state if each.name == name)


def test_every_kind_of_number_is_what_the_process_holds(
    reading: tuple[Snapshot, dict[str, object], float],
):
    found = table(reading[0], "kinds")

    assert "Engine.loop:self" == found.where
    assert {f"{kind} {path}": value for (path, kind), value in EXPECTED.items()} == dict(
        found.rows[0].values
    )
    assert () == found.rows[0].moved


def test_what_is_not_there_is_absent_and_says_why(
    reading: tuple[Snapshot, dict[str, object], float],
):
    snapshot = reading[0]

    assert {f"{kind} {path}": why for (path, kind), why in ABSENT.items()} == dict(
        table(snapshot, "kinds").rows[0].absent
    )
    assert "there is None instead of something with on" == table(snapshot, "broken").absent
    assert ((), "") == (table(snapshot, "empty").rows, table(snapshot, "empty").absent)
    assert "nowhere" not in [each.name for each in snapshot.state or ()]


@pytest.mark.parametrize("name", ["item", "listed"])
def test_each_value_of_a_map_and_item_of_a_list_has_a_row(
    name: str, reading: tuple[Snapshot, dict[str, object], float]
):
    rows = table(reading[0], name).rows

    assert list(range(9)) == [row.values["number"] for row in rows]
    assert reading[1]["items"] == [row.values["length"] for row in rows]
    assert ["Base", "Derived"] == [row.values["state"] for row in rows[:2]]


def test_more_rows_than_the_limit_are_counted(reading: tuple[Snapshot, dict[str, object], float]):
    found = table(reading[0], "many")

    assert (MAX_ROWS, 1000 - MAX_ROWS) == (len(found.rows), found.left_out)


def test_locals_cells_async_generators_and_threads_are_looked_into(
    reading: tuple[Snapshot, dict[str, object], float],
):
    snapshot = reading[0]
    tasks = {task.id: task.chain[0].function for task in snapshot.tasks if task.chain}

    (cell,) = table(snapshot, "cell").rows
    assert {"int engine.one": 1, "int level": 7} == dict(cell.values)
    assert ["int unset"] == list(cell.absent)
    nested = table(snapshot, "nested").rows
    assert [(1, 3), (2, 6), (3, 9)] == sorted(tuple(row.values.values()) for row in nested)
    assert ["nested"] * 3 == [tasks[row.task] for row in nested]
    assert 1 == table(snapshot, "stream").rows[0].values["int one"]
    (thread,) = table(snapshot, "thread").rows
    assert (12, 0) == (thread.values["int count"], thread.task)


def test_an_age_is_counted_from_the_monotonic_clock(
    reading: tuple[Snapshot, dict[str, object], float],
):
    snapshot, truth, now = reading
    since = truth["since"]
    age = table(snapshot, "age").rows[0].values["age since"]
    assert isinstance(since, float)
    assert isinstance(age, float)

    assert 100 <= age <= now - since + 1
    assert "it is a int" == table(snapshot, "age").rows[0].absent["age one"]


def test_no_string_of_the_process_is_in_the_document(
    reading: tuple[Snapshot, dict[str, object], float],
):
    found = document(reading[0])
    schema = json.loads((resources.files("hangwatch") / "schemas/tasks-1.json").read_text())

    jsonschema.validate(found, schema)
    assert SECRET not in json.dumps(found)
    assert () == reading[0].problems


def test_a_document_without_probes_has_no_state(tmp_path: Path):
    with running(ONE, "numbers_of", "rest", folder=tmp_path) as (process, _):
        target = remote.attach(process.pid)

        assert "state" not in document(target.tasks())
        assert [] == document(target.tasks(state=()))["state"]


# ------------------------------------------------------------------ at full speed

MOVING = (
    Table(
        name="moving",
        where=("Moving.run:self",),
        probes=(
            Probe(name="count", kind="int", path="count"),
            Probe(name="low", kind="int", path="low"),
            Probe(name="real", kind="float", path="real"),
            Probe(name="grows", kind="length", path="grows"),
            Probe(name="shuffled", kind="length", path="shuffled"),
            Probe(name="label", kind="enum", path="label"),
        ),
    ),
    Table(name="visit", where=("Coming.visit",), probes=(probe("number", "int"),)),
    KINDS,
)


@pytest.mark.parametrize("interpreter", FOUND, ids=str)
def test_at_full_speed_a_number_is_right_or_marked(interpreter: Interpreter, tmp_path: Path):
    with running(interpreter, "numbers_of", "move", folder=tmp_path) as (process, _):
        target = remote.attach(process.pid)
        rows: list[StateRow] = []
        still: list[StateRow] = []
        last, wrong = 1000, 0
        for _ in range(READINGS):
            snapshot = target.tasks(state=MOVING)
            for each in snapshot.state or ():
                rows += each.rows if each.name == "moving" else ()
                still += each.rows if each.name == "kinds" else ()
            for row in rows[-1:]:
                count = row.values.get("count")
                if "count" in row.moved or not isinstance(count, int):
                    continue
                wrong += not last <= count < 1 << 40
                last = count

    assert len(rows) > READINGS // 2
    assert 0 == wrong
    for row in rows:
        certain = {name: value for name, value in row.values.items() if name not in row.moved}
        assert 1000 == certain.get("low", 1000)
        assert certain.get("label", "WAITING") in ("WAITING", "RUNNING")
        assert certain.get("grows", 0) in range(3001 + 1)
        assert certain.get("shuffled", 0) in range(7)
    # What rests is exact while its neighbours fly.
    assert READINGS == len(still)
    assert all(dict(row.values) == dict(still[0].values) for row in still)
    assert all(() == row.moved for row in still)


# ------------------------------------------------------------------ garbage

LIMITS = Limits(seconds=3.0, bytes=256 << 20, tasks=2000)
TRIALS = int(os.environ.get("HANGWATCH_PROOF_TRIALS", "25"))
BY_MINOR = {each.minor: each for each in FOUND}


@pytest.mark.parametrize("minor", sorted(BY_MINOR))
def test_garbage_costs_numbers_and_never_the_reading(minor: int, tmp_path: Path):
    with running(BY_MINOR[minor], "numbers_of", "rest", folder=tmp_path) as (process, _):
        recorder = Recorder(ProcessSource(process.pid))
        found = runtime.find(Memory(recorder, LIMITS), process.pid)
        whole = RemotePython(process.pid, recorder, LIMITS, found, 0).tasks(state=TABLES)
        pages = dict(recorder.pages)
    random.seed(minor)
    read = 0
    for trial in range(TRIALS):
        spoiled = corrupt(pages, (50, 500, 5000)[trial % 3])
        started = time.monotonic()
        try:
            target = RemotePython(1, ImageSource(spoiled), LIMITS, found, 0)
            snapshot = target.tasks(state=TABLES)
        except remote.RemoteError:
            continue
        read += 1
        json.dumps(document(snapshot), allow_nan=False)

        assert time.monotonic() - started < 6 * LIMITS.seconds
        assert snapshot.bytes <= LIMITS.bytes + (64 << 20)
    assert read
    assert whole.state


def test_a_budget_that_is_used_up_is_said(tmp_path: Path):
    with running(ONE, "numbers_of", "rest", folder=tmp_path) as (process, _):
        needed = remote.attach(process.pid).tasks().bytes
        limits = Limits(bytes=needed + 4096)
        snapshot = remote.attach(process.pid, limits=limits).tasks(state=TABLES)

    assert ["state"] == [each.where for each in snapshot.problems]
    assert ["truncated"] == [each.kind for each in snapshot.problems]


def test_a_stopped_process_is_read_all_the_same(tmp_path: Path):
    with running(ONE, "numbers_of", "rest", folder=tmp_path) as (process, _):
        os.kill(process.pid, 19)
        while procfs_state(process.pid) != "T":
            time.sleep(0.01)
        snapshot = remote.attach(process.pid).tasks(state=TABLES)

    assert dict(table(snapshot, "kinds").rows[0].values)["int negative"] == -77


def procfs_state(pid: int) -> str:
    assert procfs.start_ticks(pid)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
