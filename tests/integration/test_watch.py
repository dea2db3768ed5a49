"""``hangwatch watch`` on servers that really hang."""

from __future__ import annotations

import json
import re
import signal
import socket
import tarfile
from pathlib import Path

import pytest
from running import Hangwatch, kill, runs, wait_for

from hangwatch.lab.launch import Fleet, Server

pytestmark = pytest.mark.slow

QUICK = ("--heartbeat-interval", "1", "--stall-after", "6", "--json", "--log-format", "json")


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path / "ray", "--fault", "blocked-call", servers=2) as running:
        running.wait_ready()
        yield running


ALARMED = {"suspected_hang", "hung", "blocked", "dead"}


def watch(tmp_path: Path, logs: str | None, *more: str, gap: int = 1) -> Hangwatch:
    arguments = ["watch", *QUICK, "--output", str(tmp_path / "out"), "--state"]
    arguments += [str(tmp_path / "state"), *(("--log", logs) if logs else ()), *more]
    return Hangwatch(*arguments, environment={"HANGWATCH_SAMPLE_GAP": str(gap)})


def beating(daemon: Hangwatch, fleet: Fleet) -> None:
    """Return when every server was seen to work."""
    for server in fleet.servers:
        daemon.wait("transition", pid=server["pid"], after="ok")


def alarmed(daemon: Hangwatch, fleet: Fleet) -> None:
    """Return when an alarm was raised for every server."""
    for server in fleet.servers:
        wait_for(
            lambda pid=server["pid"]: [
                t for t in daemon.of("transition") if t["pid"] == pid and t["after"] in ALARMED
            ],
            "an alarm",
        )


def bundles(tmp_path: Path) -> list[Path]:
    """Return what looks like a bundle."""
    return sorted((tmp_path / "out").glob("*.tar.gz"))


def names(bundle: Path) -> set[str]:
    with tarfile.open(bundle) as tar:
        return set(tar.getnames())


