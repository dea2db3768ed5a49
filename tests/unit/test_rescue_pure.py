"""The rescue without a process: the one file, who is kin, what fits, and how it is unpacked."""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from hangwatch import registry
from hangwatch.capture.reading import read
from hangwatch.cli.main import command
from hangwatch.cli.rescue import program
from hangwatch.core.rescue import unpack
from hangwatch.errors import NotABundleError
from hangwatch.model.identity import InstanceKey
from hangwatch.rescue import aside, kernel, reading
from hangwatch.rescue.single_file import LEFT_OUT, NUMBERS, PACKAGES, compose

PACKAGE = Path(__file__).parents[2] / "hangwatch"
LMDEPLOY = registry.profiles()["lmdeploy"]
OURS = 4_000_000
SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123"
BEAT = (
    "[2026-03-08 07:03:{:02d} DP0] Avg thr (in/out): 1.0 / 2.0 tokens/s, Server "
    "(succeeded/failed/routed/waiting): 0 / 0 / 8 / 0, Engine (running/waiting): 6 / 2, "
    "KV cache: 71.0%, \n"
)


# --- the one file -------------------------------------------------------------------------------


def modules_of(text: str) -> dict[str, str]:
    found = {}
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Subscript(slice=name)], value=ast.Tuple() as value):
                found[ast.literal_eval(name)] = ast.literal_eval(value)[1]
    return found


def test_the_one_file_holds_every_module_as_it_is():
    expected = {}
    for package in PACKAGES:
        for path in PACKAGE.joinpath(package).rglob("*.py"):
            name = ".".join(("hangwatch", *path.relative_to(PACKAGE).with_suffix("").parts))
            expected[name.removesuffix(".__init__")] = path.read_text()

    made = LEFT_OUT | {NUMBERS, "hangwatch"}
    assert {k: v for k, v in expected.items() if k not in made} == {
        k: v for k, v in modules_of(compose()).items() if k not in made
    }


def test_the_one_file_needs_nothing_but_the_standard_library():
    foreign = set()
    for source in (*modules_of(program()).values(), program()):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                foreign.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert 0 == node.level
                foreign.add(str(node.module).split(".")[0])

    assert {"hangwatch"} == foreign - sys.stdlib_module_names


def test_the_one_file_passes_every_terminal_and_locale():
    assert program().isascii()


def test_a_name_of_a_later_python_is_not_used():
    for name, source in modules_of(program()).items():
        ast.parse(source, name, feature_version=(3, 10))


def test_the_verb_prints_the_file():
    done = CliRunner().invoke(command, ["rescue"])

    assert (0, program()) == (done.exit_code, done.output)
    assert LMDEPLOY.state[0].name in modules_of(done.output)[NUMBERS]


# --- who belongs to whom ------------------------------------------------------------------------


def rows(*lines: tuple[int, int, str]) -> dict[int, kernel.Stat]:
    return {pid: kernel.Stat(pid, comm, ("S", str(ppid))) for pid, ppid, comm in lines}


def test_descendants_belong_to_a_named_process():
    table = rows((1, 0, "init"), (10, 1, "server"), (11, 10, "engine"), (12, 11, "w"), (20, 1, "x"))

    assert {10: "named", 11: "child of 10", 12: "child of 11"} == kernel.kin([10], table, OURS)


def test_whatever_runs_under_the_raylet_belongs_to_each_other():
    table = rows(
        (5, 1, "raylet"), (10, 5, "ray::A"), (11, 5, "ray::B"), (12, 11, "w"), (20, 1, "x")
    )

    assert {
        10: "named",
        5: "raylet of 10",
        11: "same raylet as 10",
        12: "same raylet as 10",
    } == kernel.kin([10], table, OURS)


def test_we_do_not_belong_to_them():
    table = rows((10, 1, "server"), (OURS, 10, "python3"), (OURS + 1, OURS, "python3"))

    assert {10: "named"} == kernel.kin([10], table, OURS)


# --- what fits ----------------------------------------------------------------------------------


def test_of_many_that_are_alike_some_are_kept_and_the_odd_one_always():
    items = [{"id": i, "chain": "queue.get"} for i in range(5000)] + [{"id": -1, "chain": "odd"}]

    text = reading._fit(items, lambda item: item["chain"], 3000, lambda kept: kept)

    kept = json.loads(text)
    assert len(text) <= 3000
    assert {"id": -1, "chain": "odd"} in kept
    assert 64 == len(kept) - 1


def test_what_is_all_different_is_cut():
    items = [{"id": i, "chain": i} for i in range(5000)]

    text = reading._fit(items, lambda item: item["chain"], 3000, lambda kept: kept)

    assert 0 < len(json.loads(text)) < 200
    assert len(text) <= 3000


# --- work that may block ------------------------------------------------------------------------


def stuck() -> Iterator[bytes]:
    yield b"first"
    time.sleep(600)
    yield b"never"


def output() -> Iterator[bytes]:
    found = []
    for stream in range(3):
        try:
            found.append(os.fstat(stream))
        except OSError:
            continue
    yield b"%d" % len(found)


