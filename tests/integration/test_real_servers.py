"""The daemon on LMDeploy's own API server, which really idles, sleeps, hangs and dies.

Each server is the published wheel's ``serve`` under uvicorn, with its engine in a process of its
own, its health monitor, metrics and middlewares; ``programs/serving.py`` says what is stood in for.
Everything takes a tenth of its usual time: beats come each second, and a minute is six seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import kill, wait_for
from served import INTERVAL, STALL_AFTER, Daemon, Served, watching
from test_genuine_lmdeploy import wheel

pytestmark = [pytest.mark.network, pytest.mark.slow]

for package in ("fastapi", "numpy", "prometheus_client", "uvicorn", "zmq"):
    pytest.importorskip(package)

Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def lmdeploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The command line of a server names it, as an installed one's does.
    folder = tmp_path_factory.mktemp("wheel") / "lmdeploy"
    with zipfile.ZipFile(wheel("0.18.0")) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
    return folder


@pytest.fixture
def serve(lmdeploy: Path, tmp_path: Path) -> Iterator[Serve]:
    """Start a server with clients; options that begin with ``client_`` are theirs."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *, folder: Path = tmp_path, **options: object) -> Served:
            theirs = {k.removeprefix("client_"): v for k, v in options.items() if "client_" in k}
            own = {k: v for k, v in options.items() if "client_" not in k}
            server = stack.enter_context(Served(lmdeploy, folder, name, **own))
            server.clients(**theirs)
            return server

        yield start


UPDATE = ("/update_weights", '{"serialized_named_tensors": ""}')


# --- no hangs ------------------------------------------------------------------------------------


def test_idleness_sleep_an_update_and_a_lost_heartbeat_are_no_alarm_however_long(tmp_path, serve):
    names = ("busy", "idle", "asleep", "deep", "updated", "beatless")
    busy, idle, asleep, deep, updated, beatless = (serve(n, warm_up=3, update=5) for n in names)
    servers = (busy, idle, asleep, deep, updated, beatless)
    with watching(tmp_path, *servers) as daemon:
        for server in (idle, asleep, deep, updated):
            server.rest()
        assert 200 == asleep.post("/sleep?level=1")
        assert 200 == deep.post("/sleep?level=2")
        beatless.begin("beat-dies")
        daemon.comes_to(updated, "idle", "not-a-hang:idle")
        asked_before, since = {s.name: asked(s) for s in servers}, time.monotonic()
        assert 200 == updated.post(*UPDATE)
        updated.work()
        daemon.listen(1.2 * STALL_AFTER)
        ended = {server.name: daemon.path(server)[-1] for server in servers}
        elapsed = time.monotonic() - since
        for server in servers:
            for path, times in asked(server).items():
                assert times - asked_before[server.name].get(path, 0) <= elapsed / INTERVAL + 1
        for server in (asleep, deep):
            assert 200 == server.post("/wakeup?tags=weights")
            assert 200 == server.post(*UPDATE)
            assert 200 == server.post("/wakeup?tags=kv_cache")
        for server in (idle, asleep, deep):
            server.work()
            daemon.comes_to(server, "ok", "not-a-hang:busy")

        assert {
            "busy": ("ok", "not-a-hang:busy"),
            "idle": ("idle", "not-a-hang:idle"),
            "asleep": ("paused", "not-a-hang:paused"),
            "deep": ("paused", "not-a-hang:paused"),
            "updated": ("ok", "not-a-hang:busy"),
            "beatless": ("ok", "not-a-hang:heartbeat-lost"),
        } == ended
        assert {("ok", "not-a-hang:busy")} == set(daemon.path(busy))
        assert [] == daemon.of("incident")


