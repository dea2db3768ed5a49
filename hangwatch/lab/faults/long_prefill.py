"""A long prompt: the device computes, the host asks it every millisecond whether it is done.

As LMDeploy's ``get_output_async``, with a clock in place of the device.
"""

from __future__ import annotations

import asyncio
import time

from . import FORWARD, Fault, Scene

STEPS = 64
"""Eight heartbeats long: a heartbeat is eight steps."""


class DeviceEvent:
    """Done when the device has come to it."""

    def __init__(self, seconds: float) -> None:
        self._done_at = time.monotonic() + seconds

    def query(self) -> bool:
        """Say whether it has."""
        return time.monotonic() >= self._done_at


async def get_output_async(event: DeviceEvent) -> None:
    """Wait for the device."""
    while not event.query():
        await asyncio.sleep(0.001)


async def strike(scene: Scene) -> None:
    """Run one forward that is as long as many."""
    event = DeviceEvent(scene.lasts or STEPS * scene.engine.executor.model_agent.step)
    scene.begin()
    await get_output_async(event)


FAULT = Fault(
    title="one prompt takes eight heartbeats to read, and none is printed meanwhile",
    shows="no heartbeats, no tokens; the engine's loop wakes up a thousand times a second",
    place=FORWARD,
    strike=strike,
    verdicts=("ok",),
    causes=("not-a-hang:busy",),
    ends=True,
)
