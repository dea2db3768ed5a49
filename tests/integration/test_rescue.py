"""``hangwatch-rescue.py`` as users run it: through a pipe, into whatever Python there is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from processes import eventually, python
from remote_targets import Interpreter, interpreters, running
from running import state_of, wait_for

from hangwatch.cli import rescue as verb
from hangwatch.lab.launch import Fleet, Server
from hangwatch.rescue.single_file import compose

pytestmark = pytest.mark.needs_ptrace

FOUND = [*{each.minor: each for each in interpreters() if each.root == Path("/")}.values()]
READERS = pytest.mark.parametrize("reader", FOUND, ids=lambda each: f"by-{each}")
TARGETS = pytest.mark.parametrize("target", FOUND, ids=lambda each: f"of-{each}")
LIMIT = 8_000_000


@pytest.fixture(scope="module")
def program() -> bytes:
    return verb.program().encode()


def rescue(
    program: bytes,
    *arguments: object,
    reader: tuple[str, ...] = (sys.executable,),
    **more: Any,
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*reader, "-", *map(str, arguments)],
        input=program,
        capture_output=True,
        timeout=120,
        check=False,
        **more,
    )


def read(program: bytes, pid: int, *arguments: object, **more: Any) -> dict[str, Any]:
    done = rescue(program, "--pid", pid, "--gap", 0.2, *arguments, **more)
    assert 0 == done.returncode, done.stderr.decode()
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def diagnosis(document: dict[str, Any], folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "d.json"
    path.write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-m", "hangwatch", "diagnose", str(path), "--json", *arguments],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in {0, 3}, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@READERS
@TARGETS
def test_any_python_reads_any_other(
    program: bytes, reader: Interpreter, target: Interpreter, tmp_path: Path
):
    with running(target, "blocked", folder=tmp_path) as (process, _):
        document = read(program, process.pid, reader=reader.command)

    named = document["processes"][0]
    assert [] == [each for each in document["problems"] if "log" not in each]
    assert (process.pid, "named", 2) == (named["pid"], named["why"], len(named["samples"]))
    for sample in named["samples"]:
        assert target.version == sample["tasks"]["python"]
        assert sample["tasks"]["tasks"]
        assert "MainThread" in [thread["thread_name"] for thread in sample["threads"]]
        assert process.pid in [thread["tid"] for thread in sample["kernel"]]


def test_the_document_keeps_to_its_schema(program: bytes, tmp_path: Path):
    schemas = resources.files("hangwatch") / "schemas"
    with running(FOUND[-1], "blocked", folder=tmp_path) as (process, _):
        document = read(program, process.pid)

    for name, part in (
        ("rescue-1.json", document),
        ("tasks-1.json", document["processes"][0]["samples"][0]["tasks"]),
    ):
        jsonschema.validate(part, json.loads((schemas / name).read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "named"),
    [
        ("blocked-call", "event-loop-blocked", "SharedStore.get"),
        ("await-never", "await-never-completes", "ModelAgent.wait_for_event"),
    ],
)
def test_a_hung_server_is_explained_from_one_document(
    program: bytes, tmp_path: Path, fault: str, cause: str, named: str
):
    with Server(tmp_path, "--fault", fault) as server:
        wait_for(lambda: server.log.read_text().count("Avg thr") > 2, "three beats")
        server.start_fault()
        server.truth()
        said = server.log.stat().st_size
        eventually(lambda: age(server.log) > 5 and server.log.stat().st_size >= said)

        document = read(program, server.pid)

    found = diagnosis(document, tmp_path, "--heartbeat-interval", "1", "--stall-after", "4")
    assert ("hung", cause) == (found["verdict"], found["cause"])
    assert named in json.dumps(found["findings"])
    assert {server.pid, server.engine_pid} <= {each["pid"] for each in document["processes"]}


def age(path: Path) -> float:
    """Return the seconds since a file was written, by the clock that stamps it."""
    beside = path.with_suffix(".now")
    beside.touch()
    return beside.stat().st_mtime - path.stat().st_mtime


@pytest.mark.slow
def test_a_server_at_work_is_not_accused(program: bytes, tmp_path: Path):
    with Server(tmp_path) as server:
        wait_for(lambda: server.log.read_text().count("Avg thr") > 2, "three beats")
        document = read(program, server.pid)

    found = diagnosis(document, tmp_path, "--heartbeat-interval", "1", "--stall-after", "30")
    assert "ok" == found["verdict"]


@pytest.mark.slow
def test_the_engine_leads_to_its_server_and_the_log(program: bytes, tmp_path: Path):
    with Server(tmp_path) as server:
        wait_for(lambda: "Avg thr" in server.log.read_text(), "a beat")
        document = read(program, server.engine_pid)

    why = {each["pid"]: each["why"] for each in document["processes"]}
    assert "named" == why[server.engine_pid]
    assert f"parent of {server.engine_pid}" == why[server.pid]
    (log,) = [each for each in document["logs"] if each["path"] == str(server.log)]
    assert {server.pid, server.engine_pid} == set(log["pids"])
    assert "Avg thr" in log["text"]


@pytest.mark.slow
def test_under_ray_all_that_runs_beneath_the_raylet_is_read(program: bytes, tmp_path: Path):
    with Fleet(tmp_path, servers=2) as fleet:
        fleet.wait_ready()
        first, second = fleet.servers
        for server in fleet.servers:
            log = Path(server["log"])
            wait_for(lambda log=log: log.exists() and "Avg thr" in log.read_text(), "a beat")
        document = read(program, first["pid"])

    why = {each["pid"]: each["why"] for each in document["processes"]}
    assert f"same raylet as {first['pid']}" == why[second["pid"]]
    assert f"raylet of {first['pid']}" == why[fleet.pid]
    assert 2 == sum("Avg thr" in log["text"] for log in document["logs"])
    found = diagnosis(document, tmp_path, "--heartbeat-interval", "1", "--stall-after", "30")
    assert {first["pid"], second["pid"]} == {each["pid"] for each in found["instances"]}


COUNTER = """
import asyncio
class Engine:
    def __init__(self): self.free = 7
    async def loop(self): await asyncio.Event().wait()
