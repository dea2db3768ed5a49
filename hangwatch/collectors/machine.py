"""The machine that it happened on, and the hangwatch that looked."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hangwatch import __version__
from hangwatch.model.capture import Collector, Room, Scope, Stage, Step

_MEMORY: Final = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Dirty", "Writeback")


def _collect(step: Step, room: Room) -> None:  # noqa: ARG001  # it is about the machine
    system = os.uname()
    document = {
        "kernel": system.release,
        "machine": system.machine,
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "memory_mib": _memory(),
        "pressure": {name: _text(f"/proc/pressure/{name}") for name in ("cpu", "memory", "io")},
        "ptrace_scope": _text("/proc/sys/kernel/yama/ptrace_scope"),
        "python": platform.python_version(),
        "hangwatch": __version__,
        "py_spy": _version("py-spy"),
    }
    room.write("environment/machine.json", (json.dumps(document, indent=1) + "\n").encode())


def _text(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return None


def _memory() -> dict[str, int]:
    lines = (_text("/proc/meminfo") or "").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(values[name].split()[0]) // 1024 for name in _MEMORY if name in values}


def _version(name: str) -> Any:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


COLLECTOR: Final = Collector(
    name="machine",
    title="Kernel, cores, memory and load of the machine, and our own versions",
    scope=Scope.NODE,
    rung=9,
    stage=Stage.B,
    timeout=5.0,
    collect=_collect,
)
