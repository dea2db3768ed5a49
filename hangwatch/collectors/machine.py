"""The machine that it happened on, and the hangwatch that looked."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from hangwatch import __version__
from hangwatch.model.capture import Collector, Room, Scope, Stage, Step

MIB: Final = 1 << 20


def _collect(_step: Step, room: Room) -> None:
    system = os.uname()
    document = {
        "kernel": system.release,
        "machine": system.machine,
        "booted_at": datetime.fromtimestamp(psutil.boot_time(), UTC).isoformat(),
        "cores": psutil.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "load": psutil.getloadavg(),
        "memory_mib": _memory(),
        "pids": len(psutil.pids()),
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
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "total": memory.total // MIB,
        "available": memory.available // MIB,
        "cached": memory.cached // MIB,
        "swap_total": swap.total // MIB,
        "swap_free": swap.free // MIB,
    }


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