async def main():
    task = asyncio.create_task(Engine().loop())
    await asyncio.sleep(0)
    ready()
    await task
"""


def test_numbers_of_the_engine_are_read_as_its_profile_says():
    probe = {"name": "blocks free", "kind": "int", "path": "free", "minus": ""}
    table = {"name": "blocks", "where": ["Engine.loop:self"], "probes": [probe]}
    with python(COUNTER, rest="asyncio.run(main())") as target:
        document = read(compose([table]).encode(), target.pid)

    (found,) = document["processes"][0]["samples"][0]["tasks"]["state"]
    assert {"blocks free": 7} == found["rows"][0]["values"]


# --- what it does not do ------------------------------------------------------------------------


def test_a_stopped_process_is_read_and_stays_stopped(program: bytes):
    with python("") as target:
        target.send_signal(signal.SIGSTOP)
        eventually(lambda: state_of(target.pid) == "T")

        document = read(program, target.pid)

        assert "T" == state_of(target.pid)
    assert "T" == document["processes"][0]["samples"][0]["state"]
    assert document["processes"][0]["samples"][1]["threads"]


def test_no_file_is_written(program: bytes, tmp_path: Path):
    with python("") as target:
        read(program, target.pid, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})

    assert [] == list(tmp_path.iterdir())


def test_no_environment_is_printed(program: bytes):
    with python("", env={**os.environ, "TOKEN": "a-secret-that-nobody-asked-for"}) as target:
        done = rescue(program, "--pid", target.pid, "--gap", 0.2)

    assert 0 == done.returncode
    assert b"a-secret-that-nobody-asked-for" not in done.stdout + done.stderr


def test_modules_of_the_folder_that_it_is_started_in_are_not_imported(
    program: bytes, tmp_path: Path
):
    for name in ("argparse", "hangwatch", "select", "ctypes", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n")

    with python("") as target:
        assert read(program, target.pid, cwd=tmp_path)["processes"]


def test_what_is_not_python_is_described_by_the_kernel(program: bytes):
    with subprocess.Popen(["sleep", "600"]) as target:
        try:
            document = read(program, target.pid)
        finally:
            target.kill()

    (process,) = document["processes"]
    assert process["samples"][0]["kernel"][0]["syscall"]
    assert "_PyRuntime" in " ".join(document["problems"])


def test_a_process_that_ends_meanwhile_is_said_to_be_gone(program: bytes):
    with (
        python("") as target,
        subprocess.Popen(
            [sys.executable, "-", "--pid", str(target.pid), "--gap", "4", "--no-logs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as reader,
    ):
        assert reader.stdin is not None
        assert reader.stderr is not None
        reader.stdin.write(program)
        reader.stdin.close()
        assert b"reading 1 processes" in reader.stderr.readline()
        reader.stdin = None
        # Between the samples it sleeps, and has no child.
        eventually(lambda: not children(reader.pid) and state_of(reader.pid) == "S")
        target.kill()
        target.wait()
        out, _ = reader.communicate(timeout=60)

    assert "gone" == json.loads(out)["processes"][0]["samples"][1]["state"]


def children(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return ""


# --- bounds -------------------------------------------------------------------------------------

CROWD = """
import asyncio
async def wait(event): await event.wait()
async def main():
    event = asyncio.Event()
    tasks = [asyncio.create_task(wait(event), name=f"t-{i}" * 40) for i in range(10000)]
    odd = asyncio.create_task(asyncio.sleep(1e6), name="the odd one")
    await asyncio.sleep(0)
    ready()
    await event.wait()
