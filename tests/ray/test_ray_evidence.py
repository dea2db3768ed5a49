"""A capture of a real Ray says who its workers are, and has Ray's own logs."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from captures import capture
from running import wait_for  # neighbours, found by the line above

from hangwatch.model.capture import FailureKind

pytestmark = [pytest.mark.needs_ptrace, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "integration" / "programs" / "ray_fleet.py"


@pytest.fixture(scope="module")
def captured() -> Iterator[dict[str, Any]]:
    """Give the fleet, the evidence by step, and the folder of a capture of its engine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'hangwatch[ray]'")
    # Sockets lie beneath it, and the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as path:
        told = Path(path) / "fleet.json"
        with subprocess.Popen(
            [sys.executable, str(PROGRAM), path, "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        ) as driver:
            try:
                wait_for(lambda: told.exists() or driver.poll() is not None, "the fleet", 120)
                fleet = json.loads(told.read_text())
                outcome, evidence = capture(fleet["engines"][0], output=Path(path) / "output")
                yield {"fleet": fleet, "evidence": evidence, "work": Path(outcome.work)}
            finally:
                driver.communicate(timeout=60)


def test_every_worker_has_the_names_that_ray_gave_it(captured: dict[str, Any]):
    fleet = captured["fleet"]
    session = json.loads((captured["work"] / "ray" / "session.json").read_text())
    names = {each["pid"]: each for each in session["workers"]}

    assert "RayEngineWorker" == names[fleet["engines"][0]]["actor_name"]
    assert "SharedStore" == names[fleet["store"]]["actor_name"]
    assert "run_lmdeploy_server_wrapper" == names[fleet["servers"][0]]["task_name"]
    assert names[fleet["engines"][0]]["title"].startswith("RayEngineWorker")


def test_the_session_is_that_of_the_raylet(captured: dict[str, Any]):
    session = json.loads((captured["work"] / "ray" / "session.json").read_text())

    assert any(
        each["raylet"] and each["arguments"]["node_id"] and "gcs_address" in each["arguments"]
        for each in session["sessions"]
    )


def test_plain_ray_has_no_dashboard_and_the_remedy_is_named(captured: dict[str, Any]):
    failure = captured["evidence"]["ray_state"].failure

    assert FailureKind.NOT_AVAILABLE == failure.kind
    assert "ray[default]" in failure.hint


def test_the_logs_of_ray_itself_are_there(captured: dict[str, Any]):
    work = captured["work"]
    names = {path.name for folder in ("logs", "ray") for path in (work / folder).iterdir()}
    engine = captured["fleet"]["engines"][0]

    assert {"raylet.out", "gcs_server.out", "log_monitor.log", "monitor.log"} <= names
    assert any(name.endswith(f"_{engine}.log") for name in names)
