"""One rank is missing from a collective of torch.distributed, with gloo, on the CPU."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from . import FORWARD, Fault, Scene
from ._process import spawn

RANKS = 2
MISSING = 1


def rank_main(rank: int, store: str, engine: Connection) -> None:
    """Run one rank: take a share of the batch, reduce, answer."""
    torch: Any = importlib.import_module("torch")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(days=35600),  # as LMDeploy's groups: no watchdog ever ends it
    )
    while True:
        share = wait_for_batch(engine)
        if share == 0:
            continue
        tensor = torch.full((8,), float(share))
        torch.distributed.all_reduce(tensor)
        engine.send(float(tensor[0]))


def wait_for_batch(engine: Connection) -> int:
    """Return our share of the next batch."""
    return int(engine.recv())


class Ranks:
    """The engine's side."""

    def __init__(self, store: str) -> None:
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(
                spawn(rank_main, rank, store, theirs, name=f"RayWorkerWrap-{rank}")
            )
            self.pipes.append(ours)

    def forward(self, shares: tuple[int, ...]) -> float:
        """Give each rank its share and return the answer of rank 0."""
        for pipe, share in zip(self.pipes, shares, strict=True):
            pipe.send(share)
        answers = [float(pipe.recv()) for pipe in self.pipes]
        return answers[0]


def prepare(scene: Scene) -> Any:
    """Start the ranks, and let them reduce once."""
    ranks = Ranks(str(scene.folder() / f"rendezvous-{os.getpid()}"))
    ranks.forward((1,) * RANKS)
    return ranks


async def strike(scene: Scene) -> None:
    """Leave nothing for one rank."""
    ranks = scene.prepared
    scene.begin(ranks.processes[MISSING].pid)
    await asyncio.get_running_loop().run_in_executor(None, ranks.forward, (1, 0))


def unavailable() -> str | None:
    """Say whether torch is missing."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


FAULT = Fault(
    title="one rank waits in an all_reduce of torch.distributed that the other one skipped",
    shows="rank 0 stands in torch.distributed's all_reduce; rank 1 waits for its next batch",
    place=FORWARD,
    strike=strike,
    prepare=prepare,
    unavailable=unavailable,
    needs="torch",
    verdicts=("hung", "suspected_hang"),
    causes=("collective-mismatch", "await-never-completes"),
    culprits=("all_reduce", "wait_for_batch"),
)
