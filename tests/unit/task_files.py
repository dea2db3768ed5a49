"""Readings of asyncio tasks, as collectors leave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hangwatch.collectors.tasks import lines

SITE = "/opt/venv/lib/python3.12/site-packages/"
LIB = "/usr/lib/python3.12/"
EVENT = (LIB + "asyncio/locks.py", "Event.wait", 212)
GET = (LIB + "asyncio/queues.py", "Queue.get", 158)
LOOP = (SITE + "lmdeploy/pytorch/engine/model_agent.py", "ModelAgent.async_loop", 90)
FORWARD = (SITE + "lmdeploy/pytorch/engine/model_agent.py", "ModelAgent.forward", 120)
MAIN = (SITE + "lmdeploy/pytorch/engine/engine.py", "EngineLoop.main_loop", 300)


def task(
    name: str,
    chain: Sequence[tuple[str, str, int]] = (LOOP, FORWARD, EVENT),
    *,
    kind: str = "event",
    detail: str = "Event.wait: not set, 1 waiter",
    number: int = 1,
    on: Sequence[int] = (),
    state: str = "pending",
    **more: Any,
) -> dict[str, Any]:
    """Return one task; its id is *number*, it waits for the tasks *on*."""
    due = more.pop("due_in_s", None)
    return {
        "id": number,
        "name": name,
        "state": state,
        "loop": 7,
        "chain": [
            {"function": function, "file": file, "line": line, "kind": "coroutine"}
            for file, function, line in chain
        ],
        "awaits": {
            "kind": kind,
            "detail": detail,
            "task": None,
            "tasks": [{"id": id_, "name": f"task {id_}"} for id_ in on],
            "object": 99,
            "due_in_s": due,
        },
        "waiter": 5,
        "torn": None,
        **more,
    }


def reading(
    *tasks: dict[str, Any],
    pid: int = 11,
    cycles: Sequence[Sequence[int]] = (),
    state: Sequence[dict[str, Any]] = (),
    actors: Sequence[str] = (),
) -> bytes:
    """Return the file of one reading."""
    return b"".join(
        lines(
            {
                "schema": "hangwatch.tasks/1",
                "pid": pid,
                "python": "3.12.1",
                "loops": [{"id": 7, "thread_id": pid}],
                "tasks": list(tasks),
                "edges": [],
                "cycles": [],
                "cycle_ids": [list(cycle) for cycle in cycles],
                "problems": [],
                "state": list(state),
                "actors": list(actors),
            }
        )
    )


IDLE = task(
    "MainLoopSendResponse", (MAIN, GET), kind="queue", detail="Queue.get: 0 items", number=2
)
STUCK = task("ModelAgentLoop")