"""


@pytest.mark.slow
def test_a_crowd_of_tasks_stays_within_the_size(program: bytes):
    with python(CROWD, rest="asyncio.run(main())") as target:
        done = rescue(program, "--pid", target.pid, "--gap", 0.2, "--seconds", 120)

    tasks = json.loads(done.stdout)["processes"][0]["samples"][0]["tasks"]
    assert len(done.stdout) < LIMIT
    assert "the odd one" in [task["name"] for task in tasks["tasks"]]
    assert "truncated" in [problem["kind"] for problem in tasks["problems"]]


def test_of_a_long_log_the_end_is_kept(program: bytes, tmp_path: Path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"".join(b"\xffline %d\n" % number for number in range(200_000)))
    with log.open("ab") as file, python("", stderr=file) as target:
        document = read(program, target.pid)

    (found,) = document["logs"]
    assert log.stat().st_size == found["size"]
    assert found["text"].endswith("line 199999\n")
    assert len(json.dumps(found["text"])) <= 256 << 10


def test_it_is_over_in_its_time_even_if_that_is_short(program: bytes):
    with python("") as target:
        document = read(program, target.pid, "--seconds", 0.2)

    assert target.pid == document["processes"][0]["pid"]


# --- who may, and what is said ------------------------------------------------------------------


@contextmanager
def as_nobody() -> Iterator[dict[str, Any]]:
    if os.geteuid():
        pytest.skip("needs root to become somebody else")
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin:/opt/bin")
    if found is None:
        pytest.skip("needs a Python that everybody may run")
    yield {"interpreter": found, "user": 65534, "group": 65534, "extra_groups": (), "cwd": "/"}


@pytest.mark.needs_root
def test_the_same_user_needs_no_privilege(program: bytes):
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0":
        pytest.skip("Yama lets only ancestors read")
    with as_nobody() as somebody, python("", **somebody) as target:
        reader = (somebody.pop("interpreter"),)
        document = read(program, target.pid, reader=reader, **somebody)

    assert document["processes"][0]["samples"][0]["threads"]


@pytest.mark.needs_root
def test_who_may_not_read_gets_what_the_kernel_shows_and_the_cure(program: bytes):
    with as_nobody() as somebody, python("") as target:
        reader = (somebody.pop("interpreter"),)
        document = read(program, target.pid, reader=reader, **somebody)

    sample = document["processes"][0]["samples"][0]
    assert "S" == sample["state"]
    assert "threads" not in sample
    assert any("SYS_PTRACE" in problem for problem in document["problems"])


def test_without_a_pid_it_lists_what_there_is(program: bytes):
    with python("") as target:
        done = rescue(program)

    assert 2 == done.returncode
    assert b"" == done.stdout
    assert f"--pid {target.pid} " in done.stderr.decode()


def test_a_pid_that_is_not_there_is_an_error(program: bytes):
    done = rescue(program, "--pid", 4_194_303)

    assert 1 == done.returncode
    assert b"" == done.stdout
    assert "there is no process 4194303" in done.stderr.decode()


def test_a_python_that_is_too_old_is_told_so(program: bytes):
    roots = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    old = sorted(roots.glob("3.[6-9].*/bin/python"))
    if not old:
        pytest.skip("needs a Python before 3.10")

    done = rescue(program, "--pid", 1, reader=(str(old[0]),))

    assert 1 == done.returncode
    assert b"needs Python 3.10" in done.stderr
