"""Control groups of all processes: limits, use, pressure, throttling, kills for want of memory.

Of each group and of those that it lies in, once for all its processes. A group that can be seen
neither from here nor through the root of its process is named without figures.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Final

from hangwatch.core import cgroups
from hangwatch.core.objects import page
from hangwatch.core.planning import file_name
from hangwatch.model.capture import CaptureKind, Collector, Room, Scope, Stage, Step
from hangwatch.system import cgroupfs, procfs

MAX_GROUPS: Final = 128


def _collect(step: Step, room: Room) -> None:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    unseen: dict[int, str] = {}
    for target in step.targets:
        pid = target.process.pid
        if not procfs.is_same(target.process):
            continue
        groups: tuple[cgroupfs.Group, ...] = ()
        with contextlib.suppress(OSError):
            groups = tuple(cgroupfs.groups(pid))
        if not groups:
            unseen[pid] = _named(pid)
        for group in groups:
            key = (group.version, group.controllers, group.path)
            if key not in found and len(found) < MAX_GROUPS:
                found[key] = _record(group)
            if key in found:
                found[key]["processes"].append(pid)
    head = {
        "schema": "hangwatch.cgroups/1",
        "sample": step.sample,
        "monotonic": time.monotonic(),
        "machine": _machine(),
        "unseen": {str(pid): path for pid, path in unseen.items()},
    }
    records = [record for record in found.values() if len(record) > 4 or not record["controllers"]]
    room.write(file_name("cgroups", ".json", step.sample), page(head, {"groups": records}))


def _record(group: cgroupfs.Group) -> dict[str, Any]:
    return {
        "path": group.path,
        "version": group.version,
        "controllers": list(group.controllers),
        "processes": [],
        **cgroups.describe(cgroupfs.read(group)),
    }


def _named(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = procfs.read_file(pid, "cgroup").decode("utf-8", "replace")
        return next((path for *_, path in cgroups.memberships(text)), "")
    return ""


def _machine() -> dict[str, Any]:
    """Return the pressure on the whole machine, and how many were killed for want of memory."""
    pressure = {}
    for name in ("cpu", "memory", "io"):
        if said := cgroups.pressure(_text(f"/proc/pressure/{name}")):
            pressure[name] = said
    kills = cgroups.keyed(_text("/proc/vmstat")).get("oom_kill")
    return {"pressure": pressure, **({} if kills is None else {"oom_kill": kills})}


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


COLLECTOR: Final = Collector(
    name="cgroups",
    title="Memory, CPU, input and output, pressure and freezing of every control group",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    samples=2,
    timeout=5.0,
    needs="the group file system, here or through /proc/PID/root (Linux 5.6)",
    waits=True,
    kinds=frozenset(CaptureKind) - {CaptureKind.BASELINE},
    collect=_collect,
)
