"""What a capture of eight processes with forty threads each takes, beside plain py-spy.

Each process has forty threads, fifty frames deep. A *capture* is the whole default ladder as it
runs for an incident: the search, both samples of every rung, logs and environment. The pause
between the samples is not counted: the second sample is due at once. Beside it, interleaved, the
peer that anyone would script: ``py-spy dump --nonblocking --json`` of the same processes, once
and twice, as many at a time as there are cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hangwatch.capture import run
from hangwatch.model.capture import CapturedInstance, CaptureKind, CaptureOutcome, CaptureRequest
from hangwatch.model.identity import InstanceKey
from hangwatch.model.policy import Policy
from hangwatch.system.clock import SystemClock

PROCESSES = 8
THREADS = 40
ROUNDS = 7

TARGET = f"""
import threading
def deep(n):
    if n:
        return deep(n - 1)
    threading.Event().wait()
for _ in range({THREADS}):
    threading.Thread(target=deep, args=(50,)).start()
print("ready", flush=True)
"""


def measure(rounds: int = ROUNDS, processes: int = PROCESSES) -> list[dict[str, Any]]:
    """Return one row a way to look at the processes; medians over interleaved rounds."""
    targets = [
        subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    captures: list[CaptureOutcome] = []
    ours: list[float] = []
    once: list[float] = []
    twice: list[float] = []
    try:
        for target in targets:
            assert target.stdout is not None
            target.stdout.readline()
        pids = [target.pid for target in targets]
        for _ in range(rounds):
            once.append(peer(pids))
            with tempfile.TemporaryDirectory() as output:
                outcome = run.run(request(pids, output), clock=SystemClock())
            captures.append(outcome)
            ours.append(outcome.ended_at - outcome.started_at)
            twice.append(peer(pids * 2))
    finally:
        for target in targets:
            target.kill()
            target.wait()
    first = [(o.first_evidence_at or o.ended_at) - o.started_at for o in captures]
    failed = {e.step for o in captures for e in o.evidence if e.failure and "gpu" not in e.step}
    base = statistics.median(twice)
    return [
        row("hangwatch, two samples of all rungs", ours, base, f"{len(failed)} steps failed"),
        row("hangwatch, until the first evidence", first, base),
        row("py-spy dump --nonblocking --json, once", once, base),
        row("py-spy dump --nonblocking --json, twice", twice, base),
    ]


def request(pids: list[int], output: str) -> CaptureRequest:
    """Return what the daemon would ask for, without the pause."""
    return CaptureRequest(
        id="benchmark",
        kind=CaptureKind.INCIDENT,
        output=output,
        profile="lmdeploy",
        policy=Policy(sample_gap=0.0),
        epoch=SystemClock().epoch(),
        instances=tuple(
            CapturedInstance(instance=InstanceKey(pid=pid), pid=pid, profile="lmdeploy")
            for pid in pids
        ),
    )


def peer(pids: list[int]) -> float:
    """Return the seconds that py-spy takes for all of them."""
    program = str(Path(sys.executable).with_name("py-spy"))
    arguments = [program, "dump", "--nonblocking", "--json", "--full-filenames", "--pid"]
    began = time.monotonic()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        for _ in threads.map(
            lambda pid: subprocess.run([*arguments, str(pid)], capture_output=True, check=True),
            pids,
        ):
            pass
    return time.monotonic() - began


def row(what: str, seconds: list[float], base: float, remark: str = "") -> dict[str, Any]:
    """Return one row of the table."""
    return {
        "what": what,
        "median_s": round(statistics.median(seconds), 2),
        "min_s": round(min(seconds), 2),
        "max_s": round(max(seconds), 2),
        "ratio_to_py_spy_twice": round(statistics.median(seconds) / base, 2),
        "remark": remark,
    }


if __name__ == "__main__":
    for line in measure():
        print(json.dumps(line))
