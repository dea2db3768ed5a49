"""What the capture of an incident of eight engines costs, with forty processes in all.

Eight laboratory servers under one raylet await what never completes; each has an API server and an
engine. Beside them run 24 processes with 46 threads and 206 tasks each, in the places of Ray
workers. The capture is the whole default ladder as an incident has it, the pause of five seconds
between the samples included, native stacks of the engines too, then the bundle.

*Pause* is how long an engine stood still, as its watcher saw it; the longest of all.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.capture import request
from benchmarks.pause import target
from hangwatch.capture import conductor
from hangwatch.lab.launch import Fleet
from hangwatch.model.capture import FailureKind
from hangwatch.model.policy import Policy
from hangwatch.system.clock import SystemClock

SERVERS = 8
OTHERS = 24
ROUNDS = 5
ABSENT = frozenset({FailureKind.NOT_AVAILABLE, FailureKind.NOT_PYTHON})
"""Failures that say that there is nothing of the kind here: no GPU, no Ray."""


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return one row a round, and one with the medians."""
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        fault = ("--fault", "await-never", "--after", "2")
        fleet = opened.enter_context(Fleet(folder / "ray", *fault, servers=SERVERS, interval=1.0))
        fleet.wait_ready()
        others = tuple(opened.enter_context(target(46)) for _ in range(OTHERS))
        fleet.truth()
        pids = [server["pid"] for server in fleet.servers]
        rows = [_capture(pids, others, folder / str(number)) for number in range(rounds)]
    medians = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
    return [*({"round": n, **row} for n, row in enumerate(rows, 1)), {"round": "median", **medians}]


def _capture(pids: list[int], others: tuple[int, ...], output: Path) -> dict[str, Any]:
    clock = SystemClock()
    asked = replace(request(pids, str(output)), seeds=others, policy=Policy(), verdict="hung")
    outcome, written = conductor.capture_and_bundle(
        asked, clock=clock, rejudge=lambda _stage_a: "hung"
    )
    ended = clock.now()
    failed = [e for e in outcome.evidence if e.failure and e.failure.kind not in ABSENT]
    first = (outcome.first_evidence_at or ended) - outcome.started_at
    return {
        "processes": len(outcome.targets),
        "steps": len(outcome.evidence),
        "failed": len(failed),
        "first evidence s": round(first, 2),
        "captured s": round(outcome.ended_at - outcome.started_at, 2),
        "bundled s": round(ended - outcome.started_at, 2),
        "bundle MB": round(written.path.stat().st_size / 1e6, 2),
        "pause ms": round(max(e.pause_ms for e in outcome.evidence), 1),
    }
