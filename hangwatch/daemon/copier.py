"""Passes standard input through to standard output, and lends the daemon a copy.

``some-server 2>&1 | hangwatch watch --log -`` puts us between a server and its output: if nobody
reads, the server stops at its next ``print``. So the bytes are moved by a process of its own that
does nothing else. It lives in a session of its own, ignores every signal that can be ignored, and
goes on until its input ends, whatever becomes of the daemon. Its output comes first, and waits for
its reader as it would without us. The daemon's copy goes into a pipe that is never waited for: what
it does not take is dropped, up to the next whole line. Where the output cannot be written (its
reader is gone, the disk is full), the input is read on all the same.

The daemon, which the shell started and a user may kill, keeps the input open and starts the copier
again if something kills it; what that one had read and not written is lost then, 64 KiB at most.
Where no copier can be had at all, the daemon copies, in a thread: that ends with it, which is still
better than a server that waits from the first full pipe on.

The copier is run as a file, with the standard library alone: nothing that it needs can be missing.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Final

BLOCK: Final = 64 << 10
PIPE_SIZE: Final = 1 << 20
"""Bytes that wait for the follower; an unprivileged process may have as many in one pipe."""

RESTART_PAUSE: Final = 0.1
FUTILE: Final = 5
"""Copiers in a row that end within a second of their start before none is tried any more."""

IGNORED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGUSR2")


def wanted(arguments: Sequence[str]) -> bool:
    """Say whether a command line asks for ``watch --log -``, however wrong the rest of it is."""
    named = (after for before, after in pairwise(arguments) if before == "--log")
    return "watch" in arguments and ("--log=-" in arguments or "-" in named)


@cache
def start() -> dict[str, str]:
    """Start to pass standard input through; return what ``FollowRequest.streams`` takes.

    To be called early, by the process that the shell gave its standard input and output; a second
    call returns what the first one did.
    That process must leave descriptors 0 and 1 alone afterwards: it may write nothing to standard
    output, the stream is there. It may end at any time; the copier does not. When the input ends,
    the source ``-`` retires; with nothing else to follow there is nothing left to wait for.

    Raises:
        OSError: No pipe can be had.
    """
    read_fd, write_fd = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    threading.Thread(target=_keep, args=(write_fd,), name="hangwatch-copier", daemon=True).start()
    return {"-": f"/proc/{os.getpid()}/fd/{read_fd}"}


def _keep(write_fd: int) -> None:
    """Have the input copied until it ends."""
    futile = 0
    while futile < FUTILE:
        started_at = time.monotonic()
        with suppress(OSError):
            if _run(write_fd) == 0:
                break
        futile = futile + 1 if time.monotonic() - started_at < 1.0 else 0
        time.sleep(RESTART_PAUSE)
    else:
        copy(0, 1, Copy(write_fd))
    os.close(write_fd)  # the follower sees the end when the last writer is gone


def _run(write_fd: int) -> int:
    """Run a copier; return its exit code: 0 when the input ended.

    Raises:
        OSError: It cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(write_fd)],
        stdin=0,
        stdout=1,
        stderr=subprocess.DEVNULL,
        pass_fds=(write_fd,),
        start_new_session=True,
    ).wait()


class Copy:
    """The daemon's copy of a stream: whole lines, as far as it takes them."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._within_gap = False

    def write(self, block: bytes) -> None:
        """Hand *block* on, or what of it is taken at once; never wait."""
        if self._fd < 0:
            return
        if self._within_gap:
            end = block.find(b"\n")
            if end < 0:
                return
            block = block[end:]
        try:
            written = os.write(self._fd, block)
        except BlockingIOError:
            written = 0
        except OSError:
            self._fd = -1  # the daemon is gone
            return
        self._within_gap = written < len(block)


def copy(source: int, target: int, duplicate: Copy) -> None:
    """Copy *source* to *target* until it ends, and lend *duplicate* what it takes."""
    while True:
        try:
            block = os.read(source, BLOCK)
        except BlockingIOError:
            select.select([source], [], [])
            continue
        except OSError:
            return
        if not block:
            return
        _write_all(target, block)
        duplicate.write(block)


def _write_all(target: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return  # nobody reads, or no room: the server must go on all the same


def _main() -> None:
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    copy(0, 1, Copy(int(sys.argv[1])))


if __name__ == "__main__":
    _main()
