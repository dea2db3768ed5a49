"""Two processes wait for each other: the engine for an answer, its worker for the next command.

The worker answers a number once and takes a smaller one for a repetition. The engine starts to
count anew.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from . import LOOP, Fault, Scene
from ._process import spawn


def worker_main(commands: Connection, answers: Connection) -> None:
    """Answer every command that is new."""
    last = -1
    while True:
        number = wait_for_command(commands)
        if number > last:
            last = number
            answers.send(number)


def wait_for_command(commands: Connection) -> int:
    """Return the next command."""
    return int(commands.recv())


class Executor:
    """The engine's side."""

    def __init__(self) -> None:
        theirs, self.commands = multiprocessing.Pipe(duplex=False)
        self.answers, answers = multiprocessing.Pipe(duplex=False)
        self.process = spawn(worker_main, theirs, answers, name="ExecutorProc-1")
        theirs.close()
        answers.close()

    def call(self, number: int) -> int:
        """Send a command and return its answer."""
        self.commands.send(number)
        return self.get_response()

    def get_response(self) -> int:
        """Return the worker's next answer."""
        return int(self.answers.recv())


def prepare(scene: Scene) -> Any:
    """Let the worker do some work."""
    del scene
    executor = Executor()
    for number in range(10):
        executor.call(number)
    return executor


def strike(scene: Scene) -> None:
    """Count anew."""
    scene.begin(scene.prepared.process.pid)
    scene.prepared.call(0)


FAULT = Fault(
    title="the engine waits for its worker's answer, the worker for the engine's next command",
    shows="two processes read from pipes, each from one that only the other one writes to",
    place=LOOP,
    strike=strike,
    prepare=prepare,
    verdicts=("hung", "suspected_hang"),
    causes=("queue-mutual-wait", "event-loop-blocked"),
    culprits=("wait_for_command", "Executor.get_response"),
)
