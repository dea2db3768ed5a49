"""``hangwatch snapshot`` of servers that nothing is wrong with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from hangwatch.lab.launch import Fleet

pytestmark = pytest.mark.needs_ptrace


def snapshot(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HANGWATCH_")}
    return subprocess.run(
        [
            *(sys.executable, "-m", "hangwatch", "snapshot", *arguments),
            *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state")),
        ],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**clean, "HANGWATCH_SAMPLE_GAP": "1", "HANGWATCH_HEARTBEAT_INTERVAL": "1"},
    )


def test_a_healthy_server_is_bundled_as_a_run_and_the_report_reads_it(tmp_path, healthy):
    done = snapshot(tmp_path, "--pid", str(healthy.engine_pid), "--json")
    assert 0 == done.returncode, done.stderr
    result = json.loads(done.stdout)
    schema = files("hangwatch") / "schemas" / "hangwatch.snapshot.1.schema.json"
    with tarfile.open(result["bundle"]) as tar:
        held = {member.name.split("/", 1)[1]: member for member in tar if member.isfile()}
        manifest = json.load(tar.extractfile(held["manifest.json"]))
        issue = tar.extractfile(held["issue.md"]).read().decode()
    report = subprocess.run(
        [sys.executable, "-m", "hangwatch", "report", result["bundle"], "--format", "markdown"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    diagnosed = subprocess.run(
        [sys.executable, "-m", "hangwatch", "diagnose", result["bundle"], "--json"],
        check=False,
        capture_output=True,
        text=True,
    )

    jsonschema.validate(result, json.loads(schema.read_text()))
    assert "ok" == result["verdict"]
    assert {healthy.pid, healthy.engine_pid} <= {each["pid"] for each in result["processes"]}
    assert {0.0} == set(result["pause_ms"].values())
    assert "run" == manifest["kind"]
    assert f"processes/engine-{healthy.engine_pid}/tasks2.json" in held
    assert not any(name.rsplit("/", 1)[1].startswith("threads") for name in held if "/" in name)
    for text in (report, issue):
        assert "no incident was open" in text
    assert 0 == diagnosed.returncode
    assert "ok" == json.loads(diagnosed.stdout)["verdict"]


def test_for_people_it_prints_who_was_looked_at_and_the_path_alone_on_standard_output(
    tmp_path, healthy
):
    done = snapshot(tmp_path, "--pid", str(healthy.pid), "--pid", str(healthy.engine_pid))

    assert 0 == done.returncode, done.stderr
    assert [str(path) for path in (tmp_path / "out").glob("*.tar.gz")] == done.stdout.split()
    assert 1 == done.stderr.count(f" {healthy.engine_pid} ")
    assert "verdict: ok" in done.stderr


def test_an_engine_is_found_where_none_is_named(tmp_path):
    with Fleet(tmp_path / "ray", servers=1) as fleet:
        fleet.wait_ready()
        done = snapshot(tmp_path, "--json")

    assert 0 == done.returncode, done.stderr
    found = {each["pid"] for each in json.loads(done.stdout)["processes"]}
    assert {fleet.servers[0]["pid"], fleet.servers[0]["engine_pid"]} <= found


def test_a_process_that_does_not_exist_is_an_error_with_its_number(tmp_path):
    done = snapshot(tmp_path, "--pid", "4194303")

    assert 1 == done.returncode
    assert "4194303" in done.stderr
    assert "" == done.stdout


def test_where_no_engine_runs_the_next_thing_to_type_is_said(tmp_path):
    done = subprocess.run(
        [
            *("unshare", "--fork", "--pid", "--mount-proc"),
            *(sys.executable, "-m", "hangwatch", "snapshot"),
            *("--output", str(tmp_path), "--state", str(tmp_path)),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no namespaces to be had here: {done.stderr.strip()}")

    assert 1 == done.returncode
    assert "--pid" in done.stderr
