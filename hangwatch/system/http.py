"""Asks one question at one socket of a watched process.

Only GET, only at a listening socket that the named process holds right now, in our own network
namespace; no redirects, no proxies, no cookies, no retries. A time-out is a deadline for the whole
exchange: a peer that sends a byte now and then gains nothing by it.

An ``Exchange`` never waits, so one thread can have hundreds of them on their way and a mute peer
costs a descriptor and nothing else; ``get`` waits for one.

Three ways not to be answered are told apart, because they accuse different culprits: nobody
listens (``connection refused``), the kernel holds the door because the server accepts nobody (``TCP
was not accepted within 15 s``: its queue is full), and TCP was accepted but HTTP does not answer
(``timeout after 15 s``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import time
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from hangwatch.model.identity import ProcessId
from hangwatch.model.process import Listener
from hangwatch.system import procfs

MAX_BODY: Final = 4 << 20
"""Bytes; a /metrics page of sixteen engines with all histograms is below 1 MB."""

MAX_HEAD: Final = 1 << 16
"""Bytes of status line and headers, of those before the final answer, too."""

NOT_ACCEPTED: Final = "TCP was not accepted"
"""How the error of an exchange begins that never got a connection."""

_BLOCK: Final = 1 << 16
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |$)")
_SIZE: Final = re.compile(rb"\s*([0-9A-Fa-f]{1,8})\s*(?:;|$)")
_KEY: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """How a request ended.

    Attributes:
        status: Status code, or ``None`` if there was no answer.
        body: The body, at most ``limit`` bytes of it.
        complete: ``False`` if the body was cut, by us or by the peer.
        error: Why there was no answer, see the module; ``""`` if there was one.
        elapsed: Seconds that it took.
    """

    status: int | None = None
    body: bytes = b""
    complete: bool = True
    error: str = ""
    elapsed: float = 0.0


def get(
    owner: ProcessId,
    listener: Listener,
    path: str,
    *,
    timeout: float,
    limit: int = MAX_BODY,
    key: str = "",
) -> Response:
    """Ask for *path* at a socket of *owner* and wait; never raises for what a peer does.

    Args:
        owner: The process that must hold the socket.
        listener: The socket.
        path: Absolute path, as the profile lists it.
        timeout: Seconds after which the connection is cut.
        limit: Bytes of the body that are kept.
        key: Sent as a bearer token unless empty.

    Raises:
        ValueError: The path is not absolute, or the key cannot stand in a header.
    """
    exchange = Exchange(owner, listener, path, timeout=timeout, limit=limit, key=key)
    while exchange.response is None:
        poll = select.poll()
        poll.register(exchange.fileno(), exchange.events)
        left = max(0.0, exchange.deadline - time.monotonic())
        exchange.advance(ready=bool(poll.poll(left * 1000 + 1)))
    return exchange.response


class Exchange:
    """One question on its way.

    Attributes:
        response: How it ended; ``None`` while it is on its way.
        deadline: When it is cut, monotonic seconds.
    """

    def __init__(
        self,
        owner: ProcessId,
        listener: Listener,
        path: str,
        *,
        timeout: float,
        limit: int = MAX_BODY,
        key: str = "",
    ) -> None:
        """Begin to ask, as ``get`` does; it may have ended already when this returns.

        Raises:
            ValueError: The path is not absolute, or the key cannot stand in a header.
        """
        if not re.fullmatch(r"/[\x21-\x7e]*", path):
            raise ValueError(f"{path!r} is not an absolute path")
        if key and not _KEY.fullmatch(key):
            raise ValueError("the key cannot stand in a header")
        self.response: Response | None = None
        self._began_at = time.monotonic()
        self.deadline = self._began_at + timeout
        self._timeout = timeout
        self._answer = _Answer(limit)
        self._connected = False
        self._socket: socket.socket | None = None
        refusal = _refusal(owner, listener)
        if refusal:
            self._end(Response(error=refusal))
            return
        url = urlsplit(listener.url)
        assert url.hostname is not None
        self._unsent = _request(url.netloc, path, key)
        self._connect(url.hostname, listener.port)

    def fileno(self) -> int:
        """Return the descriptor to wait on until there is a response."""
        assert self._socket is not None
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to wait for, as ``select.poll`` has it."""
        return select.POLLOUT if self._unsent else select.POLLIN

    def advance(self, *, ready: bool) -> None:
        """Do what can be done now; call it when its descriptor is *ready*, or at its deadline."""
        if ready:
            try:
                self._turn()
            except BlockingIOError:
                pass
            except OSError as error:
                self._end(Response(error=_reason(error)))
            except _NotHttpError as error:
                self._end(Response(error=f"not HTTP: {error}"))
        if time.monotonic() >= self.deadline:
            late = f"timeout after {self._timeout:g} s"
            if not self._connected:
                late = f"{NOT_ACCEPTED} within {self._timeout:g} s"
            self._end(Response(error=late))

    def _connect(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._socket.connect((host, port))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(Response(error=_reason(error)))
            return
        self._connected = True

    def _turn(self) -> None:
        assert self._socket is not None
        if not self._connected:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self._connected = True
        if self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
            return
        block = self._socket.recv(_BLOCK)
        if self._answer.take(block):
            self._end(self._answer.response())

    def _end(self, response: Response) -> None:
        if self.response is not None:
            return
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self.response = replace(response, elapsed=time.monotonic() - self._began_at)


class _NotHttpError(Exception):
    """What came is no answer of HTTP."""


class _Answer:
    """What has come of an answer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._status: int | None = None
        self._raw = bytearray()  # not understood yet
        self._head = 0  # bytes of heads so far
        self._body = bytearray()
        self._left: int | None = None  # bytes of the body, or of its chunk, that are to come
        self._chunked = False
        self._whole = False

    def take(self, block: bytes) -> bool:
        """Take in what came, ``b""`` for the end; say whether nothing more is to be waited for.

        Raises:
            _NotHttpError: It is no answer of HTTP.
        """
        self._raw += block
        while self._status is None:
            if not self._take_head(ended=not block):
                return False
        if self._chunked:
            self._take_chunks()
        else:
            taken = len(self._raw) if self._left is None else min(self._left, len(self._raw))
            self._body += self._raw[:taken]
            del self._raw[:taken]
            if self._left is not None:
                self._left -= taken
                self._whole = self._left == 0
            else:
                self._whole = not block
        return self._whole or not block or len(self._body) > self._limit

    def response(self) -> Response:
        """Return what came."""
        body = bytes(self._body[: self._limit])
        complete = self._whole and len(self._body) <= self._limit
        return Response(status=self._status, body=body, complete=complete)

    def _take_head(self, *, ended: bool) -> bool:
        start = bytes(self._raw[:5])
        if not b"HTTP/".startswith(start):
            raise _NotHttpError(repr(bytes(self._raw[:40])))
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            if ended:
                raise _NotHttpError("the connection was closed before an answer had come")
            if self._head + len(self._raw) > MAX_HEAD:
                raise _NotHttpError(f"no end of the headers within {MAX_HEAD} bytes")
            return False
        self._head += len(head)
        first, *lines = bytes(head).split(b"\r\n")
        found = _STATUS.match(first)
        if found is None:
            raise _NotHttpError(repr(first[:40]))
        self._raw = rest
        status = int(found[1])
        if 100 <= status < 200:
            if self._head > MAX_HEAD:
                raise _NotHttpError(f"no final answer within {MAX_HEAD} bytes")
            return True  # a final answer follows
        self._status = status
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        self._chunked = headers.get(b"transfer-encoding", b"").endswith(b"chunked")
        length = headers.get(b"content-length", b"")
        if status in (204, 304):
            self._left = 0
        elif length.isdigit() and len(length) < 16 and not self._chunked:
            self._left = int(length)
        return True

    def _take_chunks(self) -> None:
        while not self._whole and self._raw:
            if self._left is None:
                line, end, rest = self._raw.partition(b"\r\n")
                if not end:
                    if len(self._raw) > MAX_HEAD:
                        raise _NotHttpError("a chunk without a size")
                    return
                size = _SIZE.match(bytes(line))
                if size is None:
                    raise _NotHttpError("a chunk without a size")
                self._raw, self._left = rest, int(size[1], 16)
                if self._left == 0:
                    self._whole = True  # trailers tell us nothing
                    return
                self._left += 2  # the line break behind it
            taken = min(self._left, len(self._raw))
            own = max(0, min(taken, self._left - 2))
            self._body += self._raw[:own]
            del self._raw[:taken]
            self._left = self._left - taken or None
            if len(self._body) > self._limit:
                return


def _request(host: str, path: str, key: str) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: hangwatch",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _refusal(owner: ProcessId, listener: Listener) -> str:
    """Return why this socket may not be asked, or ``""``."""
    gone = f"connection refused: process {owner} does not listen there any more"
    try:
        # A socket keeps its inode and address, so its descriptor proves both; looking it up in
        # /proc/net/tcp costs ten times the request on a machine with many connections.
        if not (procfs.holds(owner.pid, listener.inode) and procfs.is_same(owner)):
            return gone
        theirs = procfs.read_link(owner.pid, "ns/net")
        foreign = theirs != procfs.read_link(os.getpid(), "ns/net")
    except (FileNotFoundError, ProcessLookupError):
        return gone
    except OSError as error:
        return f"the socket of process {owner} cannot be looked at: {error.strerror}"
    if foreign:
        # The same address leads to somebody else here.
        return f"process {owner} listens in another network namespace"
    return ""


def _reason(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    return (error.strerror or str(error)).lower()
