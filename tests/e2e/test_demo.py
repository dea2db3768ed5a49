"""The demo: servers that really hang, from the first beat to the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hangwatch.lab import faults
from hangwatch.lab.faults import await_never

INTERVAL = 1.0

pytestmark = pytest.mark.slow


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "hangwatch", "demo", *arguments),
            *("--output", str(folder / "bundles")),
        ],
        capture_output=True,
        text=True,
        timeout=170.0,
        check=False,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder), "HOME": str(folder)},
    )


def instants(result: dict[str, Any]) -> tuple[datetime, datetime, datetime, datetime]:
    """When it could have happened, by the report; when it did happen, first and last."""
    earliest, latest = (datetime.fromisoformat(stamp) for stamp in result["window"])
    truth = result["truth"]
    first, last = (datetime.fromisoformat(truth[key]) for key in ("at_wall", "last_at_wall"))
    return earliest, first, last, latest


@pytest.mark.needs_ptrace
def test_eight_servers_that_freeze_are_caught_and_explained(tmp_path):
    done = demo(tmp_path, "--json")
    assert 0 == done.returncode, done.stderr
    result = json.loads(done.stdout)
    earliest, first, last, latest = instants(result)
    bundle = Path(result["bundle"])
    written = list((tmp_path / "bundles").iterdir())
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
    report = subprocess.run(
        [sys.executable, "-m", "hangwatch", "report", str(bundle)],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    ).stdout

    assert "hung" == result["verdict"]
    assert ["hung"] * 8 == [instance["verdict"] for instance in result["instances"]]
    # A beat is as late as the machine is busy, and missing after one and a half intervals.
    late = timedelta(seconds=INTERVAL / 2)
    assert earliest <= first <= last <= latest + late
    assert latest - earliest <= timedelta(seconds=INTERVAL) + late
    assert result["truth"]["frame"] in result["culprit"]["frame"]
    assert "SharedStore.get (faults/blocked_call.py:" in report
    assert [bundle] == written
    engines = {re.search(r"processes/engine-(\d+)/threads.json", name) for name in names} - {None}
    assert {server["pid"] for server in result["truth"]["servers"]} == {
        int(match[1]) for match in engines
    }
    for pid in (instance["pid"] for instance in result["instances"]):
        assert not Path(f"/proc/{pid}").exists()
    assert ["bundles"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.needs_ptrace
def test_an_await_that_never_completes_is_named_with_its_line(tmp_path):
    source = Path(await_never.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, start=1) if "await event.wait()" in text)

    done = demo(tmp_path, "await-never", "--servers", "2", "--json")
    assert 0 == done.returncode, done.stderr
    result = json.loads(done.stdout)
    (finding,) = [f for f in result["findings"] if f["rule"] == "await-never-completes"]

    assert ("hung", "await-never-completes") == (result["verdict"], result["cause"])
    assert "ModelAgent.wait_for_event" == result["truth"]["frame"] == result["culprit"]["frame"]
    assert f"ModelAgent.wait_for_event (faults/await_never.py:{line})" in finding["sentence"]
    assert "task ModelAgentLoop" in finding["sentence"]
    assert "an event that nobody sets" in finding["sentence"]
    with tarfile.open(result["bundle"]) as archive:
        names = archive.getnames()
    for process in result["truth"]["servers"]:
        for name in ("tasks.json", "tasks2.json"):
            assert any(n.endswith(f"processes/engine-{process['pid']}/{name}") for n in names)


def test_idle_servers_raise_no_alarm(tmp_path):
    done = demo(tmp_path, "idle", "--servers", "3")

    assert 0 == done.returncode
    told = [line[9:] for line in done.stderr.splitlines()]
    assert [
        "3 servers print heartbeats and have work",
        f"injected idle: {faults.load('idle').title}",
    ] == told
    assert "No alarm in 20 s of it. All 3 servers are: idle (not-a-hang:idle)." in done.stdout
    assert [] == list((tmp_path / "bundles").iterdir())


@pytest.mark.skipif(
    not faults.load("collective-gloo").unavailable(), reason="torch is installed here"
)
def test_a_fault_that_cannot_happen_here_is_said_to(tmp_path):
    done = demo(tmp_path, "collective-gloo")

    assert 2 == done.returncode
    assert "collective-gloo cannot happen here: torch is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_fault_is_a_mistake_of_usage(tmp_path):
    done = demo(tmp_path, "earthquake")

    assert 2 == done.returncode
    assert "blocked-call" in done.stderr
    assert "Traceback" not in done.stderr
