"""What became of each process of an earlier bundle: it lives, waits to be reaped, or is gone.

The bundle says who there was. One that was reaped takes its exit code along; the kernel log and
the last lines of its parent may still say why it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hangwatch.core.aftermath import ENDS
from hangwatch.core.layout import MANIFEST
from hangwatch.core.objects import page
from hangwatch.model.capture import (
    CaptureKind,
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.model.identity import ProcessId
from hangwatch.system import paths, procfs

TAIL: Final = 64 << 10
LINES: Final = 40
"""The last ones of each log of a parent whose child has ended, and bytes that are read for them."""

MAX_LOGS: Final = 4
"""Of one parent."""

_LOGS: Final = (".log", ".out", ".err", ".txt")


def _collect(step: Step, room: Room) -> None:
    before, parents = _before(step.options.get("bundle", ""))
    rows = [_row(process, parents.get(process["pid"])) for process in before]
    room.write(ENDS, page({"schema": "hangwatch.ends/1"}, {"processes": rows}))
    left = {row["parent"]["pid"] for row in rows if row["state"] == "gone" and row.get("parent")}
    for pid in sorted(left):
        for number, tail in enumerate(_tails(pid), start=1):
            room.write(f"logs/parent-{pid}-{number}.log", tail)


def _before(bundle: str) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return the processes of a bundle, and their parents."""
    try:
        with tarfile.open(bundle) as archive:
            found = {
                name: archive.extractfile(member)
                for member in archive.getmembers()
                if (name := member.name.partition("/")[2]) in (MANIFEST, "procs.json")
            }
            manifest = found.get(MANIFEST)
            processes = json.load(manifest)["processes"] if manifest is not None else []
            table = found.get("procs.json")
            rows = json.load(table) if table is not None else []
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError) as error:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, f"the bundle that this follows cannot be read: {error}"
        ) from error
    return processes, {row["pid"]: row["ppid"] for row in rows if row.get("ppid")}


def _row(process: Mapping[str, Any], ppid: int | None) -> dict[str, Any]:
    pid, ticks = int(process["pid"]), int(process["start_ticks"])
    known = {"pid": pid, "start_ticks": ticks, "role": process.get("role", "")}
    known["instance"] = process.get("instance", "")
    state: dict[str, Any] = {"state": "gone"}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if procfs.is_same(ProcessId(pid, ticks)):
            row = procfs.read_row(pid)
            state = {"state": row.state}
            if row.state == "Z":
                state["exit_signal"] = row.exit_signal or None
    if ppid is not None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            above = procfs.read_row(ppid)
            state["parent"] = {"pid": ppid, "comm": above.comm, "state": above.state}
    return {**known, **state}


def _tails(pid: int) -> Iterator[bytes]:
    """Yield the last lines of the logs that a process writes."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        row = procfs.look_closer(procfs.read_row(pid), procfs.Sockets())
        for log in [log for log in row.logs if Path(log).suffix in _LOGS][:MAX_LOGS]:
            fds = [fd for fd, target in procfs.links(pid).items() if target == log]
            with contextlib.suppress(OSError):
                opened = paths.open_regular(f"{procfs.PROC}/{pid}/fd/{fds[0]}")
                with os.fdopen(opened, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                    lines = file.read(TAIL).splitlines(keepends=True)
                if lines:
                    yield b"".join(lines[-LINES:])


COLLECTOR: Final = Collector(
    name="ends",
    title="What became of each process since the bundle, and the last lines of who started it",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    timeout=10.0,
    needs="same pid namespace",
    kinds=frozenset({CaptureKind.AFTERMATH}),
    collect=_collect,
)
