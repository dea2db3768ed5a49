"""Messages between the daemon and its children: length-prefixed JSON over pipes.

A message is a JSON object behind its length, four bytes, big endian. Neither end ever blocks on
the other: what cannot be written waits in a bounded buffer, and a peer that lets the buffer fill
is stuck and to be treated as such. A length beyond ``MAX_MESSAGE`` means that the peer writes
nonsense; the channel is closed then, because nothing after it can be trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
from collections.abc import Mapping
from typing import Any, Final

MAX_MESSAGE: Final = 8 << 20
"""Bytes; a batch of log candidates is at most 1 MB, so is a process table of 2,000 rows."""

MAX_PENDING: Final = 32 << 20

_LENGTH: Final = struct.Struct(">I")


class ChannelClosedError(Exception):
    """The peer is gone, or wrote nonsense."""


class Channel:
    """One end of a pair of pipes; owns both descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._eof = False
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor to wait on for incoming messages."""
        return self._read_fd

    @property
    def write_fd(self) -> int:
        """The descriptor to wait on while ``pending`` is not zero."""
        return self._write_fd

    @property
    def pending(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._outgoing)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue *message* and write what the pipe takes now.

        Raises:
            ChannelClosedError: The peer is gone, or has let ``MAX_PENDING`` bytes pile up.
            ValueError: The message is larger than ``MAX_MESSAGE``.
        """
        body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "surrogateescape"
        )
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(body)} bytes is too large")
        if len(self._outgoing) + len(body) > MAX_PENDING:
            raise ChannelClosedError("the peer does not read")
        self._outgoing += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now.

        Raises:
            ChannelClosedError: The peer is gone.
        """
        while self._outgoing:
            try:
                written = os.write(self._write_fd, memoryview(self._outgoing)[: 1 << 16])
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            del self._outgoing[:written]

    def drain(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds until the peer has taken all; say whether it has."""
        while self._outgoing:
            if not select.select([], [self._write_fd], [], timeout)[1]:
                return False
            self.flush()
        return True

    def receive(self) -> tuple[dict[str, Any], ...]:
        """Return the whole messages that have arrived; never wait.

        Raises:
            ChannelClosedError: The peer is gone and every message was returned before, or it
                wrote nonsense.
        """
        while not self._eof and len(self._incoming) <= 2 * MAX_MESSAGE:
            try:
                block = os.read(self._read_fd, 1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not block:
                self._eof = True
                break
            self._incoming += block
        messages = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > MAX_MESSAGE:
                raise ChannelClosedError(f"the peer announced a message of {length} bytes")
            if len(self._incoming) < _LENGTH.size + length:
                break
            body = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            try:
                message = json.loads(body.decode("utf-8", "surrogateescape"))
            except ValueError as error:
                raise ChannelClosedError("the peer wrote something that is not JSON") from error
            if not isinstance(message, dict):
                raise ChannelClosedError("the peer wrote something that is not an object")
            messages.append(message)
        if self._eof and not messages:
            raise ChannelClosedError("the peer is gone")
        return tuple(messages)

    def wait(self, timeout: float | None) -> tuple[dict[str, Any], ...]:
        """Return the messages that arrive within *timeout* seconds, as soon as there is one.

        Raises:
            ChannelClosedError: See ``receive``.
        """
        ready, _, _ = select.select([self._read_fd], [], [], timeout)
        return self.receive() if ready else ()

    def close(self) -> None:
        """Close both descriptors."""
        for fd in (self._read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
