"""What Ray says of itself: command lines, titles, heads of logs, answers of its dashboard.

Kept are fields of a list and nothing else. The answers hold what a job was given besides: variables
of its environment with their values, and whatever a later version adds. Of a runtime environment
the names are kept, never a value.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

PATHS: Final[Mapping[str, str]] = {
    "actors": "/api/v0/actors?detail=True&limit=2000&timeout=3",
    "ray_tasks": (
        "/api/v0/tasks?limit=2000&timeout=3"
        "&filter_keys=state&filter_predicates=%21%3D&filter_values=FINISHED"
    ),
    "workers": "/api/v0/workers?detail=True&limit=2000&timeout=3",
    "placement_groups": "/api/v0/placement_groups?limit=500&timeout=3",
    "nodes": "/nodes?view=summary",
}
"""The only paths that Ray's dashboard is asked, by what they tell.

Source: ``ray/dashboard/modules/state/state_head.py`` and ``modules/node/node_head.py``; tried with
2.60. ``timeout`` is the one towards the cluster's state: without it the dashboard goes on asking a
stuck ``gcs_server`` for 24 s.
"""

MAX_ROWS: Final = 2000

MAX_MESSAGE: Final = 300
"""Characters of what Ray says about a death; the rest is the program's own."""

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "actors": (
        *("actor_id", "class_name", "name", "repr_name", "state", "pid", "node_id", "job_id"),
        *("ray_namespace", "is_detached", "num_restarts", "placement_group_id"),
        "required_resources",
    ),
    "ray_tasks": (
        *("task_id", "name", "state", "type", "actor_id", "worker_pid", "node_id", "job_id"),
        *("attempt_number", "parent_task_id", "error_type"),
    ),
    "workers": (
        *("worker_id", "worker_type", "pid", "node_id", "is_alive", "exit_type", "start_time_ms"),
        "end_time_ms",
    ),
    "placement_groups": ("placement_group_id", "name", "state", "creator_job_id"),
}
_NODE: Final = ("ip", "hostname", "cpu", "now", "bootTime", "loadAvg", "mem", "shm")
_NODE_RAYLET: Final = (
    *("nodeId", "state", "stateMessage", "isHeadNode", "startTimeMs", "resourcesTotal"),
    *("numWorkers", "objectStoreUsedMemory", "objectStoreAvailableMemory"),
)
_CORE_WORKER: Final = (
    *("pid", "actorId", "workerType", "taskQueueLength", "numPendingTasks", "numRunningTasks"),
    *("numExecutedTasks", "numObjectRefsInScope", "numInPlasma"),
)
_FLAGS: Final = frozenset(
    {"session_dir", "temp_dir", "log_dir", "session_name", "node_id", "node_ip_address", "head"}
    | {"gcs_address", "static_resource_list", "maximum_startup_concurrency", "cluster_id"}
    | {"num_prestart_python_workers", "object_store_memory", "plasma_directory", "ray_commit"}
    | {"metrics_export_port", "node_manager_port"}
)
_FLAG: Final = re.compile(r"--(?P<name>[\w-]+)(?:=(?P<value>.*))?", re.DOTALL)
_TITLE: Final = re.compile(r"ray::(?P<name>[^\s(]+)")
_HEAD: Final = re.compile(rb"^:(job_id|actor_name|task_name):(.*)$", re.MULTILINE)
_WORKER_LOG: Final = re.compile(r"worker-(?P<worker>[0-9a-f]{8,})-(?P<job>[0-9a-f]{8})-\d+\.out")
_LOG_FOLDER: Final = re.compile(r"^(?P<session>/.*/session_[^/]+)/logs/[^/]+$")


def flags(arguments: Iterable[str]) -> dict[str, str]:
    """Return the arguments of ``raylet`` or ``gcs_server`` that may be kept, by name.

    Not among them are the commands for workers, and the configuration in base64: they repeat the
    rest, and may hold a password.
    """
    found = {}
    for argument in arguments:
        match = _FLAG.fullmatch(argument)
        if match is not None:
            name = match["name"].replace("-", "_")
            if name in _FLAGS:
                found[name] = match["value"] or ""
    return found


def session_of(logs: Iterable[str]) -> str:
    """Return the directory of the session that one of these logs lies in, or ``""``."""
    return next((match["session"] for log in logs if (match := _LOG_FOLDER.match(log))), "")


def is_dashboard(arguments: Iterable[str], session: str) -> bool:
    """Say whether a command line is that of the dashboard of a session."""
    arguments = tuple(arguments)
    return any(each.endswith("/ray/dashboard/dashboard.py") for each in arguments) and any(
        each.startswith(("--session-dir=", "--log-dir=", "--logs-dir="))
        and f"{each.partition('=')[2]}/".startswith(f"{session}/")
        for each in arguments
    )


def worker(title: str, log: str = "", head: bytes = b"") -> dict[str, str]:
    """Return the names of a worker: by its title, and by the name and head of its log.

    The title is an actor's class or a task's function; behind a dot stands the method that the
    actor entered last, of several that it runs at once too.
    """
    found = {}
    if match := _TITLE.match(title):
        found["title"] = match["name"]
    if match := _WORKER_LOG.search(log):
        found |= {"worker_id": match["worker"]}
    # An idle worker that is given work writes a further head: the last one counts.
    said = {name.decode(): value.decode("utf-8", "replace") for name, value in _HEAD.findall(head)}
    return found | said


