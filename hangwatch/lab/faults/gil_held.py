"""C code that waits and keeps the GIL: no thread of the process runs Python any more.

The wait is a mutex that its holder locks again. ``ctypes.PyDLL`` calls C as an extension module
does that forgot ``Py_BEGIN_ALLOW_THREADS``.
"""

from __future__ import annotations

import ctypes
import threading
import time

from . import LOOP, Fault, Scene


def tick() -> None:
    """Want to run ten times a second."""
    while True:
        time.sleep(0.1)


def prepare(scene: Scene) -> None:
    """Start a thread that will miss the GIL."""
    del scene
    threading.Thread(target=tick, name="ticker", daemon=True).start()


def call_into_c() -> None:
    """Lock a mutex twice, without letting go of the GIL."""
    c = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)


def strike(scene: Scene) -> None:
    """Call it."""
    scene.begin()
    call_into_c()


FAULT = Fault(
    title="a C function waits for ever and keeps the GIL",
    shows="the loop's thread in futex below C code; every other thread that wants to run waits "
    "for the GIL",
    place=LOOP,
    strike=strike,
    prepare=prepare,
    verdicts=("hung", "suspected_hang"),
    causes=("gil-held-by-c-code", "event-loop-blocked"),
    culprits=("call_into_c",),
)
