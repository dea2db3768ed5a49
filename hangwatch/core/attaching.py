"""What attaching did to a process: how long it stood still, and whether it must be told to go on.

Theory of operation. Whoever attaches stops every thread of its target, and lets them run when it
detaches or ends, even by SIGKILL: so says the kernel of those that were seized. A tool that stops
its target with a signal, as ``PTRACE_ATTACH`` does, can die and leave it stopped for ever. That is
the one case in which hangwatch sends a signal to a process that it watches: it was not stopped
before, our step ended in an unplanned way, nobody traces it any more, and it is stopped now.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

STOPPED: Final = frozenset("Tt")
"""Letters of states in which a thread stands still because it was told to, or is traced."""

ENDED: Final = frozenset("ZX")
"""Letters of states of a thread that has ended."""


class Repair(Enum):
    """What a process needs after a step that attached to it ended in an unplanned way."""

    NOTHING = "nothing"
    """It runs, or somebody else had stopped it."""
    CONTINUE = "continue"
    """It was left stopped: SIGCONT."""
    WAIT = "wait"
    """It is still traced, or about to stop: look again."""


def repair(
    before: Collection[str], now: Collection[str], *, traced: bool, stopping: bool = False
) -> Repair:
    """Return what a process needs.

    Args:
        before: Letters of the states of its threads before the step attached.
        now: The same now.
        traced: Whether any of its threads has a tracer now.
        stopping: Whether a signal that stops it is on its way.
    """
    if STOPPED & set(before):
        return Repair.NOTHING
    if traced or "t" in now:
        return Repair.WAIT
    if "T" in now:
        return Repair.CONTINUE
    return Repair.WAIT if stopping else Repair.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """How long a process stood still, as looks from outside tell; never too short.

    It lasts from the last look that saw it run to the first that sees it run again, and where it
    stood still several times, from the first of them to the last.

    Attributes:
        ran_at: The last look that saw it run; seconds.
        began_at: When it stopped, ``None`` if it never did.
        ended_at: When it ran again, ``None`` while it stands.
    """

    ran_at: float
    began_at: float | None = None
    ended_at: float | None = None

    def seen(self, at: float, *, stopped: bool) -> Pause:
        """Return it after one more look."""
        if stopped:
            began = self.ran_at if self.began_at is None else self.began_at
            return replace(self, began_at=began, ended_at=None)
        if self.began_at is None or self.ended_at is not None:
            return replace(self, ran_at=at)
        return replace(self, ran_at=at, ended_at=at)

    def seconds(self, now: float) -> float:
        """Return how long it lasted, or has lasted by *now*; 0 if it never stood still."""
        if self.began_at is None:
            return 0.0
        return (now if self.ended_at is None else self.ended_at) - self.began_at
