"""Virtual time and scripted input, for our tests and for those of plug-in authors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hangwatch.model.time import Epoch, Instant

START = datetime(2026, 3, 4, 10, 0, 0, tzinfo=UTC)
"""What a fake clock shows at instant 0."""


class FakeClock:
    """A clock that moves only when told to, or when somebody sleeps on it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> Instant:
        """Return the present instant."""
        return Instant(self._now)

    def wall(self) -> datetime:
        """Return the present wall time; it never steps."""
        return START + timedelta(seconds=self._now)

    def sleep(self, seconds: float) -> None:
        """Advance at once."""
        self._now += max(0.0, seconds)

    def epoch(self) -> Epoch:
        """Return the mapping of instants to wall time."""
        return Epoch(boot_id="fake", at=Instant(0.0), wall=START)
