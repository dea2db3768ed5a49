"""The child that hears of announced pauses: at the socket of the state directory, and in a file.

In: ``{"kind": "serve", "socket": PATH, "file": PATH, "limit": S, "leases": [Lease…]}``, once; an
empty ``file`` is none.

Out: ``{"kind": "taken", "lease": Lease, "asked": S}``, ``{"kind": "returned", "id": ID, "at": …}``,
``{"kind": "problem", "of": "socket" | "file", "problem": TEXT}`` whenever that changes (``""``:
none any more), ``{"kind": "alive"}``.

At the socket, a line of JSON for a line of JSON: ``{"take": ID, "seconds": S, "reason": TEXT}`` or
``{"return": ID}``, answered by ``{"seconds": S, "limit": S}`` or by ``{"error": TEXT}``. Who may
ask is what the file system says: the socket and its folder are the owner's alone. It answers at
once, however long the daemon takes to listen: a training script waits for it.

A thread looks at the file, for it may lie on a volume that stalls; then it alone sees nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hangwatch.core.codec import from_plain, to_plain
from hangwatch.core.leasing import Look, Paper, clean
from hangwatch.model.lease import Lease
from hangwatch.model.time import Clock, Instant
from hangwatch.system.channel import Channel, ChannelClosedError
from hangwatch.system.clock import SystemClock
from hangwatch.system.leasing import address
from hangwatch.system.spawn import message_kind, serve

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at the file."""

STALLED_AFTER: Final = 5.0
"""Seconds that a look may take."""

ALIVE_INTERVAL: Final = 1.0

MAX_QUESTION: Final = 4096
MAX_VISITORS: Final = 64
"""Questions that are heard at once; more wait in the queue of the socket."""

MAX_LEASES: Final = 1024
"""At a time; each rank of a job may hold one."""

VISIT: Final = 2.0
"""Seconds that somebody may take to ask."""

NOT_UNDERSTOOD: Final = "hangwatch does not understand the question: are both of one version?"

_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(slots=True)
class _Visitor:
    wire: socket.socket
    until: Instant
    said: bytearray = field(default_factory=bytearray)


