"""The engine process ends without a word; the API server stays and answers."""

from __future__ import annotations

import os

from . import LOOP, Fault, Scene


def strike(scene: Scene) -> None:
    """End this process."""
    scene.begin()
    os._exit(1)


FAULT = Fault(
    title="the engine process ends, the API server stays",
    shows="the server's child is a zombie, or gone; /health says that it is not alive",
    place=LOOP,
    strike=strike,
    verdicts=("dead",),
    causes=("child-dead",),
)
