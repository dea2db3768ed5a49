"""Finds the Ray sessions of a capture, and their dashboards, among the processes.

Reads command lines, which can block for as long as a process does: for expendable processes only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hangwatch.core import raystate
from hangwatch.model.capture import Target
from hangwatch.model.identity import ProcessId
from hangwatch.model.process import Listener
from hangwatch.system import procfs

_DASHBOARD_PORTS: Final = 50
"""A dashboard whose port is taken tries as many after it (``--port-retries``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One Ray on this machine.

    Attributes:
        directory: Of the session, as its own processes name it.
        reader: A process through whose root the directory can be reached.
        raylet: Its raylet, or ``None`` if only its workers are seen.
        flags: What its raylet was started with, see ``raystate.flags``.
    """

    directory: str
    reader: ProcessId
    raylet: ProcessId | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> str:
        """The folder of its logs."""
        return self.flags.get("log_dir") or f"{self.directory}/logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Who answers for the state of a Ray.

    Attributes:
        process: It.
        listener: Where it listens for HTTP, or ``None`` if nowhere.
    """

    process: ProcessId
    listener: Listener | None


def find(targets: Iterable[Target]) -> tuple[Session, ...]:
    """Return the sessions that these processes belong to; raylets know best."""
    found: dict[str, Session] = {}
    targets = tuple(targets)
    for target in targets:
        if target.comm == "raylet" and procfs.is_same(target.process):
            flags = raystate.flags(arguments(target.process))
            directory = flags.get("session_dir") or raystate.session_of(target.logs)
            if directory:
                found[directory] = Session(
                    directory=directory, reader=target.process, raylet=target.process, flags=flags
                )
    for target in targets:
        directory = raystate.session_of(target.logs)
        if directory and directory not in found:
            found[directory] = Session(directory=directory, reader=target.process)
    return tuple(found.values())


def arguments(process: ProcessId) -> tuple[str, ...]:
    """Return the command line of a process; empty if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return procfs.read_arguments(process.pid)
    return ()


def dashboard(session: Session) -> Dashboard | None:
    """Return the dashboard of a session, or ``None``: it lives on the head node alone."""
    found = [process for process, comm in procfs.names() if comm.startswith(("python", "ray"))]
    for process in sorted(found, key=_may_block):
        line = arguments(process)
        if raystate.is_dashboard(line, session.directory):
            with contextlib.suppress(OSError):
                return Dashboard(process=process, listener=_listener(process, line))
    return None


def _may_block(process: ProcessId) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return procfs.may_block(process.pid)
    return False


def _listener(process: ProcessId, line: Iterable[str]) -> Listener | None:
    """Return its socket for HTTP: it has others, for Prometheus and for gRPC."""
    wanted = [each.partition("=")[2] for each in line if each.startswith("--port=")]
    first = int(wanted[0]) if wanted and wanted[0].isdigit() else 8265
    listeners = procfs.listeners(process.pid)
    return next(
        (each for each in listeners if first <= each.port <= first + _DASHBOARD_PORTS), None
    )
