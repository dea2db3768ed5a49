"""Children: fresh interpreters with a channel, each in a session of its own, each killable.

Never ``fork`` without ``exec``: a fork of a process with threads inherits locks that nobody will
release. A child dies with its parent (``PR_SET_PDEATHSIG``) and ends by itself when its channel
closes; it never reads the terminal and never writes to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from hangwatch.system.channel import Channel, ChannelClosedError

PR_SET_PDEATHSIG: Final = 1

WATCH_INTERVAL: Final = 0.005
"""Seconds between two looks at what a program does to its target."""

MINIMAL: Final = {"PATH": os.defpath, "LC_ALL": "C"}
"""Environment of a tool."""


class Child:
    """A running child and our end of its channel."""

    def __init__(self, module: str, *, name: str, environment: Mapping[str, str] | None = None):
        """Start ``python -P -m module``: it finds what we find, and nothing in its folder.

        Args:
            module: A module of ours whose ``main`` calls ``serve``.
            name: For people and logs.
            environment: Variables besides our own.

        Raises:
            OSError: It cannot be started: no memory, no processes left.
        """
        self.name = name
        self.module = module
        their_read, our_write = os.pipe()
        our_read, their_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid())],
                stdin=their_read,
                stdout=their_write,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                close_fds=True,
            )
        except OSError:
            for fd in (our_read, our_write):
                os.close(fd)
            raise
        finally:
            os.close(their_read)
            os.close(their_write)
        self.channel = Channel(our_read, our_write)

    @property
    def pid(self) -> int:
        """Its process id, which is also its group and session."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs; reaps it when it does not."""
        return self.process.poll() is None

    def halt(self) -> None:
        """Stop it where it is, so that until it is killed it starts and reaps nobody."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it with its whole group; do not wait for it.

        Once it was reaped its number may be somebody else's, a watched process among them: nothing
        is sent then. A process in D state does not end; ``alive`` says so, and the caller abandons
        it.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self, timeout: float = 1.0) -> bool:
        """Close the channel, give it *timeout* seconds to end, then kill it and its group.

        Returns:
            Whether it is gone; ``False`` for one in D state, which is abandoned.
        """
        self.channel.close()
        self._await_end(timeout)
        self.kill()  # its group, too; before it is reaped the number is still its own
        return self._gone(1.0)

    def _await_end(self, timeout: float) -> None:
        """Wait until it has ended, *timeout* seconds at most, and leave it to be reaped."""
        deadline = time.monotonic() + timeout
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self.process.returncode is None:
            if os.waitid(os.P_PID, self.process.pid, flags) or time.monotonic() >= deadline:
                return
            time.sleep(0.005)

    def _gone(self, timeout: float) -> bool:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill us when our parent dies; leave at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def reap_children_ourselves() -> None:
    """Undo an ignored ``SIGCHLD``, which ``exec`` hands down to us.

    The kernel would reap our children as they end, and their numbers could be a watched process's
    while we still take them for ours.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def serve(body: Callable[[Channel], None]) -> None:
    """Run a child's *body* on the channel that its parent opened, until either ends.

    A crash is told to the parent as ``{"kind": "crash", "traceback": …}``; there is nobody else
    who would read it.
    """
    parent = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else None
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reap_children_ourselves()
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    channel = Channel(read_fd, write_fd)

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        with contextlib.suppress(ChannelClosedError, ValueError):
            channel.send({"kind": "crash", "traceback": text[-8000:]})
            channel.drain(1.0)
        os._exit(1)

    sys.excepthook = tell
    with contextlib.suppress(ChannelClosedError):
        body(channel)
        channel.drain(5.0)
    os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """How a program ended.

    Attributes:
        code: Exit code, negative for a signal; ``None`` if it does not end even when killed.
        output: Standard output.
        errors: Standard error.
        ended_by_us: Whether it was killed at its deadline, or for writing too much.
    """

    code: int | None
    output: bytes
    errors: bytes
    ended_by_us: bool


