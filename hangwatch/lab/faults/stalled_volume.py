"""A volume that does not answer: the engine reads its weights from it, in state D.

The volume is a FUSE file system that nobody serves, mounted where only this thread sees it, so
that it goes with the process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from . import LOOP, Fault, Scene

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18


def mount(folder: Path) -> int:
    """Mount the volume for the calling thread; return what must stay open."""
    c = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if (
        c.unshare(CLONE_NEWNS)
        or c.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or c.mount(b"fuse", os.fsencode(folder), b"fuse", 0, options)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return server


def read_weights(path: Path) -> Any:
    """Open a file of the volume."""
    return path.open("rb")


def prepare(scene: Scene) -> Path:
    """Make the folder."""
    folder = scene.folder() / f"weights-{os.getpid()}"
    folder.mkdir()
    return folder


def strike(scene: Scene) -> None:
    """Mount the volume and read from it."""
    held = mount(scene.prepared)
    scene.begin()
    read_weights(scene.prepared / "model-00012-of-00066.safetensors")
    os.close(held)


def unavailable() -> str | None:
    """Try it, in a thread whose mounts go with it."""
    failed: list[str] = []

    def attempt() -> None:
        try:
            os.close(mount(Path("/mnt")))
        except OSError as error:
            failed.append(f"no volume can be mounted here: {error.strerror}")

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return failed[0] if failed else None


FAULT = Fault(
    title="the engine opens a file on a volume that does not answer",
    shows="state D in the loop's thread, below open",
    place=LOOP,
    strike=strike,
    prepare=prepare,
    unavailable=unavailable,
    needs="root, /dev/fuse",
    verdicts=("hung", "suspected_hang"),
    causes=("storage-d-state",),
    culprits=("read_weights",),
)
