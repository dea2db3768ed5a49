"""The child that finds out whom to watch: Ray sessions, a process's kin, a log's writer.

``python -m hangwatch.daemon.discovery`` talks with the daemon:

- in ``{"kind": "sessions", "every": S}``: from now on look for raylets every S seconds;
  out ``{"kind": "sessions", "sessions": [RaySession…]}``, first and whenever it changes;
- in ``{"kind": "kin", "pid": N, "profiles": [EngineProfile…]}``;
  out ``{"kind": "kin", "kin": Kin}``;
- in ``{"kind": "servers", "profiles": [EngineProfile…]}``;
  out ``{"kind": "servers", "servers": [PID…]}``;
- in ``{"kind": "owners", "logs": […], "profiles": [EngineProfile…]}``;
  out ``{"kind": "owners", "owners": [LogOwner…]}``.

A process of its own, because command lines and foreign file systems can block for as long as the
process that they belong to. It only reads ``/proc`` and asks for the identity of files.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hangwatch.core import kinship
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.errors import TargetNotFoundError
from hangwatch.model.capture import CapturedInstance, Target
from hangwatch.model.discovery import Kin, LogOwner, RaySession
from hangwatch.model.identity import NEEDED, InstanceKey, Role
from hangwatch.model.process import ProcessRow
from hangwatch.model.profile import EngineProfile
from hangwatch.system import procfs
from hangwatch.system.channel import Channel
from hangwatch.system.spawn import message_kind, serve

WORKER_LOGS: Final = "worker-*.out"
"""Where Ray puts what a worker prints; its ``.err`` holds heartbeats of no known engine."""

_WORKER_LOG: Final = re.compile(r"/worker-[^/]+\.out(?: \(deleted\))?$")

_ENGINE: Final = (Role.ENGINE, Role.ENGINE_WORKER)

# ray/_private/services.py, start_raylet: both spellings were in use.
_SESSION: Final = re.compile(r"--session[-_]dir[= ](\S+)")
_LOGS: Final = re.compile(r"--log[-_]dir[= ](\S+)")
_RAYLET_LOG: Final = re.compile(r"^(/.+)/logs/raylet\.(?:out|err)$")

# Logs of Ray's own C++ core: large, and no engine prints there.
_NOT_OUTPUT: Final = re.compile(
    r"/(?:python-core-|(?:export_)?events/|raylet\.|gcs_server\.|runtime_env)"
)


def table() -> tuple[ProcessRow, ...]:
    """Return every process, looked at closely; can block, see ``system.procfs``."""
    sockets = procfs.Sockets()
    rows = []
    for row in procfs.read_table():
        with contextlib.suppress(OSError):
            rows.append(procfs.look_closer(row, sockets))
    return tuple(rows)


def ray_sessions() -> tuple[RaySession, ...]:
    """Return the Ray sessions whose raylet we can see, in the order of their folders."""
    found = {}
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if procfs.read_file(pid, "comm").strip() == b"raylet":
                session = _session(pid)
                if session is not None:
                    found[session.folder] = session
    return tuple(found[folder] for folder in sorted(found))


def _session(raylet: int) -> RaySession | None:
    title = procfs.read_title(raylet)
    links = procfs.links(raylet)
    folder = ""
    if named := _SESSION.search(title):
        folder = named[1]
    else:
        for target in links.values():
            if opened := _RAYLET_LOG.match(target):
                folder = opened[1]
    if not folder:
        return None
    logs = named[1] if (named := _LOGS.search(title)) else f"{folder}/logs"
    if _same(Path(logs), Path(f"/proc/{raylet}/root{logs}")):
        return RaySession(raylet=raylet, folder=folder, logs=(f"{logs}/{WORKER_LOGS}",))
    paths = []
    for pid in procfs.children(raylet):
        for fd, target in procfs.links(pid).items():
            if _WORKER_LOG.search(target):
                paths.append(f"/proc/{pid}/fd/{fd}")
                break
    return RaySession(raylet=raylet, folder=folder, logs=tuple(sorted(paths)), reachable=False)


def _same(here: Path, there: Path) -> bool:
    """Say whether both paths lead to one file; if the other one may not be seen, if ours does."""
    try:
        ours = here.stat()
    except OSError:
        return False
    try:
        theirs = there.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def kin(pid: int, profiles: Sequence[EngineProfile]) -> Kin:
    """Return what *pid* belongs to; ``problem`` says why nothing can be said."""
    closed = False
    try:
        procfs.identify(pid)
        Path(f"/proc/{pid}/exe").readlink()  # needs the right to look into it
    except TargetNotFoundError as error:
        return Kin(pid=pid, problem=str(error))
    except PermissionError:
        closed = True
    except OSError:
        return Kin(pid=pid, problem=f"process {pid} ended while it was looked at")
    rows = table()
    targets = kinship.related(rows, seeds=(pid,), profiles=profiles)
    by_pid = {row.pid: row for row in rows}
    servers = tuple(target.process.pid for target in targets if target.role is Role.API_SERVER)
    printers = servers or (_above(pid, targets, by_pid),)
    if not servers:
        instances = [CapturedInstance(instance=InstanceKey(pid=p), pid=p) for p in printers]
        targets = kinship.related(rows, seeds=(pid,), profiles=profiles, instances=instances)
    logs: dict[str, int | None] = {}
    for server in printers:
        for path in _output_of(by_pid[server], rows) if server in by_pid else ():
            # Whoever shares a log with another server cannot be told from it by the log's name.
            logs[path] = server if path not in logs else None
    return Kin(
        pid=pid,
        targets=targets,
        servers=printers,
        profile=_profile(targets, by_pid, profiles),
        closed=closed,
        guessed=not servers and all(target.role not in _ENGINE for target in targets),
        logs=tuple(LogOwner(log=path, pid=server) for path, server in logs.items()),
    )


def servers(profiles: Sequence[EngineProfile]) -> tuple[int, ...]:
    """Return the processes that some profile knows as servers; of the others nothing is asked."""
    found = ((row.pid, kinship.recognised(row, profiles)) for row in table())
    return tuple(pid for pid, known in found if known and known[0] is Role.API_SERVER)


def _profile(
    targets: Iterable[Target], rows: Mapping[int, ProcessRow], profiles: Sequence[EngineProfile]
) -> str:
    """Return the profile that knows the likeliest of the needed processes, ``""`` if none does."""
    for target in targets:
        row = rows.get(target.process.pid)
        known = kinship.recognised(row, profiles) if row is not None else None
        if known is not None and known[0] in NEEDED:
            return known[1].name
    return ""


def _above(pid: int, targets: Sequence[Target], rows: Mapping[int, ProcessRow]) -> int:
    """Return the server above *pid*, where no title says who it is: an engine's parent."""
    roles = {target.process.pid: target.role for target in targets}
    while roles.get(pid) in _ENGINE:
        parent = rows.get(rows[pid].ppid)
        if parent is None or parent.pid == 1 or parent.comm == "raylet":
            break
        pid = parent.pid
    return pid


