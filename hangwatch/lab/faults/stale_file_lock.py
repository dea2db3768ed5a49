"""A lock that is a file, left behind by a builder that was killed.

As torch's ``FileBaton``: whoever finds the file waits until it is gone, ten times a second, and
it looks like a long compilation.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from . import LOOP, Fault, Scene
from ._process import spawn


class FileBaton:
    """Held by whoever made the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait(self, scene: Scene) -> None:
        """Wait until the holder removes it."""
        while self.path.exists() and not scene.over():
            time.sleep(0.1)


def build(path: Path) -> None:
    """Take the lock and compile, in a process of its own, until killed."""
    path.touch(exist_ok=False)
    time.sleep(3600.0)


def prepare(scene: Scene) -> Path:
    """Let a builder take the lock, and kill it."""
    path = scene.folder() / f"kernels-{os.getpid()}.lock"
    builder = spawn(build, path, name="ninja")
    while not path.exists():
        time.sleep(0.01)
    builder.kill()
    builder.join()
    return path


def strike(scene: Scene) -> None:
    """Need the kernel that the builder was to build."""
    scene.begin()
    FileBaton(scene.prepared).wait(scene)


FAULT = Fault(
    title="the engine waits for a lock file that a dead process left behind",
    shows="the loop's thread looks for a file ten times a second; no process has it open",
    place=LOOP,
    strike=strike,
    prepare=prepare,
    verdicts=("hung", "blocked", "suspected_hang"),
    causes=("file-lock-stale", "event-loop-blocked"),
    culprits=("FileBaton.wait",),
    ends=True,
)
