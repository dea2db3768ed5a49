"""The kernel's view of one process, thread by thread: state, wait channel, system call, counters.

Reads only files that never wait for the target's memory map. The counters count since each thread
began: two samples tell a frozen thread (nothing grew) from one that ticks (switches grew) and one
that spins (run time grew as fast as the clock).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Final

from hangwatch.core.planning import file_name
from hangwatch.model.capture import Collector, Room, Scope, Stage, Step
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
    # One thread a line, written as it is read: what a kill cuts off is the tail.
    with room.create(file_name("kernel", ".json", step.sample)) as out:
        out.write(json.dumps(head).removesuffix("]}").encode())
        for number, thread in enumerate(procfs.read_threads(pid)):
            line = json.dumps(asdict(thread), ensure_ascii=False)
            out.write(f"{',' if number else ''}\n {line}".encode("utf-8", "surrogateescape"))
        out.write(b"\n]}\n")


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
