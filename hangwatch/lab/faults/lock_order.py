"""Two locks, two threads, two orders: each holds what the other one wants.

They are threads of the loop's executor, as a tokenizer's or a grammar's are; the loop lives and
awaits them.
"""

from __future__ import annotations

import asyncio
import threading

from . import FORWARD, Fault, Scene


class Tokenizer:
    """Two caches with a lock for each."""

    def __init__(self) -> None:
        self.vocabulary = threading.Lock()
        self.merges = threading.Lock()
        self.both_hold_one = threading.Barrier(2)

    def encode(self) -> None:
        """Look a word up, then merge."""
        with self.vocabulary:
            self.both_hold_one.wait()
            with self.merges:
                pass

    def decode(self) -> None:
        """Unmerge, then look the word up."""
        with self.merges:
            self.both_hold_one.wait()
            with self.vocabulary:
                pass


async def strike(scene: Scene) -> None:
    """Encode while something else is decoded."""
    tokenizer = Tokenizer()
    run = asyncio.get_running_loop().run_in_executor
    scene.begin()
    run(None, tokenizer.decode)
    await run(None, tokenizer.encode)


FAULT = Fault(
    title="two threads of the engine take two locks in opposite orders; its loop awaits them",
    shows="two threads sleep in futex, each with a lock that the other one waits for",
    place=FORWARD,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("lock-order-deadlock",),
    culprits=("Tokenizer.encode", "Tokenizer.decode"),
)