def broken() -> Iterator[bytes]:
    yield b"first"
    raise ValueError("no luck")


def fine() -> Iterator[bytes]:
    yield b"x" * 300_000
    yield b"last"


def test_a_job_that_is_late_leaves_the_lines_that_it_finished():
    results = aside.run({1: stuck, 2: fine}, limit=3.0, until=time.monotonic() + 60)

    assert [b"first"] == results[1].lines
    assert "not read within 3.0 s" == results[1].problem
    assert [b"x" * 300_000, b"last"] == results[2].lines
    assert "" == results[2].problem


def test_a_job_does_not_hold_our_output_open():
    results = aside.run({1: output}, limit=30, until=time.monotonic() + 60)

    assert [b"0"] == results[1].lines


def test_a_job_that_fails_says_why():
    results = aside.run({1: broken}, limit=30, until=time.monotonic() + 60)

    assert aside.Result(lines=[b"first"], problem="ValueError: no luck") == results[1]


def test_a_job_whose_time_never_came_says_so():
    results = aside.run({1: fine}, limit=30, until=time.monotonic() - 1)

    assert "the time was over before it was its turn" == results[1].problem


# --- unpacking ----------------------------------------------------------------------------------


def document(**more: Any) -> dict[str, Any]:
    def sample(at: float) -> dict[str, Any]:
        return {
            "monotonic": at,
            "ppid": 1,
            "state": "S",
            "comm": "ZMQMPEngine",
            "thread_count": 1,
            "cpu_seconds": 10.0 + at / 10,
            "kernel": [
                {"tid": 7, "comm": "x", "state": "D", "vol_ctxt": int(at), "stack": "[<0>] nfs"}
            ],
            "threads": [
                {"pid": 99, "os_thread_id": 7, "frames": [{"name": "f", "filename": "f.py"}]}
            ],
            "tasks": {"schema": "hangwatch.tasks/1", "pid": 99, "tasks": []},
        }

    return {
        "schema": "hangwatch.rescue/1",
        "began": "2026-03-08T07:10:00+08:00",
        "ended": "2026-03-08T07:10:11+08:00",
        "asked": {"pids": [7], "gap": 3, "seconds": 30},
        "host": {"kernel": "6.1"},
        "processes": [
            {
                "pid": 7,
                "start_ticks": 5,
                "why": "named",
                "title": f"python serve --api-key {SECRET}",
                "logs": ["/var/log/server"],
                "samples": [sample(100.0), sample(110.0)],
            }
        ],
        "logs": [
            {
                "path": "/var/log/server",
                "pids": [7],
                "size": 9,
                "written": "2026-03-08T07:03:50+08:00",
                "text": "".join(map(BEAT.format, (19, 29, 39, 49))) + f"token={SECRET}\n",
            }
        ],
        "problems": ["a sentence"],
    } | more


def packed(**more: Any) -> bytes:
    return json.dumps(document(**more)).encode()


def test_the_document_of_these_tests_keeps_to_the_schema():
    schema = json.loads((PACKAGE / "schemas" / "rescue-1.json").read_text())

    jsonschema.validate(document(), schema, format_checker=jsonschema.FormatChecker())


def test_a_document_becomes_loose_evidence():
    found = unpack(packed(), (LMDEPLOY,))

    assert {
        "procs.json",
        "procs2.json",
        "environment/machine.json",
        "processes/engine-7/kernel.json",
        "processes/engine-7/kernel2.json",
        "processes/engine-7/stack_7.txt",
        "processes/engine-7/threads.json",
        "processes/engine-7/threads2.json",
        "processes/engine-7/tasks.json",
        "processes/engine-7/tasks2.json",
    } == found.files.keys()
    assert ["logs/0/server.log"] == list(found.logs)
    assert ["a sentence"] == found.problems


def test_the_second_sample_has_rates():
    (row,) = json.loads(unpack(packed(), (LMDEPLOY,)).files["procs2.json"])

    assert (10.0, 1.0, 1.0) == (row["cpu_pct"], row["vol_ctxt_per_s"], row["switches_per_s"])
    assert ({"D": 1}, 1) == (row["thread_states"], row["threads"])


def test_whose_stacks_they_are_is_not_for_the_stacks_to_say():
    files = unpack(packed(), (LMDEPLOY,)).files

    assert 7 == json.loads(files["processes/engine-7/threads.json"])[0]["pid"]
    assert 7 == json.loads(files["processes/engine-7/tasks.json"])["pid"]


def test_every_byte_of_a_log_comes_back():
    raw = b"\xff\xfe caf\xc3\xa9 \x1b[0m\x00\n"
    log = {"path": "x.log", "pids": [], "text": raw.decode("utf-8", "surrogateescape")}

    assert raw == unpack(packed(logs=[log]), (LMDEPLOY,)).logs["logs/0/x.log"].data


