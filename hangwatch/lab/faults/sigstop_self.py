"""Everything is stopped by SIGSTOP, as a debugger leaves it that was killed."""

from __future__ import annotations

import os
import signal

from . import LOOP, Fault, Scene


def strike(scene: Scene) -> None:
    """Stop the API server, then ourselves."""
    scene.begin()
    for pid in (scene.parent, os.getpid()):
        if pid:
            os.kill(pid, signal.SIGSTOP)


FAULT = Fault(
    title="both processes are stopped by SIGSTOP",
    shows="state T, and no tracer",
    place=LOOP,
    strike=strike,
    verdicts=("hung",),
    causes=("stopped-by-tracer",),
    culprits=("strike",),
)
