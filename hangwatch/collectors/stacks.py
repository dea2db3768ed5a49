"""Python stacks of every thread, read from memory while the target runs: py-spy, non-blocking.

Never the blocking kind: with one thread in D state it hangs with the whole engine stopped. What
reads a running process can read it in the middle of a change (``Bad address``): on a busy engine
8 of 22 dumps failed so, therefore it is tried up to three times.
"""

from __future__ import annotations

import time
from typing import Final

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
from hangwatch.system import procfs, pyspy
from hangwatch.system.spawn import ToolResult, run_tool

TIMEOUT: Final = 10.0

ATTEMPTS: Final = 3


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    pid = step.target.process.pid
    if procfs.read_row(pid).state in ("Z", "X"):
        raise CollectorError(
            FailureKind.TARGET_GONE, f"process {pid} has ended and waits to be reaped"
        )
    program = pyspy.find(step.options.get("py_spy", ""))
    # A second less than the step has, so that a py-spy that hangs is told from a worker that does.
    deadline = time.monotonic() + step.timeout - 1.0
    for attempt in range(1, ATTEMPTS + 1):
        result = _dump(program, pid, max(0.5, deadline - time.monotonic()))
        if result.code == 0 and not result.ended_by_us:
            pyspy.threads(result.output)
            room.write(file_name("threads", ".json", step.sample), result.output)
            return
        torn = pyspy.TORN.search(result.errors.decode("utf-8", "replace"))
        if (
            not torn
            or result.ended_by_us
            or attempt == ATTEMPTS
            or not procfs.is_same(step.target.process)
        ):
            raise pyspy.failure(result, attempt)


def _dump(program: str, pid: int, timeout: float) -> ToolResult:
    arguments = [program, "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(pid)]
    try:
        return run_tool(arguments, timeout=timeout, limit=pyspy.MAX_OUTPUT)
    except OSError as error:
        raise pyspy.not_started(program, error) from error


COLLECTOR: Final = Collector(
    name="stacks",
    title="Python stacks of every thread, without stopping it",
    scope=Scope.PROCESS,
    rung=5,
    stage=Stage.A,
    samples=2,
    timeout=TIMEOUT,
    needs="the right to read the target's memory: same user, or SYS_PTRACE",
    python_only=True,
    options={"py_spy": "path of another py-spy than the one that was installed with hangwatch"},
    collect=_collect,
)
