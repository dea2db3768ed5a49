"""How long a process stands still for a look at it.

The target has THREADS threads, sixty frames deep, two event loops with 206 suspended tasks, and
imports torch where that is installed; the other sizes leave torch out. A thread of C in it stamps
a monotonic clock in a tight loop: its longest gap, less the time that it queued for a core, is the
pause (``_pause.c``). Every tool takes its turn in each of ROUNDS rounds, in an order drawn anew,
and so does *nobody*: the same target, left alone for as long as our stage A takes. The *floor* is
the 95th percentile of what nobody costs: from there on a pause is one at all.

*Stage A* is all that hangwatch does to a process before it knows that it hangs, rungs 1 to 5 twice.
*Rung 6* stops it: native stacks, watched from outside, killed at a budget of 250 ms. gdb takes
seconds, therefore it has a tenth of the rounds. HANGWATCH_PROOF_ROUNDS changes their number; a tool
that is not installed is left out.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import _target
from benchmarks._pause import Meter
from benchmarks._peers import PEERS, Peer, call
from benchmarks.capture import request
from hangwatch import registry
from hangwatch.capture import run
from hangwatch.model.capture import CaptureKind, Evidence, FailureKind
from hangwatch.system.clock import SystemClock

ROUNDS = int(os.environ.get("HANGWATCH_PROOF_ROUNDS", "20"))
SIZES = ((48, True), (10, False), (100, False), (600, False))
"""Threads, and whether torch is imported."""

Look = Callable[[int], bool]
"""Looks at a process; says whether it failed."""


def measure(rounds: int = ROUNDS) -> dict[str, list[dict[str, Any]]]:
    """Return a table for each size of the target."""
    return {
        f"{threads} threads{', torch where it is installed' if torch else ''}": _table(
            threads, torch=torch, rounds=rounds
        )
        for threads, torch in SIZES
    }


def _table(threads: int, *, torch: bool, rounds: int) -> list[dict[str, Any]]:
    looks: dict[str, Look] = {
        "nobody": lambda _pid: False,
        "hangwatch, stage A": lambda pid: _capture(pid, CaptureKind.INCIDENT, "suspected_hang"),
        "hangwatch, with rung 6": lambda pid: _capture(pid, CaptureKind.INCIDENT, "hung"),
        **{peer.name: _by(peer) for peer in PEERS if peer.available},
    }
    pauses: dict[str, list[float]] = {name: [] for name in looks}
    walls: dict[str, list[float]] = {name: [] for name in looks}
    failed: dict[str, int] = dict.fromkeys(looks, 0)
    order = random.Random(0)  # the same on every machine
    with (
        tempfile.TemporaryDirectory() as folder,
        Meter(Path(folder)) as meter,
        target(threads, torch=torch, code=meter.code) as pid,
    ):
        for number in range(rounds):
            names = [n for n in looks if not n.startswith("gdb") or number % 10 == 0]
            order.shuffle(names)
            for name in names:
                began = time.monotonic()
                meter.reset()
                failed[name] += looks[name](pid)
                if name == "nobody":
                    time.sleep(statistics.median(walls["hangwatch, stage A"] or [0.5]))
                pauses[name].append(meter.longest_ms)
                walls[name].append(time.monotonic() - began)
    floor = sorted(pauses["nobody"])[int(0.95 * (len(pauses["nobody"]) - 1))]
    return [
        {
            "tool": name,
            "pause ms, median": f"{statistics.median(found):.2f}",
            "min": f"{min(found):.2f}",
            "max": f"{max(found):.2f}",
            "beyond the floor": f"{sum(pause > floor for pause in found)} of {len(found)}",
            "seconds, median": f"{statistics.median(walls[name]):.2f}",
            "failed": failed[name],
        }
        for name, found in pauses.items()
    ]


def _by(peer: Peer) -> Look:
    return lambda pid: call(peer, pid).failed


def _capture(pid: int, kind: CaptureKind, verdict: str) -> bool:
    """Make one capture without the pause between its samples; say whether a step failed."""
    # It takes the target for an engine, whatever it is called.
    everyone = replace(registry.collectors()["native"], roles=frozenset())
    known = {**registry.collectors(), "native": everyone}
    with (
        tempfile.TemporaryDirectory() as output,
        mock.patch.object(registry, "collectors", return_value=known),
    ):
        asked = replace(request([pid], output), kind=kind, verdict=verdict)
        outcome = run.run(asked, clock=SystemClock(), rejudge=lambda _stage_a: verdict)
    return any(_counts(evidence) for evidence in outcome.evidence)


def _counts(evidence: Evidence) -> bool:
    if evidence.failure is None or evidence.failure.kind is FailureKind.GATED:
        return False
    return evidence.collector in {"tasks", "stacks", "native"}


@contextmanager
def target(threads: int, *, torch: bool = False, code: str = "") -> Iterator[int]:
    """Give the pid of a target that is ready."""
    arguments = [sys.executable, _target.__file__, "--threads", str(threads), "--run", code]
    process = subprocess.Popen(
        [*arguments, *(["--torch"] if torch else [])], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
