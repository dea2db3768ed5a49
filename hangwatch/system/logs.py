"""Our own log: facts with keys on standard error, which never block us.

Whoever reads our log may stop reading it: a terminal on hold, a full pipe, a container runtime
that hangs. So lines go into a bounded queue that a thread of its own writes out; what does not fit
is dropped and counted, and the next line that fits says how many are missing.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, Literal

# structlog loads rich wherever that is installed, 9 MB that plain lines never use; a ``None``
# here is Python's own way of saying "not installed". Who needs rich imports it later as ever.
_MODULES: MutableMapping[str, Any] = sys.modules
_RICH = _MODULES.get("rich")
if _RICH is None:
    _MODULES["rich"] = None
import structlog  # noqa: E402  # see above

if _RICH is None:
    del _MODULES["rich"]

Format = Literal["auto", "console", "json"]

MAX_QUEUED: Final = 1000
"""Lines; at about 200 bytes each."""


class LineWriter:
    """Writes lines to a descriptor from a thread of its own; drops what it cannot get rid of.

    Attributes:
        dropped: Lines dropped so far.
    """

    def __init__(
        self,
        fd: int,
        *,
        limit: int = MAX_QUEUED,
        confess: Callable[[int], str] = "{} lines dropped".format,
    ) -> None:
        """Start the thread.

        Args:
            fd: Open descriptor.
            limit: Lines that may wait.
            confess: Makes the line that tells how many are missing at this place.
        """
        self.dropped = 0
        self._fd = fd
        self._confess = confess
        self._untold = 0
        self._lines: queue.Queue[bytes | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="hangwatch-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue *line*; never wait, never fail."""
        text = f"{self._confess(self._untold)}\n{line}" if self._untold else line
        try:
            self._lines.put_nowait(text.encode("utf-8", "backslashreplace") + b"\n")
        except queue.Full:
            self.dropped += 1
            self._untold += 1
        else:
            self._untold = 0

    def close(self, timeout: float = 1.0) -> None:
        """Give the thread *timeout* seconds to write what is queued."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                # Nobody will ever read it again (EPIPE), or not now; either way the loop goes on.
                self.dropped += 1


def configure(*, form: Format = "auto", fd: int = 2, color: bool | None = None) -> LineWriter:
    """Send the events of ``log`` to *fd* from now on, and return what writes them.

    Args:
        form: ``json``: one object a line; ``console``: for people; ``auto``: for people on a
            terminal, else JSON.
        fd: Open descriptor; it is neither closed nor made non-blocking, for others share it.
        color: Whether console lines may be coloured; ``None`` asks the terminal.
    """
    terminal = os.isatty(fd)
    if form == "console" or (form == "auto" and terminal):
        colored = terminal and "NO_COLOR" not in os.environ if color is None else color
        _output.render = _Console(color=colored)
    else:
        _output.render = structlog.processors.JSONRenderer(default=str, ensure_ascii=True)
    _output.take = None
    _output.writer = LineWriter(fd, confess=_output.confess)
    return _output.writer


def divert(take: Callable[[Mapping[str, Any]], None]) -> None:
    """Hand the events of ``log`` to *take* from now on, which must not block, and write none."""
    _output.take = take


def facts(event: Mapping[str, Any]) -> str:
    """Return what *event* tells besides its name, on one line and printable."""
    told = {key: event[key] for key in event if key not in _FIRST and key != "exception"}
    return " ".join(f"{key}={_shown(value)}" for key, value in told.items())


Event = MutableMapping[str, Any]

_FIRST: Final = ("timestamp", "level", "event")
"""What every line has stands first: people read it, too."""


class _Output:
    """Where events go: nowhere until ``configure``, so that a library stays quiet."""

    def __init__(self) -> None:
        self.writer: LineWriter | None = None
        self.take: Callable[[Mapping[str, Any]], None] | None = None
        self.render: Callable[[Any, str, Event], Any] = structlog.processors.JSONRenderer()
        self._stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)

    def __call__(self, logger: Any, method: str, event: Event) -> Any:
        """Render *event*; the last processor."""
        if self.writer is None and self.take is None:
            raise structlog.DropEvent
        stamped = self._stamp(logger, method, event)
        if self.take is not None:
            self.take(stamped)
            raise structlog.DropEvent
        first: Event = {key: stamped.pop(key) for key in _FIRST}
        return self.render(logger, method, {**first, **stamped})

    def confess(self, lines: int) -> str:
        """Return the line that says how many are missing."""
        event: Event = {"event": "hangwatch.log_lines_dropped", "level": "warning", "lines": lines}
        return str(self.render(None, "warning", self._stamp(None, "warning", event)))

    def write(self, line: str) -> None:
        """Take a rendered line."""
        if self.writer is not None:
            self.writer.write(line)

    debug = info = warning = error = critical = exception = msg = write


_output = _Output()

log: Any = structlog.wrap_logger(
    _output,
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        _output,
    ],
    wrapper_class=structlog.make_filtering_bound_logger(20),  # info and above
    cache_logger_on_first_use=False,
)
"""Our log: ``log.info("hangwatch.capture_finished", incident=…)``; facts, in the past tense."""


class _Console:
    """``10:01:22Z warning  hangwatch.child_silent  child=follower``; escapes the unprintable."""

    COLORS: Final = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        stamp = f"{str(event.pop('timestamp', ''))[11:19]}Z"
        level = str(event.pop("level", ""))
        name = str(event.pop("event", ""))
        trace = event.pop("exception", "")
        line = f"{stamp} {level:<8} {name}  {facts(event)}".rstrip()
        if self._color and level in self.COLORS:
            line = f"{self.COLORS[level]}{line}\x1b[0m"
        return f"{line}\n{trace}" if trace else line


def _shown(value: object) -> str:
    """Return *value* on one line, quoted where it holds blanks; the log text may be hostile."""
    text = value if isinstance(value, str) else repr(value)
    if text.isprintable() and text and not any(c in text for c in " =\"'"):
        return text
    return repr(text) if isinstance(value, str) else text