def _output_of(row: ProcessRow, rows: Sequence[ProcessRow]) -> Iterator[str]:
    """Yield the logs that hold what a process prints, as paths that can be read from here."""
    printed = [log for log in row.logs if not _NOT_OUTPUT.search(log)]
    if printed:
        yield from _readable(row.pid, printed)
        return
    pipes = {target for target in row.stdio[1:] if target.startswith("pipe:")}
    for copier in rows:
        if copier.pid != row.pid and copier.stdio and copier.stdio[0] in pipes:
            yield from _readable(copier.pid, copier.logs)


def _readable(pid: int, logs: Sequence[str]) -> Iterator[str]:
    """Yield each log as it is where it is the same file here, else as a path through ``/proc``."""
    opened = {target: fd for fd, target in sorted(procfs.links(pid).items(), reverse=True)}
    for log in logs:
        if log in opened:
            through = f"/proc/{pid}/fd/{opened[log]}"
            yield log if _same(Path(log), Path(through)) else through


def owners(logs: Iterable[str], profiles: Sequence[EngineProfile]) -> tuple[LogOwner, ...]:
    """Return who writes each of *logs*: the server, where several processes share a log."""
    rows = table()
    return tuple(LogOwner(log=log, pid=_owner(log, rows, profiles)) for log in logs)


def _owner(log: str, rows: Sequence[ProcessRow], profiles: Sequence[EngineProfile]) -> int | None:
    # What the daemon reads as its standard input is a pipe, known by its number alone.
    real = _standard_input() if log == "-" else os.path.realpath(log)
    rows = [row for row in rows if row.pid != os.getppid() and row.ppid != os.getppid()]
    targets = kinship.related(rows, seeds=(), profiles=profiles, logs=(real,))
    writers = {t.process.pid: t for t in targets if t.why.startswith("writes")}
    # Engines and workers inherit the output of the server that started them.
    first = [target for target in writers.values() if target.ppid not in writers]
    servers = [target for target in writers.values() if target.role is Role.API_SERVER]
    return min((target.process.pid for target in servers or first), default=None)


def _standard_input() -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{os.getppid()}/fd/0").readlink())
    return ""


def _profiles_of(message: Mapping[str, Any]) -> tuple[EngineProfile, ...]:
    profiles: tuple[EngineProfile, ...] = from_plain(tuple[EngineProfile, ...], message["profiles"])
    return profiles


def body(channel: Channel) -> None:
    """Answer the daemon until it closes the channel."""
    looking_every: float | None = None
    look_at = 0.0
    told: tuple[RaySession, ...] | None = None
    while True:
        for message in channel.wait(1.0):
            match message_kind(message):
                case "sessions":
                    looking_every = float(message["every"])
                    look_at, told = 0.0, None
                case "kin":
                    found = kin(int(message["pid"]), _profiles_of(message))
                    channel.send({"kind": "kin", "kin": to_plain(found)})
                case "servers":
                    pids = servers(_profiles_of(message))
                    channel.send({"kind": "servers", "servers": pids})
                case "owners":
                    whose = owners(message["logs"], _profiles_of(message))
                    channel.send({"kind": "owners", "owners": to_plain(whose)})
                case _:
                    pass
        if looking_every is not None and time.monotonic() >= look_at:
            sessions = ray_sessions()
            look_at = time.monotonic() + looking_every
            if sessions != told:
                told = sessions
                channel.send({"kind": "sessions", "sessions": to_plain(sessions)})
        channel.send({"kind": "alive"})


if __name__ == "__main__":
    serve(body)
