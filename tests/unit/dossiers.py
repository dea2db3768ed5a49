"""Dossiers for tests of rules and renderers, made of loose evidence like any other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hangwatch import registry
from hangwatch.core.diagnosis import diagnose
from hangwatch.core.loose import dossier
from hangwatch.model.dossier import Citation, Diagnosis, InstanceRecord
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.policy import Policy
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import Confidence, Hung, Ok, StopWindow, Verdict
from hangwatch.profiles.lmdeploy import PROFILE

AT = Instant(600.0)
EPOCH = Epoch(boot_id="", at=AT, wall=datetime(2026, 3, 4, 5, 50, tzinfo=UTC))
LIB = "/usr/lib/python3.12/"
SITE = "/opt/venv/lib/python3.12/site-packages/"
PARKED = (
    (LIB + "selectors.py", "EpollSelector.select", 468),
    (LIB + "asyncio/base_events.py", "BaseEventLoop._run_once", 1954),
)
BLOCKED = (
    (SITE + "ray/_private/worker.py", "Worker.get_objects", 967),
    (SITE + "lmdeploy/pytorch/engine/engine_instance.py", "EngineInstance._fetch", 153),
    (LIB + "asyncio/events.py", "Handle._run", 88),
    (LIB + "asyncio/base_events.py", "BaseEventLoop._run_once", 1954),
)
SILENT = Hung(
    since=Instant(100.0),
    cause="one-instance-silent",
    confidence=Confidence.MEDIUM,
    because=("no heartbeat for 30 s",),
)
WORKING = Ok(since=AT, cause="not-a-hang:busy", confidence=Confidence.HIGH)


def beat(pid: int | None, at: float, source: str = "log.txt") -> Heartbeat:
    return Heartbeat(
        instance=InstanceKey(pid=pid, tag="DP0"),
        at=Instant(at),
        source=source,
        in_tps=10.0,
        out_tps=500.0,
        running=6,
        waiting=2,
        routed=8,
    )


def instance(
    pid: int | None, verdict: Verdict = SILENT, *, stopped: float = 100.0, source: str = "log.txt"
) -> InstanceRecord:
    beats = tuple(beat(pid, stopped - 10 * i, source) for i in range(3, -1, -1))
    alarm = not isinstance(verdict, Ok)
    return InstanceRecord(
        instance=InstanceKey(pid=pid, tag="DP0"),
        verdict=verdict,
        last_beat=beats[-1],
        window=StopWindow(earliest=Instant(stopped), latest=Instant(stopped + 10))
        if alarm
        else None,
        beats=beats,
        citation=Citation(path=source, line=9, text="Avg thr"),
    )


def thread(
    pid: int, frames: Sequence[tuple[str, str, int]] = BLOCKED, **more: Any
) -> dict[str, Any]:
    return {
        "pid": pid,
        "os_thread_id": pid,
        "thread_name": "MainThread",
        "active": False,
        "owns_gil": False,
        "frames": [{"filename": f, "name": n, "line": line} for f, n, line in frames],
        **more,
    }


def dump(*threads: Mapping[str, Any]) -> bytes:
    return json.dumps(list(threads), indent=1).encode()


def diagnosed(
    *instances: InstanceRecord,
    files: Mapping[str, bytes] | None = None,
    verdict: Verdict | None = None,
    **changes: Any,
) -> Diagnosis:
    """Return what all rules make of these instances and files."""
    windows = [record.window for record in instances if record.window is not None]
    result = ReplayResult(
        **{
            "heartbeats": 4,
            "instances": instances,
            "transitions": (),
            "incidents": (),
            "verdict": verdict or (instances[0].verdict if instances else WORKING),
            "window": StopWindow(
                earliest=min(w.earliest for w in windows), latest=max(w.latest for w in windows)
            )
            if windows
            else None,
            "until": AT,
            "epoch": EPOCH,
            "policy": Policy(),
            **changes,
        }
    )
    found = dossier(files or {}, origin="test", result=result, profile=PROFILE)
    return diagnose(found, registry.rules().values())
