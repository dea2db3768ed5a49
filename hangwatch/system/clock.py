"""The real clock."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from hangwatch.model.time import Epoch, Instant


class SystemClock:
    """CLOCK_MONOTONIC and local wall time."""

    def now(self) -> Instant:
        """Return the present instant."""
        return Instant(time.monotonic())

    def wall(self) -> datetime:
        """Return the present wall time, with the local offset."""
        return datetime.now().astimezone()

    def sleep(self, seconds: float) -> None:
        """Return after *seconds*."""
        time.sleep(max(0.0, seconds))

    def epoch(self) -> Epoch:
        """Return how instants map to wall time at this moment."""
        return Epoch(boot_id=boot_id(), at=self.now(), wall=self.wall())


def boot_id() -> str:
    """Return the kernel's id of this boot, or ``""`` where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
