"""What a thread did between two looks, by its counters."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from hangwatch.model.process import ThreadRow

COUNTERS: Final = ("run_ns", "wait_ns", "slices", "vol_ctxt", "invol_ctxt")

SPINS: Final = 0.8
"""Share of the time on a core from which a thread spins."""

BUSY: Final = 0.05
"""Share of the time on a core from which a thread works."""


class Pace(StrEnum):
    """What a thread did between two looks."""

    FROZEN = "frozen"
    """Nothing: it was not on a core once."""
    TICKING = "ticking"
    """It woke up and did next to nothing: timers, a loop that polls."""
    BUSY = "busy"
    SPINNING = "spinning"
    """It was on a core nearly all the time."""
    BLOCKED = "blocked"
    """It is in state D: the kernel does not let it be interrupted."""
    STOPPED = "stopped"
    """It was stopped by a signal or a tracer."""


def grown(before: ThreadRow | Mapping[str, object], now: ThreadRow) -> dict[str, int] | None:
    """Return by how much the counters of a thread grew.

    ``None`` where one of them is smaller than before: then another thread has its number now.
    """
    found = {}
    for name in COUNTERS:
        earlier = before.get(name) if isinstance(before, Mapping) else getattr(before, name)
        later = getattr(now, name)
        if isinstance(earlier, int) and later is not None:
            found[name] = later - earlier
    return None if any(much < 0 for much in found.values()) else found


def pace(state: str, grew: Mapping[str, int], elapsed: float) -> Pace:
    """Return what a thread did.

    Args:
        state: Its letter now.
        grew: What ``grown`` says of it.
        elapsed: Seconds between the looks.
    """
    if state in ("T", "t"):
        return Pace.STOPPED
    if state == "D":
        return Pace.BLOCKED
    share = grew.get("run_ns", 0) / 1e9 / elapsed if elapsed > 0 else 0.0
    if share > SPINS:
        return Pace.SPINNING
    if share > BUSY:
        return Pace.BUSY
    ran = any(grew.get(name) for name in ("run_ns", "slices", "vol_ctxt", "invol_ctxt"))
    return Pace.TICKING if ran else Pace.FROZEN