def run_tool(
    arguments: list[str],
    *,
    timeout: float,
    limit: int,
    environment: Mapping[str, str] | None = None,
    interrupt_after: float | None = None,
    watch: Callable[[], bool] | None = None,
    become: Callable[[list[str], dict[str, str]], None] | None = None,
) -> ToolResult:
    """Run a program with a deadline and a bound on its output.

    It gets a session of its own, so that its whole group can be killed, and dies with us. Call
    it from a process with one thread: the child runs Python before it becomes the program.

    Args:
        arguments: Program and arguments; no shell.
        timeout: Seconds after which its group is killed.
        limit: Bytes of output after which its group is killed.
        environment: The whole environment; ``None`` for a minimal one.
        interrupt_after: Seconds after which it is sent ``SIGINT``, for a program that goes on until
            then and writes its result at its end; ``None`` for never.
        watch: Asked every ``WATCH_INTERVAL`` while it runs; at ``True`` its group is killed.
        become: Turns the child into the program, given its arguments and environment, where that
            takes more than to look for it; does not return.

    Returns:
        What it wrote until it ended, or until we ended it.

    Raises:
        OSError: It cannot be started.
    """
    us = os.getpid()
    variables = dict(environment) if environment is not None else dict(MINIMAL)

    def prepare() -> None:
        die_with_parent(us)
        if become is not None:
            become(arguments, variables)

    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509  # one thread, as said above
    )
    assert process.stdout is not None
    assert process.stderr is not None
    streams: dict[int, bytearray] = {}
    for stream in (process.stdout, process.stderr):
        os.set_blocking(stream.fileno(), False)
        streams[stream.fileno()] = bytearray()
    out, err = process.stdout.fileno(), process.stderr.fileno()
    ended_by_us = _pump(
        process,
        streams,
        timeout=timeout,
        limit=limit,
        interrupt_after=interrupt_after,
        watch=watch,
    )
    process.stdout.close()
    process.stderr.close()
    return ToolResult(
        code=process.poll(),
        output=bytes(streams[out]),
        errors=bytes(streams[err]),
        ended_by_us=ended_by_us,
    )


def _pump(
    process: subprocess.Popen[bytes],
    streams: dict[int, bytearray],
    *,
    timeout: float,
    limit: int,
    interrupt_after: float | None,
    watch: Callable[[], bool] | None,
) -> bool:
    began_at = time.monotonic()
    deadline = began_at + timeout
    interrupt_at = deadline if interrupt_after is None else began_at + interrupt_after
    interval = WATCH_INTERVAL if watch is not None else timeout

    def left() -> float:
        now = time.monotonic()
        until = deadline if now >= interrupt_at else min(deadline, interrupt_at)
        return max(0.0, min(interval, until - now))

    def is_up() -> bool:
        late = time.monotonic() >= deadline or sum(map(len, streams.values())) > limit
        return late or (watch is not None and watch())

    interrupted = interrupt_after is None
    ended_by_us = False
    with selectors.DefaultSelector() as selector:
        for fd in streams:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and not ended_by_us:
            if not interrupted and time.monotonic() >= interrupt_at:
                interrupted = True
                os.kill(process.pid, signal.SIGINT)
            for key, _ in selector.select(left()):
                block = os.read(key.fd, 1 << 16)
                if block:
                    streams[key.fd] += block
                else:
                    selector.unregister(key.fd)
            ended_by_us = is_up()
    # Not reaped before this point: until then its number is its own, whatever it started.
    while not ended_by_us:
        try:
            process.wait(max(0.01, min(interval, deadline - time.monotonic())))
            break
        except subprocess.TimeoutExpired:
            ended_by_us = is_up()
    if ended_by_us:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return ended_by_us


def message_kind(message: Mapping[str, Any]) -> str:
    """Return what a message is about: its ``kind``, or ``""``."""
    kind = message.get("kind", "")
    return kind if isinstance(kind, str) else ""
