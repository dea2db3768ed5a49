"""Python stacks of every thread, read from memory while the target runs: py-spy, non-blocking.

Never the blocking kind: with one thread in D state it hangs with the whole engine stopped. What
reads a running process can read it in the middle of a change (``Bad address``): on a busy engine
8 of 22 dumps failed so, therefore it is tried up to three times. py-spy exits with 1 whatever
happened, so its text is read, and only after our own look at the process.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from pathlib import Path
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
from hangwatch.system import procfs
from hangwatch.system.spawn import ToolResult, run_tool

TIMEOUT: Final = 10.0

ATTEMPTS: Final = 3

MAX_OUTPUT: Final = 24 << 20
"""Bytes: 2,000 threads with 40 frames each."""

_TORN: Final = re.compile(
    r"Bad address|Failed to copy|Failed to get stack traces|Invalid argument \(os error 22\)"
)
_NOT_PYTHON: Final = re.compile(r"Failed to find python version|Failed to find a python")
_NOT_PERMITTED: Final = re.compile(
    r"Permission [Dd]enied|Operation not permitted|os error (?:1|13)\)"
)
_ENDED: Final = re.compile(r"No such process|Check that the process is running")
_NO_LIBRARY: Final = re.compile(r"No such file or directory")
_CAUSE: Final = re.compile(r"^(?:Error|Caused by)?:?\s*(?:\d+: )?(?P<text>\S.*)$", re.MULTILINE)


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    pid = step.target.process.pid
    if procfs.read_row(pid).state in ("Z", "X"):
        raise CollectorError(
            FailureKind.TARGET_GONE, f"process {pid} has ended and waits to be reaped"
        )
    program = step.options.get("py_spy") or _find()
    # A second less than the step has, so that a py-spy that hangs is told from a worker that does.
    deadline = time.monotonic() + step.timeout - 1.0
    for attempt in range(1, ATTEMPTS + 1):
        result = _dump(program, pid, max(0.5, deadline - time.monotonic()))
        if result.code == 0 and not result.ended_by_us:
            room.write(file_name("threads", ".json", step.sample), _checked(result.output))
            return
        torn = _TORN.search(result.errors.decode("utf-8", "replace"))
        if (
            not torn
            or result.ended_by_us
            or attempt == ATTEMPTS
            or not procfs.is_same(step.target.process)
        ):
            raise _failure(result, attempt)


def _find() -> str:
    """Return py-spy: the one that was installed with us, else the one on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise CollectorError(
            FailureKind.NOT_INSTALLED, "py-spy is not installed", "pip install py-spy"
        )
    return found


def _dump(program: str, pid: int, timeout: float) -> ToolResult:
    arguments = [program, "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(pid)]
    try:
        return run_tool(arguments, timeout=timeout, limit=MAX_OUTPUT)
    except FileNotFoundError as error:
        raise CollectorError(
            FailureKind.NOT_INSTALLED, f"there is no {program}", "pip install py-spy"
        ) from error
    except OSError as error:
        raise CollectorError(
            FailureKind.NOT_INSTALLED,
            f"{program} cannot be started: {error.strerror}",
            "pip install --force-reinstall py-spy",
        ) from error


def _checked(output: bytes) -> bytes:
    """Return *output* if it is what py-spy promises."""
    try:
        threads = json.loads(output)
    except (ValueError, RecursionError):
        threads = None
    if not isinstance(threads, list) or not all(
        isinstance(thread, dict) and isinstance(thread.get("frames"), list) for thread in threads
    ):
        raise CollectorError(
            FailureKind.TOOL_FAILED,
            "py-spy wrote something that is not a list of threads",
            "pip install --upgrade py-spy",
        )
    return output


def _failure(result: ToolResult, attempts: int) -> CollectorError:
    text = result.errors.decode("utf-8", "replace")
    if result.ended_by_us:
        if len(result.output) + len(result.errors) > MAX_OUTPUT:
            return CollectorError(
                FailureKind.TOO_LARGE, f"py-spy wrote more than {MAX_OUTPUT >> 20} MiB"
            )
        return CollectorError(FailureKind.TIMED_OUT, "py-spy did not end in time and was killed")
    if result.code is not None and result.code < 0:
        return CollectorError(FailureKind.TOOL_FAILED, f"py-spy died of signal {-result.code}")
    for pattern, kind, message, hint in _KNOWN:
        if pattern.search(text):
            return CollectorError(kind, message, hint)
    said = "; ".join(match["text"] for match in _CAUSE.finditer(text.split("\nStack backtrace")[0]))
    tried = f" ({attempts} attempts)" if attempts > 1 else ""
    return CollectorError(
        FailureKind.TOOL_FAILED, f"py-spy failed{tried}: {said[:500] or f'exit code {result.code}'}"
    )


# The first that matches; our own look at the process, before and after, goes before any of them.
_KNOWN: Final = (
    (_NOT_PYTHON, FailureKind.NOT_PYTHON, "there is no Python in this process", ""),
    (
        _NOT_PERMITTED,
        FailureKind.NOT_PERMITTED,
        "its memory may not be read",
        procfs.PERMISSION_HINT,
    ),
    (_ENDED, FailureKind.TARGET_GONE, "the process ended meanwhile", ""),
    (
        _NO_LIBRARY,
        FailureKind.TOOL_FAILED,
        "py-spy cannot open the target's interpreter: its files were deleted or replaced",
        "",
    ),
)


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
