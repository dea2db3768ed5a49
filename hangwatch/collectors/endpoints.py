"""What the servers say of themselves: ``/health`` and ``/metrics``, at their own sockets.

All servers are asked at once, each path in a thread of its own, because any of them may be late.
Only GET, only the paths that the profile lists, only at sockets that the process holds at that
moment. A server that does not answer is evidence, not a failure: ``health.json`` says how it did
not answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Final

from hangwatch.core.planning import file_name
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
    Target,
)
from hangwatch.model.process import Listener
from hangwatch.system.http import Response, get

REQUEST_TIMEOUT: Final = 15.0
"""Seconds: an unhealthy LMDeploy probes its engine for up to ten before it answers. The option
``request_timeout`` sets another."""

_FILES: Final = {"health": ("health", ".json"), "metrics": ("metrics", ".prom")}


def _collect(step: Step, room: Room) -> None:
    paths = {purpose: path for purpose in _FILES if (path := step.options.get(f"path.{purpose}"))}
    servers = [
        (target, [listener for listener in target.listeners if _is_asked(step, target, listener)])
        for target in step.targets
    ]
    questions = sum(len(listeners) for _, listeners in servers) * len(paths)
    if not questions:
        raise CollectorError(FailureKind.NOT_AVAILABLE, "no server listens on an address")
    timeout = float(step.options.get("request_timeout", REQUEST_TIMEOUT))
    with ThreadPoolExecutor(max_workers=questions) as threads:
        asked: dict[Future[Response], tuple[Target, Listener, str]] = {
            threads.submit(get, target.process, listener, path, timeout=timeout): (
                target,
                listener,
                purpose,
            )
            for target, listeners in servers
            for listener in listeners
            for purpose, path in paths.items()
        }
        answers: dict[tuple[int, str], list[tuple[Listener, Response]]] = {}
        for future in as_completed(asked):
            target, listener, purpose = asked[future]
            given = answers.setdefault((target.process.pid, purpose), [])
            given.append((listener, future.result()))
            expected = sum(
                other is target and about == purpose for other, _, about in asked.values()
            )
            if len(given) == expected:
                _write(step, room, target, purpose, min(given, key=_rank))


def _is_asked(step: Step, target: Target, listener: Listener) -> bool:
    prefix = f"url.{target.process.pid}."
    return any(
        value == listener.url for name, value in step.options.items() if name.startswith(prefix)
    )


def _rank(answer: tuple[Listener, Response]) -> tuple[int, int]:
    """Order the sockets of one server: the one that speaks HTTP, then the one that is mute."""
    listener, response = answer
    if response.status is not None:
        return (0 if response.status in (200, 503) else 1, listener.port)
    return (2 if response.error.startswith("timeout") else 3, listener.port)


def _write(
    step: Step, room: Room, target: Target, purpose: str, answer: tuple[Listener, Response]
) -> None:
    listener, response = answer
    name = f"{target.folder.name}/{file_name(*_FILES[purpose], step.sample)}"
    if purpose == "health":
        document = _health(listener, response)
        room.write(name, (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode())
    elif response.status == 200:
        room.write(name, response.body)


def _health(listener: Listener, response: Response) -> dict[str, Any]:
    document: dict[str, Any] = {
        "http": response.status,
        "url": listener.url,
        "elapsed": round(response.elapsed, 3),
        "monotonic": round(time.monotonic(), 3),
    }
    if response.status is None:
        return {**document, "error": response.error}
    try:
        body = json.loads(response.body)
    except (ValueError, RecursionError):
        text = response.body[:2000].decode("utf-8", "replace").strip()
        return {**document, "message": text}
    return {**document, **body} if isinstance(body, Mapping) else {**document, "message": body}


COLLECTOR: Final = Collector(
    name="endpoints",
    title="/health and /metrics of every server, with GET at its own socket",
    scope=Scope.ENDPOINT,
    rung=2,
    stage=Stage.A,
    samples=2,
    timeout=20.0,
    needs="same network namespace",
    collect=_collect,
    waits=True,
)