def is_worker_log(path: str) -> bool:
    """Say whether a log is what a worker prints."""
    return _WORKER_LOG.search(path) is not None


def telling_logs(names: Iterable[str], pids: Iterable[int]) -> tuple[str, ...]:
    """Return which logs of a session are worth reading, the most telling first.

    Args:
        names: Names in the folder of its logs.
        pids: Processes of the capture; of others' logs none is read.
    """
    own = frozenset(map(str, pids))
    ranked = []
    for name in names:
        for rank, pattern in enumerate(_TELLING):
            match = pattern.fullmatch(name)
            if match and (not match.groups() or match[1] in own):
                ranked.append((rank, name))
                break
    return tuple(name for _, name in sorted(ranked))


_TELLING: Final = (
    re.compile(r"(?:gcs_server|raylet)\.(?:out|err)"),
    re.compile(r"python-core-(?:worker|driver)-[0-9a-f]+_(\d+)\.log"),
    re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(\d+)\.(?:out|err)"),
    re.compile(r"(?:monitor|log_monitor|dashboard|dashboard_StateHead)\.(?:log|out|err)"),
    re.compile(r"(?:dashboard_agent|runtime_env_agent)\.(?:log|out|err)"),
    re.compile(r"dashboard_\w+\.(?:log|err)|runtime_env_setup-[0-9a-f]+\.log"),
)


def rows(kind: str, body: bytes) -> list[dict[str, Any]]:
    """Return what an answer of the dashboard tells, of the fields that may be kept.

    Args:
        kind: One of ``PATHS``.
        body: The answer.

    Raises:
        ValueError: It is no such answer.
    """
    try:
        answer = json.loads(body)
        data = answer["data"]
        found = data["summary"] if kind == "nodes" else data["result"]["result"]
        if not answer.get("result") or not isinstance(found, list):
            raise ValueError(str(answer.get("msg"))[:MAX_MESSAGE] or "it has no result")
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("it is not what Ray's dashboard answers") from error
    objects = [row for row in found if isinstance(row, dict)][:MAX_ROWS]
    if kind == "nodes":
        return [_node(row) for row in objects]
    return [_row(kind, row) for row in objects]


def _row(kind: str, row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: row[name] for name in _FIELDS[kind] if row.get(name) not in (None, "", {})}
    if kind == "actors":
        kept |= _runtime_environment(row.get("serialized_runtime_env")) | _death(row)
    if row.get("exit_detail"):
        kept["exit_detail"] = _short(row["exit_detail"])
    return kept


def _runtime_environment(text: Any) -> dict[str, Any]:
    try:
        environment = json.loads(text)
        variables = environment.get("env_vars", {})
        return {"runtime_env": sorted(environment), "env_vars": sorted(variables)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _death(row: Mapping[str, Any]) -> dict[str, Any]:
    cause = row.get("death_cause")
    if not isinstance(cause, Mapping) or not cause:
        return {}
    contexts = [each for each in cause.values() if isinstance(each, Mapping)]
    said = [_short(each["error_message"]) for each in contexts if each.get("error_message")]
    return {"death": next(iter(cause)), **({"death_message": said[0]} if said else {})}


def _short(text: Any) -> str:
    return str(text).split("\n", 1)[0][:MAX_MESSAGE]


def _node(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: row[name] for name in _NODE if name in row}
    raylet = row.get("raylet")
    if isinstance(raylet, Mapping):
        kept |= {name: raylet[name] for name in _NODE_RAYLET if name in raylet}
        workers = raylet.get("coreWorkersStats")
        if isinstance(workers, list):
            kept["workers"] = [
                {name: each[name] for name in _CORE_WORKER if name in each}
                for each in workers[:MAX_ROWS]
                if isinstance(each, Mapping)
            ]
    return kept


def with_calls(
    actors: Iterable[Mapping[str, Any]],
    *,
    tasks: Iterable[Mapping[str, Any]] = (),
    nodes: Iterable[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the actors with the calls that wait at each (``pending_calls``), and those that run.

    Nodes know best, but report some seconds late, and nothing of an actor that is new; then the
    unfinished tasks are counted.
    """
    running: Counter[str] = Counter()
    pending: Counter[str] = Counter()
    for task in tasks:
        counted = running if task.get("state") == "RUNNING" else pending
        counted[str(task.get("actor_id"))] += 1
    seen = {each.get("actorId"): each for node in nodes for each in node.get("workers", ())}
    merged = []
    for actor in actors:
        name = str(actor.get("actor_id"))
        numbers = {"pending_calls": pending[name], "running_calls": running[name]}
        numbers |= {
            call: int(seen[name][key])
            for call, key in _CALLS.items()
            if str(seen.get(name, {}).get(key, "")).isdigit()
        }
        merged.append({**actor, **numbers})
    return merged


_CALLS: Final = {
    "pending_calls": "taskQueueLength",
    "running_calls": "numRunningTasks",
    "awaited_calls": "numPendingTasks",
}