class Lessor:
    """Grants what is asked for, and tells the daemon.

    Attributes:
        leases: What was granted and has not ended, by id.
    """

    def __init__(self, channel: Channel, clock: Clock, order: Mapping[str, Any]) -> None:
        """Serve nobody yet.

        Args:
            channel: To the daemon.
            clock: Ours.
            order: The daemon's ``serve``.
        """
        known: tuple[Lease, ...] = from_plain(tuple[Lease, ...], order.get("leases", ()))
        self.leases = {lease.id: lease for lease in known}
        self._channel = channel
        self._clock = clock
        self._limit = float(order["limit"])
        self._visitors: dict[int, _Visitor] = {}
        self._wakes = selectors.DefaultSelector()
        self._wakes.register(channel.fileno(), selectors.EVENT_READ)
        self._told_at = Instant(0.0)
        self._told: dict[str, str] = {}
        self._door = self._open(Path(order["socket"]))
        self._file: _File | None = None
        if path := str(order.get("file", "")):
            self._file = _File(path, clock=clock, limit=self._limit, lease=self.leases.get(path))
            self._wakes.register(self._file.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the channel closes.

        Raises:
            ChannelClosedError: The daemon is gone.
        """
        while True:
            ready = {key.fd for key, _ in self._wakes.select(ALIVE_INTERVAL / 2)}
            self._channel.receive()  # says nothing more, but ends
            if self._channel.pending:
                self._channel.flush()
            if self._door is not None and self._door.fileno() in ready:
                self._let_in(self._door)
            for visitor in [v for fd, v in self._visitors.items() if fd in ready]:
                self._hear(visitor)
            self._see_out()
            if self._file is not None:
                self._read(self._file)
            now = self._clock.now()
            self.leases = {i: lease for i, lease in self.leases.items() if lease.until > now}
            if now - self._told_at >= ALIVE_INTERVAL and not self._channel.pending:
                self._tell({"kind": "alive"})

    # --- the socket ---

    def _open(self, path: Path) -> socket.socket | None:
        """Listen at *path*; a socket that lies there is of a daemon that is gone."""
        new = path.with_name(f".{path.name}.new")  # takes its name once somebody listens
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            new.unlink(missing_ok=True)
            with address(new) as where:
                door.bind(where)
            door.listen(MAX_VISITORS)
            door.setblocking(False)
            new.replace(path)
        except OSError as error:
            door.close()
            self._confess("socket", f"cannot listen at {path}: {error.strerror or error}")
            return None
        finally:
            os.umask(before)
        self._path = path
        self._wakes.register(door.fileno(), selectors.EVENT_READ)
        return door

    def close(self) -> None:
        """Take the socket away: nobody answers any more."""
        if self._door is not None:
            self._path.unlink(missing_ok=True)

    def _let_in(self, door: socket.socket) -> None:
        while len(self._visitors) < MAX_VISITORS:
            try:
                wire, _ = door.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, say: whoever waits would wake us for nothing
                self._clock.sleep(LOOK_INTERVAL)
                return
            wire.setblocking(False)
            until = Instant(self._clock.now() + VISIT)
            self._visitors[wire.fileno()] = visitor = _Visitor(wire, until)
            self._wakes.register(wire.fileno(), selectors.EVENT_READ)
            self._hear(visitor)
        # Full: those who wait shall not wake us until somebody leaves.
        self._wakes.unregister(door.fileno())

    def _hear(self, visitor: _Visitor) -> None:
        try:
            block = visitor.wire.recv(MAX_QUESTION)
        except BlockingIOError:
            return
        except OSError:
            block = b""
        visitor.said += block
        line, end, _ = visitor.said.partition(b"\n")
        if end:
            self._reply(visitor.wire, self.answer(bytes(line), _who(visitor.wire)))
        if end or not block or len(visitor.said) >= MAX_QUESTION:
            self._leave(visitor)

    def _reply(self, wire: socket.socket, answer: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it fits into the buffer, unless nobody is there
            wire.send(json.dumps(answer).encode() + b"\n")

    def _see_out(self) -> None:
        now = self._clock.now()
        for visitor in [v for v in self._visitors.values() if v.until <= now]:
            self._leave(visitor)

    def _leave(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.wire.fileno()]
        self._wakes.unregister(visitor.wire.fileno())
        visitor.wire.close()
        if self._door is not None and self._door.fileno() not in self._wakes.get_map():
            self._wakes.register(self._door.fileno(), selectors.EVENT_READ)

    def answer(self, line: bytes, who: str) -> dict[str, Any]:
        """Return the answer to one question."""
        try:
            question = json.loads(line)
            if "return" in question:
                return self._take_back(clean(str(question["return"])))
            seconds = float(question["seconds"])
            ident, reason = clean(str(question["take"])), clean(str(question.get("reason", "")))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            seconds, ident, reason = 0.0, "", ""
        if not (math.isfinite(seconds) and seconds > 0 and ident):
            return {"error": NOT_UNDERSTOOD}
        if ident not in self.leases and len(self.leases) >= MAX_LEASES:
            return {"error": f"{MAX_LEASES} leases are held already: give some back"}
        now = self._clock.now()
        granted = min(seconds, self._limit)
        lease = Lease(id=ident, at=now, until=Instant(now + granted), reason=reason, holder=who)
        self._grant(lease, seconds)
        return {"seconds": granted, "limit": self._limit}

    def _take_back(self, ident: str) -> dict[str, Any]:
        lease = self.leases.pop(ident, None)
        if lease is None or lease.until <= self._clock.now():
            return {"error": f"no lease {ident!r} is held: it has ended, or never was"}
        self._tell({"kind": "returned", "id": ident, "at": self._clock.now()})
        return {"seconds": 0.0, "limit": self._limit}

    # --- the file ---

    def _read(self, file: _File) -> None:
        before = file.paper.lease
        file.take_in()
        self._confess("file", file.problem)
        lease = file.paper.lease
        if lease is before:
            return
        if lease is not None:
            self._grant(lease, file.paper.asked)
        elif before is not None and self.leases.pop(before.id, None) is not None:
            self._tell({"kind": "returned", "id": before.id, "at": self._clock.now()})

    # --- the daemon ---

    def _grant(self, lease: Lease, asked: float) -> None:
        self.leases[lease.id] = lease
        self._tell({"kind": "taken", "lease": to_plain(lease), "asked": asked})

    def _confess(self, part: str, problem: str) -> None:
        if problem != self._told.get(part, ""):
            self._told[part] = problem
            self._tell({"kind": "problem", "of": part, "problem": problem})

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._told_at = self._clock.now()
        self._channel.send(message)


class _File:
    """The file, with the thread that looks at it.

    Attributes:
        paper: What it announces.
    """

    def __init__(self, path: str, *, clock: Clock, limit: float, lease: Lease | None) -> None:
        self.paper = Paper(path, limit=limit, lease=lease)
        self._path = path
        self._clock = clock
        self._looks: list[Look] = []
        self._looking_since: Instant | None = None
        self._wake_fd, self._bell = os.pipe()
        os.set_blocking(self._wake_fd, False)
        threading.Thread(target=self._watch, name="hangwatch-lease-file", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor that says when there was a look."""
        return self._wake_fd

    def _watch(self) -> None:
        while True:
            self._looking_since = self._clock.now()
            self._looks.append(look_at(self._path))
            self._looking_since = None
            os.write(self._bell, b".")
            time.sleep(LOOK_INTERVAL)

    def take_in(self) -> None:
        """Act on the looks since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_fd, 4096)
        while self._looks:
            self.paper.see(self._looks.pop(0), self._clock.now())

    @property
    def problem(self) -> str:
        """What is wrong with it now, with the remedy, or ``""``."""
        since = self._looking_since
        if since is not None and self._clock.now() - since > STALLED_AFTER:
            return f"{self._path}: its volume does not answer; hangwatch lease still works"
        return f"{self._path}: {self.paper.problem}" if self.paper.problem else ""


def look_at(path: str) -> Look:
    """Return what lies at *path* now; may block for as long as its volume does."""
    try:
        # Opening asks a network file system anew, where ``stat`` may be told what was true a
        # minute ago. No link, for we may read what the writer may not; no pipe, for it may block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Look()
    except OSError as error:
        return Look(problem=f"cannot be read: {error.strerror}; a plain file is looked for")
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            return Look(problem="is no plain file")
        text = os.read(fd, MAX_QUESTION).decode("utf-8", "replace")
    except OSError as error:
        return Look(problem=f"cannot be read: {error.strerror}")
    finally:
        os.close(fd)
    return Look(text=text, version=(seen.st_ino, seen.st_mtime_ns), age=time.time() - seen.st_mtime)


def _who(wire: socket.socket) -> str:
    """Return who asks, for people; its number is 0 where it lives in another pid namespace."""
    raw = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return f"pid {pid}" if pid else f"uid {uid}"


def _body(channel: Channel) -> None:
    order: Mapping[str, Any] | None = None
    while order is None:
        for message in channel.wait(ALIVE_INTERVAL):
            if message_kind(message) == "serve":
                order = message
        channel.send({"kind": "alive"})
    lessor = Lessor(channel, SystemClock(), order)
    try:
        lessor.run()
    except ChannelClosedError:
        lessor.close()


if __name__ == "__main__":
    serve(_body)
