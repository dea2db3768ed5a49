"""A small HTTP server in one thread: it answers GET for a few paths, and nobody can hold it up.

It speaks HTTP/1.1 and closes each connection after its answer. Whoever takes longer than ``VISIT``
seconds to ask, or to take the answer, is cut off. Beyond ``MAX_VISITORS`` connections at once, who
came first gives way to who comes: a probe is answered beside a thousand that say nothing. What it
answers comes from values that others made: it opens nothing, and asks nobody.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from hangwatch.errors import ConfigError, ListenError

MAX_VISITORS: Final = 16
QUEUE: Final = 128
"""Connections that wait to be let in."""

MAX_QUESTION: Final = 8192
"""Bytes of a request line and its headers."""

VISIT: Final = 5.0
"""Seconds from a connection to its end."""

_REASONS: Final = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    400: "Bad Request",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent back.

    Attributes:
        body: Of which bytes.
        kind: Of which content type.
        status: With which status.
    """

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200


Routes = Mapping[str, Callable[[], Answer]]
"""Path to what answers it; called in the thread, must not block."""


def address_of(text: str) -> tuple[str, int]:
    """Return the address and port that a setting says: ``127.0.0.1:9464``, ``[::1]:9464``.

    A number, not a name: looking up a name can take as long as it likes.

    Raises:
        ConfigError: It says none.
    """
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    bracketed = host.startswith("[") and host.endswith("]")
    family = ipaddress.IPv6Address if bracketed else ipaddress.IPv4Address
    with suppress(ValueError):
        address, number = family(host[1:-1] if bracketed else host), int(port)
        if port.isascii() and port.isdigit() and number < 1 << 16:
            return str(address), number
    raise ConfigError(
        f"{text!r} is no address to listen at: write 127.0.0.1:9464 or [::1]:9464, "
        "0.0.0.0:9464 for every address of this machine"
    )


@dataclass(slots=True)
class _Visitor:
    wire: socket.socket
    until: float
    asked: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class Endpoint:
    """Listens from its making on, answers from ``start`` on.

    Attributes:
        url: Where: ``http://127.0.0.1:9464``.
    """

    def __init__(self, address: str, routes: Routes) -> None:
        """Listen.

        Args:
            address: See ``address_of``; port 0 picks one.
            routes: What it answers.

        Raises:
            ConfigError: That is no address.
            ListenError: It cannot listen there.
        """
        host, port = address_of(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A successor need not wait for connections that the kernel has not forgotten.
            self._door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._door.bind((host, port))
            self._door.listen(QUEUE)
        except OSError as error:
            self._door.close()
            raise ListenError(
                f"cannot listen at {address}: {(error.strerror or str(error)).lower()}; "
                "end who listens there, or choose another address with --listen"
            ) from error
        self._door.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._door.getsockname()[1]}"
        self._routes = routes
        self._visitors: dict[int, _Visitor] = {}
        self._wakes = selectors.DefaultSelector()
        self._wakes.register(self._door, selectors.EVENT_READ)
        self._bell, self._ringer = socket.socketpair()
        self._wakes.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hangwatch-http", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and let the address go."""
        self._ringer.close()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._door.close()

    def _run(self) -> None:
        while True:
            soonest = min((v.until for v in self._visitors.values()), default=None)
            patience = None if soonest is None else max(0.0, soonest - time.monotonic())
            ready = {key.fd for key, _ in self._wakes.select(patience)}
            if self._bell.fileno() in ready:
                break
            for visitor in [v for fd, v in self._visitors.items() if fd in ready]:
                self._serve(visitor)
            if self._door.fileno() in ready:
                self._let_in()
            now = time.monotonic()
            for visitor in [v for v in self._visitors.values() if v.until <= now]:
                self._leave(visitor)
        for visitor in [*self._visitors.values()]:
            self._leave(visitor)
        self._bell.close()

    def _let_in(self) -> None:
        for _ in range(MAX_VISITORS):
            try:
                wire, _ = self._door.accept()
            except OSError:  # BlockingIOError: nobody more
                return
            if len(self._visitors) >= MAX_VISITORS:
                self._leave(next(iter(self._visitors.values())))
            wire.setblocking(False)
            visitor = _Visitor(wire, time.monotonic() + VISIT)
            self._visitors[wire.fileno()] = visitor
            self._wakes.register(wire, selectors.EVENT_READ)
            self._serve(visitor)

    def _leave(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.wire.fileno()]
        self._wakes.unregister(visitor.wire)
        visitor.wire.close()

    def _serve(self, visitor: _Visitor) -> None:
        try:
            if visitor.answer is None:
                self._hear(visitor)
            if visitor.answer is not None:
                visitor.answer = visitor.answer[visitor.wire.send(visitor.answer) :]
                if not visitor.answer:
                    with suppress(OSError):
                        visitor.wire.shutdown(socket.SHUT_WR)
                    self._leave(visitor)
        except BlockingIOError:
            pass
        except OSError:
            self._leave(visitor)

    def _hear(self, visitor: _Visitor) -> None:
        block = visitor.wire.recv(MAX_QUESTION)
        if not block:
            raise ConnectionResetError
        visitor.asked += block
        if b"\r\n\r\n" in visitor.asked or b"\n\n" in visitor.asked:
            visitor.answer = memoryview(self._answer(bytes(visitor.asked)))
        elif len(visitor.asked) >= MAX_QUESTION:
            visitor.answer = memoryview(_reply(Answer(body=b"too long\n", status=400)))
        if visitor.answer is not None:
            self._wakes.modify(visitor.wire, selectors.EVENT_WRITE)

    def _answer(self, asked: bytes) -> bytes:
        words = asked.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _reply(Answer(body=b"this speaks HTTP/1.1\n", status=400))
        if words[0] != b"GET":
            return _reply(Answer(body=b"only GET\n", status=405))
        path = words[1].decode("latin-1").partition("?")[0]
        route = self._routes.get(path)
        if route is None:
            there = " ".join(sorted(self._routes))
            return _reply(Answer(body=f"there is {there}\n".encode(), status=404))
        return _reply(route())


def _reply(answer: Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + answer.body
