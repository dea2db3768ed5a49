"""NCCL's own report of its ranks, asked of a played RAS thread (protocol of NCCL 2.28)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from hangwatch.capture.rooms import StepRoom
from hangwatch.collectors import nccl_ras
from hangwatch.model.capture import CollectorError, FailureKind, Step, Target
from hangwatch.model.identity import Role
from hangwatch.system import procfs

# What NCCL 2.28.9 said of a job of one rank on an H200.
REPORT = Path(__file__).parents[1].joinpath("fixtures", "gpu", "nccl_ras.txt").read_bytes()


@contextlib.contextmanager
def server(*, mute: bool = False, answer: bytes = b"SERVER PROTOCOL 2\n") -> Iterator[int]:
    """Listen as NCCL does, in this process; yield the port."""
    said: list[bytes] = []
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                talk, _ = listening.accept()
                with talk, talk.makefile("rb") as lines:
                    for line in lines:
                        said.append(line)
                        if mute:
                            continue
                        if line.startswith(b"CLIENT PROTOCOL"):
                            talk.sendall(answer)
                        elif line.startswith(b"TIMEOUT"):
                            talk.sendall(b"OK\n")
                        elif line == b"VERBOSE STATUS\n":
                            talk.sendall(REPORT)
                            return

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def collect(folder: Path, port: int, monkeypatch, timeout: float = 30.0) -> str:
    monkeypatch.setattr(nccl_ras, "PORT", port)
    pid = os.getpid()
    target = Target(process=procfs.identify(pid), role=Role.ENGINE, listeners=procfs.listeners(pid))
    step = Step(
        id="nccl_ras",
        collector="nccl_ras",
        scope=nccl_ras.COLLECTOR.scope,
        stage=nccl_ras.COLLECTOR.stage,
        sample=1,
        rung=10,
        folder=PurePosixPath(),
        timeout=timeout,
        targets=(target,),
    )
    nccl_ras.COLLECTOR.collect(step, StepRoom(folder, folder))
    return (folder / "gpu" / "nccl_ras.txt").read_text()


def test_the_report_of_the_ranks_is_kept(tmp_path, monkeypatch):
    with server() as port:
        kept = collect(tmp_path, port, monkeypatch)

    assert f"# 127.0.0.1:{port}, of process {os.getpid()} or its peers" == kept.splitlines()[0]
    assert kept.endswith(REPORT.decode())


def test_nobody_is_asked_where_a_process_that_is_not_watched_listens_too(tmp_path, monkeypatch):
    with server() as port:
        sockets = procfs.listening_on
        monkeypatch.setattr(
            nccl_ras.procfs, "listening_on", lambda pid, at: sockets(pid, at) | {4711}
        )
        with pytest.raises(CollectorError, match="not watched listens there too"):
            collect(tmp_path, port, monkeypatch)


def test_one_that_speaks_something_else_is_left_alone(tmp_path, monkeypatch):
    with (
        server(answer=b"HTTP/1.1 400 Bad Request\n") as port,
        pytest.raises(CollectorError, match="does not speak NCCL's protocol"),
    ):
        collect(tmp_path, port, monkeypatch)


def test_one_that_never_answers_is_given_up_at_its_deadline(tmp_path, monkeypatch):
    with server(mute=True) as port, pytest.raises(CollectorError, match="timed out") as caught:
        collect(tmp_path, port, monkeypatch, timeout=2.0)

    assert FailureKind.TOOL_FAILED == caught.value.failure.kind


def test_without_nccl_nobody_is_asked(tmp_path, monkeypatch):
    with pytest.raises(CollectorError, match="no watched process answers for NCCL"):
        collect(tmp_path, 1, monkeypatch)
