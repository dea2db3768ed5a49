"""Asleep: the trainer has sent the engine to sleep, to use its memory."""

from __future__ import annotations

from . import CLIENTS, Fault, Scene


def strike(scene: Scene) -> None:
    """Finish what is in flight, and sleep."""
    scene.clients.asking.clear()
    if scene.server is not None:
        scene.server.sleep(level=2)
    scene.begin()


FAULT = Fault(
    title="the engine is put to sleep, as for an update of the weights",
    shows="POST /sleep in the access log, /health says sleeping; no heartbeats",
    place=CLIENTS,
    strike=strike,
    verdicts=("paused", "idle"),
    causes=("not-a-hang:paused", "not-a-hang:idle"),
)
