"""When a tool that keeps failing is left alone, and when it is tried again.

Theory of operation. Three failures of one kind in a row open the breaker: to wait for the deadline
of a tool that hangs on each of forty processes leaves a capture without time. What failed may come
back (a load that passed, a process that was killed), so once ``REST`` seconds have gone by one step
is tried. If it succeeds the breaker is closed; if not, it is open for as long again. That is sooner
than the second sample comes, which therefore begins with a try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hangwatch.model.capture import Failure, FailureKind
from hangwatch.model.time import Instant

FAILURES: Final = 3

REST: Final = 3.0
"""Seconds; less than the 5 between two samples."""

COUNTED: Final = frozenset(
    {
        FailureKind.NOT_INSTALLED,
        FailureKind.TIMED_OUT,
        FailureKind.OVER_BUDGET,
        FailureKind.WORKER_DIED,
        FailureKind.TOOL_FAILED,
        FailureKind.TOO_LARGE,
        FailureKind.CRASHED,
    }
)
"""Failures that say something of the tool; the others say something of one target."""


_NEVER: Final = Instant(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """What is known of one collector.

    Attributes:
        kind: How it failed last, or ``None`` if it did not.
        failures: How many times in a row it failed so.
        at: When it last failed, or was last tried although it had.
    """

    kind: FailureKind | None = None
    failures: int = 0
    at: Instant = _NEVER

    def is_open(self, now: Instant) -> bool:
        """Say whether its steps are not to be tried."""
        return self.failures >= FAILURES and now < self.at + REST

    def tried(self, now: Instant) -> Breaker:
        """Return it as a step begins: one that is half open waits for what becomes of it."""
        if self.failures < FAILURES:
            return self
        return Breaker(kind=self.kind, failures=self.failures, at=now)

    def after(self, failure: Failure | None, now: Instant) -> Breaker:
        """Return it as a step has ended; one whose work another tool did counts for nothing."""
        if failure is None:
            return Breaker()
        if failure.kind not in COUNTED or failure.stand_in:
            return self
        failures = self.failures + 1 if failure.kind is self.kind else 1
        return Breaker(kind=failure.kind, failures=failures, at=now)
