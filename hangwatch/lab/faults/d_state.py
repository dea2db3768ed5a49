"""A thread in uninterruptible sleep, as on a disk that does not answer, without any disk.

``clone`` with ``CLONE_VFORK`` lets its caller wait, in state D, until the new task executes a
program or ends. The new task is a thread here, so that it ends with its process, and it pauses.
"""

from __future__ import annotations

import ctypes
import sys

from . import LOOP, Fault, Scene

CLONE_VM, CLONE_FS, CLONE_FILES, CLONE_SIGHAND = 0x100, 0x200, 0x400, 0x800
CLONE_VFORK, CLONE_THREAD, CLONE_SYSVSEM = 0x4000, 0x10000, 0x40000
FLAGS = (
    CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_VFORK | CLONE_THREAD | CLONE_SYSVSEM
)
STACK = 1 << 16


def wait_in_the_kernel() -> None:
    """Start a thread that pauses, and wait until it is done."""
    c = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(STACK)
    top = (ctypes.addressof(stack) + STACK - 256) & ~0xFF
    c.clone(ctypes.cast(c.pause, ctypes.c_void_p), ctypes.c_void_p(top), FLAGS, None)


def strike(scene: Scene) -> None:
    """Do it on the loop."""
    scene.begin()
    wait_in_the_kernel()


def unavailable() -> str | None:
    """Say whether this is no Linux."""
    return None if sys.platform == "linux" else "it needs Linux"


FAULT = Fault(
    title="the loop's thread sleeps uninterruptibly in the kernel",
    shows="state D; whatever attaches to the process would hang on it",
    place=LOOP,
    strike=strike,
    unavailable=unavailable,
    verdicts=("hung", "suspected_hang"),
    causes=("storage-d-state",),
    culprits=("wait_in_the_kernel",),
)
