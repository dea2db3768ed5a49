"""The API server ends, and its engine with it."""

from __future__ import annotations

import os

from . import SERVER, Fault, Scene


def strike(scene: Scene) -> None:
    """End this process."""
    scene.begin()
    os._exit(1)


FAULT = Fault(
    title="the API server ends, and the engine with it",
    shows="the processes are gone, the port refuses",
    place=SERVER,
    strike=strike,
    verdicts=("dead",),
    causes=("child-dead",),
)
