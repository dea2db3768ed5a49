"""``hangwatch watch`` that is stopped, killed or started again in the middle of things."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from running import Hangwatch, kill, runs, state_of, wait_for
from test_watch import ALARMED, beating, bundles, fleet

pytestmark = pytest.mark.slow

__all__ = ["fleet"]

STALL = 3.0
AWAY = 8.0
"""Seconds; more than twice ``STALL``, and than a silent child is left alive."""


def watch(tmp_path: Path, logs: str) -> Hangwatch:
    return Hangwatch(
        *("watch", "--json", "--log-format", "json", "--log", logs),
        *("--heartbeat-interval", "1", "--stall-after", f"{STALL:g}"),
        *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state")),
        environment={"HANGWATCH_SAMPLE_GAP": "1", "HANGWATCH_CHILD_SILENCE": "2"},
    )


def stop(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(state_of(pid) == "T" for pid in pids), "the stop")


def go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def alarms(daemon: Hangwatch) -> list[dict[str, Any]]:
    return [told for told in daemon.of("transition") if told["after"] in ALARMED]


def began(told: dict[str, Any]) -> float:
    return datetime.fromisoformat(told["at"]).timestamp()


@pytest.mark.parametrize("who", ["the daemon", "all, the daemon first", "all, the daemon last"])
def test_who_was_stopped_for_long_raises_no_alarm_and_catches_the_next_hang(tmp_path, fleet, who):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        daemon.child("hangwatch.daemon.prober")
        children = [] if who == "the daemon" else [*daemon.children()]
        family = [*children, daemon.pid] if who.endswith("last") else [daemon.pid, *children]
        stop(family)
        time.sleep(AWAY)  # what is tested is that time passes
        go_on(family)
        wait_for(lambda: daemon.read() and b"hangwatch.loop_paused" in daemon.errors, "the pause")
        fleet.start_fault()
        truth = fleet.truth()
        daemon.wait("bundle")
        daemon.end()

    (incident,) = daemon.of("incident")
    assert truth["at_wall"] is not None
    assert began(incident) > datetime.fromisoformat(truth["at_wall"]).timestamp()
    assert {str(server["pid"]) for server in fleet.servers} == {
        told["instance"] for told in alarms(daemon)
    }
    assert b"hangwatch.child_lost" not in daemon.errors
    assert 1 == len(bundles(tmp_path))


def test_a_hang_that_began_while_the_daemon_was_stopped_is_caught_once(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        stop([daemon.pid])
        fleet.start_fault()
        fleet.truth()
        time.sleep(AWAY)  # what is tested is that time passes
        go_on([daemon.pid])
        daemon.wait("bundle")
        daemon.end()

    assert 1 == len(daemon.of("incident"))
    assert 1 == len(bundles(tmp_path))


def test_a_daemon_killed_before_it_hears_of_its_bundle_is_followed_by_one_that_finds_it(
    tmp_path, fleet
):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("capture", part="bundling")
        stop([daemon.pid])
        (bundle,) = wait_for(lambda: bundles(tmp_path), "the bundle")
        children = daemon.children()
        kill(daemon.pid)
        wait_for(lambda: not any(runs(pid) for pid in children), "the end of its children")
    alarmed_again(tmp_path, fleet)

    assert [bundle] == bundles(tmp_path)


def test_a_daemon_killed_as_soon_as_its_bundle_is_told_leaves_no_work_to_the_next(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        daemon.wait("bundle")
        kill(daemon.pid)
    alarmed_again(tmp_path, fleet)

    assert 1 == len(bundles(tmp_path))


def test_a_daemon_killed_over_and_over_while_it_captures_leaves_one_bundle(tmp_path, fleet):
    with watch(tmp_path, fleet.logs) as daemon:
        beating(daemon, fleet)
        fleet.start_fault()
        first = daemon.wait("incident")["incident"]
        kill(daemon.pid)
    with watch(tmp_path, fleet.logs) as daemon:
        daemon.wait("capture", part="first sample")
        kill(daemon.pid)
    with watch(tmp_path, fleet.logs) as daemon:
        bundle = daemon.wait("bundle")
        daemon.end()
    alarmed_again(tmp_path, fleet)

    assert first == bundle["incident"]
    assert 1 == len(bundles(tmp_path))


def alarmed_again(tmp_path: Path, fleet: Any) -> None:
    """Return when another daemon has seen every server hang, and had time to capture."""
    with watch(tmp_path, fleet.logs) as daemon:
        for server in fleet.servers:
            name = str(server["pid"])
            wait_for(
                lambda name=name: [told for told in alarms(daemon) if told["instance"] == name],
                "an alarm",
            )
        assert 0 == daemon.end()
        assert [] == daemon.of("incident")
