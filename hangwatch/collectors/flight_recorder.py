"""The last collectives of a rank, by PyTorch's NCCL flight recorder, upon request.

The process makes a named pipe for this if ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE`` was set when it
started (``hangwatch env``), and a thread of PyTorch's looks at it once a second; a byte in it lets
another thread write the dump (``ProcessGroupNCCL.cpp``, ``DumpPipe`` and ``HeartbeatMonitor``).
That thread puts names to Python stacks, for which it takes the GIL a moment: where the GIL is held
for ever, no dump comes. The engine goes on.

The dump is a pickle: it is read as data and never executed, and what enters the bundle is JSON.
Servers may share the file they dump into, so that they are asked one after the other.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from hangwatch.core import flight
from hangwatch.core.pickles import NotPlainDataError
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
from hangwatch.system import procfs, triggers

TIMEOUT: Final = 20.0
"""Seconds: the pipe is looked at once a second, and the first dump took five on an H200."""

INTERVAL: Final = 0.25

MAX_DUMP: Final = 64 << 20

PIPE: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    deadline = time.monotonic() + step.timeout - 1.0
    variables = procfs.read_environment(process.pid)
    prefix = variables.get(PIPE, "")
    if not prefix:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "the process was started without the pipe of the flight recorder",
            'before the engine starts: eval "$(hangwatch env)"',
        )
    name = re.compile(re.escape(PurePosixPath(prefix).name) + r"(\d+)\.pipe")
    with contextlib.ExitStack() as opened:
        pipe, match = opened.enter_context(triggers.opened_by(process, name))
        rank = int(match[1])
        dumps = tuple(_dumps(process.pid, variables, rank, opened))
        before = {dump.path: dump.state() for dump in dumps}
        triggers.pull(process, pipe)
        found = _await_dump(dumps, before, rank, deadline)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    room.write("flight_recorder.json", f"{text}\n".encode())


def _dumps(
    pid: int, variables: Mapping[str, str], rank: int, opened: contextlib.ExitStack
) -> Iterator[triggers.Dump]:
    """Yield where the dump may appear."""
    for place in _places(variables):
        with contextlib.suppress(FileNotFoundError):
            path = triggers.in_root_of(pid, f"{place}{rank}")
            yield opened.enter_context(triggers.Dump(pid, path))


def _await_dump(
    dumps: tuple[triggers.Dump, ...],
    before: Mapping[PurePosixPath, tuple[int, int, int] | None],
    rank: int,
    deadline: float,
) -> dict[str, Any]:
    refused: dict[PurePosixPath, tuple[int, int, int]] = {}
    while time.monotonic() < deadline:
        time.sleep(INTERVAL)
        for dump in dumps:
            state = dump.state()
            if state is None or state == before[dump.path]:
                continue
            with dump.opened() as descriptor, open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_DUMP)
            try:
                found = flight.summary(data, rank)
            except NotPlainDataError as error:
                if refused.get(dump.path) == state:  # it was not just half written
                    raise CollectorError(
                        FailureKind.TOOL_FAILED, f"the dump cannot be read: {error}"
                    ) from error
                refused[dump.path] = state
                continue
            return found | {"file": str(dump.path), "size": state[2]}
    raise CollectorError(FailureKind.TIMED_OUT, "no dump of the flight recorder came")


def _places(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield what the dump's name may begin with, by the environment of the process."""
    for name in FILES:
        if variables.get(name):
            yield variables[name]
            return
    home = variables.get("HOME") or "/tmp"  # noqa: S108  # PyTorch's own default
    yield f"{variables.get('XDG_CACHE_HOME') or home + '/.cache'}/torch/comm_lib_trace_rank_"
    yield f"{home}/.cache/torch/comm_lib_trace_rank_"
    yield "/tmp/nccl_trace_rank_"  # noqa: S108  # of older versions


COLLECTOR: Final = Collector(
    name="flight_recorder",
    title="The last collectives of each rank, by PyTorch's flight recorder; writes into its pipe",
    scope=Scope.PROCESS,
    rung=10,
    stage=Stage.B,
    timeout=TIMEOUT,
    needs="an engine that was started with what hangwatch env prints",
    opt_in=True,
    python_only=True,
    gpu_only=True,
    asks=True,
    gates=(Gate.NOT_STOPPED,),
    collect=_collect,
    waits=True,
)
