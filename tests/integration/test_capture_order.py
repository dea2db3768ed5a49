"""What waits for what: steps that must not meet, and a verdict for what was answered in time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from captures import capture
from processes import python

from hangwatch import registry
from hangwatch.model.capture import Stage
from hangwatch.model.observation import GpusSeen

PLAYER = Path(__file__).parent / "programs" / "nvml"


@pytest.fixture
def target():
    with python("") as process:
        yield process.pid


@pytest.fixture
def known(monkeypatch):
    """Let a test say which collectors there are, made of those that exist."""
    there = registry.collectors()

    def only(**changes):
        made = {name: replace(there[name], **more) for name, more in changes.items()}
        monkeypatch.setattr(registry, "collectors", lambda: made)

    return only


def test_what_breaks_its_target_begins_when_all_else_has_ended(tmp_path, known, target):
    known(
        kernel={},
        environment={},
        machine={"stage": Stage.A, "harms": True, "waits": True},
        logs={},
    )

    _, evidence = capture(target, output=tmp_path, gap=3.0)

    harmful = evidence.pop("machine")
    assert evidence
    assert max(e.started_at + e.elapsed for e in evidence.values()) <= harmful.started_at


@pytest.mark.parametrize("touch", ["attaches", "asks"])
def test_what_needs_a_process_that_nobody_stops_waits_for_its_turn(tmp_path, known, target, touch):
    known(
        environment={"attaches": True, "waits": True, "rung": 6, "stage": Stage.B},
        stacks={touch: True, "samples": 1, "rung": 10, "stage": Stage.B},
    )

    _, evidence = capture(target, output=tmp_path)

    first, second = evidence[f"environment/{target}"], evidence[f"stacks/{target}"]
    assert first.started_at + first.elapsed <= second.started_at


def test_whoever_judges_knows_what_the_gpu_driver_said(tmp_path, known, target, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLAYER))
    monkeypatch.setenv("PLAYED_GPUS", json.dumps({"minors": [0], "users": [[target]]}))
    known(kernel={}, gpu={"waits": False})
    told = []

    capture(target, output=tmp_path, rejudge=lambda stage_a: told.append(stage_a) or "")

    (gpus,) = [each for each in told[0].answers if isinstance(each, GpusSeen)]
    assert [(0, 100.0, 0.0)] == [
        (gpu.index, gpu.utilization_pct, gpu.memory_activity_pct) for gpu in gpus.gpus
    ]
