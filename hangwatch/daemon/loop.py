"""The one loop: wait, see, advance, act.

Everything that could block is somebody else's: children look outside and capture, and what they
saw comes through ``Senses``. The loop only waits for them, at most until the next poll or until
the state can change by itself, whichever is earlier. It holds the clock; the decision does not.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final, Protocol

from hangwatch.core.advance import advance
from hangwatch.core.fleet import State, due
from hangwatch.daemon.children import Wire
from hangwatch.model.observation import Action, LoopPaused, Observation
from hangwatch.model.policy import Policy
from hangwatch.model.time import Clock, Instant
from hangwatch.system.logs import log

MIN_WAIT: Final = 0.01
"""Seconds; keeps a moment that is due but changes nothing from becoming a busy loop."""


CROWD: Final = 100
"""Observations of one turn that are not little; a pipe holds several hundred."""


class Senses(Protocol):
    """What the loop sees with."""

    def listen(self, timeout: float) -> tuple[Observation, ...]:
        """Return what was seen, as soon as there is something, after *timeout* seconds at most."""


class Part(Protocol):
    """Some children that report."""

    def wires(self) -> Iterable[Wire]:
        """Return the channels to wait on now."""

    def hear(self) -> tuple[Observation, ...]:
        """Return what they reported; look after them; never wait."""

    @property
    def losses(self) -> int:
        """How often one of them was lost: it died, fell silent, or took nothing."""

    def close(self) -> None:
        """End them."""


class Loop:
    """Turns what is seen into actions.

    Attributes:
        state: All that is known.
        turns: How often it went round.
        pauses: How often it stood still for longer than counts as listening.
    """

    def __init__(
        self,
        state: State,
        *,
        clock: Clock,
        policy: Policy,
        senses: Senses,
        act: Callable[[Action], None],
        settled: Callable[[State], None] = lambda _: None,
    ) -> None:
        """Begin with *state*.

        Args:
            state: From ``core.fleet.begin``, or remembered.
            clock: Ours.
            policy: The limits.
            senses: What it sees with.
            act: Carries out one action; must not block.
            settled: Told the state at the end of each turn.
        """
        self.state = state
        self.turns = 0
        self.pauses = 0
        self._clock = clock
        self._policy = policy
        self._senses = senses
        self._act = act
        self._settled = settled
        self._looked_at = clock.now()
        self._due = due(state)

    def turn(self) -> None:
        """Go round once; takes at most one poll interval, unless *act* does."""
        observations = self._senses.listen(self._patience())
        now = self._clock.now()
        pause = now - self._looked_at
        self._looked_at = now
        self.turns += 1
        if pause > self._policy.loop_gap:
            # We, or the whole machine, stood still: nobody listened in between.
            self.pauses += 1
            log.warning("hangwatch.loop_paused", seconds=round(pause, 3))
            observations = (LoopPaused(at=now, seconds=pause), *observations)
        if observations or (self._due is not None and now >= self._due):
            self.state, actions = advance(self.state, observations, now)
            self._due = due(self.state)
            for action in actions:
                self._act(action)
        self._settled(self.state)

    def run(self, until: Callable[[], bool]) -> None:
        """Go round until *until* says so."""
        while not until():
            self.turn()

    def _patience(self) -> float:
        if self._due is None:
            return self._policy.poll_interval
        left = self._due - self._clock.now()
        return min(max(left, MIN_WAIT), self._policy.poll_interval)


class Ears:
    """Waits on the channels of all children at once: the real ``Senses``.

    Children stamp what they see, so it may wait a moment in their pipes: one turn takes in what
    gathered since the last one, unless something is urgent, or so much comes that a pipe might be
    full.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        *,
        clock: Clock,
        pace: float,
        urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listen to *parts*, every *pace* seconds at most while nothing is *urgent*."""
        self._parts = tuple(parts)
        self._clock = clock
        self._pace = pace
        self._urgent = urgent
        self._heard_at = Instant(float("-inf"))
        self._crowded = True

    def listen(self, timeout: float) -> tuple[Observation, ...]:
        """Return what any part reports."""
        began = self._clock.now()
        if not self._crowded and not self._urgent():
            self._clock.sleep(min(timeout, self._heard_at + self._pace - began))
        poll = select.poll()
        for wire in chain.from_iterable(part.wires() for part in self._parts):
            poll.register(wire.fileno(), select.POLLIN)
            if wire.pending:
                poll.register(wire.write_fd, select.POLLOUT)
        left = timeout - (self._clock.now() - began)
        poll.poll(max(0.0, left) * 1000)
        self._heard_at = self._clock.now()
        observations = tuple(chain.from_iterable(part.hear() for part in self._parts))
        self._crowded = len(observations) > CROWD
        return observations
