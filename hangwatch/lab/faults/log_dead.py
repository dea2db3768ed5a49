"""A dead path: what copies the server's output to its log goes on reading, and writes nowhere.

As Ray's log monitor after a rotation, which sought to the old offset in the new file. The server
notices nothing: its pipe is emptied.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import LOG, Fault, Scene
from ._process import spawn


def copier_main(pipe: Connection, log: Path, orders: Connection) -> None:
    """Copy the pipe to the log, until told to lose it."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    while block := os.read(pipe.fileno(), 1 << 16):
        if orders.poll():
            out = os.open(os.devnull, os.O_WRONLY)
        os.write(out, block)


def prepare(scene: Scene) -> Any:
    """Put the copier between the server and its log."""
    del scene
    theirs, ours = multiprocessing.Pipe(duplex=False)
    told, orders = multiprocessing.Pipe(duplex=False)
    log = Path("/proc/self/fd/1").readlink()
    copier = spawn(copier_main, theirs, log, told, name="log_monitor")
    os.dup2(ours.fileno(), 1)
    return orders, ours, copier


def strike(scene: Scene) -> None:
    """Let it lose the log."""
    orders, _, copier = scene.prepared
    orders.send("lose it")
    scene.begin(copier.pid)


FAULT = Fault(
    title="what copies the server's output to its log loses the log; the engine works on",
    shows="a log that does not grow, not even by access lines; token counters rise, /health is "
    "content",
    place=LOG,
    strike=strike,
    prepare=prepare,
    verdicts=("log_stalled", "ok"),
    causes=("not-a-hang:log-pipeline", "not-a-hang:heartbeat-lost"),
)
