"""What a bundle should tell of the time before it: beats, and how verdicts changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.incident import Transition
from hangwatch.model.observation import BeatSeen, Observation

MAX_BEATS: Final = 12_000
"""Of all instances: four hours of eight of them at one every ten seconds; about 6 MB."""

MAX_TRANSITIONS: Final = 1000


class History:
    """The recent past, bounded."""

    def __init__(self) -> None:
        self._beats: deque[Heartbeat] = deque(maxlen=MAX_BEATS)
        self._transitions: deque[Transition] = deque(maxlen=MAX_TRANSITIONS)

    def note(self, observations: Iterable[Observation]) -> None:
        """Take note of the beats among *observations*."""
        self._beats.extend(seen.beat for seen in observations if isinstance(seen, BeatSeen))

    def turn(self, transition: Transition) -> None:
        """Take note of a changed verdict."""
        self._transitions.append(transition)

    @property
    def beats(self) -> tuple[Heartbeat, ...]:
        """The beats that are kept, oldest first."""
        return tuple(self._beats)

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """How verdicts changed, oldest first."""
        return tuple(self._transitions)
