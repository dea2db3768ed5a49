"""The baseline ring and the bundle of a run, by a real daemon on real servers."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from captures import CLOCK, request_for
from processes import python
from running import Hangwatch, wait_for

from hangwatch.capture import bundle
from hangwatch.capture.manifest import Manifest
from hangwatch.capture.run import run
from hangwatch.core.baseline import NODE, Look
from hangwatch.lab.launch import Fleet
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs
from hangwatch.system.clock import boot_id
from hangwatch.system.looks import Ring

pytestmark = [pytest.mark.slow, pytest.mark.needs_ptrace]

OFTEN = {
    "HANGWATCH_BASELINE_INTERVAL": "1",
    "HANGWATCH_BASELINE_LOAD": "10000",
    "HANGWATCH_SAMPLE_GAP": "1",
}


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path / "ray", "--fault", "blocked-call", servers=2) as running:
        running.wait_ready()
        yield running


def watch(tmp_path: Path, fleet: Fleet, *more: str, **environment: str) -> Hangwatch:
    return Hangwatch(
        *("watch", "--json", "--log-format", "json", "--log", fleet.logs),
        *("--heartbeat-interval", "1", "--stall-after", "6"),
        *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state"), *more),
        environment={**OFTEN, **environment},
    )


def works(daemon: Hangwatch, fleet: Fleet) -> None:
    for server in fleet.servers:
        daemon.wait("transition", pid=server["pid"], after="ok")


def logged(daemon: Hangwatch, event: str) -> list[dict[str, Any]]:
    daemon.read()
    told = [json.loads(line) for line in daemon.errors.splitlines() if line.startswith(b"{")]
    return [line for line in told if line["event"] == f"hangwatch.{event}"]


def taken(daemon: Hangwatch, count: int) -> None:
    wait_for(lambda: len(logged(daemon, "baseline_taken")) >= count, f"{count} looks")


def looked_at(ring: Ring) -> Counter[ProcessId]:
    return Counter(look.process for look in ring.looks if look.process != NODE)


def members(bundle: str) -> dict[str, bytes]:
    with tarfile.open(bundle) as tar:
        found = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        return {name.split("/", 1)[1]: file.read() for name, file in found.items() if file}


def test_looks_at_working_engines_are_kept_and_enter_the_bundle_of_a_later_hang(tmp_path, fleet):
    ring = Ring(tmp_path / "state")
    engines = {procfs.identify(server["engine_pid"]) for server in fleet.servers}
    with watch(tmp_path, fleet) as daemon:
        works(daemon, fleet)
        taken(daemon, 8)
        kept = looked_at(ring)
        reads = logged(daemon, "target_read")
        fleet.start_fault()
        told = daemon.wait("bundle")
        after = ring.looks
        assert 0 == daemon.end()
    files = members(told["bundle"])
    manifest = Manifest.model_validate_json(files["manifest.json"])

    assert engines <= kept.keys()
    assert 6 == max(kept.values())
    assert {(p.pid, p.start_ticks) for p in engines} <= {
        (line["pid"], line["start_ticks"]) for line in reads if line["incident"] == "baseline"
    }
    assert {0o600} == {
        stat.S_IMODE(path.stat().st_mode)
        for folder in (ring.folder, ring.known)
        for path in folder.iterdir()
    }
    # It is still there for the next capture, and the hang itself is not among the looks.
    assert all(look.at < manifest.clocks.monotonic + 60 for look in after)
    entries = {(each.pid, each.start_ticks): each for each in manifest.baseline if each.pid}
    for engine in engines:
        entry = entries[engine.pid, engine.start_ticks]
        document = json.loads(files[entry.path])
        assert [look.at for look in entry.samples] == [s["at"] for s in document["samples"]]
        assert {"ok"} == {look.verdict for look in entry.samples}
        newest = document["samples"][0]
        functions = {frame["function"] for frame in newest["frames"]}
        assert any(function.endswith("async_loop") for function in functions)
        assert sum(group["count"] for group in newest["tasks"]) > 0


def test_the_ring_outlives_the_daemon_and_forgets_who_is_gone(tmp_path, fleet):
    ring = Ring(tmp_path / "state")
    with watch(tmp_path, fleet) as daemon:
        works(daemon, fleet)
        taken(daemon, 2)
        daemon.process.kill()
    before = looked_at(ring)
    gone = fleet.servers[0]
    with watch(tmp_path, fleet) as daemon:
        works(daemon, fleet)
        taken(daemon, 1)
        later = looked_at(ring)
        assert 0 == daemon.end()

    assert before.keys() <= later.keys()
    assert all(later[process] >= before[process] for process in before)
    assert gone["pid"] in {process.pid for process in later}


def test_a_ring_of_another_boot_is_dropped(tmp_path):
    ring = Ring(tmp_path)
    ring.open("another boot")
    (ring.folder / "1-2.3.ok.json.gz").write_bytes(b"old")
    (ring.known / "1-2.known").write_bytes(b"old")
    ring.open(boot_id())

    assert ["boot"] == [path.name for path in ring.folder.iterdir()]
    assert [] == list(ring.known.iterdir())
    assert () == ring.looks


def test_what_a_look_holds_is_redacted_in_a_bundle(tmp_path):
    ring = Ring(tmp_path / "state")
    ring.open(boot_id())
    secret = "sk-proj-Zq7Yw2Lm9Kx4Vb8Nc3Td6Rf1"
    ours = procfs.identify(os.getpid())
    ring.write(
        Look(process=ours, at=CLOCK.now(), word="ok"),
        {
            "pid": ours.pid,
            "start_ticks": ours.start_ticks,
            "role": "engine",
            "at": "2026-01-01T00:00:00+00:00",
            "verdict": "ok",
            "frames": [{"function": "step", "file": "/srv/engine.py", "line": 41}],
            "threads": [{"tid": 7, "name": f"fetch https://u:{secret}@host.example/x"}],
        },
    )
    with python("") as it:
        request = request_for(it.pid, output=tmp_path, state=str(tmp_path / "state"))
        outcome = run(request, clock=CLOCK)
        written = bundle.write(outcome, request, clock=CLOCK)
    found = members(str(written.path))

    look = found[f"baseline/engine-{ours.pid}.json"].decode()
    assert '"line": 41' in look
    assert secret not in b"".join(found.values()).decode("utf-8", "replace")


def test_who_only_observes_reads_no_memory_and_records_no_run(tmp_path, fleet):
    with watch(tmp_path, fleet, "--observe-only", HANGWATCH_RUN_BUNDLE="true") as daemon:
        works(daemon, fleet)
        fleet.start_fault()
        daemon.wait("withheld")
        assert 0 == daemon.end()
        reads = logged(daemon, "target_read")

    assert [] == reads
    assert not (tmp_path / "state" / "baseline").exists()
    assert [] == list((tmp_path / "out").glob("*.tar.gz"))


def test_the_end_of_a_healthy_run_leaves_a_bundle_that_says_so(tmp_path, fleet):
    with watch(tmp_path, fleet, HANGWATCH_RUN_BUNDLE="true") as daemon:
        works(daemon, fleet)
        taken(daemon, 1)
        assert 0 == daemon.end()
        told = daemon.wait("bundle", incident="run")
    files = members(told["bundle"])
    manifest = Manifest.model_validate_json(files["manifest.json"])

    assert "run" == manifest.kind
    assert "ok" == told["verdict"]
    assert "no incident was open" in files["REPORT.md"].decode()
    assert b"Avg thr" in b"".join(d for name, d in files.items() if name.startswith("logs/"))
    assert len(files["history/beats.csv"].splitlines()) > 2
    assert {server["engine_pid"] for server in fleet.servers} <= {
        each.pid for each in manifest.baseline
    }
    assert not any(step.step.startswith(("stacks/", "native/")) for step in manifest.steps)


def test_a_run_whose_servers_have_ended_is_recorded_without_them(tmp_path, fleet):
    with watch(tmp_path, fleet, HANGWATCH_RUN_BUNDLE="true") as daemon:
        works(daemon, fleet)
        fleet.stop()
        assert 0 == daemon.end()
        bundles = daemon.of("bundle")

    # Whether the end of the servers was still seen as an incident is a matter of milliseconds.
    assert len(bundles) <= 1


def test_a_grace_period_that_is_too_short_for_it_is_not_begun(tmp_path, fleet):
    with watch(tmp_path, fleet, HANGWATCH_RUN_BUNDLE="true", HANGWATCH_GRACE="2") as daemon:
        works(daemon, fleet)
        assert 0 == daemon.end()

    assert [] == daemon.of("recording")
    assert [] == list((tmp_path / "out").glob("*.tar.gz"))
