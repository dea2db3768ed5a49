"""What the servers say of themselves: ``/health`` and ``/metrics``, at their own sockets.

All servers are asked at once, each path in a thread of its own, because any of them may be late.
Only GET, only the paths that the profile lists, only at sockets that the process holds at that
moment. A server that does not answer is evidence, not a failure: ``health.json`` says how it did
not answer. An API key is never sent to ``/health`` unless that refuses to answer without one, and
what a server echoes of it is masked here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Final

from hangwatch.core.planning import file_name
from hangwatch.errors import ConfigError
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
from hangwatch.system.keys import KeyFile, masked

REQUEST_TIMEOUT: Final = 15.0
"""Seconds: an unhealthy LMDeploy probes its engine for up to ten before it answers. The option
``request_timeout`` sets another."""

AGAIN: Final = 5.0
"""Seconds for a server that did not answer in time before: the capture waits for nothing longer."""

LOCKED: Final = (401, 403)
"""Status codes of an endpoint that wants a key, or another one."""

_FILES: Final = {"health": ("health", ".json"), "metrics": ("metrics", ".prom")}


def _collect(step: Step, room: Room) -> None:
    questions = [
        (target, listener, purpose, path)
        for target in step.targets
        for listener in target.listeners
        if _is_asked(step, target, listener)
        for purpose in _FILES
        if (path := step.options.get(f"path.{target.process.pid}.{purpose}"))
    ]
    if not questions:
        raise CollectorError(FailureKind.NOT_AVAILABLE, "no server listens on an address")
    timeout = float(step.options.get("request_timeout", REQUEST_TIMEOUT))
    keys = _keys(step)
    mute = [target for target in step.targets if step.sample > 1 and _was_mute(target, room)]
    with ThreadPoolExecutor(max_workers=len(questions)) as threads:
        asked: dict[Future[Response], tuple[Target, Listener, str, str]] = {
            threads.submit(
                _ask,
                target,
                listener,
                purpose,
                path,
                timeout=min(timeout, AGAIN) if target in mute else timeout,
                keys=keys,
            ): (target, listener, purpose, path)
            for target, listener, purpose, path in questions
        }
        locked: set[str] = set()
        answers: dict[tuple[int, str], list[tuple[Listener, Response]]] = {}
        for future in as_completed(asked):
            target, listener, purpose, path = asked[future]
            given = answers.setdefault((target.process.pid, purpose), [])
            given.append((listener, future.result()))
            expected = sum(
                other is target and about == purpose for other, _, about, _ in asked.values()
            )
            if len(given) == expected:
                best = min(given, key=_rank)
                _write(step, room, target, purpose, best)
                if best[1].status in LOCKED:
                    locked.add(path)
    if locked:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            f"{' and '.join(sorted(locked))}: refused without an API key"
            + (", and with those that we have" if keys else ""),
            "--api-key-file FILE, or HANGWATCH_API_KEY_FILE: one key a line",
        )


def _was_mute(target: Target, room: Room) -> bool:
    """Say whether a server's ``/health`` was not answered in time in the first sample."""
    answer = room.earlier(f"{target.folder.name}/health.json")
    return answer is not None and str(json.loads(answer).get("error", "")).startswith("timeout")


def _keys(step: Step) -> tuple[str, ...]:
    """Return the API keys; none where they cannot be read, for what needs none is asked anyway."""
    path = step.options.get("api_key_file", "")
    try:
        return KeyFile(path).read() if path else ()
    except ConfigError:
        return ()


def _ask(
    target: Target,
    listener: Listener,
    purpose: str,
    path: str,
    *,
    timeout: float,
    keys: tuple[str, ...],
) -> Response:
    """Ask with one key after the other until one is not refused; health first without any."""
    response = Response()
    for key in ("", *keys) if purpose == "health" else keys or ("",):
        response = get(target.process, listener, path, timeout=timeout, key=key)
        if response.status not in LOCKED:
            break
    return replace(response, body=masked(response.body, keys))


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
