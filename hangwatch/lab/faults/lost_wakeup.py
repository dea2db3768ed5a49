"""A lost wake-up: the reader clears the signal of a letter that it has not seen.

The letter lies in the box, the reader waits for the signal, and the signal came. It takes one
suspension between looking and waiting.
"""

from __future__ import annotations

import asyncio

from . import FORWARD, Fault, Scene


class Mailbox:
    """Letters, and a signal that there are some."""

    def __init__(self) -> None:
        self.letters: list[str] = []
        self.arrived = asyncio.Event()

    def put(self, letter: str) -> None:
        """Leave a letter, then ring."""
        self.letters.append(letter)
        self.arrived.set()

    async def take(self) -> str:
        """Return the next letter."""
        while not self.letters:
            await asyncio.sleep(0)  # here comes the letter …
            self.arrived.clear()  # … and here its signal is lost
            await self.arrived.wait()
        return self.letters.pop()


async def strike(scene: Scene) -> None:
    """Wait for the outputs, which arrive."""
    box = Mailbox()
    asyncio.get_running_loop().call_soon(box.put, "outputs")
    scene.begin()
    await box.take()


FAULT = Fault(
    title="a signal is cleared before it is waited for: what it announced is there, unseen",
    shows="as await-never; the list that is waited for has one entry",
    place=FORWARD,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("await-never-completes",),
    culprits=("Mailbox.take",),
)
