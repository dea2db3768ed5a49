"""``nvidia-smi -q`` as text, with programs that are played."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from hangwatch.capture.rooms import StepRoom
from hangwatch.collectors.nvidia_smi import COLLECTOR
from hangwatch.model.capture import CollectorError, FailureKind, Scope, Stage, Step


def collect(folder: Path, script: str, timeout: float = 30.0) -> Path:
    """Run the collector with a program that does what *script* says; return its file."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    step = Step(
        id="nvidia_smi",
        collector="nvidia_smi",
        scope=Scope.NODE,
        stage=Stage.A,
        sample=1,
        rung=3,
        folder=PurePosixPath(),
        timeout=timeout,
        options={"program": str(program)},
    )
    COLLECTOR.collect(step, StepRoom(folder, folder))
    return folder / "gpu" / "nvidia_smi.txt"


def test_what_it_prints_is_kept(tmp_path):
    kept = collect(tmp_path, 'echo "asked with $*"')

    assert "asked with -q\n" == kept.read_text()


def test_one_that_hangs_is_killed_and_what_it_said_is_kept(tmp_path):
    with pytest.raises(CollectorError) as caught:
        collect(tmp_path, "echo GPU 0; exec sleep 600", timeout=2.0)

    assert FailureKind.TIMED_OUT == caught.value.failure.kind
    assert "GPU 0\n" == (tmp_path / "gpu" / "nvidia_smi.txt").read_text()


def test_its_own_words_say_why_it_failed(tmp_path):
    with pytest.raises(CollectorError, match="ended with 15: GPU is lost") as caught:
        collect(tmp_path, "echo GPU is lost >&2; exit 15")

    assert FailureKind.TOOL_FAILED == caught.value.failure.kind


def test_a_machine_without_it_is_a_clear_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    step = Step(
        id="nvidia_smi",
        collector="nvidia_smi",
        scope=Scope.NODE,
        stage=Stage.A,
        sample=1,
        rung=3,
        folder=PurePosixPath(),
        timeout=10.0,
    )

    with pytest.raises(CollectorError, match="no nvidia-smi here"):
        COLLECTOR.collect(step, StepRoom(tmp_path, tmp_path))
