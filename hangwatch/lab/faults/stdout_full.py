"""A pipe that nobody empties: the API server prints a line and waits for room.

Its output goes through a pipe to a process that copies it to the log, as ``tee`` does, and that
stands still.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from . import SERVER, Fault, Scene
from ._process import spawn


def copier_main(pipe: Connection, ready: Connection) -> None:
    """Hold the pipe's other end, and read nothing of it."""
    with pipe:
        ready.send("ready")
        while True:
            signal.pause()


def print_line() -> None:
    """Print a line, as every request does."""
    print('INFO:     127.0.0.1:40000 - "GET /v1/models HTTP/1.1" 200 OK', flush=True)


def prepare(scene: Scene) -> Any:
    """Start the copier."""
    del scene
    theirs, ours = multiprocessing.Pipe(duplex=False)
    told, tell = multiprocessing.Pipe(duplex=False)
    copier = spawn(copier_main, theirs, tell, name="tee")
    told.recv()
    theirs.close()
    return ours, copier


def strike(scene: Scene) -> None:
    """Print into the pipe until it is full, and then once more."""
    pipe, copier = scene.prepared
    os.set_blocking(pipe.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe.fileno(), b"\n" * 4096)
    os.set_blocking(pipe.fileno(), True)
    scene.begin(copier.pid)
    os.dup2(pipe.fileno(), 1)
    print_line()


FAULT = Fault(
    title="the API server prints into a pipe that nobody empties",
    shows="the server's main thread sleeps in pipe_write; the pipe is full, and another process "
    "has its other end and does not read",
    place=SERVER,
    strike=strike,
    prepare=prepare,
    verdicts=("hung", "suspected_hang"),
    causes=("stdout-pipe-full", "event-loop-blocked"),
    culprits=("print_line",),
)
