"""Reads the asyncio tasks and threads of another CPython process, without touching it.

    >>> import hangwatch.remote
    >>> engine = hangwatch.remote.attach(4242)
    >>> snapshot = engine.tasks()
    >>> for task in snapshot.tasks:
    ...     print(task.name, task.chain[-1], task.awaits.detail)

Works on CPython 3.10 to 3.15 from any Python that this package runs on: in another container,
stopped, or hung in the kernel. Needs the right to read the process's memory (the one that ptrace
needs) and nothing else. The target is never stopped, signalled, traced or written to.

Every failure is an item in the result: a task that moved while it was read is there, and
marked ``torn``. Only a process that cannot be read at all raises, one of ``RemoteError``.

From the ground up: ``memory`` (pages, bounds), ``procfs``, ``elf`` (symbols from memory),
``layouts`` (data, one file per version), ``runtime`` (which layout is believed, and why),
``objects``, ``linetable``, ``frames``, ``coroutines`` (one link of a chain), ``registries`` (where
tasks are listed), ``tasks`` (whole chains, and whether they held still), ``awaits`` (what they
wait for), ``graph`` (who waits for whom), ``threads``, ``thread_locks``, ``probes`` (numbers of the
program), and on top ``process``.
``results`` holds what comes out; ``document``, ``grouping`` and ``text`` show it. Standard library
only, and nothing of the rest of hangwatch.
"""

from __future__ import annotations

from hangwatch.remote.errors import (
    NotPermittedError,
    NotPythonError,
    ProcessGoneError,
    RemoteError,
    UnknownLayoutError,
)
from hangwatch.remote.memory import Limits
from hangwatch.remote.probes import Probe, Table
from hangwatch.remote.process import RemotePython, attach
from hangwatch.remote.results import (
    Awaits,
    Edge,
    Frame,
    Hold,
    Interpreter,
    Loop,
    Problem,
    Snapshot,
    StateRow,
    StateTable,
    Task,
    Thread,
    ThreadWait,
    Waits,
)

__all__ = [
    "Awaits",
    "Edge",
    "Frame",
    "Hold",
    "Interpreter",
    "Limits",
    "Loop",
    "NotPermittedError",
    "NotPythonError",
    "Probe",
    "Problem",
    "ProcessGoneError",
    "RemoteError",
    "RemotePython",
    "Snapshot",
    "StateRow",
    "StateTable",
    "Table",
    "Task",
    "Thread",
    "ThreadWait",
    "UnknownLayoutError",
    "Waits",
    "attach",
]
