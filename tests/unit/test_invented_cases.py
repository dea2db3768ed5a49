"""Loose evidence of the kinds that users bring, made up: the verdict is the one of its meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from hangwatch.capture.reading import explain, read
from hangwatch.model.dossier import Diagnosis
from hangwatch.model.policy import Policy
from hangwatch.model.verdict import ALARMS

START = datetime(2026, 5, 4, 9, tzinfo=timezone(timedelta(hours=8)))
POLICY = Policy(heartbeat_interval=10.0, stall_after=120.0)
Printed = tuple[float, str]
"""When a line arrives, in seconds, and the line."""


def stamp(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return (START + timedelta(seconds=at)).strftime(form)


def lmdeploy(at: float, *, running: int = 6, out: float = 900.0, tag: str = "DP0") -> str:
    return (
        f"[{stamp(at)} {tag}] Avg thr (in/out): 5000.0 / {out:.1f} tokens/s, "
        f"Server (succeeded/failed/routed/waiting): 9 / 0 / {running} / 0, "
        f"Engine (running/waiting): {running} / 0, KV cache: 21.4%, "
    )


def vllm(at: float, *, running: int = 5, tps: float = 400.0, waiting: int = 0, tag: int = 0) -> str:
    return (
        f"(APIServer pid=31) INFO {stamp(at, '%m-%d %H:%M:%S')} [loggers.py:271] Engine {tag:03}: "
        f"Avg prompt throughput: {tps:.1f} tokens/s, Avg generation throughput: {tps:.1f} tokens/s,"
        f" Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: 22.4%, "
        "Prefix cache hit rate: 68.6%"
    )


def sglang(at: float, *, running: int = 3, tag: str = "TP0", extra: str = "") -> str:
    return (
        f"[{stamp(at)} {tag}] Decode batch, #running-req: {running}, #token: 4800, token usage: "
        f"0.04, {extra}cuda graph: True, gen throughput (token/s): {40.0 * running:.2f}, "
        "#queue-req: 0"
    )


def served(
    beat: Callable[[float], str], *, first: int = 0, until: int = 300, every: int = 10
) -> list[Printed]:
    return [(float(at), beat(at)) for at in range(first, until + 1, every)]


def asked(at: float, path: str) -> Printed:
    return (at, f'INFO:     192.0.2.7:45000 - "POST {path} HTTP/1.1" 200 OK')


def says(message: str) -> dict[str, Any]:
    return {"health.json": {"http": 503, "status": "unhealthy", "message": message}}


def server(**facts: object) -> dict[str, Any]:
    return {"pid": 1, "role": "api_server", "state": "S", **facts}


BUSY = served(lmdeploy)
IDLE = [*BUSY[:-1], (300.0, lmdeploy(300, running=0, out=30))]
MUTE = {"health.json": {"http": None, "error": "timeout after 10 s"}}
REFUSED = {"health.json": {"http": None, "error": "connection refused"}}
ASLEEP = {"health.json": {"http": 200, "status": "sleeping", "message": "Engine is sleeping."}}
BLOCKED = says("Backend health probe timed out after 10.0s.")
LOST = says(
    "Backend has dispatched request handle(s), but schedule metrics report no active or "
    "waiting sequences."
)
STARTED = [(0.0, f"{stamp(0)},000 - lmdeploy - INFO - it starts")]
HELD_BACK = "pre-allocated usage: 0.00, #prealloc-req: 3, #transfer-req: 0, #retracted-req: 2, "


def explained(
    folder: Path, lines: Iterable[Printed], now: float, files: Mapping[str, Any]
) -> Diagnosis:
    """Return the diagnosis at *now* of a folder with these lines and files."""
    lines = list(lines)
    (folder / "log.txt").write_text("".join(f"{text}\n" for _, text in lines))
    (folder / "arrival.txt").write_text("".join(f"{at}\n" for at, _ in lines))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return explain(read([folder], now=START + timedelta(seconds=now), policy=POLICY))


@pytest.mark.parametrize(
    ("lines", "now", "files", "verdict", "cause"),
    [
        (BUSY, 340, BLOCKED, "hung", "event-loop-blocked"),
        (BUSY, 420, LOST, "hung", "lost-request"),
        (IDLE, 600, LOST, "hung", "lost-request"),
        (BUSY, 330, says("PyTorch engine main loop has stopped."), "dead", "engine-task-dead"),
        (BUSY, 390, {**MUTE, "procs.json": [server(wchan="pipe_write")]},
         "hung", "stdout-pipe-full"),
        (BUSY, 480, {**MUTE, "procs.json": [server(wchan="ep_poll")]},
         "hung", "concurrency-limit"),
        (BUSY, 480, {**MUTE, "procs.json": [server(state="R", cpu_pct=99.5)]},
         "blocked", "event-loop-blocked-by-cpu"),
        (BUSY, 400, REFUSED, "dead", "child-dead"),
        ([*BUSY, asked(302, "/sleep?level=2")], 40_000, {}, "suspected_hang", "pause-outlived"),
        ([*BUSY, *((float(at), f"{stamp(at)} WARNING no next prefill running request")
                   for at in range(310, 600))], 600, {}, "hung", "one-instance-silent"),
        ([*served(vllm), *((float(at), vllm(at, tps=0, running=0, waiting=12))
                           for at in range(310, 700, 10))], 700, {}, "hung", "scheduler-stuck"),
        ([line for at in range(0, 601, 10)
          for line in ((at, vllm(at)), (at, vllm(at, tag=1, tps=400.0 if at <= 200 else 0.0)))],
         605, {}, "hung", "one-instance-silent"),
        ([*served(vllm), (305.0, "ERROR RayWorkerProc rank=[0] died unexpectedly, shutting down")],
         360, {}, "dead", "engine-task-dead"),
        ([*served(sglang), *served(lambda at: sglang(at, running=0, extra=HELD_BACK),
                                   first=310, until=900)], 905, {}, "hung", "scheduler-stuck"),
        ([line for at in range(0, 601, 10) for line in ((at, sglang(at, tag="DP0 TP0")),
          *([(at, sglang(at, tag="DP1 TP1"))] if at <= 300 else ()))],
         605, {}, "hung", "one-instance-silent"),
    ],
)  # fmt: skip
def test_what_hangs_is_told_with_its_cause(
    lines: list[Printed],
    now: float,
    files: Mapping[str, Any],
    verdict: str,
    cause: str,
    tmp_path: Path,
):
    found = explained(tmp_path, lines, now, files)

    assert (verdict, cause) == (found.verdict, found.cause)


@pytest.mark.parametrize(
    ("lines", "now", "files", "verdict"),
    [
        (IDLE, 2000, {}, "idle"),
        (IDLE, 2000, {"procs.json": [server(wchan="pipe_write", cpu_pct=1.0)]}, "idle"),
        (IDLE, 3600, ASLEEP, "paused"),
        (IDLE, 1000, REFUSED, "gone"),
        (BUSY, 305, MUTE, "ok"),
        ([*BUSY, asked(301, "/abort_request")], 1500, {}, "idle"),
        ([*BUSY, asked(302, "/sleep?level=2"), asked(800, "/wakeup?tags=weights"),
          asked(890, "/update_weights")], 900, BLOCKED, "paused"),
        ([*BUSY, asked(301, "/abort_request"), asked(340, "/update_weights")], 370, BLOCKED,
         "idle"),
        ([*BUSY[:5], *((at, lmdeploy(at).replace("5000.0", "nan")) for at, _ in BUSY[5:])],
         305, {}, "ok"),
        (STARTED, 900, REFUSED, "loading"),
        ([*BUSY, (330.0, "Loading weights from safetensors:  0%|  | 0/12 [00:00<?, ?it/s]")],
         700, REFUSED, "loading"),
        ([*served(vllm), (310.0, vllm(310, tps=0, running=0))], 2000, {}, "idle"),
        ([*served(vllm), *served(lambda at: vllm(at, tps=0, running=1), first=310, until=390),
          *served(vllm, first=400, until=600)], 605, {}, "ok"),
        ([line for at in range(0, 601, 10) for line in ((at, vllm(at)),
          *([(at, vllm(at, tag=1))] if at <= 200 else ()),
          *([(at, vllm(at, tag=1, tps=0, running=0))] if at == 210 else ()))], 605, {}, "ok"),
        ([*served(sglang), *(asked(302.0 + n, "/generate") for n in range(3))], 2000, {}, "idle"),
        ([*served(sglang), asked(304, "/release_memory_occupation")], 3000, {}, "paused"),
        (served(sglang, until=1200, every=35), 1200, {}, "ok"),
    ],
)  # fmt: skip
def test_what_does_not_hang_raises_no_alarm_at_any_moment(
    lines: list[Printed], now: float, files: Mapping[str, Any], verdict: str, tmp_path: Path
):
    found = explained(tmp_path, lines, now, files)

    assert verdict == found.verdict
    assert [] == [t for t in found.dossier.transitions if isinstance(t.after, ALARMS)]
