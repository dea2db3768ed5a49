"""The audit trail: whatever touches a watched process is told, before it does."""

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace

import pytest
from captures import CLOCK, pool, program, request_for, step_for
from processes import python

from hangwatch import registry
from hangwatch.capture.conductor import capture_and_bundle
from hangwatch.model.capture import Gate, Means, Phase

pytestmark = pytest.mark.needs_ptrace


def touches_of(tmp_path, *steps):
    """Run steps; return what touched their targets, and how."""
    seen = []
    with pool(tmp_path / "output", touching=lambda step, means: seen.append((step.id, means))) as (
        workers,
        _,
    ):
        workers.submit(steps, phase=Phase.ONSET)
        workers.wait(steps)
    return sorted(seen)


def test_each_reading_and_each_attaching_is_told_once(tmp_path):
    with python("") as it:
        steps = [
            step_for(it.pid, collector=name, name=name)
            for name in ("kernel", "tasks", "stacks", "native")
        ]
        seen = touches_of(tmp_path, *steps)

    assert [("native", Means.ATTACH), ("stacks", Means.MEMORY), ("tasks", Means.MEMORY)] == seen


def test_a_signal_to_go_on_is_told_as_well(tmp_path):
    tool = program(tmp_path / "py-spy", 'for pid in "$@"; do :; done; kill -STOP $pid; exit 1')
    with python("") as it:
        seen = touches_of(tmp_path, step_for(it.pid, collector="native", name="n", py_spy=tool))

    assert [("n", Means.ATTACH), ("n", Means.SIGCONT)] == seen


def test_a_process_that_a_gate_protected_was_not_touched(tmp_path):
    with python("") as it:
        os.kill(it.pid, 19)
        step = replace(step_for(it.pid, collector="native"), gates=(Gate.NOT_STOPPED,))
        gone = step_for(it.pid, ticks=1)

        assert [] == touches_of(tmp_path, step, gone)


def test_whatever_reads_memory_in_a_plan_says_so():
    silent = ("kernel", "process_table", "environment", "endpoints")
    for collector in registry.collectors().values():
        if collector.rung in (4, 5, 6):
            assert collector.reads_memory or collector.attaches, collector.name
        if collector.name in silent:
            assert not collector.reads_memory


def test_a_bundle_has_the_trail_of_its_capture(tmp_path):
    told = []
    with python("") as it:
        _, written = capture_and_bundle(
            request_for(it.pid, output=tmp_path), clock=CLOCK, touched=told.append
        )
        ticks = told[0].process.start_ticks

    with tarfile.open(written.path) as bundle:
        (name,) = (each for each in bundle.getnames() if each.endswith("hangwatch/audit.jsonl"))
        lines = [json.loads(line) for line in bundle.extractfile(name).read().splitlines()]
    assert [(f"{c}/{it.pid}/{n}", "memory") for n in (1, 2) for c in ("stacks", "tasks")] == [
        (line["step"], line["means"]) for line in sorted(lines, key=lambda line: line["step"][::-1])
    ]
    assert {(it.pid, ticks, "test")} == {
        (line["pid"], line["start_ticks"], line["incident"]) for line in lines
    }
    assert len(lines) == len(told)


@pytest.mark.slow
def test_a_capture_by_hand_has_the_trail_in_its_log(tmp_path):
    with python("") as it:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "hangwatch", "attach", "--pid", str(it.pid), "--now"),
                *("--output", str(tmp_path), "--state", str(tmp_path / "state")),
                *("--log-format", "json"),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HANGWATCH_SAMPLE_GAP": "0.1"},
        )

    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    reads = [event for event in events if event["event"] == "hangwatch.target_read"]
    assert [it.pid] * 4 == [event["pid"] for event in reads]


def test_a_reading_by_hand_is_logged_where_a_log_is_wanted():
    with python("") as it:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "hangwatch", "tasks", "--pid", str(it.pid)),
                *("--log-format", "json"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )

    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [(it.pid, "memory")] == [(event["pid"], event["means"]) for event in events]