@pytest.mark.parametrize(
    "more",
    [
        {"processes": None},
        {"processes": [None, 3, {}, {"pid": "7"}, {"pid": 7}, {"pid": 7, "samples": [[]]}]},
        {"processes": [{"pid": 7, "samples": [{"kernel": [3], "threads": {}, "tasks": []}]}]},
        {
            "processes": [
                {"pid": 7, "title": "ZMQMPEngine", "samples": [{"ppid": 8, "state": 4}]},
                {"pid": 8, "title": "ZMQMPEngine", "samples": [{"ppid": 7, "state": "gone"}]},
                {"pid": 9, "title": "ZMQMPEngine", "samples": [{"ppid": [], "monotonic": "x"}]},
            ]
        },
        {"logs": [None, {"path": "../../etc/passwd", "text": "x", "pids": [[], "7", 7]}]},
        {"logs": [{"path": 3, "text": 3}], "problems": [3, None], "host": [], "ended": "now"},
    ],
)
def test_a_document_that_was_tampered_with_gives_what_makes_sense(more: dict[str, Any]):
    found = unpack(packed(**more), (LMDEPLOY,))

    assert not [name for name in (*found.files, *found.logs) if ".." in name.split("/")]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (packed()[:-40], "cut short"),
        (b'{"schema":"hangwatch.rescue/1",' + b"[" * 100_000, "cut short"),
        (packed(schema="hangwatch.rescue/9"), "later version"),
    ],
)
def test_a_document_that_cannot_be_read_says_what_to_do(data: bytes, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        unpack(data, (LMDEPLOY,))


# --- diagnosing ---------------------------------------------------------------------------------


def diagnose(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["diagnose", *map(str, arguments)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "d.json"
    found.write_bytes(packed())
    return found


def test_the_end_is_when_it_was_taken_in_its_own_zone(path: Path):
    (instance,) = json.loads(diagnose(path, "--json").output)["instances"]

    assert "2026-03-08T07:03:49+08:00" == instance["last_heartbeat"]
    assert instance["verdict"] in {"suspected_hang", "hung"}


def test_a_log_whose_name_says_nothing_of_its_process_is_that_of_the_server(tmp_path: Path):
    server = {
        **document()["processes"][0],
        "title": "lmdeploy serve api_server m",
        "samples": [{"comm": "lmdeploy", "state": "S", "ppid": 1, "monotonic": 1.0}],
    }
    (tmp_path / "d").write_bytes(packed(processes=[server]))

    assert [InstanceKey(pid=7, tag="DP0").pid] == [
        instance.instance.pid for instance in read([tmp_path / "d"]).instances
    ]


def test_what_was_answered_before_the_file_was_last_written_is_no_sign_of_life_after(
    tmp_path: Path,
):
    answered = 'INFO:     10.0.0.1:4 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 3
    (log,) = document()["logs"]
    path = tmp_path / "d.json"
    path.write_bytes(packed(logs=[{**log, "text": log["text"] + answered}]))

    assert 3 == diagnose(path).exit_code


def test_it_may_have_any_name_and_lie_in_a_folder(tmp_path: Path):
    (tmp_path / "issue-77.txt").write_bytes(packed())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "d.json").write_bytes(packed())

    assert 3 == diagnose(tmp_path / "issue-77.txt").exit_code
    assert 3 == diagnose(tmp_path / "folder").exit_code


def test_a_log_may_be_given_beside_it(tmp_path: Path):
    (tmp_path / "d.json").write_bytes(packed(logs=[]))
    (tmp_path / "engine.log").write_text("".join(map(BEAT.format, (19, 29, 39, 49))))

    assert 3 == diagnose(tmp_path / "d.json", tmp_path / "engine.log").exit_code


def test_without_a_log_nothing_is_claimed_and_all_that_stands_is_shown(tmp_path: Path):
    chain = [{"function": "C.wait", "file": "/app/c.py", "line": 7, "kind": "coroutine"}]
    task = {"id": 1, "name": "t", "state": "pending", "chain": chain, "awaits": {"kind": "event"}}
    processes = document()["processes"]
    for sample in processes[0]["samples"]:
        sample["tasks"]["tasks"] = [task]
    path = tmp_path / "d.json"
    path.write_bytes(packed(logs=[], processes=processes))

    done = diagnose(path)

    assert 0 == done.exit_code
    assert "no log was given" in " ".join(done.output.split())
    assert "C.wait (app/c.py:7)" in done.output


def test_what_it_holds_is_redacted(path: Path):
    for form in ((), ("--json",)):
        assert SECRET not in diagnose(path, *form).output
    assert SECRET not in repr(read([path]))


def test_two_documents_are_refused(path: Path):
    (path.parent / "e.json").write_bytes(packed())

    with pytest.raises(NotABundleError, match="one of them at a time"):
        read([path, path.parent / "e.json"])


def test_one_that_was_cut_short_is_refused_in_a_sentence(path: Path):
    path.write_bytes(packed()[:-10])

    done = diagnose(path)

    assert 1 == done.exit_code
    assert "d.json: it is cut short or damaged" in done.output
