"""Which system calls the threads of a process are in; never waits for the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hangwatch.core import syscalls
from hangwatch.core.syscalls import Call
from hangwatch.system import procfs


def calls(pid: int) -> Iterator[tuple[int, Call]]:
    """Yield each thread that is in a call, and the call; those that end meanwhile are left out.

    Raises:
        PermissionError: They may not be read.
        FileNotFoundError: The process is gone.
    """
    machine = os.uname().machine
    for tid in procfs.thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            call = syscalls.decode(procfs.read_call(pid, tid), machine)
            if call is not None:
                yield tid, call
