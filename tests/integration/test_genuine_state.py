"""The profile's state probes on the genuine article: LMDeploy's own engine, on a CPU.

The published wheel's scheduler, loops, request manager, model agent, sessions, handles and health
monitor run in a process of their own until the model's forward does not return. What is read from
outside must be what the process says of itself, in every number.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from remote_targets import Interpreter, interpreters, running
from test_genuine_lmdeploy import downloaded, wheel

from hangwatch import remote
from hangwatch.cli.tasks import command
from hangwatch.core.codec import to_plain
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.remote import Snapshot
from hangwatch.remote.probes import tables

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.needs_ptrace]

VERSION = "0.18.0"
NUMPY = "2.2.6"
"""The last one for 3.10, the first ones for 3.13."""
BY_MINOR = {each.minor: each for each in interpreters() if each.minor in range(10, 14)}
TABLES = tables(to_plain(PROFILE.state))


def numpy(interpreter: Interpreter) -> Path:
    """Return the wheel of NumPy for an interpreter, downloaded once."""
    return downloaded(
        f"numpy-{NUMPY}-cp3{interpreter.minor}-*.whl",
        "--platform",
        "manylinux2014_x86_64",
        "--python-version",
        f"3.{interpreter.minor}",
        f"numpy=={NUMPY}",
    )


@pytest.fixture(scope="module")
def lmdeploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lmdeploy")
    with zipfile.ZipFile(wheel(VERSION)) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder, names)
    return folder


@pytest.fixture(scope="module", params=sorted(BY_MINOR), ids=lambda minor: f"3.{minor}")
def python(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Interpreter, Path]:
    """Return an interpreter, and a folder with NumPy for it."""
    interpreter = BY_MINOR[request.param]
    folder = tmp_path_factory.mktemp("numpy")
    with zipfile.ZipFile(numpy(interpreter)) as archive:
        archive.extractall(folder)
    return interpreter, folder


def read(
    python: tuple[Interpreter, Path], lmdeploy: Path, folder: Path, fault: str, steps: int
) -> tuple[Snapshot, Mapping[str, Any]]:
    interpreter, packages = python
    arguments = (lmdeploy, packages, fault, steps)
    with running(interpreter, "genuine_engine", *arguments, folder=folder, timeout=120) as (
        process,
        truth,
    ):
        return remote.attach(process.pid).tasks(state=TABLES), truth


def compared(snapshot: Snapshot, truth: Mapping[str, Any]) -> tuple[int, dict[str, object]]:
    """Return how many numbers were compared, and those that differ."""
    found = {table.name: table for table in snapshot.state or ()}
    differing: dict[str, object] = {}
    count = 0
    for name, expected in truth.items():
        if expected == []:
            count += 1
            if name in found and found[name].rows:
                differing[name] = (0, len(found[name].rows))
            continue
        rows = found[name].rows
        if isinstance(expected, list):
            key = "id" if "id" in expected[0] else "session"
            read = {row.values.get(key): row.values for row in rows}
            pairs = [(each, read.get(each[key], {})) for each in expected]
            if len(rows) != len(expected):
                differing[name] = (len(expected), len(rows))
        else:
            pairs = [(expected, rows[0].values if len(rows) == 1 else {})]
        for wanted, values in pairs:
            for label, value in wanted.items():
                got: Any = values.get(label, "absent")
                if label == "by status" and isinstance(got, Mapping):
                    # A status that nobody had is not there.
                    value = {key: n for key, n in value.items() if n}  # noqa: PLW2901
                    got = {key: n for key, n in got.items() if n}
                count += len(value) if isinstance(value, dict) else 1
                if got != value or type(got) is not type(value):
                    differing[f"{name}: {label}"] = (value, got)
    return count, differing


CASES = {
    ("hang", 0): (180, {"RUNNING": 4, "WAITING": 2}),
    ("hang", 40): (180, {"RUNNING": 4, "WAITING": 2}),
    ("blocked", 3): (180, {"RUNNING": 4, "WAITING": 2}),
    ("leak", 0): (170, {"WAITING": 6}),
    ("idle", 0): (50, {}),
}
"""Fault, and forwards before it: how many numbers are compared at least, sequences by status."""


@pytest.mark.parametrize(("fault", "steps"), CASES)
def test_every_number_of_the_real_engine_is_what_it_says_itself(
    fault: str, steps: int, python: tuple[Interpreter, Path], lmdeploy: Path, tmp_path: Path
):
    snapshot, truth = read(python, lmdeploy, tmp_path, fault, steps)
    count, differing = compared(snapshot, truth)

    least, statuses = CASES[fault, steps]
    assert {} == differing
    assert count >= least
    assert statuses == {name: n for name, n in truth["scheduler"]["by status"].items() if n}
    assert (fault != "idle") == truth["engine loop"]["runnable"]
    assert set() == {n for table in snapshot.state or () for row in table.rows for n in row.moved}
    assert [] == [each for each in snapshot.problems if each.where == "state"]


def test_the_command_shows_the_numbers_and_that_none_moves(
    python: tuple[Interpreter, Path], lmdeploy: Path, tmp_path: Path
):
    interpreter, packages = python
    if interpreter.minor != max(BY_MINOR):
        pytest.skip("once is enough")
    arguments = (lmdeploy, packages, "hang", 3)
    with running(interpreter, "genuine_engine", *arguments, folder=tmp_path, timeout=120) as (
        process,
        truth,
    ):
        once = ["--pid", str(process.pid)]
        twice = [*once, "--watch", "--interval", "0.1", "--count", "2"]
        shown = [CliRunner().invoke(command, each).output for each in (once, twice)]

    scheduler = truth["scheduler"]
    start = f"\nstate\n  scheduler: tick {scheduler['tick']}, sequences {scheduler['sequences']}, "
    assert start in shown[0]
    assert "  6 x sequence: " in shown[0]
    assert shown[1].endswith("  state: no number changed\n")
