"""Steps that must not meet: two that attach to one process, and one that breaks its target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from captures import capture
from processes import python

from hangwatch import registry
from hangwatch.model.capture import Stage


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


def test_two_that_attach_to_one_process_take_turns(tmp_path, known, target):
    known(
        environment={"attaches": True, "waits": True, "rung": 6, "stage": Stage.B},
        stacks={"attaches": True, "samples": 1, "rung": 10, "stage": Stage.B},
    )

    _, evidence = capture(target, output=tmp_path)

    first, second = evidence[f"environment/{target}"], evidence[f"stacks/{target}"]
    assert first.started_at + first.elapsed <= second.started_at
