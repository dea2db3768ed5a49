"""Python stacks of every thread, read from memory while the target runs: py-spy, non-blocking.

Never the blocking kind: with one thread in D state it hangs with the whole engine stopped. What
reads a running process can read it in the middle of a change (``Bad address``): on a busy engine
8 of 22 dumps failed so, therefore it is tried up to three times. When it fails all the same, is
missing, or hangs, our own reader stands in, in the same shape: names and lines are the same, so
that a stack read by one of them can be compared with one read by the other. The failure of py-spy
stays on record.
"""

from __future__ import annotations

import time
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
from hangwatch.system import procfs, pyspy
from hangwatch.system.spawn import ToolResult, run_tool

TIMEOUT: Final = 10.0

ATTEMPTS: Final = 3

READER: Final = "hangwatch's own reader"

READER_TIMEOUT: Final = 2.5
"""Seconds that are left for our reader when py-spy hangs: it takes 0.05 for 48 threads."""

_TARGETS_OWN: Final = frozenset(
    (FailureKind.TARGET_GONE, FailureKind.NOT_PYTHON, FailureKind.NOT_PERMITTED)
)
"""Failures that our reader would have as well."""

_ENDED: Final = ("Z", "X")
"""States of a thread that has ended."""

_hung: set[str] = set()
"""Programs that hung on this worker: it does not wait for them again."""


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    number = _living(process.pid)
    name = file_name("threads", ".json", step.sample)
    try:
        room.write(name, _dump(step, process, number))
    except CollectorError as error:
        if error.failure.kind in _TARGETS_OWN or not procfs.is_same(process):
            raise
        found = _read(process, error)
        room.write(name, pyspy.lines(found))
        raise CollectorError(
            error.failure.kind,
            f"{error.failure.message}; {READER} stands in",
            error.failure.hint,
            stand_in=READER,
        ) from error


def _living(pid: int) -> int:
    """Return the number by which py-spy finds a process: where its main thread has ended, another.

    Raises:
        CollectorError: ``TARGET_GONE`` where no thread is left.
    """
    if procfs.read_row(pid).state not in _ENDED:
        return pid
    for tid, state in procfs.thread_states(pid).items():
        if state not in _ENDED:
            return tid
    raise CollectorError(FailureKind.TARGET_GONE, f"process {pid} has ended and waits to be reaped")


def _dump(step: Step, process: ProcessId, number: int) -> bytes:
    """Return what py-spy prints of the process that has the thread *number*.

    Raises:
        CollectorError: It did not succeed.
    """
    program = pyspy.find(step.options.get("py_spy", ""))
    if program in _hung:
        raise CollectorError(FailureKind.TIMED_OUT, "py-spy hung before, and is not waited for")
    # A second less than the step has, so that a py-spy that hangs is told from a worker that does.
    deadline = time.monotonic() + step.timeout - 1.0 - min(READER_TIMEOUT, step.timeout / 4)
    attempt = 0
    while True:
        attempt += 1
        result = _run(program, number, max(0.5, deadline - time.monotonic()))
        if result.code == 0 and not result.ended_by_us:
            pyspy.threads(result.output)
            return result.output
        torn = pyspy.TORN.search(result.errors.decode("utf-8", "replace"))
        again = torn and not result.ended_by_us and attempt < ATTEMPTS
        if not again or not procfs.is_same(process):
            error = pyspy.failure(result, attempt)
            if error.failure.kind is FailureKind.TIMED_OUT:
                _hung.add(program)
            raise error


def _run(program: str, pid: int, timeout: float) -> ToolResult:
    arguments = [program, "dump", "--nonblocking", "--json", "--full-filenames", "--pid", str(pid)]
    try:
        return run_tool(arguments, timeout=timeout, limit=pyspy.MAX_OUTPUT)
    except OSError as error:
        raise pyspy.not_started(program, error) from error


def _read(process: ProcessId, failed: CollectorError) -> list[dict[str, Any]]:
    """Return what our reader sees, in py-spy's shape.

    Raises:
        CollectorError: What py-spy said, and that our reader cannot do it either.
    """
    try:
        reader = remote.attach(process.pid, limits=remote.Limits(seconds=READER_TIMEOUT))
        threads = reader.threads()
        states = procfs.thread_states(process.pid)
    except (remote.RemoteError, OSError) as error:
        message = f"{failed.failure.message}; {READER} cannot stand in: {error}"
        raise CollectorError(failed.failure.kind, message, failed.failure.hint) from failed
    # Without attaching py-spy has no kernel ids of the threads of 3.10, and threads are compared by
    # what both samples have.
    numbered = not reader.python.startswith("3.10.")
    return [
        {
            **_as_py_spy_has_it(process.pid, thread),
            "os_thread_id": thread.thread_id if numbered and thread.thread_id else None,
            "active": states.get(thread.thread_id) == "R",
        }
        for thread in threads
    ]


def _as_py_spy_has_it(pid: int, thread: remote.Thread) -> dict[str, Any]:
    found = {
        "pid": pid,
        "thread_id": thread.ident,
        "thread_name": thread.name or None,
        "owns_gil": thread.holds_gil,
        "frames": [
            {
                "name": frame.function,
                "filename": frame.file,
                "module": None,
                "short_filename": frame.short_file,
                "line": frame.line or 0,
            }
            for frame in thread.frames
        ],
        "reader": "hangwatch",
    }
    if thread.torn:
        found["torn"] = thread.torn
    return found


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
    reads_memory=True,
    options={"py_spy": "path of another py-spy than the one that was installed with hangwatch"},
    collect=_collect,
)
