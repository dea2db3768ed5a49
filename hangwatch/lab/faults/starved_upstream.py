"""Starved: the driver of the job stands still, so nobody asks the engines.

The driver is a process that hands out work. It waits for the rewards of the step before, which
nobody computes.
"""

from __future__ import annotations

import multiprocessing
import queue
from multiprocessing.connection import Connection
from typing import Any

from . import CLIENTS, Fault, Scene
from ._process import set_title, spawn


def driver_main(work: Connection) -> None:
    """Hand out a step of work, then wait for its rewards."""
    set_title("python xtuner/v1/train/cli/rl.py --config grpo.py", "python")
    work.send("step 1")
    rewards: queue.Queue[float] = queue.Queue()
    wait_for_rewards(rewards)
    work.send("step 2")


def wait_for_rewards(rewards: queue.Queue[float]) -> float:
    """Return the next reward."""
    return rewards.get()


def prepare(scene: Scene) -> Any:
    """Let the driver hand out its first step."""
    del scene
    ours, theirs = multiprocessing.Pipe(duplex=False)
    driver = spawn(driver_main, theirs, name="driver")
    ours.recv()
    return driver


def strike(scene: Scene) -> None:
    """The step is done, and no other one comes."""
    scene.clients.asking.clear()
    scene.begin(scene.prepared.pid)


FAULT = Fault(
    title="the job's driver stands still, and the engines have nothing to do",
    shows="as idle; a driver lives and waits",
    place=CLIENTS,
    strike=strike,
    prepare=prepare,
    verdicts=("idle",),
    causes=("starved-upstream", "not-a-hang:idle"),
    culprits=("wait_for_rewards",),
)
