"""One worker of the pool: runs collectors, one step at a time, in a process that may be killed.

It is told ``{"kind": "step", "step": …, "room": DIR, "earlier": DIR, "note": FILE}`` and answers
``{"kind": "done", "step": ID, "complete": [NAME…], "pause_ms": …, "settled": …, "failure": …}``;
before the first step it says ``{"kind": "ready"}``, and ``{"kind": "touching", "step": ID}`` right
before it reads a target's memory or attaches to it. It sends nothing while a collector runs: the
pool holds the clock.

The identity of the target and the gates of the step are looked at here, right before the
collector starts, because that is as late as they can be. This is the one place where a
collector's exception ends; whatever it was, the step has a failure and the worker lives on.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hangwatch.capture.rooms import QUOTA, StepRoom, is_full
from hangwatch.core.attaching import ENDED
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    Failure,
    FailureKind,
    Gate,
    Room,
    Step,
)
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs
from hangwatch.system.attaching import Note, explained, settle_left
from hangwatch.system.channel import Channel
from hangwatch.system.spawn import message_kind, serve


def run_step(step: Step, room: StepRoom, touching: Callable[[], None]) -> Failure | None:
    """Run one step and say how it failed, if it did; what it wrote lies in the room.

    Args:
        step: It.
        room: Where it may write.
        touching: Called right before it touches its target, if it does.
    """
    _limit(step.memory)
    try:
        failure = _refuse(step)
        if failure is None:
            collect = _collector(step.collector).collect
            if step.means is not None:
                touching()
            if step.attaches and step.target is not None:
                _attach(collect, step, step.target.process, room)
            else:
                collect(step, room)
    except CollectorError as error:
        failure = error.failure
    except Exception as error:  # noqa: BLE001  # the plug-in border: a bug costs one step
        failure = _explain(error)
    if failure is not None and step.target is not None:
        failure = _gone(step) or _ended(step) or failure
    return explained(failure, room.settled) if failure is not None else None


def _attach(
    collect: Callable[[Step, Room], None],
    step: Step,
    process: ProcessId,
    room: StepRoom,
) -> None:
    """Run a collector that attaches; what it did to the target is put right, however it ends."""
    Note.of(process, step.id).leave(room.note)
    try:
        collect(step, room)
    except BaseException:
        room.settled = settle_left(room.note)
        raise
    room.note.unlink(missing_ok=True)


def _limit(memory: int) -> None:
    for what, bytes_ in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 2 * QUOTA),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        soft = bytes_ if hard == resource.RLIM_INFINITY else min(bytes_, hard)
        resource.setrlimit(what, (soft, hard))


def _collector(name: str) -> Collector:
    # By module and not through the registry, which takes as long to load as the interpreter.
    census = name == "census"
    module = importlib.import_module(
        "hangwatch.capture.census" if census else f"hangwatch.collectors.{name}"
    )
    collector: Collector = module.CENSUS if census else module.COLLECTOR
    return collector


def _refuse(step: Step) -> Failure | None:
    """Return why the step must not start."""
    if step.target is None:
        return None
    gone = _gone(step)
    if gone is not None:
        return gone
    pid = step.target.process.pid
    states = set(procfs.thread_states(pid).values()) if step.gates else set()
    if Gate.NO_D_STATE in step.gates and "D" in states:
        return _closed("a thread of the process is in D state: attaching could stop it for ever")
    if Gate.NOT_STOPPED in step.gates and states & {"T", "t"}:
        return _closed("the process is stopped")
    if Gate.NO_TRACER in step.gates and (tracer := procfs.tracer(pid)):
        return _closed(f"process {tracer} traces it already")
    return None


def _closed(message: str) -> Failure:
    return Failure(kind=FailureKind.GATED, message=message)


def _gone(step: Step) -> Failure | None:
    assert step.target is not None
    process = step.target.process
    ticks = procfs.start_ticks(process.pid)
    if ticks is None:
        return Failure(kind=FailureKind.TARGET_GONE, message=f"process {process.pid} is gone")
    if process.start_ticks not in (0, ticks):
        return Failure(
            kind=FailureKind.PID_REUSED,
            message=f"process {process.pid} is gone; another one has its number now",
        )
    return None


def _ended(step: Step) -> Failure | None:
    """Return that a process has ended although its number is its own until somebody reaps it."""
    assert step.target is not None
    pid = step.target.process.pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if set(procfs.thread_states(pid).values()) <= ENDED:
            return Failure(
                kind=FailureKind.TARGET_GONE,
                message=f"process {pid} has ended and waits to be reaped",
            )
    return None


def _explain(error: Exception) -> Failure:
    if isinstance(error, PermissionError):
        return Failure(
            kind=FailureKind.NOT_PERMITTED,
            message=f"may not read {error.filename or 'it'}",
            hint=procfs.PERMISSION_HINT,
        )
    if isinstance(error, ProcessLookupError):
        return Failure(
            kind=FailureKind.TARGET_GONE, message="the process, or its main thread, has ended"
        )
    if isinstance(error, OSError) and is_full(error):
        return Failure(
            kind=FailureKind.TOO_LARGE,
            message="there is no space left for it",
            hint="make room on the disk of the output directory, or choose another with --output",
        )
    if isinstance(error, MemoryError):
        return Failure(kind=FailureKind.TOO_LARGE, message="it needs more memory than it may use")
    return Failure(
        kind=FailureKind.CRASHED, message="".join(traceback.format_exception(error))[-4000:]
    )


def _work(channel: Channel) -> None:
    channel.send({"kind": "ready"})
    while True:
        for message in channel.wait(None):
            if message_kind(message) == "step":
                channel.send(_answer(message, channel))


def _answer(message: dict[str, Any], channel: Channel) -> dict[str, Any]:
    step: Step = from_plain(Step, message["step"])
    room = StepRoom(Path(message["room"]), Path(message["earlier"]), Path(message["note"]))
    touching = {"kind": "touching", "step": step.id}
    failure = run_step(step, room, lambda: channel.send(touching))
    return {
        "kind": "done",
        "step": step.id,
        "complete": room.complete,
        "pause_ms": room.pause_ms,
        "settled": room.settled,
        "failure": to_plain(failure),
    }


if __name__ == "__main__":
    serve(_work)
