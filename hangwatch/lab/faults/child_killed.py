"""A worker is killed and nobody notices: it stays a zombie, and the engine waits for its answer.

The engine keeps the worker's ends of both pipes open, so that neither an error nor an end of file
tells it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from . import LOOP, Fault, Scene
from ._process import spawn


def worker_main(commands: Connection, answers: Connection) -> None:
    """Answer every command."""
    while True:
        answers.send(commands.recv())


class Launcher:
    """Starts the worker and waits for it."""

    def __init__(self) -> None:
        self.kept, self.commands = multiprocessing.Pipe(duplex=False)
        self.answers, self.forgotten = multiprocessing.Pipe(duplex=False)
        self.process = spawn(worker_main, self.kept, self.forgotten, name="ExecutorProc-1")

    def call(self, command: Any) -> Any:
        """Send a command and return its answer."""
        self.commands.send(command)
        return self.wait_for_worker()

    def wait_for_worker(self) -> Any:
        """Return the worker's answer."""
        return self.answers.recv()


def prepare(scene: Scene) -> Any:
    """Let the worker answer once."""
    del scene
    launcher = Launcher()
    launcher.call("hello")
    return launcher


def strike(scene: Scene) -> None:
    """Kill the worker, and need it."""
    launcher = scene.prepared
    launcher.process.kill()
    scene.begin(launcher.process.pid)
    launcher.call("forward")


FAULT = Fault(
    title="a worker of the engine is killed and stays a zombie; the engine waits for its answer",
    shows="a process in state Z; its parent reads from a pipe that nobody else has open",
    place=LOOP,
    strike=strike,
    prepare=prepare,
    verdicts=("dead", "hung", "suspected_hang"),
    causes=("child-dead", "event-loop-blocked"),
    culprits=("Launcher.wait_for_worker",),
)
