"""Ray's state and logs, from processes that play a Ray: one that answers, hangs, or is none."""

import json
import os
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import PurePosixPath

import pytest
from captures import pool
from processes import python

from hangwatch.model.capture import FailureKind, Phase, Scope, Stage, Step, Target
from hangwatch.model.identity import ProcessId, Role
from hangwatch.system import procfs

SECRET = "planted-secret-value-123"

NAMED = """
import ctypes
ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)
"""

DASHBOARD = """
import json, socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit
environment = json.dumps({"env_vars": {"HF_TOKEN": "planted-secret-value-123"}})
ANSWERS = {
    "/api/v0/actors": [
        {"actor_id": "ab", "class_name": "Store", "state": "ALIVE", "pid": 7,
         "serialized_runtime_env": environment}
    ],
    "/api/v0/tasks": [
        {"task_id": "1", "state": "RUNNING", "actor_id": "ab"},
        {"task_id": "2", "state": "SUBMITTED_TO_WORKER", "actor_id": "ab"},
    ],
    "/api/v0/workers": [],
    "/api/v0/placement_groups": [],
}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with open(sys.argv[2], "a") as asked: asked.write(f"{self.command} {self.path}\\n")
        path = urlsplit(self.path).path
        data = {"summary": []} if path == "/nodes" else {"result": {"result": ANSWERS[path]}}
        body = json.dumps({"result": True, "data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET
    def log_message(self, *_): pass
port = int([a for a in sys.argv if a.startswith("--port=")][0][7:])
for port in range(port, port + 50):
    try: server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError: continue
    break
"""

ANSWERING = DASHBOARD + "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
MUTE = DASHBOARD  # the kernel takes the connection, nobody answers
DEAF = "\n"


@contextmanager
def ray(folder, dashboard=ANSWERING):
    """Give the raylet of a session with logs, and a dashboard beside it unless ``None``."""
    session = folder / "ray" / "session_1"
    (session / "logs").mkdir(parents=True, exist_ok=True)
    arguments = [f"--session_dir={session}", f"--redis_password={SECRET}"]
    with python(NAMED.format(name="raylet"), arguments=arguments) as raylet:
        if dashboard is None:
            yield raylet.pid, session
            return
        asked = str(folder / "asked")
        title = ["/lib/ray/dashboard/dashboard.py", asked, "--port=48265"]
        with python(dashboard, arguments=[*title, f"--session-dir={session}"]):
            yield raylet.pid, session


def target(pid, role=Role.RAY_SYSTEM, **more):
    return Target(
        process=ProcessId(pid, procfs.start_ticks(pid)),
        role=role,
        comm=procfs.read_row(pid).comm,
        **more,
    )


def collected(folder, collector, *targets, **options):
    """Run a collector for the whole node; return its evidence and the files that it left."""
    step = Step(
        id=collector,
        collector=collector,
        scope=Scope.NODE,
        stage=Stage.B,
        sample=1,
        rung=7,
        folder=PurePosixPath(),
        timeout=30.0,
        targets=targets,
        options=options,
    )
    with pool(folder / "output") as (workers, rooms):
        workers.submit([step], phase=Phase.LATER)
        (evidence,) = workers.wait([step])
        return evidence, {
            artifact.path.name: (rooms.path / artifact.path).read_bytes()
            for artifact in evidence.artifacts
        }


def test_the_state_of_ray_is_asked_of_its_dashboard(tmp_path):
    with ray(tmp_path) as (raylet, _):
        evidence, files = collected(tmp_path, "ray_state", target(raylet))

    assert evidence.failure is None
    (store,) = json.loads(files["actors.json"])
    assert ("Store", 1, 1) == (
        store["class_name"],
        store["running_calls"],
        store["pending_calls"],
    )
    assert [200] * 5 == [each["http"] for each in json.loads(files["requests.json"])]


def test_a_dashboard_gets_nothing_but_get_on_the_listed_paths(tmp_path):
    with ray(tmp_path) as (raylet, _):
        collected(tmp_path, "ray_state", target(raylet))

    asked = (tmp_path / "asked").read_text().splitlines()
    assert {
        "GET /api/v0/actors",
        "GET /api/v0/tasks",
        "GET /api/v0/workers",
        "GET /api/v0/placement_groups",
        "GET /nodes",
    } == {line.partition("?")[0] for line in asked}
    assert 5 == len(asked)


def test_no_secret_of_a_job_is_written_even_before_redaction(tmp_path):
    with ray(tmp_path) as (raylet, _):
        _, files = collected(tmp_path, "ray_state", target(raylet))

    assert b"HF_TOKEN" in files["actors.json"]
    assert [] == [name for name, data in files.items() if SECRET.encode() in data]


