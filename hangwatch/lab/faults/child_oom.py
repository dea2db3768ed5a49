"""A worker takes more memory than its control group has, and the kernel kills it.

Nothing is printed about it; the group's counters and the kernel's log know. What follows is as in
``child-killed``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import LOOP, Fault, Scene
from ._process import spawn
from .child_killed import Launcher

LIMIT = 96 << 20
"""Bytes; an interpreter that has done nothing takes a fifth of it."""


def worker_main(commands: Connection, answers: Connection) -> None:
    """Load weights, for each command as many bytes as it says."""
    weights = []
    while True:
        weights.append(b"\1" * commands.recv())
        answers.send(len(weights))


class Group:
    """A memory control group, of either version.

    Attributes:
        folder: Where it is made.
    """

    def __init__(self) -> None:
        old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.root, self.file = old, "memory.limit_in_bytes"
        if not old.exists():
            self.root, self.file = new, "memory.max"
            mine = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip("/\n")
            if "memory" not in (new / mine / "cgroup.subtree_control").read_text().split():
                self.root = new / mine
                while self.root != new and not self._delegates():
                    self.root = self.root.parent
            else:
                self.root = new / mine
        self.folder = self.root / f"hangwatch-lab-{os.getpid()}"

    def _delegates(self) -> bool:
        return "memory" in (self.root / "cgroup.subtree_control").read_text().split()

    def make(self) -> None:
        """Make it, with its limit."""
        self.folder.mkdir()
        (self.folder / self.file).write_text(str(LIMIT))

    def add(self, pid: int) -> None:
        """Put a process into it."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove it, once nobody runs in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


class OutOfMemory(Launcher):
    """Starts a worker whose memory is bounded."""

    def __init__(self) -> None:
        theirs, self.commands = multiprocessing.Pipe(duplex=False)
        self.answers, self.forgotten = multiprocessing.Pipe(duplex=False)
        self.process = spawn(worker_main, theirs, self.forgotten, name="ExecutorProc-1")
        self.group = Group()
        self.group.make()
        self.group.add(self.process.pid or 0)


def prepare(scene: Scene) -> Any:
    """Let the worker answer once."""
    del scene
    launcher = OutOfMemory()
    launcher.call(1 << 20)
    return launcher


def strike(scene: Scene) -> None:
    """Need more than there is."""
    launcher = scene.prepared
    launcher.commands.send(2 * LIMIT)
    os.waitid(os.P_PID, launcher.process.pid, os.WEXITED | os.WNOWAIT)
    launcher.group.remove()
    scene.begin(launcher.process.pid)
    launcher.wait_for_worker()


def unavailable() -> str | None:
    """Say whether no control group can be made here."""
    try:
        group = Group()
        group.make()
    except OSError as error:
        return f"no memory control group can be made here: {error.strerror}"
    group.remove()
    return None


FAULT = Fault(
    title="a worker is killed by the kernel for want of memory and stays a zombie; the engine "
    "waits for its answer",
    shows="as child-killed; the control group and the kernel's log count one more OOM kill",
    place=LOOP,
    strike=strike,
    prepare=prepare,
    unavailable=unavailable,
    needs="root, a writable memory cgroup",
    verdicts=("dead", "hung", "suspected_hang"),
    causes=("child-dead", "event-loop-blocked"),
    culprits=("Launcher.wait_for_worker",),
)
