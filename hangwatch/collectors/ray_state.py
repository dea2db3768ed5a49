"""What Ray says of its actors, tasks, workers and nodes; first what needs no answer from it.

A Ray that hangs is a suspect itself: its dashboard asks the cluster's state, and with a frozen
``gcs_server`` answers after half a minute or never. So what titles, command lines and heads of logs
tell is written before anything is asked. The dashboard is asked with GET alone, only the paths of
``raystate.PATHS``, at the socket that the dashboard of this very session holds, all at once and
each with a deadline. How it did not answer is evidence: ``requests.json``.

Ray's client is not imported: it must be of the cluster's own version, and a hung cluster hangs it
for minutes.
"""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from hangwatch.core import raystate
from hangwatch.core.objects import lines
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
from hangwatch.model.identity import Role
from hangwatch.system import logfiles, procfs, raysessions
from hangwatch.system.http import Response, get
from hangwatch.system.raysessions import Dashboard, Session

REQUEST_TIMEOUT: Final = 5.0
"""Seconds; a dashboard that is well takes 0.02. The option ``request_timeout`` sets another."""

HEAD: Final = 4096
"""Bytes of a worker's log in which it says who it is."""


def _collect(step: Step, room: Room) -> None:
    sessions = raysessions.find(step.targets)
    if not sessions:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, "there are Ray workers, but no session of theirs is seen"
        )
    _write_sessions(step, room, sessions)
    known = {session.directory: raysessions.dashboard(session) for session in sessions}
    heads = [dashboard for dashboard in known.values() if dashboard is not None]
    if not heads:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "the dashboard of this Ray is not on this machine, or was never started",
            "capture on the head node, with `pip install 'ray[default]'` there; without it "
            "ray/session.json has what processes and logs tell",
        )
    _ask(step, room, heads[0])


def _write_sessions(step: Step, room: Room, sessions: tuple[Session, ...]) -> None:
    document = {
        "schema": "hangwatch.ray/1",
        "sessions": [
            {
                "directory": session.directory,
                "raylet": session.raylet.pid if session.raylet is not None else None,
                "arguments": dict(session.flags),
            }
            for session in sessions
        ],
        "system": [
            {"pid": target.process.pid, "comm": target.comm, "arguments": found}
            for target in step.targets
            if target.role is Role.RAY_SYSTEM
            and (found := raystate.flags(raysessions.arguments(target.process)))
        ],
        "workers": [
            {"pid": target.process.pid, "role": target.role.value, **names}
            for target in step.targets
            if (names := _worker(target))
        ],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False)
    room.write("ray/session.json", f"{text}\n".encode("utf-8", "surrogateescape"))


def _worker(target: Target) -> dict[str, str]:
    """Return the names of a Ray worker; nothing for what is none."""
    # A target's title is that of the plan: an actor may have entered another method since. One that
    # may hold us up is not asked again, lest the names of all others be lost.
    title = target.title
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if not procfs.may_block(target.process.pid):
            title = procfs.read_title(target.process.pid) or title
    log = next((each for each in target.logs if raystate.is_worker_log(each)), "")
    head = b""
    if log and procfs.is_same(target.process):
        with (
            contextlib.suppress(OSError),
            logfiles.open_written((target.process.pid,), log) as file,
        ):
            head = file.read(HEAD)
    return raystate.worker(title, log, head)


def _ask(step: Step, room: Room, dashboard: Dashboard) -> None:
    if dashboard.listener is None:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            f"Ray's dashboard (process {dashboard.process}) listens on no port: it is the small "
            "one that plain Ray has",
            "pip install 'ray[default]'",
        )
    timeout = float(step.options.get("request_timeout", REQUEST_TIMEOUT))
    listener = dashboard.listener

    def ask(kind: str) -> Response:
        return get(dashboard.process, listener, raystate.PATHS[kind], timeout=timeout)

    with ThreadPoolExecutor(max_workers=len(raystate.PATHS)) as threads:
        answers = dict(zip(raystate.PATHS, threads.map(ask, raystate.PATHS), strict=True))
    found: dict[str, list[dict[str, Any]]] = {}
    problems: dict[str, str] = {}
    for kind, answer in answers.items():
        try:
            found[kind] = _rows(kind, answer)
        except ValueError as error:
            problems[kind] = str(error)
    if "actors" in found:
        found["actors"] = raystate.with_calls(
            found["actors"], tasks=found.get("ray_tasks", ()), nodes=found.get("nodes", ())
        )
    for kind, rows in found.items():
        room.write(f"ray/{kind}.json", lines(rows))
    asked = [
        {
            "path": raystate.PATHS[kind],
            "http": answer.status,
            "elapsed": round(answer.elapsed, 3),
            "rows": len(found[kind]) if kind in found else None,
            "error": problems.get(kind, ""),
        }
        for kind, answer in answers.items()
    ]
    room.write("ray/requests.json", lines(asked))
    if problems:
        raise _unanswered(problems, answers)


def _rows(kind: str, answer: Response) -> list[dict[str, Any]]:
    if answer.status is None:
        raise ValueError(answer.error)
    if answer.status != 200:
        raise ValueError(f"HTTP {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}")
    if not answer.complete:
        raise ValueError("the answer is cut off")
    return raystate.rows(kind, answer.body)


def _unanswered(problems: dict[str, str], answers: dict[str, Response]) -> CollectorError:
    said = "; ".join(f"{kind}: {problem}" for kind, problem in problems.items())
    locked = {answers[kind].status for kind in problems} & {401, 403}
    if locked:
        return CollectorError(
            FailureKind.NOT_PERMITTED,
            f"Ray's dashboard wants a token: {said}",
            "RAY_AUTH_MODE=disabled on the cluster, or `ray list actors` by hand",
        )
    late = any(answers[kind].status is None for kind in problems)
    return CollectorError(
        FailureKind.TIMED_OUT if late else FailureKind.TOOL_FAILED,
        f"Ray did not answer for its own state: {said}",
        "look at ray/gcs_server.out and the state of gcs_server and raylet in procs.json",
    )


COLLECTOR: Final = Collector(
    name="ray_state",
    title="Ray's actors, tasks, workers, nodes and placement groups",
    scope=Scope.NODE,
    rung=7,
    stage=Stage.B,
    timeout=15.0,
    needs="Ray's dashboard on this machine (ray[default], head node); without it, what titles tell",
    roles=frozenset({Role.RAY_SYSTEM, Role.RAY_WORKER}),
    options={"request_timeout": "seconds that the dashboard has for each answer"},
    collect=_collect,
    waits=True,
)
