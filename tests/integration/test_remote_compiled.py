"""Await chains through coroutines that Cython compiled, as Ray's actor methods are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from remote_targets import PROGRAMS, Interpreter, running

from hangwatch import remote

pytestmark = [pytest.mark.needs_ptrace, pytest.mark.slow]

HERE = Interpreter((sys.executable,), "{}.{}.{}".format(*sys.version_info[:3]))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the module for the interpreter that runs the tests."""
    pytest.importorskip("Cython")
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = Path(sysconfig.get_paths()["include"])
    if compiler is None or not (include / "Python.h").exists():
        pytest.skip("needs a C compiler and Python's headers")
    folder = tmp_path_factory.mktemp("compiled")
    shutil.copy(PROGRAMS / "compiled.pyx", folder)
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", "compiled.pyx"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    target = f"compiled{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [compiler, "-O1", "-w", "-shared", "-fPIC", f"-I{include}", "compiled.c", "-o"]
    subprocess.run([*command, target], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_chains_lead_through_cython_and_back(compiled: Path, loop: str, tmp_path: Path):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    with running(HERE, "cython_chains", compiled, loop, folder=tmp_path) as (process, truth):
        snapshot = remote.attach(process.pid).tasks()

    chains = {
        task.name: [[frame.function, frame.note] for frame in task.chain] for task in snapshot.tasks
    }
    assert truth == {name: chains[name] for name in truth}
    assert () == snapshot.problems
    relay = next(task for task in snapshot.tasks if task.name == "relay")
    assert "compiled.pyx" == relay.chain[0].file
    assert "cython" == relay.chain[0].kind
    assert "event" == relay.awaits.kind
