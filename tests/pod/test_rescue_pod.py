"""The rescue as users run it: through a pipe, into a container with nothing but its Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
from bare import SECRET, Container, container, wait_for_file, wait_until_said

from hangwatch.rescue.single_file import compose

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_ptrace, pytest.mark.slow]

LAB = Path(__file__).parents[2] / "hangwatch" / "lab"
VERSIONS = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"


def pythons() -> list[Path]:
    """Return Pythons that live in folders of their own: one of each version, ours among them."""
    found = {}
    for path in sorted(VERSIONS.glob("3.1*/bin/python3")):
        found[path.resolve().name] = path.parents[1]
    if Path(sys.base_prefix) != Path("/usr"):
        found[f"python3.{sys.version_info.minor}"] = Path(sys.base_prefix)
    return list(found.values())


@pytest.fixture(scope="module")
def rescue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rescue") / "hangwatch-rescue.py"
    path.write_text(compose())
    return path


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app") / "lab"
    shutil.copytree(LAB, folder)
    folder.chmod(0o755)
    return folder


def hung(prefix: Path, app: Path, fault: str, uid: int):
    program = ("/app/server.py", "serve", "api_server", "lab", "--interval", "0.5")
    broken = ("--fault", fault, "--after", "2", "--truth", "/tmp/truth.json")
    return container(prefix, (*program, *broken), app=app, uid=uid)


def wait_until_hung(running: Container) -> None:
    wait_until_said(running, "Avg thr")
    wait_for_file(running, "truth.json", age=4.0)


HANGS = (
    ("blocked-call", 0, "SharedStore.get"),
    ("await-never", 1000, "ModelAgent.wait_for_event"),
)


@pytest.mark.parametrize(
    ("prefix", "fault", "uid", "named"),
    [(prefix, *hang) for prefix, hang in zip(pythons(), cycle(HANGS), strict=False)],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_a_hang_in_a_bare_container_is_explained_outside(
    rescue: Path, app: Path, tmp_path: Path, prefix: Path, fault: str, uid: int, named: str
):
    if os.geteuid():
        pytest.skip("needs root to make a container")
    with hung(prefix, app, fault, uid) as running:
        wait_until_hung(running)
        before = sorted(path.name for path in running.folder.iterdir())

        done = running.exec("-", "--pid", "1", "--gap", "1", stdin=rescue, uid=uid)

        assert 0 == done.returncode, done.stderr.decode()
        assert before == sorted(path.name for path in running.folder.iterdir())

    document = json.loads(done.stdout)
    assert [] == document["problems"]
    assert (1, "named") == (document["processes"][0]["pid"], document["processes"][0]["why"])
    assert ["/tmp/engine.log"] == [log["path"] for log in document["logs"]]
    assert SECRET.encode() not in done.stdout + done.stderr

    path = tmp_path / "d.json"
    path.write_bytes(done.stdout)
    limits = ("--heartbeat-interval", "0.5", "--stall-after", "3")
    told = subprocess.run(
        [sys.executable, "-m", "hangwatch", "diagnose", str(path), "--json", *limits],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert 3 == told.returncode, told.stderr.decode()
    found = json.loads(told.stdout)
    assert "hung" == found["verdict"]
    # 3.10 keeps no qualified names.
    name = named if prefix.name >= "3.11" else named.rpartition(".")[2]
    assert f"{name} (faults/{fault.replace('-', '_')}.py:" in json.dumps(found["findings"])
