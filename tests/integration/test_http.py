"""One question at one socket of a watched process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from hangwatch.core.endpoints import outcome_of_error
from hangwatch.model.identity import ProcessId
from hangwatch.model.process import Listener
from hangwatch.model.vitals import Outcome
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


def ask(listener: Listener, *, key: str = "", **options: float) -> http.Response:
    return http.get(
        ourselves(),
        listener,
        "/health",
        timeout=options.get("timeout", 30.0),
        limit=int(options.get("limit", http.MAX_BODY)),
        key=key,
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


def test_an_answer_that_never_becomes_final_is_cut():
    def put_off(peer: socket.socket) -> None:
        while True:
            peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

    with answering(put_off) as (listener, _):
        response = ask(listener, timeout=60.0)

    assert "not HTTP: no final answer within 65536 bytes" == response.error


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


def in_pieces(*pieces: bytes) -> Callable[[socket.socket], None]:
    def answer(peer: socket.socket) -> None:
        for piece in pieces:
            peer.sendall(piece)
            time.sleep(0.02)
        peer.recv(1)  # until the other side has enough

    return answer


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "said",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole",),
        (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 5\r\n\r", b"\nwh", b"ole and more"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length:5\r\n\r\nwhole"),
        (CHUNKED + b"5\r\nwhole\r\n0\r\n\r\n",),
        (CHUNKED, b"2;name=value\r\nwh\r", b"\n0", b"3\r\nole", b"\r\n0\r\n"),
        (*map(bytes, zip(CHUNKED, strict=True)), b"5\r\nwhole\r\n0\r\n\r\n"),
    ],
    ids=["at once", "torn", "after a continue", "chunked", "torn chunks", "byte by byte"],
)
def test_an_answer_ends_where_it_says_although_the_connection_stays(said):
    with answering(in_pieces(*said)) as (listener, _):
        response = ask(listener)

    assert (200, b"whole", True) == (response.status, response.body, response.complete)


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart", CHUNKED + b"9\r\npart"],
    ids=["by length", "chunked"],
)
def test_an_answer_that_breaks_off_is_not_whole(said):
    with answering(saying(said)) as (listener, _):
        response = ask(listener)

    assert (200, b"part", False) == (response.status, response.body, response.complete)


def test_a_server_that_accepts_nobody_is_told_from_one_that_does_not_answer():
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = server.getsockname()[1]
        for _ in range(4):  # the kernel takes one more than the backlog; further ones wait
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        (listener,) = (found for found in procfs.listeners(os.getpid()) if found.port == port)
        response = ask(listener, timeout=0.5)

    assert "TCP was not accepted within 0.5 s" == response.error
    assert Outcome.FAILED is outcome_of_error(response.error)


def test_a_key_is_sent_as_a_bearer_token_and_only_where_it_is_given():
    with answering(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as (listener, asked):
        ask(listener)
        ask(listener, key="sk-1234")

    assert b"Authorization" not in asked[0]
    assert b"\r\nAuthorization: Bearer sk-1234\r\n" in asked[1]


def test_a_key_that_could_break_out_of_its_header_is_refused_without_being_told():
    with pytest.raises(ValueError, match=r"^the key cannot stand in a header$"):
        ask(Listener(host="127.0.0.1", port=1, inode=1), key="sk-1234\r\nX: y")


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 yes\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        CHUNKED + b"many\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
    ],
)
def test_nonsense_ends_the_exchange_and_never_raises(said):
    with answering(saying(said)) as (listener, _):
        response = ask(listener)

    assert None is response.status
    assert response.error


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
