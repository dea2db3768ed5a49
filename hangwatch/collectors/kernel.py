"""The kernel's view of one process, thread by thread: state, wait channel, system call, counters.

Reads only files that never wait for the target's memory map. The counters count since each thread
began: the second sample says by how much they grew, and what that amounts to. Kernel stacks take
SYS_ADMIN, which no sidecar has: where they may not be read the document says so, and the wait
channel is the innermost function of them all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from hangwatch.core import scheduling, syscalls
from hangwatch.core.planning import file_name
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Sink,
    Stage,
    Step,
)
from hangwatch.model.process import ThreadRow
from hangwatch.system import procfs


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    pid = step.target.process.pid
    row = procfs.read_row(pid)
    head = {
        "schema": "hangwatch.kernel/1",
        "pid": pid,
        "start_ticks": row.process.start_ticks,
        "sample": step.sample,
        "monotonic": time.monotonic(),
        "comm": row.comm,
        "state": row.state,
        "tracer_pid": row.tracer_pid,
        "uid": row.uid,
        "rss_mib": row.rss_mib,
        "cpu_seconds": row.cpu_seconds,
        "threads": [],
    }
    look = _Look(pid, _before(room, head) if step.sample > 1 else {}, head)
    # One thread a line, written as it is read: what a kill cuts off is the tail.
    with room.create(file_name("kernel", ".json", step.sample)) as out:
        out.write(json.dumps(head).removesuffix("]}").encode())
        look.write(out)
    if step.sample == 1:
        stacks = look.stacks()
        if stacks:
            room.write(f"stack_{pid}.txt", stacks.encode("utf-8", "replace"))
    if look.closed:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            "system calls and wait channels may not be read",
            procfs.PERMISSION_HINT,
        )


def _before(room: Room, head: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the first sample said, if it was of the same process and is whole."""
    with contextlib.suppress(ValueError):
        found = json.loads(room.earlier("kernel.json") or b"{}")
        if found.get("start_ticks") == head["start_ticks"]:
            return dict(found)
    return {}


class _Look:
    """One look at the threads of one process."""

    def __init__(self, pid: int, before: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        self._pid = pid
        self._machine = os.uname().machine
        self._before = {thread["tid"]: thread for thread in before.get("threads", ())}
        self._elapsed = head["monotonic"] - before.get("monotonic", head["monotonic"])
        self._links: dict[int, str] = {}
        self._paces: Counter[str] = Counter()
        self._stacks: dict[str, list[ThreadRow]] = {}
        self._no_stacks = False
        self.closed = False

    def write(self, out: Sink) -> None:
        """Write a line for each thread, and what they have in common."""
        for number, thread in enumerate(procfs.read_threads(self._pid)):
            self.closed |= not thread.syscall
            line = json.dumps(self._line(thread), ensure_ascii=False)
            out.write(f"{',' if number else ''}\n {line}".encode("utf-8", "replace"))
            if not self._before:
                self._look_deeper(thread)
        out.write(f"\n],\n{json.dumps(self._tail())[1:]}\n".encode())

    def _line(self, thread: ThreadRow) -> dict[str, Any]:
        line: dict[str, Any] = {name: getattr(thread, name) for name in _FIELDS}
        call = syscalls.decode(thread.syscall, self._machine, thread.state)
        if call is not None:
            line["call"] = call.document()
            if call.fds:
                line["call"]["on"] = [self._link(fd) for fd in call.fds]
        before = self._before.pop(thread.tid, None)
        grew = scheduling.grown(before, thread) if before is not None else None
        if grew is not None:
            pace = scheduling.pace(thread.state, grew, self._elapsed)
            self._paces[pace] += 1
            line |= {"grew": grew, "pace": pace}
        return line

    def _link(self, fd: int) -> str:
        if fd not in self._links:
            self._links[fd] = ""
            with contextlib.suppress(OSError):
                self._links[fd] = procfs.read_link(self._pid, f"fd/{fd}")
        return self._links[fd]

    def _look_deeper(self, thread: ThreadRow) -> None:
        if self._no_stacks or thread.syscall == "running":
            return
        try:
            stack = procfs.read_stack(self._pid, thread.tid)
        except ProcessLookupError:
            return
        except OSError:
            self._no_stacks = True
        else:
            if stack:
                self._stacks.setdefault(stack, []).append(thread)

    def _tail(self) -> dict[str, Any]:
        tail: dict[str, Any] = {"missing": []}
        if self._paces:
            tail = {"paces": dict(self._paces), "ended": sorted(self._before), **tail}
        if self._no_stacks:
            tail["missing"].append("kernel stacks: they take SYS_ADMIN")
        if self.closed:
            tail["missing"].append(f"system calls, wait channels: {procfs.PERMISSION_HINT}")
        return tail

    def stacks(self) -> str:
        """Return each distinct kernel stack with its threads, those in state D first."""

        def order(threads: list[ThreadRow]) -> tuple[bool, int]:
            return all(thread.state != "D" for thread in threads), len(threads)

        return "".join(
            f"thread{'s' if len(threads) > 1 else ''} {' '.join(str(t.tid) for t in threads)} "
            f"{threads[0].comm}\n{stack}\n"
            for stack, threads in sorted(self._stacks.items(), key=lambda item: order(item[1]))
        )


_FIELDS: Final = tuple(ThreadRow.__dataclass_fields__)

COLLECTOR: Final = Collector(
    name="kernel",
    title="State, wait channel, system call and scheduling counters of every thread",
    scope=Scope.PROCESS,
    rung=1,
    stage=Stage.A,
    samples=2,
    timeout=10.0,
    needs="same pid namespace; system calls and wait channels of other users: SYS_PTRACE",
    collect=_collect,
)
