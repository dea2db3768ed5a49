"""One rank is missing from a collective: it skipped it, because its share of the batch was empty.

A stand-in for torch.distributed that needs the standard library only: ranks are processes, and
``all_reduce`` is a star of pipes. ``collective-gloo`` is the real thing, where torch is installed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from . import FORWARD, Fault, Scene
from ._process import spawn

RANKS = 4
MISSING = 2


def all_reduce(value: int, rank: int, links: Sequence[Connection]) -> int:
    """Return the sum of all ranks' values, once all of them have called this."""
    if rank != 0:
        links[0].send(value)
        return int(links[0].recv())
    total = value + sum(int(link.recv()) for link in links)
    for link in links:
        link.send(total)
    return total


def rank_main(rank: int, links: Sequence[Connection], engine: Connection) -> None:
    """Run one rank: take a share of the batch, reduce, answer."""
    while True:
        share = wait_for_batch(engine)
        if share == 0:
            continue  # nothing to do; but the others will wait for us
        engine.send(all_reduce(share, rank, links))


def wait_for_batch(engine: Connection) -> int:
    """Return our share of the next batch."""
    return int(engine.recv())


class Ranks:
    """The engine's side."""

    def __init__(self) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(1, RANKS)]
        ends = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            ours, theirs = multiprocessing.Pipe()
            name = f"ExecutorProc-{rank}"
            self.processes.append(spawn(rank_main, rank, ends[rank], theirs, name=name))
            self.pipes.append(ours)

    def forward(self, shares: Sequence[int]) -> int:
        """Give each rank its share and return the answer of rank 0."""
        for pipe, share in zip(self.pipes, shares, strict=True):
            pipe.send(share)
        answers = [int(pipe.recv()) for pipe in self.pipes]
        return answers[0]


def prepare(scene: Scene) -> Any:
    """Start the ranks, and let them reduce once."""
    del scene
    ranks = Ranks()
    ranks.forward([1] * RANKS)
    return ranks


async def strike(scene: Scene) -> None:
    """Leave nothing for one rank."""
    ranks = scene.prepared
    shares = [0 if rank == MISSING else 1 for rank in range(RANKS)]
    scene.begin(ranks.processes[MISSING].pid)
    await asyncio.get_running_loop().run_in_executor(None, ranks.forward, shares)


FAULT = Fault(
    title="three ranks of four wait in an all_reduce that the fourth one skipped (a stand-in for "
    "torch.distributed)",
    shows="ranks 0, 1 and 3 stand in all_reduce; rank 2 waits for its next batch",
    place=FORWARD,
    strike=strike,
    prepare=prepare,
    verdicts=("hung", "suspected_hang"),
    causes=("collective-mismatch", "await-never-completes"),
    culprits=("all_reduce", "wait_for_batch"),
)
