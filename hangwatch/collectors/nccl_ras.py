"""What NCCL's ranks know of each other, asked of NCCL's own RAS thread, upon request.

Since 2.24 each NCCL process runs a thread that answers on loopback, port 28028 or ``NCCL_RAS_ADDR``
(``src/ras/client_support.cc``). The talk is lines of text: ``CLIENT PROTOCOL n`` is answered by
``SERVER PROTOCOL n``, ``TIMEOUT s`` by ``OK``, and ``VERBOSE STATUS`` by the report, after which
the connection is closed. To answer, the thread asks those of all other ranks, on other machines
too, and waits for them for the seconds named: a rank that is silent is what we want to know. The
GPUs and the collectives are not touched.

All NCCL processes of a user share the port, and any of them may be the one that answers: nobody
is asked where one of them is not watched.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Final

from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Sink,
    Stage,
    Step,
    Target,
)
from hangwatch.model.process import Listener
from hangwatch.system import procfs

TIMEOUT: Final = 30.0

PORT: Final = 28028

PATIENCE: Final = 5
"""Seconds that the ranks get to answer; NCCL itself gives up after twice as many."""

MAX_ANSWER: Final = 4 << 20


def _collect(step: Step, room: Room) -> None:
    deadline = time.monotonic() + step.timeout - 1.0
    asked = dict(_servers(step.targets))
    if not asked:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "no watched process answers for NCCL (RAS, since NCCL 2.24)",
            "NCCL_RAS_ENABLE must not be 0; NCCL_RAS_ADDR says where it listens",
        )
    watched = frozenset(each.inode for target in step.targets for each in target.listeners)
    failures = []
    with room.create("gpu/nccl_ras.txt") as out:
        for listener, target in asked.items():
            try:
                _ask(listener, target, watched, out, deadline)
            except OSError as error:
                failures.append(f"{listener.host}:{listener.port}: {error.strerror or error}")
            except CollectorError as error:
                failures.append(f"{listener.host}:{listener.port}: {error.failure.message}")
    if failures:
        raise CollectorError(FailureKind.TOOL_FAILED, "; ".join(failures))


def _servers(targets: tuple[Target, ...]) -> Iterator[tuple[Listener, Target]]:
    """Yield one socket for each address at which a watched process answers for NCCL."""
    seen: set[tuple[str, int]] = set()
    for target in targets:
        port = _port(target.process.pid)
        for listener in target.listeners:
            address = (listener.host, listener.port)
            if listener.port == port and address not in seen:
                seen.add(address)
                yield listener, target


def _port(pid: int) -> int:
    try:
        named = procfs.read_environment(pid).get("NCCL_RAS_ADDR", "").rpartition(":")[2]
    except OSError:  # it is gone
        named = ""
    return int(named) if named.isdigit() else PORT


def _ask(
    listener: Listener,
    target: Target,
    watched: frozenset[int],
    out: Sink,
    deadline: float,
) -> None:
    pid = target.process.pid
    if procfs.read_link(pid, "ns/net") != procfs.read_link(os.getpid(), "ns/net"):
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, "it listens in another network namespace than ours"
        )
    if not procfs.owns(target.process, listener):
        raise CollectorError(FailureKind.TARGET_GONE, "its process is gone")
    if not procfs.listening_on(pid, listener.port) <= watched:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, "a process that is not watched listens there too"
        )
    out.write(f"# {listener.host}:{listener.port}, of process {pid} or its peers\n".encode())
    with socket.create_connection(
        (listener.host, listener.port), timeout=max(0.5, min(5.0, deadline - time.monotonic()))
    ) as talk:
        line = _exchange(talk, b"CLIENT PROTOCOL 2\n", deadline)
        if not line.upper().startswith(b"SERVER PROTOCOL "):
            raise CollectorError(FailureKind.TOOL_FAILED, "it does not speak NCCL's protocol")
        _exchange(talk, b"TIMEOUT %d\n" % PATIENCE, deadline)
        talk.sendall(b"VERBOSE STATUS\n")
        size = 0
        while block := _receive(talk, deadline):
            size += len(block)
            if size > MAX_ANSWER:
                raise CollectorError(FailureKind.TOO_LARGE, "it answers without an end")
            out.write(block)


def _exchange(talk: socket.socket, line: bytes, deadline: float) -> bytes:
    """Say a line and return the one that answers it."""
    talk.sendall(line)
    answer = b""
    while not answer.endswith(b"\n"):
        block = _receive(talk, deadline)
        answer += block
        if not block or len(answer) > 1024:
            raise CollectorError(FailureKind.TOOL_FAILED, "it ended the talk in the middle")
    return answer


def _receive(talk: socket.socket, deadline: float) -> bytes:
    talk.settimeout(max(0.01, deadline - time.monotonic()))
    return talk.recv(1 << 16)


COLLECTOR: Final = Collector(
    name="nccl_ras",
    title="What NCCL's ranks know of each other; asks NCCL's thread in the engine",
    scope=Scope.NODE,
    rung=10,
    stage=Stage.B,
    timeout=TIMEOUT,
    needs="NCCL 2.24 or later, same network namespace",
    opt_in=True,
    collect=_collect,
    waits=True,
)
