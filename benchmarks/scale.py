"""What a look at many processes takes, beside the tools that people would script it with.

Each process has 46 threads, sixty frames deep, and 206 suspended tasks on two event loops. All
tools take turns at the same processes, in ROUNDS rounds; seconds are those until the last process
is done, medians. The tools of others are called once for each process, as many at a time as turned
out best of 1, 2 and 4; *one after another* is what ``ray stack`` does, a loop around ``py-spy dump
--native`` (``stack`` in ray/scripts/scripts.py).

*First stacks and tasks* is rung 4 alone: from the decision to the last process, the search for
processes and the start of our workers included. *Warm* is the same of processes that a baseline was
taken of before. *Ladder* is everything that the capture of an incident does, both samples, without
the pause between them. *First evidence* is the time until the first file is on disk, and *skew* the
time between the first and the last process of rung 1 and of rung 4.

CPU is that of the tool and all it started; memory is the peak of its largest process.
HANGWATCH_PROOF_SIZES changes the numbers of processes, HANGWATCH_PROOF_ROUNDS the rounds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks._peers import NONBLOCKING, PEERS, Cost, Peer, call, call_all
from benchmarks.capture import request
from benchmarks.pause import target
from hangwatch import registry
from hangwatch.capture import baseline, run
from hangwatch.model.capture import CaptureKind, CaptureOutcome
from hangwatch.system.clock import SystemClock, boot_id
from hangwatch.system.looks import Ring

SIZES = tuple(map(int, os.environ.get("HANGWATCH_PROOF_SIZES", "1 8 32 64").split()))
ROUNDS = int(os.environ.get("HANGWATCH_PROOF_ROUNDS", "5"))
WIDTHS = (1, 2, 4)
THREADS = 46
FIRST = ("kernel", "tasks")
"""What rung 4 takes: the states of the threads, without which no memory is read, and the tasks."""


_WHOM = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclass
class _Seen:
    """What one way to look cost, a number a round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rss: float = 0.0
    remark: str = ""


def measure(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> dict[str, list[dict[str, Any]]]:
    """Return a table for each number of processes."""
    return {f"{size} processes": _table(size, rounds) for size in sizes}


def _table(size: int, rounds: int) -> list[dict[str, Any]]:
    seen: dict[str, _Seen] = {}
    with contextlib.ExitStack() as targets:
        pids = [targets.enter_context(target(THREADS)) for _ in range(size)]
        state = targets.enter_context(tempfile.TemporaryDirectory())
        _baseline(pids, state)
        best = {peer: _best(peer, pids) for peer in PEERS if peer.available and _fits(peer, size)}
        for _ in range(rounds):
            for peer, width in best.items():
                seconds, costs = call_all(peer, pids, width)
                _note(seen, f"{peer.name}, {width} at a time", seconds, costs)
            native = next(peer for peer in PEERS if peer.name.endswith("--native"))
            began = time.monotonic()
            costs = [call(native, pid) for pid in pids]
            _note(seen, "one after another, as `ray stack`", time.monotonic() - began, costs)
            _ours(seen, "hangwatch, first stacks and tasks, cold", pids, FIRST)
            _ours(seen, "hangwatch, first stacks and tasks, warm", pids, FIRST, state)
            _ours(seen, "hangwatch, ladder", pids, ())
    base = next(found for name, found in seen.items() if name.startswith(NONBLOCKING.name))
    unit = statistics.median(base.seconds)
    return [
        {
            "tool": name,
            "seconds": f"{statistics.median(found.seconds):.2f}",
            "ratio to py-spy": f"{statistics.median(found.seconds) / unit:.2f}",
            "CPU s": f"{statistics.median(found.cpu):.2f}",
            "peak MiB": f"{found.rss:.0f}",
            "remark": found.remark,
        }
        for name, found in seen.items()
    ]


def _fits(peer: Peer, size: int) -> bool:
    """Leave out what takes minutes: gdb needs four seconds for each process."""
    return not peer.name.startswith("gdb") or size <= 8


def _best(peer: Peer, pids: Sequence[int]) -> int:
    """Return how many at a time are fastest."""
    widths = [width for width in WIDTHS if width <= max(1, len(pids))]
    return min(widths, key=lambda width: call_all(peer, pids, width)[0])


def _note(seen: dict[str, _Seen], name: str, seconds: float, costs: Sequence[Cost]) -> None:
    found = seen.setdefault(name, _Seen())
    found.seconds.append(seconds)
    found.cpu.append(sum(cost.cpu for cost in costs))
    found.rss = max(found.rss, *(cost.rss for cost in costs))
    failed = sum(cost.failed for cost in costs)
    found.remark = found.remark or (f"{failed} of {len(costs)} failed" if failed else "")


def _baseline(pids: list[int], state: str) -> None:
    """Take one look at the processes, as the daemon does in quiet times."""
    ring = Ring(Path(state))
    ring.open(boot_id())
    well = tuple(replace(each, verdict="ok") for each in request(pids, state).instances)
    look = replace(
        request(pids, state), kind=CaptureKind.BASELINE, instances=well, state=state, deadline=600.0
    )
    outcome = run.run(look, clock=SystemClock())
    baseline.keep(outcome, look)


def _ours(
    seen: dict[str, _Seen], name: str, pids: list[int], only: Sequence[str], state: str = ""
) -> None:
    # In a process of its own, whose children are those of this capture alone.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        seconds, cost, remark = process.submit(_capture, pids, only, state).result()
    _note(seen, name, seconds, [cost])
    seen[name].remark = remark


def _capture(pids: list[int], only: Sequence[str], state: str) -> tuple[float, Cost, str]:
    """Make one capture; return the seconds that it took, what it cost, and a remark."""
    began = _spent()
    with tempfile.TemporaryDirectory() as output, _collectors(only):
        asked = replace(request(pids, output), deadline=600.0, state=state)
        outcome = run.run(asked, clock=SystemClock())
    seconds = outcome.ended_at - outcome.started_at
    peak = max(resource.getrusage(who).ru_maxrss for who in _WHOM) / 1024
    return seconds, Cost(seconds, _spent() - began, peak, failed=False), _remark(outcome)


def _remark(outcome: CaptureOutcome) -> str:
    first = (outcome.first_evidence_at or outcome.ended_at) - outcome.started_at
    told = [f"first evidence {first:.2f} s"]
    for collector in FIRST:
        began = [
            evidence.started_at
            for evidence in outcome.evidence
            if evidence.collector == collector and evidence.sample == 1 and evidence.started_at
        ]
        told.append(f"skew of {collector} {max(began) - min(began):.2f} s")
    failed = {e.step for e in outcome.evidence if e.failure and e.collector in ("tasks", "stacks")}
    return ", ".join([*told, *([f"{len(failed)} steps failed"] if failed else [])])


@contextlib.contextmanager
def _collectors(only: Sequence[str]) -> Iterator[None]:
    """Have a capture run these collectors once, or all of them as usual where none is named."""
    if not only:
        yield
        return
    some = {name: replace(registry.collectors()[name], samples=1) for name in only}
    with mock.patch.object(registry, "collectors", return_value=some):
        yield


def _spent() -> float:
    """Return the seconds of CPU of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in _WHOM]
    return sum(each.ru_utime + each.ru_stime for each in used)
