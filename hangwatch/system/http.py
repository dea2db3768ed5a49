"""Asks one question at one socket of a watched process.

Only GET, only at a listening socket that the named process holds right now, in our own network
namespace; no redirects, no proxies, no cookies, no retries. A time-out is a deadline for the whole
exchange: a peer that sends a byte now and then gains nothing by it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from urllib3 import exceptions
from urllib3.connection import HTTPConnection
from urllib3.util import parse_url

from hangwatch.model.identity import ProcessId
from hangwatch.model.process import Listener
from hangwatch.system import procfs

MAX_BODY: Final = 4 << 20
"""Bytes; a /metrics page of sixteen engines with all histograms is below 1 MB."""

_HEADERS: Final = {"User-Agent": "hangwatch", "Accept": "*/*", "Connection": "close"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """How a request ended.

    Attributes:
        status: Status code, or ``None`` if there was no answer.
        body: The body, at most ``limit`` bytes of it.
        complete: ``False`` if the body was cut.
        error: Why there was no answer: ``timeout after 15 s`` (TCP was accepted, HTTP did not
            answer), ``connection refused`` …; ``""`` if there was one.
        elapsed: Seconds that it took.
    """

    status: int | None = None
    body: bytes = b""
    complete: bool = True
    error: str = ""
    elapsed: float = 0.0


def get(
    owner: ProcessId, listener: Listener, path: str, *, timeout: float, limit: int = MAX_BODY
) -> Response:
    """Ask for *path* at a socket of *owner*; never raises for what a peer does.

    Args:
        owner: The process that must hold the socket.
        listener: The socket.
        path: Absolute path, as the profile lists it.
        timeout: Seconds after which the connection is cut.
        limit: Bytes of the body that are kept.

    Raises:
        ValueError: The path is not absolute.
    """
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path")
    started_at = time.monotonic()
    refusal = _refusal(owner, listener)
    if refusal:
        return Response(error=refusal)
    url = parse_url(listener.url)
    assert url.host is not None
    connection = HTTPConnection(url.host.strip("[]"), url.port, timeout=timeout)
    deadline = _Deadline(connection, timeout)
    try:
        with deadline:
            response = _exchange(connection, path, limit)
    except exceptions.ConnectTimeoutError:
        response = Response(error=f"TCP was not accepted within {timeout:g} s")
    except (exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
        response = Response(error=_reason(error, timeout))
    finally:
        connection.close()
    if deadline.passed:
        response = Response(error=f"timeout after {timeout:g} s")
    return Response(
        status=response.status,
        body=response.body,
        complete=response.complete,
        error=response.error,
        elapsed=time.monotonic() - started_at,
    )


def _refusal(owner: ProcessId, listener: Listener) -> str:
    """Return why this socket may not be asked, or ``""``."""
    gone = f"connection refused: process {owner} does not listen there any more"
    try:
        # A socket keeps its inode and address, so its descriptor proves both; looking it up in
        # /proc/net/tcp costs ten times the request on a machine with many connections.
        held = f"socket:[{listener.inode}]" in procfs.links(owner.pid).values()
        if not (held and procfs.is_same(owner)):
            return gone
        theirs = Path(f"/proc/{owner}/ns/net").readlink()
        ours = Path("/proc/self/ns/net").readlink()
    except (FileNotFoundError, ProcessLookupError):
        return gone
    except OSError as error:
        return f"the socket of process {owner} cannot be looked at: {error.strerror}"
    if theirs != ours:
        # The same address leads to somebody else here.
        return f"process {owner} listens in another network namespace"
    return ""


def _exchange(connection: HTTPConnection, path: str, limit: int) -> Response:
    connection.request("GET", path, headers=_HEADERS, preload_content=False, decode_content=False)
    answer = connection.getresponse()
    body = bytearray()
    while len(body) <= limit and (block := answer.read(1 << 16)):
        body += block
    return Response(status=answer.status, body=bytes(body[:limit]), complete=len(body) <= limit)


def _reason(error: Exception, timeout: float) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        if isinstance(cause, TimeoutError | exceptions.TimeoutError):
            return f"timeout after {timeout:g} s"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return f"not HTTP: {error}"


class _Deadline:
    """Cuts a connection when its time is over, whatever it is doing."""

    def __init__(self, connection: HTTPConnection, seconds: float) -> None:
        self.passed = False
        self._connection = connection
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._cut, daemon=True)

    def _cut(self) -> None:
        patience = self._seconds
        while not self._over.wait(patience):
            sock = self._connection.sock
            if sock is not None:
                self.passed = True
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                return
            patience = 0.05  # it still connects, and that has a limit of its own

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
