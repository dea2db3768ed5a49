"""Who is who: processes and engine instances."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process, told from a later one that reuses its number.

    Attributes:
        pid: Number in our pid namespace.
        start_ticks: Field 22 of ``/proc/PID/stat``: clock ticks after boot. 0 where unknown
            (evidence brought by hand).
    """

    pid: int
    start_ticks: int = 0

    def __str__(self) -> str:
        return str(self.pid)


@dataclass(frozen=True, slots=True, order=True)
class InstanceKey:
    """One engine as its log names it.

    Attributes:
        host: Address in a Ray prefix, or the pod in one of ``kubectl logs --prefix``, or ``""``.
        pid: Process that printed the line, by prefix or by file name, or ``None``.
        tag: The engine's own label of itself: ``DP0``, ``Engine 000``.
    """

    host: str = ""
    pid: int | None = None
    tag: str = ""

    @property
    def name(self) -> str:
        """A short name for people: the pid where there is one, else the tag."""
        host = f"{self.host}/" if self.host else ""
        return f"{host}{self.tag or 'engine' if self.pid is None else self.pid}"


class Role(StrEnum):
    """What a process does for the engine; the words of loose evidence."""

    API_SERVER = "api_server"
    ENGINE = "engine"
    ENGINE_WORKER = "engine_worker"
    RAY_WORKER = "ray_worker"
    RAY_SYSTEM = "ray_system"
    STORE = "store"
    SESSION_SERVER = "session_server"
    DRIVER = "driver"
    HELPER = "helper"
    OTHER = "other"


NEEDED: Final = frozenset((Role.API_SERVER, Role.ENGINE, Role.ENGINE_WORKER))
"""Roles without which an instance cannot work."""
