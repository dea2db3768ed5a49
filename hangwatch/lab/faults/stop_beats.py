"""The heartbeat task dies of an error that nobody logs, and everything else goes on.

It prints into a file on a full disk, ``/dev/full``, and nobody awaits the task.
"""

from __future__ import annotations

from pathlib import Path

from . import LOG, Fault, Scene


def strike(scene: Scene) -> None:
    """Fill the disk below the heartbeat."""
    scene.server.metrics.file = Path("/dev/full").open("w")  # noqa: SIM115  # stays open
    scene.server.heartbeat.add_done_callback(lambda _task: scene.begin())


FAULT = Fault(
    title="the heartbeat task dies of an error that nobody logs; all else goes on",
    shows="no heartbeats; token counters rise, /health is content",
    place=LOG,
    strike=strike,
    verdicts=("ok", "slow"),
    causes=("not-a-hang:heartbeat-lost",),
)
