"""The product on a real Ray: a rollout fleet in XTuner's shape whose shared store blocks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from running import Hangwatch, wait_for  # a neighbour, found by the line above

pytestmark = [
    pytest.mark.needs_ptrace,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PROGRAM = Path(__file__).parents[1] / "integration" / "programs" / "ray_fleet.py"
SERVERS = 8


class Ray:
    """A Ray with a fleet on it; ends with its driver.

    Attributes:
        fleet: The pids by what they are: ``servers``, ``engines``, ``workers``, ``store``,
            ``driver``.
    """

    def __init__(self, folder: Path, servers: int) -> None:
        told = folder / "fleet.json"
        told.unlink(missing_ok=True)
        (folder / "fault").unlink(missing_ok=True)
        self.folder = folder
        self.driver = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(servers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        )
        wait_for(lambda: told.exists() or self.driver.poll() is not None, "the fleet", 120)
        assert self.driver.poll() is None, "the fleet did not start"
        self.fleet: dict[str, Any] = json.loads(told.read_text())

    def block(self) -> None:
        """Let the store answer nothing any more."""
        (self.folder / "fault").touch()

    def end(self) -> None:
        """Shut it down, as at the end of a job."""
        self.driver.communicate(timeout=60)


def scenario(folder: Path) -> dict[str, Any]:
    """Watch a small Ray that ends and a large one whose store blocks; return what was said."""
    ray: Ray | None = None
    with Hangwatch(
        *("watch", "--json", "--heartbeat-interval", "1"),
        *("--output", str(folder / "bundles"), "--state", str(folder / "state")),
    ) as watch:
        try:
            first = ray = Ray(folder, 1)
            (old,) = first.fleet["servers"]
            watch.wait("transition", pid=old, after="ok")
            wait_for(lambda: watch.read(0.1) and b"hangwatch.server_found" in watch.errors)
            first.end()
            ended = watch.wait("transition", pid=old, before="ok")

            second = ray = Ray(folder, SERVERS)
            for server in second.fleet["servers"]:
                watch.wait("transition", pid=server, after="ok")
            kin = attach(folder, second.fleet["servers"][3], "--dry-run")
            second.block()
            bundle = watch.wait("bundle")
            assert 0 == watch.end()
            return {
                "ended": ended,
                "kin": kin["targets"],
                "fleet": second.fleet,
                "incidents": watch.of("incident"),
                "bundle": bundle,
                "attach": attach(folder, second.fleet["engines"][2], "--now", code=3),
            }
        finally:
            if ray is not None:
                ray.end()


def attach(folder: Path, pid: int, how: str, *, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hangwatch", "attach", "--pid", str(pid), how, "--json"),
            *("--heartbeat-interval", "1", "--output", str(folder / "attached")),
            *("--state", str(folder / "state")),
        ],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert code == done.returncode, done.stderr.decode()
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def hang() -> Iterator[dict[str, Any]]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'hangwatch[ray]'")
    # Sockets lie beneath it, and the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as path:
        # Other Rays of this machine are none of ours, and a watch would find them.
        alone = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
        if shutil.which("unshare") and not subprocess.call(
            [*alone, "true"], stderr=subprocess.DEVNULL
        ):
            subprocess.run([*alone, sys.executable, __file__, path], check=True, timeout=280)
        else:
            main(Path(path))
        yield json.loads((Path(path) / "said.json").read_text())


def main(folder: Path) -> None:
    (folder / "said.json").write_text(json.dumps(scenario(folder)))


def report(bundle: str) -> str:
    with tarfile.open(bundle) as archive:
        (name,) = (n for n in archive.getnames() if n.endswith("/REPORT.md"))
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode().replace("\\", "")


def everybody(fleet: dict[str, Any]) -> set[int]:
    shared = fleet["store"], fleet["driver"]
    return {*fleet["servers"], *fleet["engines"], *fleet["workers"], *shared}


def test_a_ray_that_is_shut_down_raises_no_alarm(hang: dict[str, Any]):
    assert "gone" == hang["ended"]["after"]
    assert 1 == len(hang["incidents"])


def test_all_servers_that_stopped_are_one_incident_with_one_bundle(hang: dict[str, Any]):
    bundle = hang["bundle"]
    with tarfile.open(bundle["bundle"]) as archive:
        (name,) = (n for n in archive.getnames() if n.endswith("/incident.json"))
        file = archive.extractfile(name)
        assert file is not None
        incident = json.load(file)

    assert ("hung", "event-loop-blocked") == (bundle["verdict"], bundle["cause"])
    assert set(hang["fleet"]["servers"]) == {found["pid"] for found in incident["instances"]}


def test_servers_engines_workers_and_the_store_are_captured(hang: dict[str, Any]):
    with tarfile.open(hang["bundle"]["bundle"]) as archive:
        parts = [name.split("/") for name in archive.getnames()]
    stacks = {p[2] for p in parts if p[1:2] == ["processes"] and p[-1] == "threads2.json"}

    captured = {int(folder.rpartition("-")[2]) for folder in stacks}
    assert everybody(hang["fleet"]) <= captured


def test_the_report_names_the_blocking_call_and_the_store_that_waits(hang: dict[str, Any]):
    text = report(hang["bundle"]["bundle"])

    assert f"all {SERVERS} stopped engines are blocked in the same call" in text
    assert "ray.get" in text
    assert "RayEngineWorker._get_extra_outputs" in text
    assert "SharedStore.wait_for_space" in text


def test_one_pid_leads_to_everybody(hang: dict[str, Any]):
    roles = {target["pid"]: target["role"] for target in hang["kin"]}

    fleet = hang["fleet"]
    assert everybody(fleet) <= roles.keys()
    assert {"api_server"} == {roles[pid] for pid in fleet["servers"]}
    assert ("store", "driver") == (roles[fleet["store"]], roles[fleet["driver"]])


def test_attaching_to_one_engine_captures_all_and_says_the_same(hang: dict[str, Any]):
    attached = hang["attach"]

    assert ("hung", "event-loop-blocked") == (attached["verdict"], attached["cause"])
    assert everybody(hang["fleet"]) <= {process["pid"] for process in attached["processes"]}
    served = {p["pid"]: p["instance"] for p in attached["processes"]}
    engines = [served[pid] for pid in hang["fleet"]["engines"]]
    assert {str(pid) for pid in hang["fleet"]["servers"]} == set(engines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