def test_loading_a_first_request_that_compiles_and_a_long_prefill_are_no_alarm(
    tmp_path, lmdeploy, serve
):
    with Served(lmdeploy, tmp_path, "young", wait=False, load=3, first=4) as server:
        wait_for((server.folder / "engine.began").exists, "the engine process")
        with Daemon(tmp_path, "attach", "--pid", str(server.pid)) as daemon:
            loading = daemon.wait("transition", pid=server.pid)
            server.wait_ready()
            clients = server.clients(streams=2)
            daemon.becomes(server, "ok")
            wait_for(lambda: daemon.read(0.1) and server.beats > 4, "beats")
            clients.kill()
            daemon.comes_to(server, "idle", "not-a-hang:idle")
            # Nine seconds of silence with work, of the twelve that are suspicious.
            prefill = server.clients(streams=1, requests=1, prompt=2048 * 9)
            wait_for(lambda: daemon.read(0.1) and prefill.poll() is not None, "the answer")
            calm = daemon.alarms(server)

    assert ("loading", "not-a-hang:startup") == (loading["after"], loading["cause"])
    assert [] == calm


COPY = r"""
import sys, time
prefix = f"(run_lmdeploy_server_wrapper pid={sys.argv[1]}) "
with open(sys.argv[2]) as source:
    while True:
        line = source.readline()
        if line:
            print(prefix + line, end="", flush=True)
        else:
            time.sleep(0.05)
"""
"""What Ray's log monitor and driver do to a worker's output."""


def test_a_dead_log_path_is_told_from_a_hang_and_a_replaced_log_is_followed(tmp_path, serve):
    removed, replaced = serve("removed"), serve("replaced")
    (tmp_path / "workers").mkdir()
    worker = serve("worker", folder=tmp_path / "workers")
    with (tmp_path / "driver.out").open("wb") as out:
        copy = [sys.executable, "-c", COPY, str(worker.pid), str(worker.log)]
        driver = subprocess.Popen(copy, stdout=out)
    try:
        with watching(tmp_path, removed, replaced, worker) as daemon:
            removed.log.rename(removed.log.with_suffix(".old"))
            replaced.log.rename(replaced.log.with_suffix(".old"))
            replaced.log.touch()
            driver.send_signal(signal.SIGSTOP)
            daemon.comes_to(worker, "log_stalled", "not-a-hang:log-pipeline")
            daemon.listen(1.2 * STALL_AFTER)
            stalled = daemon.path(worker)[-1]
            driver.send_signal(signal.SIGCONT)
            daemon.comes_to(worker, "ok", "not-a-hang:busy")

            assert ("log_stalled", "not-a-hang:log-pipeline") == stalled
            assert [] == daemon.of("incident")
    finally:
        driver.kill()
        driver.wait()


def test_a_client_that_does_not_read_its_answer_is_no_hang_of_the_engine(tmp_path, serve):
    server = serve("unread", width=300_000, client_tokens=60)
    with watching(tmp_path, server) as daemon:
        server.suspend_clients()
        daemon.comes_to(server, "idle", "stalled-client")

        assert [] == daemon.alarms(server)


# --- hangs ---------------------------------------------------------------------------------------


def test_a_forward_that_never_ends_and_a_loop_that_is_blocked_are_told_apart(tmp_path, serve):
    polls, waits, blocked = serve("polls"), serve("waits"), serve("blocked")
    with watching(tmp_path, polls, waits, blocked) as daemon:
        for server, fault in ((polls, "kernel"), (waits, "await"), (blocked, "lock")):
            server.begin(fault)
        told = {
            server.name: daemon.becomes(server, "hung", cause=cause)["because"]
            for server, cause in (
                (blocked, "event-loop-blocked"),
                (waits, "await-never-completes"),
                (polls, "gpu-kernel-stuck"),
            )
        }
        causes = {cause for server in (polls, waits) for _, cause in daemon.path(server)}

    assert "health probe timed out" in " ".join(told["blocked"])
    assert "scheduler_tick has not advanced" in " ".join(told["polls"])
    assert "event-loop-blocked" not in causes


