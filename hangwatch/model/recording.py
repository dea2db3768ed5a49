"""What the black box recorded: how often each thread was on a CPU, four times a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hangwatch.model.identity import ProcessId
from hangwatch.model.time import Instant

UNSEEN: Final = -1
"""Stands where nobody looked: before a thread was found, after it ended, and in our own gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One thread over all looks.

    Attributes:
        process: Whose it is.
        tid: Its kernel id; the main thread's is that of the process.
        name: Its name by the kernel.
        slices: Times it was put on a CPU since the look before, or ``UNSEEN``; one a look.
        run_us: Microseconds it ran since the look before, or ``UNSEEN``; one a look.
        ended_at: The first look in which it was gone, or ``None``.
    """

    process: ProcessId
    tid: int
    name: str
    slices: Sequence[int]
    run_us: Sequence[int]
    ended_at: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the black box holds.

    Attributes:
        period: Seconds between two looks that were made in time.
        at: When each look was made, oldest first.
        tracks: One a thread.
    """

    period: float
    at: Sequence[float] = ()
    tracks: tuple[Track, ...] = ()


class Change(StrEnum):
    """What became of the pattern in which a process runs."""

    QUIET = "quiet"
    """It runs less than before, or not at all."""
    SPINNING = "spinning"
    """It computes without a pause, as it did not before."""
    ENDED = "ended"
    UNCHANGED = "unchanged"
    INACTIVE = "inactive"
    """It hardly ever ran, so nothing can be said."""
    UNKNOWN = "unknown"
    """It was not recorded for long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When the pattern changed in which one process runs.

    Attributes:
        process: It.
        tid: The thread that this is about: the busiest of those that changed.
        name: That thread's name by the kernel.
        change: What became of it.
        earliest: The change came no earlier, or ``None`` where there is none.
        latest: It came no later.
        before: Slices a second until then, the median; ``None`` where too little was recorded.
        after: The same since then.
        run_before: Share of a core until then, the median.
        run_after: The same since then.
    """

    process: ProcessId
    tid: int
    name: str
    change: Change
    earliest: Instant | None = None
    latest: Instant | None = None
    before: float | None = None
    after: float | None = None
    run_before: float | None = None
    run_after: float | None = None
