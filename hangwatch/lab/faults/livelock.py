"""A livelock: every step drafts the token that the step before has rejected.

Speculative decoding with a grammar: the draft is outside the grammar, is rejected, the state is
rolled back, and the next draft is the same. Steps go on, ticks go on, no token comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import LOOP, Fault, Scene


class GuidedSpeculation:
    """Drafts, verifies, rolls back."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.state = 0

    def tokens(self, batch: Sequence[Any]) -> int:
        """Return how many drafted tokens of each sequence were accepted."""
        return min((self.accept_or_roll_back(sequence) for sequence in batch), default=0)

    def accept_or_roll_back(self, sequence: Any) -> int:
        """Verify one draft against the grammar."""
        draft = hash((self.state, sequence.request)) % 10_007
        if sum(state * draft for state in range(20_000)) >= 0:  # the grammar allows none of them
            self.state = 0  # as before the draft: so the next one is the same
            self.scene.begin()
            return 0
        return 1


def strike(scene: Scene) -> None:
    """Turn speculation on."""
    scene.engine.sampler = GuidedSpeculation(scene)


FAULT = Fault(
    title="the engine runs step after step, rejects every drafted token, and produces none",
    shows="the scheduler's tick advances, the loop computes, /health is content; the token "
    "counters stand",
    place=LOOP,
    strike=strike,
    verdicts=("hung", "suspected_hang", "blocked"),
    causes=("livelock",),
    culprits=("GuidedSpeculation.accept_or_roll_back",),
)
