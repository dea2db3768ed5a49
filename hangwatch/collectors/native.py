"""Merged Python and C stacks of an engine that hangs: py-spy, attaching.

It stops the target to walk its C stacks, so it comes last, of engines only, behind every gate, and
is watched: the process stands still for its budget at most, then py-spy is killed. py-spy gives up
the whole dump over one thread that it cannot unwind (``UNW_EINVAL`` of a C loop that holds the
GIL, ``UNW_EBADREG`` of libraries that it cannot find); a plain dump of the same stopped process
then still gives Python stacks that are consistent, which no reading of a running process does.

A target in another container has its libraries where we do not find them, so their functions stay
without names, unless py-spy is run inside the root of the target: ours, from a descriptor that was
opened before, and only if it is linked statically, for else the kernel would load the container's
linker for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

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
from hangwatch.model.identity import ProcessId, Role
from hangwatch.system import procfs, pyspy
from hangwatch.system.attaching import CANNOT_ENTER, Attached, Inside, Tool, run_attached

BUDGET_MS: Final = 250.0
"""Milliseconds: 84 to 110 were measured of 48 threads with torch, three times as many are left."""

WORTH_MS: Final = 50.0
"""Milliseconds that must be left for a plain dump: it stops 48 threads for that long."""

ADDRESS_SPACE: Final = 32 << 30
"""Bytes: py-spy maps the libraries of its target whole, and those of PyTorch and CUDA have 5 GB."""

TIMEOUT: Final = 15.0


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    budget = _budget(step.options)
    program = pyspy.find(step.options.get("py_spy", ""))
    what = ["--json", "--full-filenames", "--pid", str(process.pid)]
    deadline = time.monotonic() + step.timeout - 2.0
    with _inside(program, process, step.options) as inside:
        failure: CollectorError | None = None
        for kind in (["--native"], []):
            if budget < WORTH_MS and failure is not None:
                raise failure
            run = _run(
                Tool(
                    arguments=[program, "dump", *kind, *what],
                    timeout=max(0.5, deadline - time.monotonic()),
                    limit=pyspy.MAX_OUTPUT,
                    budget=budget / 1000,
                    inside=inside,
                ),
                room,
            )
            room.paused(run.pause_ms)
            budget -= run.pause_ms
            try:
                threads = _threads(run)
            except CollectorError as error:
                failure = _both(failure, error)
                if error.failure.kind is not FailureKind.TOOL_FAILED:
                    raise failure from error
                continue
            room.write("native.json", pyspy.lines(threads))
            break
    if failure is not None:
        raise failure


def _budget(options: Mapping[str, str]) -> float:
    given = options.get("budget_ms", "")
    try:
        return float(given or BUDGET_MS)
    except ValueError:
        raise CollectorError(
            FailureKind.TOOL_FAILED, f"budget_ms is no number: {given!r}", "budget_ms = 250"
        ) from None


def _run(tool: Tool, room: Room) -> Attached:
    try:
        return run_attached(tool, room.note)
    except OSError as error:
        raise pyspy.not_started(tool.arguments[0], error) from error


def _threads(run: Attached) -> list[dict[str, Any]]:
    """Return the threads that a dump has.

    Raises:
        CollectorError: It has none.
    """
    if run.over_budget:
        raise CollectorError(
            FailureKind.OVER_BUDGET,
            f"the process stood still for {run.pause_ms:.0f} ms, and py-spy was killed for it",
            "allow more in the configuration: [collectors.native] budget_ms = 1000",
        )
    result = run.result
    if result.code == 0 and not result.ended_by_us:
        return pyspy.threads(result.output)
    said = result.errors.decode("utf-8", "replace")
    if CANNOT_ENTER in said:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            said,
            "add SYS_CHROOT to the container's capabilities, or leave out inside_root",
        )
    raise pyspy.failure(result)


def _both(first: CollectorError | None, second: CollectorError) -> CollectorError:
    if first is None:
        return second
    return CollectorError(
        second.failure.kind,
        f"{first.failure.message}; then, without C frames: {second.failure.message}",
        second.failure.hint or first.failure.hint,
    )


@contextlib.contextmanager
def _inside(
    program: str, process: ProcessId, options: Mapping[str, str]
) -> Iterator[Inside | None]:
    """Give what it takes to run py-spy in the root of the target, where that is asked for."""
    if options.get("inside_root") != "yes":
        yield None
        return
    with contextlib.ExitStack() as opened:
        try:
            ours = os.open(program, os.O_RDONLY)
        except OSError as error:
            raise pyspy.not_started(program, error) from error
        opened.callback(os.close, ours)
        if not pyspy.is_static(ours):
            raise CollectorError(
                FailureKind.NOT_AVAILABLE,
                f"{program} is not linked statically: inside the root of the process it would "
                "run the loader that lies there",
                "pip install --force-reinstall py-spy (its wheels for musllinux and manylinux "
                "are static), or leave out inside_root",
            )
        root = os.open(f"/proc/{process.pid}/root", os.O_PATH | os.O_DIRECTORY)
        opened.callback(os.close, root)
        if procfs.read_link(process.pid, "ns/pid") != procfs.read_link(os.getpid(), "ns/pid"):
            raise CollectorError(
                FailureKind.NOT_AVAILABLE,
                "the process lives in another pid namespace, and its /proc counts differently",
                "share the pid namespace (shareProcessNamespace: true), or leave out inside_root",
            )
        if not procfs.is_same(process):
            raise CollectorError(FailureKind.TARGET_GONE, "the process ended meanwhile")
        yield Inside(program=ours, root=root)


COLLECTOR: Final = Collector(
    name="native",
    title="Python and C stacks of every thread, while it stands still",
    scope=Scope.PROCESS,
    rung=6,
    stage=Stage.B,
    timeout=TIMEOUT,
    needs="the right to attach to the target: same user and no Yama, or SYS_PTRACE",
    python_only=True,
    attaches=True,
    budget_ms=BUDGET_MS,
    gates=(Gate.HUNG, Gate.NO_D_STATE, Gate.NOT_STOPPED, Gate.NO_TRACER),
    roles=frozenset({Role.ENGINE, Role.ENGINE_WORKER}),
    memory=ADDRESS_SPACE,
    options={
        "budget_ms": "milliseconds that the process may stand still (250)",
        "inside_root": "yes: run our py-spy in the root of the process; needs SYS_CHROOT",
        "py_spy": "path of another py-spy than the one that was installed with hangwatch",
    },
    collect=_collect,
)