def test_servers_that_hang_together_are_one_incident_with_one_whole_bundle(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        truth = fleet.truth()
        bundle = daemon.wait("bundle")
        code = daemon.end()

    assert 0 == code
    assert [bundle["bundle"]] == [str(path) for path in bundles(tmp_path)]
    assert 1 == len(daemon.of("incident"))
    (incident,) = daemon.of("incident")
    pids = {str(server["pid"]) for server in fleet.servers}
    last = {t["instance"] for t in daemon.of("transition") if t["after"] in ALARMED}
    assert pids == last
    assert incident["watched"] == 2
    assert truth["fault"] == "blocked-call"
    assert bundle["verdict"] in ALARMED
    assert any(name.endswith("threads.json") for name in names(bundles(tmp_path)[0]))
    assert all(runs(server["pid"]) for server in fleet.servers)


def test_sigterm_ends_it_with_all_its_children_and_nothing_else(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        children = wait_for(lambda: daemon.children() if len(daemon.children()) > 1 else None)
        code = daemon.end()
        wait_for(lambda: not any(runs(pid) for pid in children))

    assert 0 == code
    assert all(runs(server["pid"]) for server in fleet.servers)


def test_killed_children_are_replaced_and_the_hang_is_caught_all_the_same(tmp_path, fleet):
    modules = ("hangwatch.daemon.follower", "hangwatch.daemon.prober")
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        killed = [daemon.child(module) for module in modules]
        for pid in killed:
            kill(pid)
        for module, pid in zip(modules, killed, strict=True):
            wait_for(lambda m=module, p=pid: set(daemon.children(m)) - {p}, f"a new {module}")
        fleet.start_fault()
        daemon.wait("bundle")
        daemon.end()

    assert 1 == len(bundles(tmp_path))


def test_a_killed_conductor_is_replaced_and_leaves_one_bundle(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("capture", part="first sample")
        kill(daemon.child("hangwatch.capture.conductor"))
        whole = bundles(tmp_path)
        daemon.wait("bundle")
        daemon.end()

    assert [] == whole
    assert 1 == len(bundles(tmp_path))
    assert all(runs(server["pid"]) for server in fleet.servers)


@pytest.mark.parametrize("moment", ["first sample", "bundling"])
def test_a_killed_daemon_takes_its_children_along_and_the_next_one_captures(
    tmp_path, fleet, moment
):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("capture", part=moment)
        children = daemon.children()
        kill(daemon.pid)
        wait_for(lambda: not any(runs(pid) for pid in children), "the end of its children")
        left = bundles(tmp_path)
    with watch(tmp_path, fleet.logs) as daemon:
        for server in fleet.servers:
            daemon.wait("transition", pid=server["pid"], after="hung")
        if not left:
            daemon.wait("bundle")
        code = daemon.end()

    assert children
    assert 0 == code
    assert bundles(tmp_path)
    for bundle in bundles(tmp_path):
        assert "manifest.json" in str(names(bundle))
    assert all(runs(server["pid"]) for server in fleet.servers)


def test_a_service_manager_hears_when_it_watches_and_when_it_ends(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60.0)
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1500000"}
        with Hangwatch(
            *("watch", "--json", "--log", "nothing-yet.log", "--output", str(tmp_path / "out")),
            *("--state", str(tmp_path / "state")),
            environment=environment,
        ) as daemon:
            words = [manager.recv(1000) for _ in range(4)]
            daemon.end()
            while words[-1] != b"STOPPING=1":
                words.append(manager.recv(1000))

    assert b"READY=1" == words[0]
    assert {b"WATCHDOG=1", b"STATUS=watching 0 logs"} <= set(words)


def test_a_daemon_that_is_started_again_does_not_capture_an_incident_twice(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("bundle")
        daemon.end()
    with watch(tmp_path, fleet.logs) as daemon:
        alarmed(daemon, fleet)
        daemon.end()

    assert 1 == len(bundles(tmp_path))


def test_sigterm_during_a_capture_finishes_the_bundle(tmp_path, fleet):
    with watch(tmp_path, fleet.logs, gap=30) as daemon:  # SIGTERM cuts the pause short
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("capture", part="pause")
        code = daemon.end()

    assert 0 == code
    assert [b["bundle"] for b in daemon.of("bundle")] == [str(p) for p in bundles(tmp_path)]
    assert 1 == len(bundles(tmp_path))


def test_without_a_log_the_ray_session_is_found_and_followed(tmp_path, fleet):
    with watch(tmp_path, None) as daemon:
        beating(daemon, fleet)
        assert 0 == daemon.end()


def test_a_single_log_leads_to_the_server_that_writes_it(tmp_path):
    with Server(tmp_path) as server, watch(tmp_path, str(server.log)) as daemon:
        daemon.wait("transition", instance="DP0", after="ok")
        wait_for(lambda: b"server_found" in (daemon.read() and daemon.errors), "the address")
        daemon.end()

    assert server.url.encode() in daemon.errors


def test_a_second_daemon_on_the_same_state_directory_refuses(tmp_path):
    with watch(tmp_path, "nothing-yet.log") as first:
        first.wait("watching")
        with watch(tmp_path, "nothing-yet.log") as second:
            code = second.finish()
        first.end()

    assert 1 == code
    assert re.fullmatch(
        rb"hangwatch: another hangwatch \(pid \d+\) uses the state directory .*--state\n",
        second.errors,
    )


def test_ctrl_c_ends_it_well(tmp_path):
    with watch(tmp_path, "nothing-yet.log") as daemon:
        daemon.wait("watching")

        assert 0 == daemon.end(signal.SIGINT)


def test_what_would_have_been_captured_is_written_down_and_captured_by_who_may(tmp_path, fleet):
    with watch(tmp_path, fleet.logs, "--observe-only") as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        withheld = daemon.wait("withheld")
        conductors = daemon.children("hangwatch.capture")
        code = daemon.end()
        said = daemon.errors
    observed = bundles(tmp_path)
    (record,) = (tmp_path / "state" / "shadow.jsonl").read_text().splitlines()
    with watch(tmp_path, fleet.logs) as daemon:
        bundle = daemon.wait("bundle")
        daemon.end()

    pids = {server["pid"] for server in fleet.servers}
    assert (0, [], {}) == (code, observed, conductors)
    assert withheld == json.loads(record)
    assert pids == {member["pid"] for member in withheld["instances"]}
    assert pids <= set(withheld["processes"])
    assert withheld["verdict"] in ALARMED
    assert withheld["because"]
    assert b'"captures_withheld": 1' in said
    assert withheld["incident"] == bundle["incident"]
    assert all(runs(pid) for pid in pids)


def test_an_observer_that_is_started_again_does_not_withhold_twice(tmp_path, fleet):
    with watch(tmp_path, fleet.logs, "--observe-only") as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("withheld")
        daemon.end()
    with watch(tmp_path, fleet.logs, "--observe-only") as daemon:
        alarmed(daemon, fleet)
        daemon.end()

    assert 1 == len((tmp_path / "state" / "shadow.jsonl").read_text().splitlines())
    assert b'"captures_withheld": 0' in daemon.errors


STARVED = {"HANGWATCH_JOB_RUNNING": "true", "HANGWATCH_STARVED_AFTER": "4"}
RETRY = "2026-03-04 10:00:07,120 - rollout - WARNING - Connection refused, retrying in 5 seconds\n"


def test_a_fleet_that_starves_is_a_notice_with_a_light_capture_that_quotes_its_producer(tmp_path):
    driver = tmp_path / "driver.log"
    driver.write_text(RETRY)
    arguments = ["watch", *QUICK, "--output", str(tmp_path / "out"), "--state"]
    arguments += [str(tmp_path / "state"), "--log", str(driver)]
    with Fleet(tmp_path / "ray", "--fault", "idle", servers=2) as fleet:
        fleet.wait_ready()
        with Hangwatch(*arguments, "--log", fleet.logs, environment=STARVED) as daemon:
            beating(daemon, fleet)
            fleet.start_fault()
            incident = daemon.wait("incident")
            bundle = daemon.wait("bundle")
            daemon.end()

    files = names(Path(bundle["bundle"]))
    said = _member(Path(bundle["bundle"]), "REPORT.md")
    assert ("idle", "starved-upstream", 2) == (
        incident["verdict"],
        incident["cause"],
        incident["watched"],
    )
    assert [] == [e for e in daemon.events if e.get("after") in ALARMED]
    assert "retrying in 5 seconds" in said
    assert not any(name.endswith("threads.json") for name in files)
    assert any(name.endswith("tasks.json") for name in files)


def _member(bundle: Path, ending: str) -> str:
    with tarfile.open(bundle) as tar:
        name = next(name for name in tar.getnames() if name.endswith(ending))
        found = tar.extractfile(name)
        assert found is not None
        return found.read().decode()
