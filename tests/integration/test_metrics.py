"""The daemon's own ``/metrics`` and ``/healthz``."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import Hangwatch, wait_for
from test_watch import ALARMED, beating, fleet, watch

from hangwatch.core.advance import advance
from hangwatch.core.fleet import State, begin
from hangwatch.daemon.metrics import Metrics
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import BeatSeen
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.system import leasing
from hangwatch.testing import FakeClock

__all__ = ["fleet"]

Values = dict[tuple[str, ...], float]


def parsed(text: str) -> Values:
    return {
        (
            sample.name.removeprefix("hangwatch_"),
            *dict(sorted(sample.labels.items())).values(),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(url: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(url + path, timeout=60.0) as answer:
        return answer.read().decode()


def values(daemon: Hangwatch) -> Values:
    return parsed(fetch(daemon.wait("listening")["url"]))


def idle(tmp_path: Path, listen: str = "127.0.0.1:0") -> Hangwatch:
    return watch(tmp_path, str(tmp_path / "nothing-yet.log"), "--listen", listen)


def test_a_daemon_that_has_seen_nothing_says_so(tmp_path):
    with idle(tmp_path) as daemon:
        daemon.wait("watching")
        found = values(daemon)
        health = fetch(daemon.wait("listening")["url"], "/healthz")
        daemon.end()

    assert "ok\n" == health
    assert {0.0} == {found["captures_total", kind] for kind in ("written", "failed", "withheld")}
    assert {0.0} == {value for key, value in found.items() if key[0] == "instances"}
    assert 12 == sum(key[0] == "instances" for key in found)
    assert 1.0 == next(value for key, value in found.items() if key[0] == "build_info")
    assert (0.0, 0.0, 0.0) == (
        found[("children_lost_total",)],
        found[("loop_pauses_total",)],
        found[("leases",)],
    )


@pytest.mark.slow
def test_a_hang_is_counted_by_verdict_and_cause(tmp_path, fleet):
    with watch(tmp_path, fleet.logs, "--listen", "[::1]:0") as daemon:
        beating(daemon, fleet)
        well = values(daemon)
        fleet.start_fault()
        incident = daemon.wait("incident")
        daemon.wait("bundle")
        hung = wait_for(
            lambda: (found := values(daemon))["captures_total", "written"] and found, "the count"
        )
        told = [(t["cause"], t["after"]) for t in daemon.of("transition")]
        daemon.end()

    names = {str(server["pid"]) for server in fleet.servers}
    assert (2.0, 0.0) == (well["instances", "ok"], well["captures_total", "written"])
    assert names == {key[1] for key in well if key[0] == "seconds_since_last_beat"}
    assert 1.0 == hung["incidents_total", incident["cause"], incident["verdict"]]
    assert 2.0 == sum(hung["instances", word] for word in ALARMED)
    assert all(hung["verdicts_total", *pair] <= told.count(pair) for pair in set(told))
    assert {2.0} <= {hung["verdicts_total", *pair] for pair in set(told)}


def test_a_lease_is_counted_while_it_is_held(tmp_path):
    with idle(tmp_path) as daemon:
        wait_for((tmp_path / "state" / leasing.SOCKET).exists, "the socket")
        leasing.take(600, ident="x", state=tmp_path / "state", timeout=30.0)
        wait_for(lambda: values(daemon)[("leases",)] == 1.0, "one lease")
        leasing.give_back("x", state=tmp_path / "state", timeout=30.0)
        wait_for(lambda: values(daemon)[("leases",)] == 0.0, "no lease")
        daemon.end()


def test_a_port_that_is_taken_ends_the_daemon_with_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with idle(tmp_path, address) as daemon:
            code = daemon.finish()

    assert 1 == code
    assert f"cannot listen at {address}: address already in use" in daemon.errors.decode()


def test_what_is_no_address_is_a_mistake_of_the_caller(tmp_path):
    with idle(tmp_path, ":9464") as daemon:
        assert 2 == daemon.finish()

    assert b"write 127.0.0.1:9464" in daemon.errors


def test_without_listen_the_client_library_is_not_loaded():
    code = "import sys, hangwatch.daemon.wiring; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert "False\n" == done.stdout


def scraped(state: State, clock: FakeClock) -> Values:
    metrics = Metrics(clock)
    metrics.publish(state, children_lost=0, loop_pauses=0, leases=0)
    return parsed(metrics.routes()["/metrics"]().body.decode())


def seen(*keys: InstanceKey) -> State:
    state = begin(Policy(), {PROFILE.name: PROFILE}, FakeClock().epoch(), Instant(0.0))
    beats = [Heartbeat(instance=key, at=Instant(1.0), source="a.log") for key in keys]
    return advance(state, [BeatSeen(beat=beat) for beat in beats], Instant(1.0))[0]


def test_ranks_of_one_process_are_told_apart_and_no_host_is_told():
    state = seen(
        InstanceKey(host="10.0.0.7", pid=5, tag="DP0"),
        InstanceKey(host="10.0.0.7", pid=5, tag="DP1"),
        InstanceKey(pid=6, tag="DP0"),
    )
    found = scraped(state, FakeClock(31.0))

    assert {"5 DP0": 30.0, "5 DP1": 30.0, "6": 30.0} == {
        key[1]: value for key, value in found.items() if key[0] == "seconds_since_last_beat"
    }


def test_the_name_of_a_log_that_is_no_text_costs_nothing_but_itself():
    found = scraped(seen(InstanceKey(tag='DP0 (a\udcff"\n.log)')), FakeClock(31.0))

    assert {'DP0 (a\ufffd" .log)': 30.0} == {
        key[1]: value for key, value in found.items() if key[0] == "seconds_since_last_beat"
    }


def test_the_number_of_series_is_bounded():
    found = scraped(seen(*(InstanceKey(pid=pid) for pid in range(1, 1000))), FakeClock(31.0))

    assert 512 == sum(key[0] == "seconds_since_last_beat" for key in found)
    assert 999.0 == found["instances", "ok"]


def test_a_loop_that_does_not_turn_is_not_healthy():
    clock = FakeClock()
    metrics = Metrics(clock)
    clock.sleep(31.0)

    assert (503, b"the loop has not turned for 31 s\n") == (
        (answer := metrics.routes()["/healthz"]()).status,
        answer.body,
    )
