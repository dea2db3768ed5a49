"""The laboratory's servers are LMDeploy's in all that hangwatch can see, and hang as told."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hangwatch.lab.faults import names
from hangwatch.lab.launch import LAB, Fleet, Server

LIMIT = 60.0

BEAT = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d DP0\] "
    r"Avg thr \(in/out\): \d+\.\d / \d+\.\d tokens/s, "
    r"Server \(succeeded/failed/routed/waiting\): \d+ / 0 / \d+ / -?\d+, "
    r"Engine \(running/waiting\): \d+ / \d+, KV cache: \d+\.\d%, $",
    re.MULTILINE,
)


def wait_for(condition: Callable[[], object], what: str) -> object:
    deadline = time.monotonic() + LIMIT
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT:.0f} s"
        time.sleep(0.05)
    return result


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def health(server: Server) -> dict[str, str]:
    return dict(json.loads(get(f"{server.url}/health")[1]))


def metric(server: Server, name: str) -> float:
    match = re.search(
        rf"^lmdeploy:{name}\{{.*\}} (\S+)$", get(f"{server.url}/metrics")[1], re.MULTILINE
    )
    assert match is not None
    return float(match[1])


def beats(server: Server) -> int:
    return len(BEAT.findall(server.log.read_text()))


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def start(folder: Path, fault: str, **options: float) -> Server:
    return Server(folder, "--fault", fault, interval=options.get("interval", 0.25), name=fault)


def test_a_healthy_server_beats_answers_and_counts(tmp_path):
    with Server(tmp_path, interval=0.25) as server:
        wait_for(lambda: beats(server) >= 3, "the third beat")
        wait_for(lambda: metric(server, "num_requests_running") > 0, "work in the gauges")
        wait_for(
            lambda: {"status": "healthy", "message": "Engine is healthy."} == health(server),
            "health",
        )
        first = metric(server, "generation_tokens_total")

        wait_for(lambda: metric(server, "generation_tokens_total") > first, "progress")
        assert "ZMQMPEngine\n" == Path(f"/proc/{server.engine_pid}/comm").read_text()
        assert (200, '{"is_sleeping":false}') == get(f"{server.url}/is_sleeping")
        assert 404 == get(f"{server.url}/terminate")[0]


def test_an_engine_blocked_in_a_call_is_silent_with_requests_in_flight(tmp_path):
    with start(tmp_path, "blocked-call") as server:
        wait_for(lambda: beats(server) >= 2, "the second beat")
        server.start_fault()
        truth = server.truth()
        wait_for(
            lambda: "Backend health probe timed out after 0.2s." == health(server)["message"],
            "the health monitor's verdict",
        )
        silent = beats(server)
        tokens = metric(server, "generation_tokens_total")
        time.sleep(1.0)

        assert silent == beats(server)
        assert tokens == metric(server, "generation_tokens_total")
        assert metric(server, "num_requests_running") > 0
        assert "S" == state(server.engine_pid)
        assert ("blocked-call", server.engine_pid) == (truth["fault"], truth["pid"])


def test_an_await_that_never_completes_leaves_the_loop_answering(tmp_path):
    with start(tmp_path, "await-never", interval=0.5) as server:
        wait_for(lambda: beats(server) >= 2, "the second beat")
        server.start_fault()
        server.truth()

        wait_for(
            lambda: "scheduler_tick has not advanced" in health(server)["message"],
            "the health monitor's verdict",
        )
        assert metric(server, "num_requests_running") > 0


def test_the_faults_that_are_not_hangs_look_as_they_do_upstream(tmp_path):
    with ExitStack() as stack:
        idle, quiet, slow = (
            stack.enter_context(start(tmp_path, fault)) for fault in ("idle", "stop-beats", "slow")
        )
        for server in (idle, quiet, slow):
            wait_for(lambda server=server: beats(server) >= 2, "the second beat")
            server.start_fault()
            server.truth()

        wait_for(lambda: metric(idle, "num_api_requests_routed") == 0, "idleness")
        wait_for(lambda: "healthy" == health(idle)["status"], "health without work")
        silent, tokens = beats(quiet), metric(quiet, "generation_tokens_total")
        wait_for(
            lambda: metric(quiet, "generation_tokens_total") > tokens + 100, "tokens without beats"
        )
        assert beats(quiet) - silent <= 1
        wait_for(lambda: "healthy" == health(quiet)["status"], "health without beats")
        before = beats(slow)
        wait_for(lambda: beats(slow) > before + 1, "a slow server's beats")


def test_a_scheduler_that_is_stuck_has_requests_waiting_and_none_running(tmp_path):
    with start(tmp_path, "scheduler-stuck") as server:
        server.start_fault()
        server.truth()

        wait_for(lambda: metric(server, "num_requests_waiting") == 8, "requests that wait")
        assert 0 == metric(server, "num_requests_running")
        assert 1 == metric(server, "gpu_cache_usage_perc")
        wait_for(lambda: "Maybe cache is full" in server.log.read_text(), "the warning")
        wait_for(
            lambda: "scheduler_tick has not advanced" in health(server)["message"],
            "the health monitor's verdict",
        )


def test_a_task_that_dies_is_logged_and_missed_by_the_health_monitor(tmp_path):
    with start(tmp_path, "engine-task-dead") as server:
        server.start_fault()
        server.truth()

        wait_for(lambda: "Task <ModelAgentLoop> failed" in server.log.read_text(), "the error")
        wait_for(
            lambda: "loop task has stopped: ['ModelAgentLoop']" in health(server)["message"],
            "the health monitor's verdict",
        )


def test_a_server_that_sleeps_says_so(tmp_path):
    with start(tmp_path, "asleep") as server:
        server.start_fault()
        server.truth()

        wait_for(lambda: "sleeping" == health(server)["status"], "sleep")
        assert (200, '{"is_sleeping":true}') == get(f"{server.url}/is_sleeping")
        assert "POST /sleep?level=2 HTTP/1.1" in server.log.read_text()


def test_a_log_that_is_rotated_often_goes_on_in_new_files(tmp_path):
    with start(tmp_path, "log-rotation") as server:
        server.start_fault()
        server.truth()
        seen = {}

        def look() -> bool:
            with suppress(FileNotFoundError):  # between the two steps of a rotation
                seen[server.log.stat().st_ino] = beats(server)
            return len([inode for inode, count in seen.items() if count]) >= 3

        wait_for(look, "a beat in the third file")


def test_a_log_whose_copier_lost_it_ends_while_tokens_flow(tmp_path):
    with start(tmp_path, "log-dead") as server:
        wait_for(lambda: beats(server) >= 2, "the second beat")
        server.start_fault()
        server.truth()
        tokens = metric(server, "generation_tokens_total")
        wait_for(lambda: metric(server, "generation_tokens_total") > tokens + 100, "tokens")
        # The copier looks at its orders with the next line, which has come by now.
        size = server.log.stat().st_size

        wait_for(lambda: metric(server, "generation_tokens_total") > tokens + 500, "more tokens")
        assert size == server.log.stat().st_size
        wait_for(lambda: "healthy" == health(server)["status"], "health without a log")


def test_processes_end_or_stop_as_told(tmp_path):
    with ExitStack() as stack:
        gone, dead, stopped = (
            stack.enter_context(start(tmp_path, fault))
            for fault in ("exit", "engine-exit", "sigstop-self")
        )
        for server in (gone, dead, stopped):
            server.start_fault()
            server.truth()

        wait_for(lambda: gone.process.poll() == 1, "the end of the server")
        wait_for(lambda: state(gone.engine_pid) == "", "the end of its engine")
        wait_for(
            lambda: "PyTorch ZMQ engine process is not alive." == health(dead)["message"],
            "the health monitor's verdict",
        )
        wait_for(lambda: "T" == state(stopped.pid), "the server's stop")
        wait_for(lambda: "T" == state(stopped.engine_pid), "the engine's stop")
    wait_for(lambda: state(stopped.engine_pid) == "", "the end of the stopped engine")


def test_a_fault_that_lasts_a_while_ends_by_itself(tmp_path):
    with Server(tmp_path, "--fault", "blocked-call", "--lasts", "1", interval=0.25) as server:
        wait_for(lambda: beats(server) >= 2, "the second beat")
        server.start_fault()
        server.truth()
        before = beats(server)

        wait_for(lambda: beats(server) > before + 2, "recovery")


def test_an_engine_that_spins_is_on_cpu(tmp_path):
    with start(tmp_path, "spin") as server:
        server.start_fault()
        server.truth()

        assert wait_for(lambda: "R" == state(server.engine_pid), "a running engine")


def test_a_command_line_can_look_like_any_other(tmp_path):
    title = "/opt/venv/bin/python /opt/venv/bin/lmdeploy serve api_server internlm/x"
    with Server(tmp_path, "--title", title) as server:
        shown = Path(f"/proc/{server.pid}/cmdline").read_bytes().rstrip(b"\0").decode()

        assert title == shown


def test_a_fleet_looks_like_rays_workers_and_freezes_at_once(tmp_path):
    with Fleet(tmp_path, "--fault", "blocked-call", servers=3, interval=0.5) as fleet:
        fleet.wait_ready()
        logs = [Path(server["log"]) for server in fleet.servers]
        wait_for(
            lambda: all(len(BEAT.findall(log.read_text())) >= 2 for log in logs),
            "the second beats",
        )
        fleet.start_fault()
        truth = fleet.truth()

        assert "raylet\n" == Path(f"/proc/{fleet.pid}/comm").read_text()
        session = Path(tmp_path, "session_latest").resolve()
        assert f"--session-dir={session}" in Path(f"/proc/{fleet.pid}/cmdline").read_text()
        assert sorted(logs) == sorted(session.glob("logs/worker-*.out"))
        for server, log in zip(fleet.servers, logs, strict=True):
            assert re.fullmatch(rf"worker-[0-9a-f]{{56}}-01000000-{server['pid']}\.out", log.name)
            assert log.read_text().startswith(
                ":job_id:01000000\n:task_name:run_lmdeploy_server_wrapper\n"
            )
            title = Path(f"/proc/{server['pid']}/cmdline").read_bytes().rstrip(b"\0")
            assert b"ray::run_lmdeploy_server_wrapper" == title
        assert sorted(server["engine_pid"] for server in fleet.servers) == sorted(
            note["pid"] for note in truth["servers"]
        )
        pids = [server["engine_pid"] for server in fleet.servers]
    wait_for(lambda: all(state(pid) == "" for pid in pids), "the end of the fleet")


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_a_server_runs_under_other_pythons(tmp_path, version):
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    python = str(found[-1]) if found else shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], check=False).returncode != 0:
        pytest.skip(f"no Python {version} here")
    with Server(tmp_path, interval=0.25, python=python) as server:
        wait_for(lambda: beats(server) >= 1, "a beat")


def test_the_laboratory_tells_its_faults():
    shown = subprocess.run(
        [sys.executable, str(LAB / "server.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert [] == [fault for fault in names() if fault not in shown]
