"""Finding out whom to watch, from real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch.daemon import discovery
from hangwatch.daemon.search import ask_kin
from hangwatch.lab.launch import Fleet, Server
from hangwatch.model.identity import Role
from hangwatch.profiles.lmdeploy import PROFILE


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with Fleet(tmp_path_factory.mktemp("ray"), servers=2) as running:
        running.wait_ready()
        yield running


def test_the_kin_of_a_server_are_its_engine_its_log_and_its_address(server):
    kin = ask_kin(server.pid, (PROFILE,))

    roles = {target.process.pid: target.role for target in kin.targets}
    assert (server.pid,) == kin.servers
    assert Role.ENGINE is roles[server.engine_pid]
    assert [(str(server.log), server.pid)] == [(owner.log, owner.pid) for owner in kin.logs]
    addresses = [x.url for t in kin.targets for x in t.listeners if t.process.pid == server.pid]
    assert server.url in addresses


def test_the_kin_of_an_engine_are_its_servers(server):
    assert (server.pid,) == ask_kin(server.engine_pid, (PROFILE,)).servers


def test_a_log_belongs_to_the_server_that_writes_it_not_to_the_engine_that_inherited_it(server):
    (owner,) = discovery.owners([str(server.log)], (PROFILE,))

    assert server.pid == owner.pid


def test_a_log_that_nobody_writes_has_no_owner(tmp_path):
    log = tmp_path / "old.log"
    log.write_text("")

    assert [None] == [owner.pid for owner in discovery.owners([str(log)], (PROFILE,))]


def test_a_log_behind_a_pipe_belongs_to_whoever_writes_into_the_pipe(tmp_path):
    read, write = os.pipe()
    log = tmp_path / "server.log"
    with (
        subprocess.Popen(["tee", str(log)], stdin=read, stdout=subprocess.DEVNULL) as tee,
        Server(tmp_path, stdout=write) as server,
    ):
        os.close(read)
        os.close(write)
        kin = ask_kin(server.pid, (PROFILE,))
        server.stop()
        tee.wait(30)

    assert str(log) in [owner.log for owner in kin.logs]


def test_a_log_that_was_deleted_is_read_through_its_descriptor(tmp_path):
    log = tmp_path / "gone.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            stdout=out,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        log.unlink()
        kin = ask_kin(process.pid, (PROFILE,))
        process.kill()

    assert [f"/proc/{process.pid}/fd/1"] == [owner.log for owner in kin.logs]


def test_a_process_that_does_not_exist_is_a_problem_with_a_remedy():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass

    assert "there is no process" in ask_kin(process.pid, (PROFILE,)).problem


def test_a_ray_session_is_found_by_its_raylet(fleet):
    sessions = {session.raylet: session for session in discovery.ray_sessions()}

    found = sessions[fleet.pid]
    assert found.reachable
    assert (fleet.logs,) == found.logs


def test_every_server_of_a_session_is_kin_of_each(fleet):
    kin = ask_kin(fleet.servers[0]["pid"], (PROFILE,))

    assert {server["pid"] for server in fleet.servers} <= {t.process.pid for t in kin.targets}
    assert {server["pid"] for server in fleet.servers} == set(kin.servers)
    assert {(server["log"], server["pid"]) for server in fleet.servers} <= {
        (owner.log, owner.pid) for owner in kin.logs
    }


def test_workers_whose_folder_is_not_mounted_here_are_read_through_their_descriptors(
    fleet, monkeypatch
):
    monkeypatch.setattr(discovery, "_same", lambda here, there: False)
    sessions = {session.raylet: session for session in discovery.ray_sessions()}

    found = sessions[fleet.pid]
    assert not found.reachable
    assert {str(Path(path).resolve()) for path in found.logs} == {
        server["log"] for server in fleet.servers
    }