def test_a_blocked_loop_of_the_server_is_blocked_by_cpu_or_hung_in_a_lock(tmp_path, serve):
    computes, waits = serve("computes"), serve("waits")
    with watching(tmp_path, computes, waits) as daemon:
        computes.begin("api-spin")
        waits.begin("api-lock")
        daemon.comes_to(computes, "blocked", "event-loop-blocked-by-cpu")
        daemon.comes_to(waits, "hung", "event-loop-blocked")


# Not strict: which witness is seen last is left to chance.
def test_requests_that_use_up_the_limit_are_told_from_a_blocked_loop(tmp_path, serve):
    server = serve("full", max_concurrent_requests=4, client_whole=True)
    with watching(tmp_path, server) as daemon:
        server.begin("lose")
        daemon.becomes(server, "hung")
        with pytest.raises(TimeoutError):
            server.get("/health", timeout=1.0)
        daemon.listen(20.0)  # longer than a question to it takes

        assert ("hung", "concurrency-limit") == daemon.path(server)[-1]
        assert "event-loop-blocked" not in {cause for _, cause in daemon.path(server)}


def test_a_full_pipe_of_the_standard_output_is_the_cause(tmp_path, serve):
    server = serve("piped", tee=True, client_streams=16, client_tokens=1)
    with watching(tmp_path, server) as daemon:
        server.tee.send_signal(signal.SIGSTOP)
        daemon.comes_to(server, "hung", "stdout-pipe-full")


def test_a_killed_engine_is_dead_a_stopped_one_hung_and_a_forgotten_request_lost(tmp_path, serve):
    killed, stopped, forgetful = serve("killed"), serve("stopped"), serve("forgetful")
    with watching(tmp_path, killed, stopped, forgetful) as daemon:
        engine = stopped.engine_pid
        kill(killed.engine_pid)
        os.kill(engine, signal.SIGSTOP)
        forgetful.begin("lose")
        daemon.comes_to(killed, "dead", "child-dead")
        daemon.comes_to(stopped, "hung", "stopped-by-tracer")
        os.kill(engine, signal.SIGCONT)
        daemon.comes_to(forgetful, "hung", "lost-request")
        daemon.comes_to(stopped, "ok", "not-a-hang:busy")


def test_servers_with_plain_logs_of_their_own_are_told_apart(tmp_path, serve):
    hung, busy = serve("hung", ray=False), serve("busy", ray=False)
    with watching(tmp_path, hung, busy, log="*.log") as daemon:
        hung.begin("lock")
        daemon.comes_to(hung, "hung", "event-loop-blocked")

        assert [] == daemon.alarms(busy)


# --- how it is asked -----------------------------------------------------------------------------


def test_a_key_another_address_and_a_proxy_in_our_environment_do_not_blind_us(tmp_path, serve):
    server = serve("elsewhere", server_name="127.0.0.2", key="secret")
    with watching(tmp_path, server) as daemon:
        server.begin("lock")
        found = daemon.becomes(server, "hung", cause="event-loop-blocked")

    assert server.url.startswith("http://127.0.0.2:")
    assert "health probe timed out" in " ".join(found["because"])
    assert '"GET /metrics HTTP/1.1" 401' in server.log.read_text()


def test_redirects_are_not_followed(tmp_path, serve):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.0)
        server = serve("redirects", redirect=f"http://127.0.0.1:{trap.getsockname()[1]}")
        with Daemon(tmp_path, "watch", "--log", str(server.log)) as daemon:
            asked = re.compile(r'"GET /health HTTP/1.1" 307')
            wait_for(
                lambda: daemon.read(0.1) and len(asked.findall(server.log.read_text())) > 2,
                "questions",
            )

        with pytest.raises(BlockingIOError):
            trap.accept()


def asked(server: Served) -> dict[str, int]:
    """Return how often each path was asked for, by the server's own access log."""
    found: dict[str, int] = {}
    for path in re.findall(r'"GET (\S+) HTTP', server.log.read_text()):
        found[path] = found.get(path, 0) + 1
    return found
