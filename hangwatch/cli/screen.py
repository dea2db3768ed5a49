"""Shows on a terminal, while it happens, what the daemon sees.

A terminal may cease to take what we write: it is on hold (^S), its window froze, nobody reads its
other end. So a thread of its own draws, from values that the daemon's loop replaces and never
changes, and the loop waits for it nowhere; at the end it gets a second, then it is left behind.

Nothing of the terminal is set that ``LEAVE`` does not restore: the page has a screen of its own,
so that what stood there before comes back, and each picture is drawn whole, so that a new size or
a key that was pressed spoils one picture only. In the background nothing is written.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Self

from hangwatch.cli.news import Heard, note
from hangwatch.cli.page import Sheet, draw
from hangwatch.core.board import Board
from hangwatch.system.logs import divert

ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""Another screen, without a cursor."""
LEAVE: Final = "\x1b[?25h\x1b[?1049l"

EVERY: Final = 1.0
"""Seconds between two pictures while nothing happens."""

AT_MOST: Final = 0.2
"""Seconds between two pictures when much happens."""

PATIENCE: Final = 1.0
"""Seconds that the terminal has at the end; half as many when we are to be suspended."""

FOOTER: Final = "Ctrl-C ends it"
LAST_FOOTER: Final = "ends when its capture is finished; Ctrl-C again ends it at once"


class Screen:
    """Draws the page on a terminal, from a thread of its own."""

    def __init__(self, fd: int, look: Callable[[], Board]) -> None:
        """Be ready to draw.

        Args:
            fd: The terminal; its settings are left alone.
            look: Returns the present board; called in the thread.
        """
        self._fd = fd
        self._look = look
        self._encoding = sys.stderr.encoding or "ascii"
        self._heard = Heard()
        self._footer = FOOTER
        # Signal handlers use these, so they must be reentrant; Event and Condition are not.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = self._suspending = self._entered = False
        self._thread = threading.Thread(target=self._run, name="hangwatch-screen", daemon=True)
        self._before: Any = None
        divert(self.logged)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event of ``Watch``."""
        self._heard = self._heard.event(event)
        if event["event"] == "stopping":
            self._footer = LAST_FOOTER
        self._wake()

    def logged(self, event: Mapping[str, Any]) -> None:
        """Take an event of our own log."""
        if line := note(event):
            self._heard = self._heard.say(line)
            self._wake()

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._wake()
        self._thread.join(PATIENCE)
        if self._before is not None:
            signal.signal(signal.SIGTSTP, self._before)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Give the terminal back, stop as Ctrl-Z does, and take it again when we continue."""
        self._suspending = True
        self._wake()
        until = time.monotonic() + PATIENCE / 2
        while self._entered and time.monotonic() < until:
            time.sleep(0.01)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._suspending = False
        self._wake()

    def _wake(self) -> None:
        if self._wakes.empty():
            self._wakes.put(None)

    # In the thread

    def _run(self) -> None:
        with suppress(OSError):  # the terminal is gone
            try:
                while not self._closing:
                    self._show()
                    self._rest()
            finally:
                self._leave()
            self._write("".join(f"{line}\r\n" for line in self._page(footer="")))

    def _show(self) -> None:
        if self._suspending or not self._foreground():
            self._leave()
        else:
            self._enter()
            self._write(self._picture())

    def _rest(self) -> None:
        try:
            self._wakes.get(timeout=EVERY)
        except queue.Empty:
            return
        if not self._closing and not self._suspending:
            time.sleep(AT_MOST)

    def _picture(self) -> str:
        rows = "\x1b[K\r\n".join(self._page(footer=self._footer))
        return f"\x1b[H{rows}\x1b[K\x1b[J"

    def _page(self, *, footer: str) -> list[str]:
        width, height = self._size()
        return draw(
            self._look(),
            self._heard,
            Sheet(
                width=width,
                height=height,
                styled=True,
                plain=bool(os.environ.get("NO_COLOR")),
                ascii=not self._encoding.lower().startswith("utf"),
            ),
            footer=footer,
        )

    def _size(self) -> tuple[int, int]:
        try:
            width, height = os.get_terminal_size(self._fd)
        except OSError:
            width = height = 0
        return width or 80, height or 24

    def _foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return True  # no terminal of ours, so nobody's job either

    def _enter(self) -> None:
        if not self._entered:
            self._entered = True
            self._write(ENTER)

    def _leave(self) -> None:
        if self._entered:
            self._write(LEAVE)
            self._entered = False

    def _write(self, text: str) -> None:
        view = memoryview(text.encode(self._encoding, "replace"))
        while view:
            view = view[os.write(self._fd, view) :]
