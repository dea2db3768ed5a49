"""What an announcement says, and what a file of announcements means when it changes.

A file holds one line: ``20m``, or ``20m weight sync``. It counts from the moment in which its
change was seen; one that lay there before is counted from its time of change, as far as the two
clocks can be compared, so that an old one announces nothing. Nobody writes a line at once: a
change counts when two looks in a row have seen the same text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hangwatch.core.durations import seconds_of
from hangwatch.model.lease import Lease
from hangwatch.model.time import Instant

MAX_REASON: Final = 200
"""Characters."""

SAME: Final = 2.0
"""Seconds by which the times of one writing may differ, as two observers reckon them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of a file.

    Attributes:
        text: What it holds; ``None`` if there is no file.
        version: Changes with every writing of it: inode and time of change.
        age: Seconds since it was written, by its clock and ours; negative where they differ.
        problem: Why it cannot be read, with the remedy, or ``""``.
    """

    text: str | None = None
    version: tuple[int, int] = (0, 0)
    age: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for.

    Attributes:
        seconds: For how long; 0 ends what was announced before.
        reason: In the words of who asks, or ``""``.
    """

    seconds: float
    reason: str = ""


def wish_of(text: str) -> Wish:
    """Return what a line says; an empty one ends what was announced before.

    Raises:
        ValueError: It says nothing of the kind; the message is a sentence with the remedy.
    """
    duration, reason = [*text.split(None, 1), "", ""][:2]
    return Wish(seconds=seconds_of(duration) if duration else 0.0, reason=clean(reason))


def clean(text: str) -> str:
    """Return the words of a stranger as one short line without anything unprintable."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * MAX_REASON])
    return " ".join(printable.split())[:MAX_REASON]


class Paper:
    """Follows what one file announces.

    Attributes:
        lease: What it announces: the same value until the file is written anew.
        asked: Seconds that were asked for with it, before any cap.
        problem: What is wrong with the file, with the remedy, or ``""``.
    """

    def __init__(self, path: str, *, limit: float, lease: Lease | None = None) -> None:
        """Have seen nothing of it yet.

        Args:
            path: Of the file, which is also the id of its lease.
            limit: Seconds of the longest lease.
            lease: What it announced by the word of somebody who looked before us.
        """
        self.lease = lease
        self.asked = 0.0
        self.problem = ""
        self._path = path
        self._limit = limit
        self._before: Look | None = None
        self._acted_on: Look | None = None

    def see(self, look: Look, now: Instant) -> None:
        """Take note of a look, and act on it if it is the second one that saw the same."""
        before, self._before = self._before, look
        settled = before is not None and (before.text, before.problem) == (look.text, look.problem)
        known = self._acted_on
        if not settled or (known is not None and replace(known, age=look.age) == look):
            return
        self._acted_on = look
        self.problem = look.problem
        if look.problem:
            return  # what was announced is not taken back by a broken mount
        try:
            wish = wish_of(look.text or "")
        except ValueError as error:
            self.problem = f"{error}; an empty file, or 0, announces nothing"
            return
        if known is None:
            self._begin(wish, look.age, now)
        else:
            self._announce(wish, wish.seconds, now)

    def _begin(self, wish: Wish, age: float, now: Instant) -> None:
        """Act on what lay there when we came."""
        left = wish.seconds - max(age, 0.0)
        if self.lease is None:
            self._announce(wish, left, now)
        elif wish.seconds == 0.0:
            self.lease = None
        elif min(left, self._limit) > self.lease.until - now + SAME:
            self._announce(wish, left, now)

    def _announce(self, wish: Wish, seconds: float, now: Instant) -> None:
        if seconds <= 0.0:
            self.lease = None
            return
        self.asked = seconds
        self.lease = Lease(
            id=self._path,
            at=now,
            until=Instant(now + min(seconds, self._limit)),
            reason=wish.reason,
            holder=self._path,
        )
