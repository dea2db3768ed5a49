"""Blocks that are never given back: every request waits, and none is ever admitted.

The running sequences are preempted to make room, their blocks are lost, and the scheduler looks
ten times a second whether there are any.
"""

from __future__ import annotations

from . import LOOP, Fault, Scene


def strike(scene: Scene) -> None:
    """Preempt what runs, and lose the blocks."""
    scene.engine.scheduler.preempt_all(blocks_returned=False)
    scene.begin()


FAULT = Fault(
    title="the KV cache has leaked away: requests wait in the scheduler and none is admitted",
    shows="0 running, 8 waiting, a full KV cache; the task MainLoopMain sleeps 0.1 s again and "
    "again in EngineLoop.no_running_warning",
    place=LOOP,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("scheduler-stuck",),
    culprits=("EngineLoop.no_running_warning",),
)
