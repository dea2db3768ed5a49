"""Who belongs to an engine: the union of every tie, then a role, then an order.

Theory of operation. A standalone server is a tree: the API server, the engine it spawned, the
engine's workers. Under Ray nothing is a tree: server, engine, model workers and the store that
all engines share are siblings under one raylet, and the children of the server's pid are nobody.
So the search follows ties of every kind and calls a process kin when any of them holds:

1. it was named, prints an instance's beats, writes one of the logs (or writes into the pipe that
   the writer of the log copies from, as in ``server | tee log``);
2. it is the parent of kin and has a role of its own in the profile: the search may have been
   started from an engine;
3. it descends from kin;
4. it is a Ray process under the same raylet, or that raylet, or the cluster's ``gcs_server``;
5. it has a GPU open;
6. it drives the job: the profile knows it, or it is a driver of the same Ray session.

Which server an engine under Ray works for, no parent says: the connections do. A server calls its
own engine, an engine its own workers, and what all of them call is shared.

Helpers that tell nothing of a hang (resource trackers, shells around a server, Ray's agents, idle
Ray workers without a GPU) and our own processes are left out, unless they were named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hangwatch.model.capture import CapturedInstance, Target
from hangwatch.model.identity import NEEDED, Role
from hangwatch.model.process import ProcessRow
from hangwatch.model.profile import EngineProfile

MAX_TITLE: Final = 400
"""Characters of a title that tell who a process is; the rest is arguments."""

_OURS: Final = re.compile(r"\s-m hangwatch(?:\.|\s|$)|/bin/hangwatch(?:\s|$)")
_HELPER: Final = re.compile(
    r"multiprocessing\.(?:resource_tracker|forkserver)"
    r"|/ray/_private/(?:log_monitor|runtime_env)|/ray/(?:dashboard|_private/workers/setup)"
    r"|ray::DashboardAgent|ray-dashboard"
)
_HELPER_NAMES: Final = frozenset(
    {"bash", "sh", "dash", "zsh", "tee", "cat", "tail", "less", "grep", "sed", "awk", "timeout"}
    | {"nohup", "env", "sudo", "su", "time", "script", "screen", "tmux", "sshd"}
    | {"tini", "dumb-init", "catatonit", "log_monitor", "runtime_env_age"}
)
_RAY_SYSTEM: Final = frozenset({"raylet", "gcs_server"})
# ray/_private/worker.py, connect: the core of each process logs into a file of this name.
_CORE_LOG: Final = re.compile(r"^(.+)/python-core-(driver|worker)-[0-9a-f]+_\d+\.log$")
_IDLE_RAY_WORKER: Final = re.compile(r"ray::IDLE\b")

_SUSPICION: Final[Mapping[Role, int]] = {
    Role.ENGINE: 90,
    Role.ENGINE_WORKER: 80,
    Role.API_SERVER: 70,
    Role.STORE: 60,
    Role.SESSION_SERVER: 50,
    Role.DRIVER: 40,
    Role.RAY_WORKER: 30,
    Role.OTHER: 20,
    Role.RAY_SYSTEM: 10,
    Role.HELPER: 0,
}
"""Who holds the telling stack, most often first; the order of the capture."""

_STOPPED_INSTANCE: Final = 200
_TELLING_STATE: Final = 100  # stopped, traced, dead or in D: outweighs every difference of role


@dataclass(slots=True)
class _Search:
    rows: Mapping[int, ProcessRow]
    profiles: tuple[EngineProfile, ...]
    children: dict[int, list[int]] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    ports: dict[str, int] = field(default_factory=dict)
    calls: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows.values():
            self.children.setdefault(row.ppid, []).append(row.pid)
            for listener in row.listeners:
                self.ports[f"{listener.host}:{listener.port}"] = row.pid
        self.calls = {row.pid: self._called(row) for row in self.rows.values() if row.called}

    def _called(self, row: ProcessRow) -> set[int]:
        """Return the processes that a process is connected to, by the addresses they listen on."""
        found: set[int] = set()
        for address in row.called:
            port = address.rpartition(":")[2]
            for host in (address, f"0.0.0.0:{port}", f":::{port}"):
                if host in self.ports:
                    found.add(self.ports[host])
                    break
        return found - {row.pid}

    def add(self, pid: int | None, why: str, *, named: bool = False) -> None:
        """Take a process in; the first reason stays."""
        if pid is None or pid not in self.rows:
            return
        if named:
            self.named.add(pid)
        self.why.setdefault(pid, why)

    def descendants(self, pid: int) -> Iterable[tuple[int, int]]:
        """Yield (parent, child) for everything below a process."""
        seen = {pid}
        stack = [pid]
        while stack:
            parent = stack.pop()
            for child in self.children.get(parent, ()):
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
                    yield parent, child


def related(
    table: Iterable[ProcessRow],
    *,
    seeds: Iterable[int],
    profiles: Iterable[EngineProfile],
    instances: Sequence[CapturedInstance] = (),
    logs: Iterable[str] = (),
) -> tuple[Target, ...]:
    """Return every process that belongs to the engines, the most suspicious first.

    Args:
        table: Every process there is, looked at closely (``system.procfs.look_closer``); a row
            without title and descriptors still takes part by its parent and name.
        seeds: Processes that were named.
        profiles: Know the roles.
        instances: The engines; their own processes are seeds, too, and name what descends
            from them.
        logs: Paths of followed logs; who writes them is a seed.

    Returns:
        Targets with role, reason and instance; without any seed there, only what rules 5 and 6
        of this module find.
    """
    rows = {row.pid: row for row in table if not row.kernel}
    search = _Search(rows=rows, profiles=tuple(profiles))
    for pid in seeds:
        search.add(pid, "named", named=True)
    for instance in instances:
        search.add(instance.pid, f"prints the heartbeats of {instance.instance.name}", named=True)
    _add_writers(search, frozenset(logs))
    _add_parents(search)
    for pid in tuple(search.why):
        if rows[pid].comm not in _RAY_SYSTEM:
            for parent, child in search.descendants(pid):
                search.add(child, f"child of {parent}")
    _add_ray(search)
    sessions = {folder for pid in search.why for folder in _sessions(rows[pid], "worker")}
    for row in rows.values():
        if row.gpus:
            search.add(row.pid, f"holds /dev/nvidia{row.gpus[0]}")
        elif role_of(row, search.profiles) is Role.DRIVER or _sessions(row, "driver") & sessions:
            search.add(row.pid, "drives the job")
    targets = [
        target
        for pid in search.why
        if (target := _target(search, rows[pid], instances)) is not None
    ]
    return tuple(sorted(targets, key=lambda item: (-item.suspicion, item.process.pid)))


def _add_writers(search: _Search, logs: frozenset[str]) -> None:
    if not logs:
        return
    for row in search.rows.values():
        for log in logs.intersection((*row.logs, *row.stdio[1:])):
            if row.comm not in _HELPER_NAMES:
                search.add(row.pid, f"writes {log}")
                search.writers.add(row.pid)
            _add_upstream(search, row, log)


def _add_upstream(search: _Search, copier: ProcessRow, log: str) -> None:
    pipe = copier.stdio[0] if copier.stdio else ""
    if not pipe.startswith("pipe:"):
        return
    for row in search.rows.values():
        if row.pid != copier.pid and pipe in row.stdio[1:] and row.comm not in _HELPER_NAMES:
            search.add(row.pid, f"writes into the pipe that {copier.pid} copies to {log}")
            search.writers.add(row.pid)


def _add_parents(search: _Search) -> None:
    for pid in tuple(search.why):
        parent = search.rows.get(search.rows[pid].ppid)
        while parent is not None and role_of(parent, search.profiles) in NEEDED:
            search.add(parent.pid, f"parent of {pid}")
            parent = search.rows.get(parent.ppid)


def _add_ray(search: _Search) -> None:
    raylets: dict[int, int] = {}
    for pid in search.why:
        row = search.rows[pid]
        if row.comm == "raylet":
            raylets.setdefault(pid, pid)
        elif row.raylet is not None and row.raylet in search.rows:
            raylets.setdefault(row.raylet, pid)
        elif (parent := search.rows.get(row.ppid)) is not None and parent.comm == "raylet":
            raylets.setdefault(parent.pid, pid)
    for raylet, pid in raylets.items():
        for above, child in search.descendants(raylet):
            tie = f"same raylet as {pid}" if above == raylet else f"child of {above}"
            search.add(child, tie)
        for row in search.rows.values():
            if row.raylet == raylet:
                search.add(row.pid, f"same raylet as {pid}")
        search.add(raylet, f"raylet of {pid}")
    if raylets:
        for row in search.rows.values():
            if row.comm == "gcs_server":
                search.add(row.pid, "Ray's cluster state")


def recognised(
    row: ProcessRow, profiles: Iterable[EngineProfile]
) -> tuple[Role, EngineProfile] | None:
    """Return what a process does by its title and names, and whose profile knows.

    What an engine's own processes are called goes before what is common to several engines.
    """
    found: tuple[Role, EngineProfile] | None = None
    for profile in profiles:
        for known in profile.roles:
            if known.pattern.search(row.title) or known.pattern.search(row.comm):
                if known.role in NEEDED:
                    return known.role, profile
                found = found or (known.role, profile)
                break
    return found


def role_of(row: ProcessRow, profiles: Iterable[EngineProfile]) -> Role:
    """Return what a process does, by its title and names; ``OTHER`` if nothing is known of it."""
    known = recognised(row, profiles)
    if known is not None:
        return known[0]
    if row.comm in _RAY_SYSTEM:
        return Role.RAY_SYSTEM
    if row.comm in _HELPER_NAMES or _HELPER.search(row.title):
        return Role.HELPER
    if row.title.startswith("ray::") or row.comm.startswith("ray::"):
        return Role.RAY_WORKER
    return Role.OTHER


def _sessions(row: ProcessRow, kind: str) -> set[str]:
    """Return the folders of logs that a process writes to as a Ray ``worker`` or ``driver``."""
    cores = map(_CORE_LOG.match, row.logs)
    return {core[1] for core in cores if core is not None and core[2] == kind}


def _role(search: _Search, row: ProcessRow, instances: Sequence[CapturedInstance]) -> Role:
    role = role_of(row, search.profiles)
    if role is not Role.OTHER:
        return role
    if _sessions(row, "driver"):
        return Role.DRIVER
    # Children inherit the log of the server that started them.
    if row.pid in search.writers and row.ppid not in search.writers and _may_be_python(row):
        return Role.API_SERVER
    if any(row.pid == instance.pid for instance in instances):
        return Role.API_SERVER
    # Before it named itself, LMDeploy's engine was a nameless spawned child with a GPU.
    parent = search.rows.get(row.ppid)
    if row.gpus and parent is not None and role_of(parent, search.profiles) is Role.API_SERVER:
        return Role.ENGINE
    return role


def _may_be_python(row: ProcessRow) -> bool:
    """Say whether it could be an engine: not a ``head`` that shares the log by inheritance."""
    return not row.exe or "python" in row.exe.rpartition("/")[2]


def _target(
    search: _Search, row: ProcessRow, instances: Sequence[CapturedInstance]
) -> Target | None:
    role = _role(search, row, instances)
    if row.pid not in search.named and _is_boring(row, role):
        return None
    instance = _instance(search, row, role, instances)
    suspicion = _SUSPICION[role]
    if instance is not None and instance.stopped:
        suspicion += _STOPPED_INSTANCE
    if row.state in ("D", "T", "t", "Z"):
        suspicion += _TELLING_STATE
    return Target(
        process=row.process,
        role=role,
        title=row.title[:MAX_TITLE],
        comm=row.comm,
        ppid=row.ppid,
        gpu=row.gpus[0] if len(row.gpus) == 1 else None,
        gpus=row.gpus,
        instance=instance.instance.name if instance is not None else "",
        why=search.why[row.pid],
        suspicion=suspicion,
        python=role is not Role.RAY_SYSTEM,
        listeners=row.listeners,
        logs=row.logs,
    )


def _is_boring(row: ProcessRow, role: Role) -> bool:
    if role is Role.HELPER or _OURS.search(row.title):
        return True
    return bool(_IDLE_RAY_WORKER.match(row.title)) and not row.gpus and row.state != "R"


def _instance(
    search: _Search, row: ProcessRow, role: Role, instances: Sequence[CapturedInstance]
) -> CapturedInstance | None:
    """Return the instance that a process works for: its own, or that of an ancestor or child."""
    by_pid = {instance.pid: instance for instance in instances if instance.pid is not None}
    ancestor: ProcessRow | None = row
    while ancestor is not None:
        if ancestor.pid in by_pid:
            return by_pid[ancestor.pid]
        if ancestor.comm in _RAY_SYSTEM:
            break
        ancestor = search.rows.get(ancestor.ppid)
    if role in NEEDED:
        for _, child in search.descendants(row.pid):
            if child in by_pid:
                return by_pid[child]
        if (server := _caller(search, row, role, by_pid)) is not None:
            return by_pid[server]
        # Nothing but the raylet may tie an engine to its server; with one server there is no
        # question.
        if len(instances) == 1:
            return instances[0]
    return None


def _caller(
    search: _Search, row: ProcessRow, role: Role, servers: Mapping[int, CapturedInstance]
) -> int | None:
    """Return the one server that calls an engine, or whose engine calls a worker."""
    callers = {pid for pid, called in search.calls.items() if row.pid in called}
    found = callers & servers.keys()
    if role is Role.ENGINE_WORKER and not found:
        engines = {
            pid for pid in callers if role_of(search.rows[pid], search.profiles) is Role.ENGINE
        }
        found = {pid for pid in servers if pid in search.calls and search.calls[pid] & engines}
    return found.pop() if len(found) == 1 else None
