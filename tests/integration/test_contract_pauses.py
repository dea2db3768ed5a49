"""The safety contract: how long a target stands still, measured inside it."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from captures import capture
from processes import eventually, python

from benchmarks._pause import Meter, NoCompilerError

CROWD = """
def deep(n):
    if n: return deep(n - 1)
    wait()
for _ in range(40): threading.Thread(target=deep, args=(50,), daemon=True).start()
"""
ROUNDS = 3
"""Whatever else holds a thread up for a moment seldom does so in each of several rounds."""


@contextlib.contextmanager
def measured(folder):
    """Give an engine with forty threads, and the meter that runs in it."""
    try:
        meter = Meter(folder)
    except NoCompilerError as error:
        pytest.skip(f"the meter is written in C: {error}")
    with meter, python(CROWD + meter.code, arguments=("mp_engine_proc",)) as it:
        eventually(lambda: meter.stamps)
        yield it.pid, meter


def longest(meter, action):
    """Return the longest pause, in milliseconds, during *action*."""
    meter.reset()
    action()
    return meter.longest_ms


@pytest.mark.needs_ptrace
def test_no_thread_stands_still_for_a_capture_as_it_does_for_a_tool_that_attaches(tmp_path):
    attaching = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid"]
    with measured(tmp_path) as (pid, meter):
        ours = [longest(meter, lambda: capture(pid, output=tmp_path)) for _ in range(ROUNDS)]
        theirs = [
            longest(
                meter,
                lambda: subprocess.run(
                    [*attaching, str(pid)], check=True, stdout=subprocess.DEVNULL
                ),
            )
            for _ in range(ROUNDS)
        ]

    print(f"longest pauses, ms: hangwatch {ours}, py-spy dump {theirs}")
    assert min(ours) < max(theirs) / 4


@pytest.mark.needs_ptrace
def test_a_process_that_was_stopped_for_its_stacks_stood_still_no_longer_than_is_told(tmp_path):
    with measured(tmp_path) as (pid, meter):
        meter.reset()
        outcome, evidence = capture(pid, output=tmp_path, rejudge=lambda _: "hung")
        stood_still = meter.longest_ms

    native = evidence[f"native/{pid}"]
    assert native.started_at
    told = native.pause_ms
    print(f"inside {stood_still:.1f} ms, told {told:.1f} ms ({native.failure})")
    assert 1 < stood_still <= told + CLOCKS_DIFFER
    assert {pid: told} == {
        evidence.target.pid: evidence.pause_ms
        for evidence in outcome.evidence
        if evidence.target is not None and evidence.pause_ms
    }


CLOCKS_DIFFER = 0.5
"""Milliseconds between a look at a clock and what it was for."""