def test_a_dashboard_that_hangs_is_told_and_what_needs_no_answer_is_there(tmp_path):
    with ray(tmp_path, MUTE) as (raylet, session):
        evidence, files = collected(tmp_path, "ray_state", target(raylet), request_timeout="0.3")

    assert FailureKind.TIMED_OUT == evidence.failure.kind
    assert "actors: timeout after 0.3 s" in evidence.failure.message
    assert "gcs_server" in evidence.failure.hint
    assert {"session.json", "requests.json"} == set(files)
    assert str(session) == json.loads(files["session.json"])["sessions"][0]["directory"]


@pytest.mark.parametrize("dashboard", [None, DEAF])
def test_without_a_dashboard_that_answers_it_is_said_how_to_get_one(tmp_path, dashboard):
    with ray(tmp_path, dashboard) as (raylet, _):
        evidence, files = collected(tmp_path, "ray_state", target(raylet))

    assert FailureKind.NOT_AVAILABLE == evidence.failure.kind
    assert "ray[default]" in evidence.failure.hint
    assert {"session.json"} == set(files)


def test_the_dashboard_of_another_session_is_not_asked(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    with ray(other), ray(mine, None) as (raylet, _):
        evidence, _ = collected(mine, "ray_state", target(raylet))

    assert FailureKind.NOT_AVAILABLE == evidence.failure.kind
    assert not (other / "asked").exists()


WORKER = """
log = open(sys.argv[1], "w")
log.write(":job_id:01000000\\n:actor_name:SharedStore\\n")
log.flush()
"""


@pytest.mark.needs_ptrace
def test_a_worker_is_named_by_the_head_of_its_log(tmp_path):
    with ray(tmp_path, None) as (raylet, session):
        log = f"{session}/logs/worker-57df15f5d6be-01000000-42.out"
        with python(WORKER, arguments=[log]) as it:
            worker = target(it.pid, Role.STORE, logs=(log,))
            _, files = collected(tmp_path, "ray_state", target(raylet), worker)
            named = json.loads(files["session.json"])["workers"]

    assert [
        {
            "pid": it.pid,
            "role": "store",
            "worker_id": "57df15f5d6be",
            "job_id": "01000000",
            "actor_name": "SharedStore",
        }
    ] == named


def test_the_logs_of_ray_are_found_through_its_raylet(tmp_path):
    with ray(tmp_path, None) as (raylet, session):
        logs = session / "logs"
        for name in ("raylet.out", "gcs_server.err", "dashboard.log", "event_GCS.log"):
            (logs / name).write_text(f"I am {name}\n")
        (logs / "monitor.out").touch()
        (logs / f"worker-57df-01000000-{raylet}.out").write_text("taken by another step\n")
        taken = target(raylet, logs=(f"{logs}/worker-57df-01000000-{raylet}.out",))
        evidence, files = collected(tmp_path, "ray_logs", taken)

    assert evidence.failure is None
    assert {
        name: f"I am {name}\n".encode()
        for name in ("raylet.out", "gcs_server.err", "dashboard.log")
    } == files


def test_of_a_long_log_of_ray_the_beginning_of_the_incident_is_kept_besides_the_end(tmp_path):
    start = datetime(2026, 3, 4, 5, 0, 0).astimezone()
    with ray(tmp_path, None) as (raylet, session):
        with (session / "logs" / "raylet.out").open("w") as log:
            for second in range(20_000):
                stamp = f"{start + timedelta(seconds=second):%Y-%m-%d %H:%M:%S},000"
                log.write(f"[{stamp} I 1 1] (raylet) line {second} {'x' * 40}\n")
        onset = (start + timedelta(seconds=5_000)).isoformat()
        _, files = collected(tmp_path, "ray_logs", target(raylet), onset=onset)

    lines = files["raylet.out"].decode().splitlines()
    assert any(" line 5000 " in line for line in lines)
    assert " line 19999 " in lines[-1]
    assert 1 == sum(line.startswith("[hangwatch left out ") for line in lines)
    assert all(line.startswith("[") for line in lines)


@pytest.mark.parametrize("trap", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_nothing_but_regular_files_of_the_session_is_opened(tmp_path, trap):
    with ray(tmp_path, None) as (raylet, session):
        trap(session / "logs" / "raylet.out")
        evidence, files = collected(tmp_path, "ray_logs", target(raylet))

    assert {} == files
    assert "raylet.out: not a regular file" in evidence.failure.message


def test_a_log_folder_that_is_not_there_is_said(tmp_path):
    with ray(tmp_path, None) as (raylet, session):
        (session / "logs").rmdir()
        evidence, _ = collected(tmp_path, "ray_logs", target(raylet))

    assert FailureKind.NOT_AVAILABLE == evidence.failure.kind
    assert str(session) in evidence.failure.message
