"""One question at one socket of a watched process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hangwatch.model.identity import ProcessId
from hangwatch.model.process import Listener
from hangwatch.system import http, procfs


def ourselves() -> ProcessId:
    return procfs.identify(os.getpid())


@contextmanager
def answering(
    answer: Callable[[socket.socket], None], family: int = socket.AF_INET
) -> Iterator[tuple[Listener, list[bytes]]]:
    """A server of one answer a connection, in a thread of ours; gives what it was asked."""
    asked: list[bytes] = []
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    asked.append(peer.recv(65536))
                    with suppress(OSError):
                        answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        (listener,) = (
            found
            for found in procfs.listeners(os.getpid())
            if found.port == server.getsockname()[1]
        )
        yield listener, asked
        server.shutdown(socket.SHUT_RDWR)
    thread.join(30.0)


def saying(data: bytes) -> Callable[[socket.socket], None]:
    return lambda peer: peer.sendall(data)


def ask(listener: Listener, **options: float) -> http.Response:
    return http.get(
        ourselves(),
        listener,
        "/health",
        timeout=options.get("timeout", 30.0),
        limit=int(options.get("limit", http.MAX_BODY)),
    )


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_an_answer_is_brought_back_as_it_is(family):
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    said = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nlate"
    with answering(saying(said), family) as (listener, asked):
        response = ask(listener)

    assert (503, b"late", "") == (response.status, response.body, response.error)
    assert asked[0].startswith(b"GET /health HTTP/1.1\r\n")


def test_a_redirect_is_not_followed():
    said = b"HTTP/1.1 302 Found\r\nlocation: /terminate\r\ncontent-length: 0\r\n\r\n"
    with answering(saying(said)) as (listener, asked):
        response = ask(listener)

    assert 302 == response.status
    assert 1 == len(asked)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with answering(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as (listener, _):
        assert 200 == ask(listener).status


def test_a_body_without_end_is_cut():
    def flood(peer: socket.socket) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            peer.sendall(b"x" * 65536)

    with answering(flood) as (listener, _):
        response = ask(listener, limit=100_000)

    assert (200, 100_000, False) == (response.status, len(response.body), response.complete)


def test_silence_after_the_connection_is_a_timeout():
    done = threading.Event()
    with answering(lambda _: bool(done.wait(30.0)) and None) as (listener, _):
        response = ask(listener, timeout=0.3)
        done.set()

    assert (None, "timeout after 0.3 s") == (response.status, response.error)


def test_a_byte_now_and_then_does_not_stretch_the_deadline():
    done = threading.Event()

    def drip(peer: socket.socket) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\n")
        while not done.wait(0.1):
            peer.sendall(b"x: y\r\n")

    with answering(drip) as (listener, _):
        response = ask(listener, timeout=0.5)
        done.set()

    assert "timeout after 0.5 s" == response.error


def test_what_is_not_http_is_told_so():
    with answering(saying(b"\x00\x00\x12\x04 settings of another protocol\r\n")) as (listener, _):
        response = ask(listener)

    assert None is response.status
    assert response.error.startswith("not HTTP")


def test_a_socket_of_another_process_is_never_asked():
    with answering(saying(b"HTTP/1.1 200 OK\r\n\r\n")) as (listener, asked):
        response = http.get(procfs.identify(os.getppid()), listener, "/health", timeout=30.0)

    assert response.error.startswith("connection refused: process")
    assert [] == asked


def test_a_socket_that_was_closed_and_opened_anew_is_another_one():
    with answering(saying(b"")) as (listener, _):
        pass

    assert ask(listener).error.startswith("connection refused")


def test_a_process_that_has_ended_listens_no_more():
    with answering(saying(b"")) as (listener, _):
        ended = http.get(ProcessId(2**22 + 1), listener, "/health", timeout=30.0)

    assert ended.error.startswith("connection refused")


def test_a_reused_pid_is_not_the_owner():
    with answering(saying(b"HTTP/1.1 200 OK\r\n\r\n")) as (listener, asked):
        response = http.get(ProcessId(os.getpid(), 1), listener, "/health", timeout=30.0)

    assert response.error.startswith("connection refused")
    assert [] == asked


def test_only_an_absolute_path_can_be_asked():
    with pytest.raises(ValueError, match="not an absolute path"):
        http.get(ourselves(), Listener(host="127.0.0.1", port=1, inode=1), "x@y", timeout=1)
