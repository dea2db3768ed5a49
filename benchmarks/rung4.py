"""What the first and the second reading of all tasks cost in a capture.

Eight processes have 300 suspended tasks each, four frames deep. A capture of the whole default
ladder reads each of them twice in its pooled workers. The *first sample* is cold: where the runtime
is, the layout and its proof, every code object, and for the first process of each worker the code
of the reader itself. The *second sample* is warm as far as the step went to the worker that took
the first; *warm* says how often it did. Milliseconds are those of a step, beside all others of the
capture; medians over all processes and rounds. py-spy is the ``stacks`` step of the same processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any
from unittest import mock

from benchmarks.capture import request
from hangwatch.capture import pool, run
from hangwatch.system.clock import SystemClock

PROCESSES = 8
TASKS = 300
ROUNDS = 3

TARGET = f"""
import asyncio
async def down(depth):
    if depth:
        await down(depth - 1)
    else:
        await asyncio.Event().wait()
async def main():
    tasks = [asyncio.create_task(down(3)) for _ in range({TASKS})]
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


def measure(rounds: int = ROUNDS, processes: int = PROCESSES) -> list[dict[str, Any]]:
    """Return one row a collector and sample."""
    targets = [
        subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    elapsed: dict[tuple[str, int], list[float]] = {}
    warm: Counter[bool] = Counter()
    give = pool.Pool._give  # how often the choice hits is not recorded

    def watched(self: pool.Pool, worker: pool._Worker, waiting: pool._Waiting) -> None:
        step = waiting.step
        if step.collector == "tasks" and step.sample == 2 and step.target is not None:
            warm[(step.collector, step.target.process) in worker.did] += 1
        give(self, worker, waiting)

    try:
        for target in targets:
            assert target.stdout is not None
            target.stdout.readline()
        for _ in range(rounds):
            with (
                tempfile.TemporaryDirectory() as output,
                mock.patch.object(pool.Pool, "_give", watched),
            ):
                outcome = run.run(
                    request([target.pid for target in targets], output), clock=SystemClock()
                )
            for evidence in outcome.evidence:
                if evidence.collector in ("tasks", "stacks"):
                    assert evidence.failure is None, evidence
                    key = (evidence.collector, evidence.sample)
                    elapsed.setdefault(key, []).append(evidence.elapsed)
    finally:
        for target in targets:
            target.kill()
            target.wait()
    share = f"{100 * warm[True] / warm.total():.0f} %"
    return [
        {
            "step": collector,
            "sample": sample,
            "median ms": f"{1000 * statistics.median(times):.0f}",
            "max ms": f"{1000 * max(times):.0f}",
            "warm": share if (collector, sample) == ("tasks", 2) else "",
        }
        for (collector, sample), times in sorted(elapsed.items())
    ]


if __name__ == "__main__":
    for row in measure():
        print(json.dumps(row))
