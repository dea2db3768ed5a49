"""cuda-gdb as a tool that attaches, played by programs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from captures import program, run_steps, step_for
from processes import eventually, is_as_before

from hangwatch.model.capture import Evidence, FailureKind, Settled

PRINTED = Path(__file__).parents[1] / "fixtures" / "gpu"


@contextlib.contextmanager
def target(**variables: str) -> Iterator[int]:
    """Run a process that waits; yield its number."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        env={"PATH": os.defpath, **variables},
    ) as running:
        try:
            assert running.stdout is not None
            running.stdout.readline()
            yield running.pid
        finally:
            running.kill()


def collect(folder: Path, pid: int, script: str, timeout: float = 60.0) -> Evidence:
    """Run the step in a worker with a cuda-gdb that does what *script* says."""
    tool = program(folder / "cuda-gdb", script)
    step = step_for(pid, collector="cuda_gdb", timeout=timeout, program=tool)
    (evidence,) = run_steps(folder, step)
    return evidence


def kept(folder: Path, evidence: Evidence, name: str) -> str:
    (path,) = [item.path for item in evidence.artifacts if item.path.name == name]
    (work,) = folder.glob("*.partial")
    return (work / path).read_text()


def test_the_kernel_and_its_line_are_kept_with_what_was_printed(tmp_path):
    with target() as pid:
        evidence = collect(tmp_path, pid, f"cat {PRINTED}/cuda_gdb-spin.txt")

    (kernel,) = json.loads(kept(tmp_path, evidence, "cuda_gdb.json"))["kernels"]
    assert ("hangwatch_lab_spin", 62) == (kernel["name"], kernel["line"])
    assert "[Inferior 1 (process 574) detached]" in kept(tmp_path, evidence, "cuda_gdb.txt")
    assert evidence.failure is None


def test_nothing_that_the_target_brings_along_is_executed_in_it(tmp_path):
    with target() as pid:
        collect(tmp_path, pid, f'echo "$@" >{tmp_path}/asked; cat {PRINTED}/cuda_gdb-spin.txt')

    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-nx -batch -iex set auto-load off")
    for setting in ("debuginfod enabled off", "libthread-db-search-path $sdir"):
        assert setting in asked
    assert asked.index("-iex") < asked.index(f"-p {pid}") < asked.index("-ex info")


def test_a_process_that_was_started_for_core_dumps_is_not_attached_to(tmp_path):
    with target(CUDA_ENABLE_USER_TRIGGERED_COREDUMP="1") as pid:
        evidence = collect(tmp_path, pid, f"touch {tmp_path}/started")

    assert evidence.failure is not None
    assert "no way to attach" in evidence.failure.message
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("echo 'ptrace: Operation not permitted.' >&2; exit 1", FailureKind.NOT_PERMITTED),
        ("echo something else >&2; exit 3", FailureKind.TOOL_FAILED),
        ("echo no kernels", FailureKind.NOT_AVAILABLE),
        ("kill -SEGV $$", FailureKind.TOOL_FAILED),
    ],
    ids=["not permitted", "fails", "nothing there", "crashes"],
)
def test_why_there_is_no_kernel_is_told(tmp_path, script, kind):
    with target() as pid:
        evidence = collect(tmp_path, pid, script)

    assert evidence.failure is not None
    assert kind == evidence.failure.kind


def test_one_that_hangs_is_killed_at_its_deadline(tmp_path):
    with target() as pid:
        evidence = collect(tmp_path, pid, "exec sleep 600", timeout=4.0)

    assert evidence.failure is not None
    assert FailureKind.TIMED_OUT == evidence.failure.kind


@pytest.mark.parametrize("then", ["kill -SEGV $$", "exit 1"], ids=["crashes", "fails"])
def test_one_that_leaves_the_engine_stopped_is_put_right_and_the_pause_is_told(tmp_path, then):
    with target() as pid:
        evidence = collect(
            tmp_path, pid, f'while [ "$1" != -p ]; do shift; done; kill -STOP $2; sleep 0.3; {then}'
        )
        eventually(lambda: is_as_before(pid))

    assert Settled.CONTINUED == evidence.settled
    assert evidence.pause_ms >= 300
