"""Instants decide; wall time is for people and file names."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NewType, Protocol

Instant = NewType("Instant", float)
"""Seconds of CLOCK_MONOTONIC; comparable between processes of one boot."""


class Clock(Protocol):
    """The one source of time; handed to whoever needs it."""

    def now(self) -> Instant:
        """Return the present instant."""

    def wall(self) -> datetime:
        """Return the present wall time, with its offset."""

    def sleep(self, seconds: float) -> None:
        """Return after *seconds*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """How instants of one boot map to wall time, as seen at one moment.

    Attributes:
        boot_id: The kernel's random id of this boot; instants of another boot mean nothing here.
        at: The instant of the reading.
        wall: The wall time of the same moment, with its offset.
    """

    boot_id: str
    at: Instant
    wall: datetime

    def wall_of(self, instant: Instant) -> datetime:
        """Return the wall time of *instant* by this reading."""
        return self.wall + timedelta(seconds=instant - self.at)

    def instant_of(self, wall: datetime) -> Instant:
        """Return the instant of *wall* by this reading."""
        return Instant(self.at + (wall - self.wall).total_seconds())
