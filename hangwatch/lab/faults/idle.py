"""Idle: nobody asks any more, and what is in flight is finished."""

from __future__ import annotations

import asyncio

from . import CLIENTS, Fault, Scene


def strike(scene: Scene) -> None:
    """Let the clients stop asking."""
    scene.clients.asking.clear()
    if scene.lasts is not None:
        asyncio.get_running_loop().call_later(scene.lasts, scene.clients.asking.set)
    scene.begin()


FAULT = Fault(
    title="the clients stop asking; what is in flight is finished",
    shows="no heartbeats, no requests in flight; every thread and task waits for work",
    place=CLIENTS,
    strike=strike,
    verdicts=("idle",),
    causes=("not-a-hang:idle",),
    ends=True,
)
