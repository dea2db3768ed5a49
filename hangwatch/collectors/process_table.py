"""The table of all processes of the capture, as loose evidence has it: ``procs.json``.

The second sample has rates besides: CPU and voluntary context switches of all threads of a
process since the first. A loop that polls the GPU makes about 900 switches a second, an idle or
deadlocked engine some tens. A process that ended keeps its row, with ``"state": "gone"``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from hangwatch.core import table
from hangwatch.core.objects import lines
from hangwatch.core.planning import file_name
from hangwatch.model.capture import CaptureKind, Collector, Room, Scope, Stage, Step, Target
from hangwatch.system import procfs


def _collect(step: Step, room: Room) -> None:
    before = _before(room) if step.sample > 1 else {}
    rows = [_row(target, before.get(target.process.pid, {})) for target in step.targets]
    room.write(file_name("procs", ".json", step.sample), lines(rows))


def _before(room: Room) -> dict[int, Mapping[str, Any]]:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return {row["pid"]: row for row in json.loads(room.earlier("procs.json") or b"[]")}
    return {}


def _row(target: Target, before: Mapping[str, Any]) -> dict[str, Any]:
    known = table.who(target, target.why)
    if not procfs.is_same(target.process):
        return {**known, "state": "gone"}
    try:
        return {**known, **_now(target.process.pid, before)}
    except (FileNotFoundError, ProcessLookupError):
        return {**known, "state": "gone"}


def _now(pid: int, before: Mapping[str, Any]) -> dict[str, Any]:
    at = time.monotonic()
    row = procfs.read_row(pid)
    threads = procfs.thread_switches(pid) if row.state != "Z" else {}
    now: dict[str, Any] = {
        "ppid": row.ppid,
        "state": row.state,
        "thread_states": dict(Counter(state for state, _ in threads.values())),
        "wchan": row.wchan,
        "tracer_pid": row.tracer_pid,
        "uid": row.uid,
        "rss_mib": row.rss_mib,
        "threads": row.threads,
        "monotonic": round(at, 3),
        "cpu_seconds": row.cpu_seconds,
        "vol_ctxt": sum(switches for _, switches in threads.values()),
    }
    if row.state == "Z":
        now["exit_signal"] = row.exit_signal or None
    if threads:
        now.update(table.rates(before, now))
    return now


COLLECTOR: Final = Collector(
    name="process_table",
    title="State, CPU and context switches of every process",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    samples=2,
    timeout=10.0,
    needs="same pid namespace",
    kinds=frozenset(CaptureKind) - {CaptureKind.BASELINE},
    collect=_collect,
)
