"""Bounds what computations may take that others thought up: regular expressions, say.

A pattern of the configuration, or one of ours, may meet a line on which it takes for ever, and the
line may be a stranger's: prompts stand in logs. No inspection of a pattern excludes that, but
Python's matcher lets signal handlers run, and one that raises ends it.

Processor time counts, not time of day: a busy machine, or one that slept, is no reason to give up.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

from hangwatch.model.time import Instant

CHEAP: Final = 0.002
"""Seconds of processor time that are not counted: a garbage collection takes as long."""

T = TypeVar("T")


class OverBudgetError(Exception):
    """It took too long."""


class _Timer:
    """The one timer of this process that counts its processor time."""

    def __init__(self) -> None:
        self._armed = False

    def start(self, seconds: float) -> None:
        if signal.getsignal(signal.SIGVTALRM) != self._expire:
            signal.signal(signal.SIGVTALRM, self._expire)
        self._armed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    def stop(self) -> None:
        self._armed = False  # a signal that is late ends nothing
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    def _expire(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:
            raise OverBudgetError


_TIMER: Final = _Timer()


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what *work* returns, if that takes it no more than so much processor time.

    Only the main thread can be interrupted; in others, *work* takes as long as it takes.

    Raises:
        OverBudgetError: It took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    try:
        _TIMER.start(seconds)
        return work()
    finally:
        _TIMER.stop()


class Allowance:
    """Processor time that one source of work may take: so much at once, and a share for ever."""

    def __init__(self, *, each: float, at_once: float, share: float) -> None:
        """Have spent nothing.

        Args:
            each: Seconds that one piece of work may take.
            at_once: Seconds that it may be ahead of its share.
            share: Of one core.
        """
        self.each = each
        self.at_once = at_once
        self.share = share
        self._debt = 0.0
        self._at = Instant(0.0)

    def is_spent(self) -> bool:
        """Say whether it took more than it may."""
        return self._debt > self.at_once

    def spend(self, work: Callable[[], T], now: Instant) -> T:
        """Return what *work* returns, and count what it took.

        Raises:
            OverBudgetError: It took too long.
        """
        self._debt = max(0.0, self._debt - self.share * (now - self._at))
        self._at = now
        began = time.thread_time()
        try:
            return within(self.each, work)
        finally:
            took = time.thread_time() - began
            self._debt += took if took > CHEAP else 0.0
