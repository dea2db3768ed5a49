"""Where the threads are, twenty times a second: py-spy, non-blocking, in the pause of the capture.

Two samples five seconds apart show the same line of a coroutine that polls and of one that is
stuck; a hundred show what it does between. Only of the three most suspicious processes, because it
costs half a core for one with 50 threads, and a whole one from 100 on. Nothing is stopped for it.

py-spy goes on until it is interrupted, writes what it has and ends well; also when its target dies.
"""

from __future__ import annotations

import time
from typing import Final

from hangwatch.core import sampling
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
from hangwatch.model.identity import NEEDED
from hangwatch.system import procfs, pyspy
from hangwatch.system.spawn import ToolResult, run_tool

RATE: Final = 20
"""Samples a second."""

SECONDS: Final = 4.0
"""How long, where the pause of the capture does not say."""

GRACE: Final = 0.3
"""Seconds to write what was seen: 80 ms for 50 threads."""


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    began_at = time.monotonic()
    until = float(step.options.get("until", began_at + SECONDS))
    seconds = until - began_at
    if seconds <= GRACE:
        raise CollectorError(FailureKind.DEADLINE, "its turn in the pause came too late")
    result = _record(pyspy.find(step.options.get("py_spy", "")), process.pid, seconds)
    seen = sampling.parse(result.output)
    if seen.threads:
        lasted = time.monotonic() - began_at
        text = sampling.render(seen, pid=process.pid, rate=RATE, seconds=lasted)
        room.write("samples.txt", text)
    if result.code != 0 or result.ended_by_us:
        raise pyspy.failure(result)
    if not procfs.is_same(process) or procfs.read_row(process.pid).state in ("Z", "X"):
        raise CollectorError(FailureKind.TARGET_GONE, "the process ended while it was sampled")
    if not seen.threads:
        raise CollectorError(
            FailureKind.TOOL_FAILED, f"py-spy saw no stack; {seen.errors or 0} samples failed"
        )


def _record(program: str, pid: int, seconds: float) -> ToolResult:
    arguments = [
        *(program, "record", "--nonblocking", "--idle", "--threads", "--full-filenames"),
        *("--rate", str(RATE), "--duration", "3600", "--format", "raw"),
        *("--output", "/dev/stdout", "--pid", str(pid)),
    ]
    try:
        return run_tool(
            arguments, timeout=seconds + GRACE, interrupt_after=seconds, limit=pyspy.MAX_OUTPUT
        )
    except OSError as error:
        raise pyspy.not_started(program, error) from error


COLLECTOR: Final = Collector(
    name="samples",
    title="Where the threads of the three most suspicious processes are, 20 times a second",
    scope=Scope.PROCESS,
    rung=5,
    stage=Stage.PAUSE,
    timeout=10.0,
    needs="the right to read the target's memory: same user, or SYS_PTRACE",
    python_only=True,
    reads_memory=True,
    roles=NEEDED,
    most=3,
    gates=(Gate.NO_D_STATE, Gate.NOT_STOPPED),
    options={"py_spy": "path of another py-spy than the one that was installed with hangwatch"},
    collect=_collect,
)
