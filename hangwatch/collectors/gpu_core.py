"""A GPU core dump of an engine that is to be restarted anyway, upon request.

The process makes a named pipe for this if it was started with what ``hangwatch env --gpu-core``
prints; a byte in it lets the driver write the state of the GPU to a file, in a tenth of a second.
The CUDA context does not survive it: every later call into it fails, the engine answers no request
any more, and nothing heals that but a restart. So it comes after everything else, of the one most
suspicious holder of a GPU, and only for a verdict of ``hung``.

The dump has 200 MB and memory of the model may be in it: it stays where it is. What goes into the
bundle is its path and its size, and what ``cuda-gdb`` says of it, if there is one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from hangwatch.core import cudagdb
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Gate,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs, triggers
from hangwatch.system.cudagdb import MAX_OUTPUT, MEMORY, arguments, find
from hangwatch.system.spawn import run_tool

TIMEOUT: Final = 60.0

ENABLED: Final = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"

INTERVAL: Final = 0.2

QUIET: Final = 1.0
"""Seconds without growth after which the dump is taken to be whole."""

READING: Final = 20.0
"""Seconds left for ``cuda-gdb``, which reads a dump in one or two."""


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    deadline = time.monotonic() + step.timeout - 2.0
    variables = procfs.read_environment(process.pid)
    pipe, file = _names(process.pid, variables)
    # Many programs end over what they then cannot do any more; their dump is there all the same.
    with triggers.Dump(process.pid, file) as dump:
        before = dump.state()
        _ask(process, pipe)
        size, seconds = _await_dump(dump, before, deadline - READING)
        found = {
            "file": str(file),
            "size": size,
            "seconds": round(seconds, 2),
            "context": "lost: the engine must be restarted",
        }
        _write(room, "gpu_core.json", found)
        text = _read(dump, step.options, deadline)
    room.write("gpu_core.txt", text.encode())
    _write(room, "gpu_core_kernels.json", {"kernels": cudagdb.kernels(text)})


def _write(room: Room, name: str, document: Mapping[str, Any]) -> None:
    room.write(name, f"{json.dumps(document, indent=1, ensure_ascii=False)}\n".encode())


def _names(pid: int, variables: Mapping[str, str]) -> tuple[PurePosixPath, PurePosixPath]:
    """Return where the process's pipe and its dump lie in its own root.

    Raises:
        CollectorError: It was not started for this.
    """
    on = variables.get(ENABLED, "0") not in ("", "0")
    pipe, file = variables.get("CUDA_COREDUMP_PIPE"), variables.get("CUDA_COREDUMP_FILE")
    if not (on and pipe and file):
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "the process was not started for GPU core dumps",
            'before the engine starts: eval "$(hangwatch env --gpu-core)"',
        )
    own = _own_number(pid)
    host = variables.get("HOSTNAME") or socket.gethostname()

    def expanded(text: str) -> PurePosixPath:
        return triggers.in_root_of(pid, text.replace("%p", str(own)).replace("%h", host))

    return expanded(pipe), expanded(file)


def _own_number(pid: int) -> int:
    """Return the number by which a process knows itself, in its own pid namespace."""
    match = re.search(rb"^NSpid:\s.*?(\d+)$", procfs.read_file(pid, "status"), re.MULTILINE)
    return int(match[1]) if match else pid


def _ask(process: ProcessId, pipe: PurePosixPath) -> None:
    try:
        with procfs.inside(process.pid, pipe) as named:
            triggers.pull(process, named)
    except FileNotFoundError as error:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            f"there is no {pipe}: the process has no CUDA context",
        ) from error


def _await_dump(
    dump: triggers.Dump, before: tuple[int, int, int] | None, deadline: float
) -> tuple[int, float]:
    """Return the size of the dump and how long it took, once it grows no more."""
    began = changed = time.monotonic()
    last = before
    while time.monotonic() < deadline:
        time.sleep(INTERVAL)
        state = dump.state()
        if state != last:
            last, changed = state, time.monotonic()
        elif last is not None and last != before and time.monotonic() - changed >= QUIET:
            return last[2], changed - began
    raise CollectorError(FailureKind.TIMED_OUT, "the driver wrote no dump")


def _read(dump: triggers.Dump, options: Mapping[str, str], deadline: float) -> str:
    """Return what ``cuda-gdb`` says of the dump."""
    program = find(options)
    with dump.opened() as descriptor:
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        result = run_tool(
            arguments(program, [f"target cudacore {path}", *cudagdb.QUESTIONS]),
            timeout=max(1.0, deadline - time.monotonic()),
            limit=MAX_OUTPUT,
        )
    if result.ended_by_us:
        raise CollectorError(
            FailureKind.TIMED_OUT, "cuda-gdb did not read the dump in time and was killed"
        )
    said = cudagdb.tidy(result.output.decode("utf-8", "replace"))
    return (said + result.errors.decode("utf-8", "replace")).replace(path, str(dump.path))


COLLECTOR: Final = Collector(
    name="gpu_core",
    title="A GPU core dump; the engine does not survive it",
    scope=Scope.PROCESS,
    rung=10,
    stage=Stage.B,
    timeout=TIMEOUT,
    needs="an engine that was started with what hangwatch env --gpu-core prints",
    opt_in=True,
    gpu_only=True,
    most=1,
    harms=True,
    asks=True,
    gates=(Gate.HUNG, Gate.NOT_STOPPED),
    memory=MEMORY,
    options={
        "program": "path of another cuda-gdb than the one on the path",
        "any_verdict": "yes: also where the verdict is not hung",
    },
    collect=_collect,
    waits=True,
)
