"""What a process needs to look like another one, and to end with its parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def set_title(title: str, comm: str) -> None:
    """Overwrite our command line, as setproctitle does, and the name of the calling thread.

    A title longer than the command line that we were started with is cut to it.
    """
    # Fields 48 and 49 of proc(5): where the kernel reads /proc/PID/cmdline from.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if title and end > start:
        text = title.encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    Path("/proc/thread-self/comm").write_text(comm[:15])


def die_with_parent(parent: int) -> None:
    """End when the parent does, whatever state we are in by then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def spawn(target: Callable[..., None], *arguments: Any, name: str) -> BaseProcess:
    """Start *target* in a fresh interpreter that ends with us; call it from a thread that stays."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(os.getpid(), name, target, arguments), name=name, daemon=True
    )
    process.start()
    return process


def _run(parent: int, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    set_title("", name)
    target(*arguments)
