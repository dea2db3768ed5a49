"""The model agent's task ends with an error; the log says so once, and the server answers on."""

from __future__ import annotations

from . import FORWARD, Fault, Scene


async def strike(scene: Scene) -> None:
    """Fail as a kernel does that gets the wrong type."""
    scene.begin()
    raise RuntimeError("expected scalar type Half but found Float")


FAULT = Fault(
    title="the task that runs the model ends with an error, which is logged once",
    shows="Task <ModelAgentLoop> failed in the log, and the task is gone; all loops live",
    place=FORWARD,
    strike=strike,
    verdicts=("dead",),
    causes=("engine-task-dead",),
)
