"""An await that never completes: the model agent waits for an event that nobody sets.

The loop lives and answers. A dump of the threads shows ``select``, as of an idle engine; only the
awaits of the task ModelAgentLoop tell.
"""

from __future__ import annotations

import asyncio

from . import FORWARD, Fault, Scene


class ModelAgent:
    """The part of a model agent that waits for its device."""

    async def wait_for_event(self, lasts: float | None) -> None:
        """Wait until the device is done; nobody says so."""
        event = asyncio.Event()
        if lasts is not None:
            asyncio.get_running_loop().call_later(lasts, event.set)
        await event.wait()


async def strike(scene: Scene) -> None:
    """Await it."""
    scene.begin()
    await ModelAgent().wait_for_event(scene.lasts)


FAULT = Fault(
    title="the model's forward is awaited and never completes; the loop lives",
    shows="every thread in select; the task ModelAgentLoop awaits an event, and does not move",
    place=FORWARD,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("await-never-completes",),
    culprits=("ModelAgent.wait_for_event",),
    ends=True,
)
