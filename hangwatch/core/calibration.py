"""How long an engine's honest silences are, learned from those that ended by themselves.

Theory of operation
===================

A long prefill prints nothing, so silence alone becomes suspicious only when it is longer than the
honest ones. How long those are depends on the model, the context and the machine; the default is a
guess, and what was seen is better.

Every gap between two beats with work in between counts, those included that were taken for a hang
and ended by themselves. The limit is twice the second longest of them: one outlier (a machine that
stood still, a disk that came back) teaches nothing, two are a habit. It is never below
``FLOOR`` nor above ``CEILING`` times the configured limit, and below the configured one only after
``ENOUGH`` gaps, because the rarest silences are the longest ones.

Gaps are kept in two windows of which the older is dropped when the newer is full, so that what was
true of last week's model is forgotten. Instances of one engine on one machine share what they
learn, and a restart of the daemon keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

FLOOR: Final = 0.75
"""Share of the configured limit below which calibration never goes."""

CEILING: Final = 5.0
"""Times the configured limit above which calibration never goes: ten minutes by default."""

FACTOR: Final = 2.0
"""Times the second longest gap that is suspicious."""

ENOUGH: Final = 2000
"""Gaps after which the limit may fall below the configured one: five hours of work."""

WINDOW: Final = 20_000
"""Gaps of a window: two days of work of one instance."""

KEPT: Final = 4
"""Longest gaps of a window that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Gaps of one stretch of time.

    Attributes:
        seen: How many.
        longest: The longest of them, seconds, longest first.
    """

    seen: int = 0
    longest: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is known of the gaps of one engine.

    Attributes:
        now: The window that is being filled.
        before: The one before it.
    """

    now: Window = Window()
    before: Window = Window()

    @property
    def seen(self) -> int:
        """How many gaps it rests on."""
        return self.now.seen + self.before.seen

    @property
    def longest(self) -> tuple[float, ...]:
        """The longest gaps, seconds, longest first."""
        return tuple(sorted((*self.now.longest, *self.before.longest), reverse=True)[:KEPT])


def observe(known: Calibration, gap: float) -> Calibration:
    """Return what is known after a gap of that many seconds ended by itself."""
    if known.now.seen >= WINDOW:
        known = Calibration(before=known.now)
    longest = known.now.longest
    if len(longest) < KEPT or gap > longest[-1]:
        longest = tuple(sorted((*longest, gap), reverse=True)[:KEPT])
    return replace(known, now=Window(seen=known.now.seen + 1, longest=longest))


def patience(known: Calibration, configured: float) -> float:
    """Return how long a silence must be to be suspicious, in seconds.

    Args:
        known: What was observed.
        configured: The limit that was set, or the default.
    """
    longest = known.longest
    if len(longest) < 2:
        return configured
    floor = FLOOR * configured if known.seen >= ENOUGH else configured
    return min(CEILING * configured, max(floor, FACTOR * longest[1]))
