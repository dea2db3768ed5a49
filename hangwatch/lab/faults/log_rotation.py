"""A storm of rotations: the log is renamed and begun anew twice a second, and four are kept."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from . import LOG, Fault, Scene

EVERY = 0.5
KEPT = 4


def rotate(path: Path) -> None:
    """Move every generation one up, and write on into a new file."""
    for generation in range(KEPT, 0, -1):
        older = path.with_name(f"{path.name}.{generation}")
        newer = path.with_name(f"{path.name}.{generation - 1}") if generation > 1 else path
        if newer.exists():
            newer.replace(older)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.close(log)


def storm(scene: Scene, path: Path) -> None:
    """Rotate again and again."""
    while not scene.over():
        rotate(path)
        time.sleep(EVERY)


def strike(scene: Scene) -> None:
    """Begin, in a thread of its own."""
    path = Path("/proc/self/fd/1").readlink()
    scene.begin()
    threading.Thread(target=storm, args=(scene, path), name="logrotate", daemon=True).start()


FAULT = Fault(
    title="the log is renamed and begun anew twice a second; heartbeats go on",
    shows="a new inode below the log's name twice a second",
    place=LOG,
    strike=strike,
    verdicts=("ok",),
    causes=("not-a-hang:busy", "not-a-hang:rotation"),
    ends=True,
)
