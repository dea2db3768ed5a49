"""Asyncio tasks with their await chains, and all threads, read from memory while the target runs.

A thread dump of an asyncio program shows ``select``; this shows the line of the ``await`` that does
not complete, and what it waits for. Our own reader is the first eye on the stacks because it only
reads: it needs no tool, and works on processes that are stopped or hang in the kernel.

The second sample of a process is cheaper than the first. Whoever read it before keeps what does not
change: where its runtime is, the layout that it proved, types, code objects and names. A worker of
the pool keeps the readers of the processes that it has read, and gets their second samples too, as
far as it is free. A process whose number was used again gets a reader of its own.

What is written has the shapes ``hangwatch.tasks/1`` and ``hangwatch.stacks/1``, one item a line, so
that each can be cited. The strings in it are names of tasks, threads, functions, files, types and
states; no value of the program. The numbers in it are those that the engine's profile asks for.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hangwatch import remote
from hangwatch.core.baseline import known_name
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
from hangwatch.remote.document import document, stacks
from hangwatch.system import procfs

TIMEOUT: Final = 10.0

RESERVE: Final = 2.0
"""Seconds before its deadline that the reading ends, so that a process with more tasks leaves what
was read of it, and says that it is not all."""

MAX_TASKS: Final = 20_000

MAX_READERS: Final = 64
"""Readers kept; one holds about 0.1 MB between its readings."""

MISSES: Final = 32
"""System calls of a reading above which what is known of a process is no longer of much use."""

MAX_KNOWN: Final = 4 << 20
"""Bytes; of an engine with 4,000 modules, 2,000 code objects and 500 tasks 1 MB is known."""

_readers: dict[ProcessId, remote.RemotePython] = {}


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    state = _probes(step)
    gc.disable()  # thousands of small values, in no circles: a third of the time would go into it
    try:
        reader = _reader(step)
        snapshot = reader.tasks(state=state, threads=True)
        for name, found in (("tasks", document(snapshot)), ("stacks", stacks(snapshot))):
            room.write(file_name(name, ".json", step.sample), b"".join(lines(found)))
        if step.options.get("learn") and snapshot.calls > MISSES:
            _keep(_file(step), reader.learn(state=state))
        reader.forget()
    except remote.RemoteError as error:
        _readers.pop(process, None)
        raise CollectorError(*_explain(error)) from error
    finally:
        gc.enable()


def _file(step: Step) -> Path | None:
    """Return where what is known of the target is kept, if anywhere."""
    folder = step.options.get("known")
    process = step.target.process if step.target is not None else None
    return Path(folder, known_name(process)) if folder and process is not None else None


def _known(step: Step) -> bytes:
    path = _file(step)
    try:
        return b"" if path is None else path.read_bytes()
    except OSError:
        return b""


def _keep(path: Path | None, known: bytes) -> None:
    """Keep what is known; whoever reads it meanwhile has the old one whole, or the new one."""
    if path is None or len(known) > MAX_KNOWN:
        return
    fresh = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # it only makes things faster
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(known)
        fresh.replace(path)


def _probes(step: Step) -> tuple[probes.Table, ...]:
    """Return which numbers of the engine to read, as its profile says."""
    return probes.tables(json.loads(step.options.get("state", "[]")))


def _reader(step: Step) -> remote.RemotePython:
    """Return the reader of a process, made now if it was not read before."""
    assert step.target is not None
    process = step.target.process
    reader = _readers.pop(process, None)
    if reader is None:
        limits = remote.Limits(seconds=max(0.5, step.timeout - RESERVE), tasks=MAX_TASKS)
        reader = remote.attach(process.pid, limits=limits, known=_known(step))
        while len(_readers) >= MAX_READERS:
            del _readers[next(iter(_readers))]
    _readers[process] = reader
    return reader


def _explain(error: remote.RemoteError) -> tuple[FailureKind, str, str]:
    match error:
        case remote.NotPermittedError():
            message, _, remedy = str(error).partition("; ")  # it knows it best
            return FailureKind.NOT_PERMITTED, message, remedy or procfs.PERMISSION_HINT
        case remote.ProcessGoneError():
            return FailureKind.TARGET_GONE, str(error), ""
        case remote.NotPythonError():
            return FailureKind.NOT_PYTHON, str(error), ""
        case remote.UnknownLayoutError():
            return FailureKind.UNKNOWN_LAYOUT, str(error), "pip install --upgrade hangwatch"
        case _:
            return FailureKind.TOOL_FAILED, str(error), ""


def lines(found: Mapping[str, Any]) -> list[bytes]:
    """Return a document in pieces: JSON with each item of its lists on a line of its own."""
    known: dict[int, str] = {}
    pieces = []
    for number, (key, value) in enumerate(found.items()):
        pieces.append(("{\n" if number == 0 else ",\n") + json.dumps(key) + ": ")
        if isinstance(value, list) and value:
            items = ",\n".join(_item(item, known) for item in value)
            pieces.append(f"[\n{items}\n]")
        else:
            pieces.append(json.dumps(value))
    pieces.append("\n}\n")
    return [piece.encode("ascii") for piece in pieces]


def _item(item: Any, known: dict[int, str]) -> str:
    """Return one item; thousands of tasks share one chain, which is encoded once."""
    chain = item.get("chain") if isinstance(item, dict) else None
    if not chain:
        return json.dumps(item)
    text = known.get(id(chain)) or known.setdefault(id(chain), json.dumps(chain))
    return json.dumps({**item, "chain": None}).replace('"chain": null', f'"chain": {text}', 1)


COLLECTOR: Final = Collector(
    name="tasks",
    title="asyncio tasks with their await chains, threads with their locks, without stopping it",
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
