"""Where our own endpoint may listen, and what it answers to whatever comes."""

from __future__ import annotations

import socket
import threading

import pytest

from hangwatch.errors import ConfigError, ListenError
from hangwatch.system import endpoint
from hangwatch.system.endpoint import Answer, Endpoint, address_of

PATIENCE = 60.0


@pytest.fixture
def served():
    routes = {
        "/metrics": lambda: Answer(body=b"up 1\n"),
        "/large": lambda: Answer(body=bytes(1 << 24)),
    }
    server = Endpoint("127.0.0.1:0", routes)
    server.start()
    yield server
    server.close()


def connect(served: Endpoint) -> socket.socket:
    port = int(served.url.rpartition(":")[2])
    wire = socket.create_connection(("127.0.0.1", port), PATIENCE)
    wire.settimeout(PATIENCE)
    return wire


def ask(served: Endpoint, question: bytes) -> bytes:
    with connect(served) as wire:
        wire.sendall(question)
        answer = b""
        while block := wire.recv(1 << 16):
            answer += block
    return answer


def get(served: Endpoint, path: str = "/metrics") -> bytes:
    return ask(served, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("localhost:1", ("127.0.0.1", 1)),
    ],
)
def test_an_address_is_a_number_and_a_port(text, address):
    assert address == address_of(text)


@pytest.mark.parametrize(
    "text",
    ["", "9464", ":9464", "::1:9464", "[127.0.0.1]:1", "host:1", "127.0.0.1:", "127.0.0.1:65536"],
)
def test_what_is_no_address_is_said_with_its_remedy(text):
    with pytest.raises(ConfigError, match=r"write 127\.0\.0\.1:9464"):
        address_of(text)


def test_a_port_that_is_taken_is_said_with_its_remedy(served):
    with pytest.raises(ListenError, match=r"in use; .*--listen"):
        Endpoint(served.url.removeprefix("http://"), {})


def test_a_path_is_answered_and_the_connection_closed(served):
    head, _, body = get(served).partition(b"\r\n\r\n")

    assert b"up 1\n" == body
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 5\r\n" in head


@pytest.mark.parametrize(
    ("question", "status"),
    [
        (b"GET /metrics?x=1 HTTP/1.0\n\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"400"),
        (b"\xff\xfe\x00\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET " + b"x" * endpoint.MAX_QUESTION, b"400"),
    ],
    ids=lambda value: value[:24].decode("latin-1").strip(),
)
def test_whatever_is_asked_the_next_one_is_answered(served, question, status):
    assert ask(served, question).split()[1] == status
    assert get(served).endswith(b"up 1\n")


def test_an_answer_larger_than_any_buffer_arrives_whole(served):
    assert (1 << 24) == len(get(served, "/large").partition(b"\r\n\r\n")[2])


def test_who_says_nothing_and_who_takes_nothing_cannot_hold_it_up(served, monkeypatch):
    monkeypatch.setattr(endpoint, "VISIT", 0.5)
    wires = [connect(served) for _ in range(3 * endpoint.MAX_VISITORS)]
    for wire in wires[::2]:
        wire.sendall(b"GET /large HTTP/1.1\r\n\r\n")

    assert get(served).endswith(b"up 1\n")
    for wire in wires:
        wire.close()


def test_a_probe_is_answered_beside_many_connections_that_say_nothing(served, monkeypatch):
    monkeypatch.setattr(endpoint, "VISIT", 10 * PATIENCE)
    wires = [connect(served) for _ in range(10 * endpoint.MAX_VISITORS)]

    assert get(served).endswith(b"up 1\n")
    for wire in wires:
        wire.close()


def test_it_ends_although_somebody_is_connected():
    before = threading.active_count()
    server = Endpoint("127.0.0.1:0", {})
    server.start()
    with connect(server):
        server.close()

    assert before == threading.active_count()
