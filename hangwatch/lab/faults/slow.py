"""Slow but alive: each step brings a tenth of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import LOOP, Fault, Scene


class Throttled:
    """Samples a tenth of what the sampler before it does."""

    def __init__(self, scene: Scene, before: Any) -> None:
        self.scene = scene
        self.before = before

    def tokens(self, batch: Sequence[Any]) -> int:
        """Return how many tokens each sequence gets in this step."""
        full = int(self.before.tokens(batch))
        return full if self.scene.over() else max(1, full // 10)


def strike(scene: Scene) -> None:
    """Throttle it."""
    scene.engine.sampler = Throttled(scene, scene.engine.sampler)
    scene.begin()


FAULT = Fault(
    title="the engine produces a tenth of its tokens",
    shows="heartbeats with a tenth of the usual throughput",
    place=LOOP,
    strike=strike,
    verdicts=("slow", "ok"),
    causes=("not-a-hang:slow", "not-a-hang:busy"),
    ends=True,
)
