"""What the processes looked like while they were well: the looks of the baseline ring.

Copies what lies in the state directory; no process is touched for it. A process that ended since
is there as well, and is marked so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hangwatch.core import baseline
from hangwatch.core.baseline import NODE
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
from hangwatch.system import procfs
from hangwatch.system.looks import Ring

SHARED: Final = ("pid", "start_ticks", "role")
"""What all looks at a process have in common."""


def _collect(step: Step, room: Room) -> None:
    state = step.options.get("state", "")
    ring = Ring(Path(state))
    looks = ring.looks if state else ()
    if not looks:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "no baseline was taken of these processes",
            "let hangwatch watch run beside them: it takes one every ten minutes",
        )
    roles = {target.process: target.role.value for target in step.targets}
    index: list[dict[str, Any]] = []
    for process in dict.fromkeys(look.process for look in looks):
        found = [seen for look in looks if look.process == process and (seen := ring.read(look))]
        if not found:
            continue
        role = roles.get(process) or found[0].get("role") or "process"
        name = "node.json" if process == NODE else f"{role}-{process.pid}.json"
        path = f"{baseline.FOLDER}/{name}"
        room.write(path, _document(found))
        head = {"path": path, **{key: found[0].get(key) for key in SHARED}}
        index.append(
            {
                **head,
                "gone": process != NODE and not procfs.is_same(process),
                "samples": [
                    {"at": seen.get("at"), "verdict": seen.get("verdict")} for seen in found
                ],
            }
        )
    room.write(baseline.INDEX, _listed(index))


def _document(found: Sequence[Mapping[str, Any]]) -> bytes:
    """Return all looks at one process, newest first, a look a line."""
    head = {"schema": baseline.SCHEMA, **{key: found[0].get(key) for key in SHARED}}
    looks = [{key: value for key, value in seen.items() if key not in SHARED} for seen in found]
    return json.dumps(head)[:-1].encode() + b', "samples": ' + _listed(looks).rstrip() + b"}\n"


def _listed(rows: Sequence[Mapping[str, Any]]) -> bytes:
    lines = ",\n ".join(json.dumps(row) for row in rows)
    return f"[\n {lines}\n]\n".encode()


COLLECTOR: Final = Collector(
    name="baseline",
    title="What the processes looked like while they were well",
    scope=Scope.NODE,
    rung=9,
    stage=Stage.B,
    timeout=10.0,
    needs="a daemon that has watched them for a while",
    kinds=frozenset({CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN}),
    collect=_collect,
)
