"""Suspended asyncio tasks with their await chains, read from memory while the target runs.

A thread dump of an asyncio program shows ``select``; this shows the line of the ``await`` that does
not complete, and what it waits for. Our own reader is the first eye on the stacks because it only
reads: it needs no tool, and works on processes that are stopped or hang in the kernel.

The second sample of a process is cheaper than the first. Whoever read it before keeps what does not
change: where its runtime is, the layout that it proved, types, code objects and names. A worker of
the pool keeps the readers of the processes that it has read, and gets their second samples too, as
far as it is free. A process whose number was used again gets a reader of its own.

What is written has the shape ``hangwatch.tasks/1``, one item a line, so that each can be cited. The
strings in it are names of tasks, functions, files, types and states; no value of the program. The
numbers in it are those that the engine's profile asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from hangwatch import remote
from hangwatch.core.planning import file_name
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.model.identity import ProcessId
from hangwatch.remote import probes
from hangwatch.remote.document import document
from hangwatch.system import procfs

TIMEOUT: Final = 10.0

RESERVE: Final = 2.0
"""Seconds before its deadline that the reading ends, so that a process with more tasks leaves what
was read of it, and says that it is not all."""

MAX_TASKS: Final = 20_000

MAX_READERS: Final = 64
"""Readers kept; one holds about 0.1 MB between its readings."""

_readers: dict[ProcessId, remote.RemotePython] = {}


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    name = file_name("tasks", ".json", step.sample)
    try:
        reader = _reader(process, max(0.5, step.timeout - RESERVE))
        snapshot = reader.tasks(state=_probes(step))
        reader.forget()
    except remote.RemoteError as error:
        _readers.pop(process, None)
        kind, hint = _explain(error)
        raise CollectorError(kind, str(error), hint) from error
    with room.create(name) as out:
        for piece in lines(document(snapshot)):
            out.write(piece)


def _probes(step: Step) -> tuple[probes.Table, ...]:
    """Return which numbers of the engine to read, as its profile says."""
    return probes.tables(json.loads(step.options.get("state", "[]")))


def _reader(process: ProcessId, seconds: float) -> remote.RemotePython:
    """Return the reader of a process, made now if it was not read before."""
    known = _readers.pop(process, None)
    if known is None:
        limits = remote.Limits(seconds=seconds, tasks=MAX_TASKS)
        known = remote.attach(process.pid, limits=limits)
        while len(_readers) >= MAX_READERS:
            del _readers[next(iter(_readers))]
    _readers[process] = known
    return known


def _explain(error: remote.RemoteError) -> tuple[FailureKind, str]:
    match error:
        case remote.NotPermittedError():
            return FailureKind.NOT_PERMITTED, procfs.PERMISSION_HINT
        case remote.ProcessGoneError():
            return FailureKind.TARGET_GONE, ""
        case remote.NotPythonError():
            return FailureKind.NOT_PYTHON, ""
        case remote.UnknownLayoutError():
            return FailureKind.UNKNOWN_LAYOUT, "pip install --upgrade hangwatch"
        case _:
            return FailureKind.TOOL_FAILED, ""


def lines(found: Mapping[str, Any]) -> list[bytes]:
    """Return a document in pieces: JSON with each item of its lists on a line of its own."""
    pieces = []
    for number, (key, value) in enumerate(found.items()):
        pieces.append(("{\n" if number == 0 else ",\n") + json.dumps(key) + ": ")
        if isinstance(value, list) and value:
            items = ",\n".join(json.dumps(item) for item in value)
            pieces.append(f"[\n{items}\n]")
        else:
            pieces.append(json.dumps(value))
    pieces.append("\n}\n")
    return [piece.encode("ascii") for piece in pieces]


COLLECTOR: Final = Collector(
    name="tasks",
    title="asyncio tasks with their await chains, without stopping it",
    scope=Scope.PROCESS,
    rung=4,
    stage=Stage.A,
    samples=2,
    timeout=TIMEOUT,
    needs="the right to read the target's memory: same user, or SYS_PTRACE",
    python_only=True,
    reads_memory=True,
    collect=_collect,
)
