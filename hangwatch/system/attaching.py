"""Runs a tool that attaches to a process: watched from outside, and cleaned up after.

Theory of operation. A tool that attaches stops the process, and can hang while it does. So it has a
*watcher* of its own, a fork of the worker: it looks at the states of the threads every few
milliseconds, kills the tool once the process has stood still for too long, and sees to it that the
process runs as it did before. The watcher outlives the worker, and everything above it, for as long
as that takes: it holds one end of a pipe, and when the other end closes it kills the tool.

Before anything attaches, the worker leaves a *note* in the work directory: who it was, and in which
states its threads were. Whoever finds the note of a step that ended in an unplanned way settles it:
the watcher first; the worker, if the watcher died; the pool, if the worker died; whoever sweeps
away the work of a dead capture, if all of them died. They all decide by ``core.attaching.repair``,
and here is the only place where a process that is watched is sent a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from hangwatch.core.attaching import ENDED, STOPPED, Pause, Repair, repair
from hangwatch.model.capture import CollectorError, Failure, FailureKind, Settled
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs
from hangwatch.system.spawn import WATCH_INTERVAL, ToolResult, run_tool

MAX_MEMORY: Final = 1 << 30
"""Bytes: py-spy has 105 MB resident with torch, files that it maps among them."""

PATIENCE: Final = 1.0
"""Seconds that a killed tool is given to let go of its target."""

MAX_WATCHED: Final = 16
"""Threads that are looked at: a tool stops all of them, the first one first and the last one last.
Each look at one costs about 10 microseconds."""


# ---------------------------------------------------------------------- what is left behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is known of a process before something attaches to it.

    Attributes:
        process: It.
        before: Letters of the states of its threads.
        step: Id of the step that attaches.
        continued: Whether it has been sent SIGCONT since, or is about to be.
    """

    process: ProcessId
    before: frozenset[str]
    step: str = ""
    continued: bool = False

    @classmethod
    def of(cls, process: ProcessId, step: str = "") -> Note:
        """Look at a process.

        Raises:
            OSError: It is gone.
        """
        states = frozenset(procfs.thread_states(process.pid).values())
        return cls(process=process, before=states, step=step)

    @classmethod
    def read(cls, path: Path) -> Note | None:
        """Return the note at *path*, ``None`` if there is none."""
        try:
            found = json.loads(path.read_bytes())
            process = ProcessId(int(found["pid"]), int(found["start_ticks"]))
            return cls(
                process=process,
                before=frozenset(found["before"]),
                step=str(found["step"]),
                continued=bool(found["continued"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it is written whole or not at all: what is there else is not ours

    def leave(self, path: Path) -> None:
        """Write it down, whole or not at all.

        Raises:
            OSError: It cannot be written: then nothing may attach.
        """
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".new")
        document = {
            "pid": self.process.pid,
            "start_ticks": self.process.start_ticks,
            "before": "".join(sorted(self.before)),
            "step": self.step,
            "continued": self.continued,
        }
        unfinished.write_text(json.dumps(document), encoding="utf-8")
        unfinished.replace(path)


def settle(path: Path, note: Note, patience: float = PATIENCE) -> Settled:
    """Let a process run that a step which ended in an unplanned way left stopped; see ``repair``.

    Args:
        path: Where *note* is.
        note: What the process was before.
        patience: Seconds to wait for a tool to let go of it.
    """
    descriptor: int | None = None
    try:
        try:
            # A descriptor of the process, not its number: a signal can reach nobody else.
            descriptor = os.pidfd_open(note.process.pid)
        except ProcessLookupError:
            return Settled.AS_BEFORE
        except OSError:
            pass  # Linux before 5.3, or a filter of an old container engine: nothing is sent
        return _settle(path, note, descriptor, time.monotonic() + patience)
    except (FileNotFoundError, ProcessLookupError):
        return Settled.AS_BEFORE
    except PermissionError:
        return Settled.NOT_PERMITTED
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _settle(path: Path, note: Note, descriptor: int | None, deadline: float) -> Settled:
    while procfs.is_same(note.process):
        pid = note.process.pid
        traced, stopping = procfs.is_traced(pid), procfs.is_stopping(pid)
        states = procfs.thread_states(pid).values()
        match repair(note.before, states, traced=traced, stopping=stopping):
            case Repair.NOTHING:
                return Settled.AS_BEFORE
            case Repair.CONTINUE:
                if descriptor is None:
                    return Settled.NOT_PERMITTED
                # Said before it is done: whoever comes after us may not see that it was stopped.
                with contextlib.suppress(OSError):
                    replace(note, continued=True).leave(path)
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
                return Settled.CONTINUED
            case Repair.WAIT:
                if time.monotonic() >= deadline:
                    return Settled.TRACED
                time.sleep(WATCH_INTERVAL)
    return Settled.AS_BEFORE


def settle_left(path: Path, patience: float = PATIENCE) -> Settled:
    """Settle the note at *path*, and remove it unless the process is still traced."""
    note = Note.read(path)
    if note is None:
        return Settled.AS_BEFORE
    settled = settle(path, note, patience)
    told = Note.read(path)
    if settled is not Settled.TRACED:
        path.unlink(missing_ok=True)
    if settled is Settled.AS_BEFORE and told is not None and told.continued:
        return Settled.CONTINUED  # by somebody before us
    return settled


def explained(failure: Failure, settled: Settled | None) -> Failure:
    """Return *failure* with what else became of the target."""
    match settled:
        case Settled.CONTINUED:
            return replace(failure, message=f"{failure.message}; {_CONTINUED}")
        case Settled.NOT_PERMITTED:
            return replace(failure, message=f"{failure.message}; {_STOPPED}", hint=_HINT)
        case _:
            return failure


_CONTINUED: Final = "the process was left stopped, and was told to go on (SIGCONT)"
_STOPPED: Final = "the process was left stopped, and may not be told to go on"
_HINT: Final = "kill -CONT PID, as the user of the process"


# ---------------------------------------------------------------------- tools that attach


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """How a tool that attaches ended, and what it did to its target.

    Attributes:
        result: How it ended.
        pause_ms: How long the target stood still.
        over_budget: Whether it was killed for that.
    """

    result: ToolResult
    pause_ms: float
    over_budget: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A program of ours that is to run in the file system of its target.

    Attributes:
        program: Descriptor of the program, opened before.
        root: Descriptor of the target's root directory.
    """

    program: int
    root: int

    def become(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Turn this process into the program; nothing of the target's files is executed."""
        try:
            os.fchdir(self.root)
            os.chroot(".")
            os.execve(self.program, arguments, environment)  # noqa: S606  # a descriptor of ours
        except OSError as error:
            os.write(2, f"{CANNOT_ENTER}: {error.strerror}".encode())
            os._exit(1)


CANNOT_ENTER: Final = "hangwatch cannot enter the root of the process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that attaches to a process.

    Attributes:
        arguments: Program and arguments; no shell.
        timeout: Seconds after which it is killed.
        limit: Bytes of output after which it is killed.
        budget: Seconds that the target may stand still.
        memory: Bytes of memory of its own; files that it maps are not counted.
        inside: Runs a program of ours in the file system of the target.
    """

    arguments: list[str]
    timeout: float
    limit: int
    budget: float
    memory: int = MAX_MEMORY
    inside: Inside | None = None


def run_attached(tool: Tool, path: Path) -> Attached:
    """Run a tool that attaches to a process, from a process with one thread.

    Args:
        tool: It.
        path: Where it is noted what the target was before.

    Raises:
        OSError: The tool cannot be started.
        CollectorError: Its watcher was killed, or there is no note.
    """
    note = Note.read(path)
    if note is None:
        raise CollectorError(FailureKind.TOOL_FAILED, "nothing attaches without a note of it")
    lifeline_read, lifeline_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # A fork and no fresh interpreter: it costs the capture a millisecond instead of fifty, and a
    # process with one thread has no locks that could be inherited.
    watcher = os.fork()
    if watcher == 0:
        _watch_and_exit(tool, path, note, lifeline_read, answer_write)
    os.close(lifeline_read)
    os.close(answer_write)
    try:
        with os.fdopen(answer_read, "rb") as answer:
            said = answer.read()
    finally:
        os.close(lifeline_write)
        os.waitpid(watcher, 0)
    return _understood(said)


def _understood(said: bytes) -> Attached:
    head, _, rest = said.partition(b"\n")
    try:
        answer: dict[str, Any] = json.loads(head)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        if "trouble" in answer:
            raise RuntimeError(answer["trouble"])
        size = int(answer["output"])
        return Attached(
            result=ToolResult(
                code=answer["code"],
                output=rest[:size],
                errors=rest[size:],
                ended_by_us=answer["ended_by_us"],
            ),
            pause_ms=answer["pause_ms"],
            over_budget=answer["over_budget"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CollectorError(
            FailureKind.WORKER_DIED, "what watched the tool ended in the middle"
        ) from error


def _watch_and_exit(tool: Tool, path: Path, note: Note, lifeline: int, answer: int) -> NoReturn:
    """Be the watcher: run the tool, say how it went, end."""
    try:
        os.setsid()
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        memory = tool.memory if most == resource.RLIM_INFINITY else min(tool.memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, most))
        inside = (tool.inside.program, tool.inside.root) if tool.inside is not None else ()
        _close_all_but({0, 1, 2, lifeline, answer, *inside})
        said = _watched(tool, path, note, lifeline)
        with os.fdopen(answer, "wb") as out:
            out.write(said)
    except BaseException as error:  # noqa: BLE001  # a fork that must end here, whatever happens
        with contextlib.suppress(OSError):
            os.write(answer, json.dumps({"trouble": repr(error)}).encode() + b"\n")
    finally:
        os._exit(0)


def _close_all_but(kept: Collection[int]) -> None:
    """Close what was inherited: whoever waits for the worker's end must not wait for ours."""
    for path in tuple(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(path.name))


def _watched(tool: Tool, path: Path, note: Note, lifeline: int) -> bytes:
    pid = note.process.pid
    with _threads(pid) as descriptors:
        pause = Pause(ran_at=time.monotonic())

        def look() -> bool:
            nonlocal pause
            now, letters = time.monotonic(), _letters(descriptors)
            pause = pause.seen(now, stopped=bool(letters & STOPPED))
            # Who waits for a process that has ended learns of it only when nobody traces it.
            ended = letters <= ENDED
            return ended or pause.seconds(now) >= tool.budget or _is_closed(lifeline)

        try:
            result = run_tool(
                tool.arguments,
                timeout=tool.timeout,
                limit=tool.limit,
                watch=look,
                become=tool.inside.become if tool.inside is not None else None,
            )
        except OSError as error:
            return json.dumps({"errno": error.errno}).encode() + b"\n"
        over_budget = result.ended_by_us and pause.seconds(time.monotonic()) >= tool.budget
        if result.ended_by_us or result.code != 0:
            settle(path, note)
        pause = pause.seen(time.monotonic(), stopped=bool(_letters(descriptors) & STOPPED))
    head = {
        "code": result.code,
        "ended_by_us": result.ended_by_us,
        "output": len(result.output),
        "pause_ms": round(pause.seconds(time.monotonic()) * 1000, 1),
        "over_budget": over_budget,
    }
    return json.dumps(head).encode() + b"\n" + result.output + result.errors


@contextlib.contextmanager
def _threads(pid: int) -> Iterator[list[int]]:
    """Give descriptors of the ``stat`` of some threads, the first and the last among them."""
    descriptors: list[int] = []
    try:
        tids = procfs.thread_ids(pid)
        step = max(1, -(-len(tids) // MAX_WATCHED))
        for tid in dict.fromkeys((*tids[::step], *tids[-1:])):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                descriptors.append(os.open(f"/proc/{pid}/task/{tid}/stat", os.O_RDONLY))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _letters(descriptors: Collection[int]) -> set[str]:
    """Return the states of those of the threads that are still there."""
    letters = set()
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError):
            state = os.pread(descriptor, 512, 0).rpartition(b") ")[2][:1]
            letters.add(state.decode("ascii", "replace"))
    return letters


def _is_closed(lifeline: int) -> bool:
    """Say whether whoever wanted the tool's result is gone."""
    return bool(select.select([lifeline], [], [], 0)[0])
