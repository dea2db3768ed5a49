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
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal

# structlog loads rich wherever that is installed, 9 MB that plain lines never use; a ``None``
# here is Python's own way of saying "not installed". Who needs rich imports it later as ever.
_RICH = sys.modules.get("rich")
if _RICH is None:
    sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # noqa: E402  # see above

if _RICH is None:
    del sys.modules["rich"]

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
    """Send the log events of this process to *fd*, and return what writes them.

    Args:
        form: ``json``: one object a line; ``console``: for people; ``auto``: for people on a
            terminal, else JSON.
        fd: Open descriptor; it is neither closed nor made non-blocking, for others share it.
        color: Whether console lines may be coloured; ``None`` asks the terminal.
    """
    terminal = os.isatty(fd)
    plain = form == "console" or (form == "auto" and terminal)
    render: Callable[[Any, str, MutableMapping[str, Any]], Any] = (
        _Console(color=terminal and "NO_COLOR" not in os.environ if color is None else color)
        if plain
        else structlog.processors.JSONRenderer(default=str, ensure_ascii=True)
    )
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=not plain)

    def confess(lines: int) -> str:
        event = {"event": "hangwatch.log_lines_dropped", "level": "warning", "lines": lines}
        return str(render(None, "warning", stamp(None, "warning", event)))

    writer = LineWriter(fd, confess=confess)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),  # info and above
        logger_factory=lambda *_: _Sink(writer),
        cache_logger_on_first_use=False,
    )
    return writer


class _Sink:
    """The logger that structlog calls with the finished line."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def _write(self, line: str) -> None:
        self._writer.write(line)

    debug = info = warning = error = critical = exception = msg = _write


class _Console:
    """``10:01:22 warning  hangwatch.child_silent  child=follower``; escapes the unprintable."""

    COLORS: Final = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        stamp = str(event.pop("timestamp", ""))[11:19]
        level = str(event.pop("level", ""))
        name = str(event.pop("event", ""))
        trace = event.pop("exception", "")
        facts = " ".join(f"{key}={_shown(value)}" for key, value in event.items())
        line = f"{stamp} {level:<8} {name}  {facts}".rstrip()
        if self._color and level in self.COLORS:
            line = f"{self.COLORS[level]}{line}\x1b[0m"
        return f"{line}\n{trace}" if trace else line


def _shown(value: object) -> str:
    """Return *value* on one line, quoted where it holds blanks; the log text may be hostile."""
    text = value if isinstance(value, str) else repr(value)
    if text.isprintable() and text and not any(c in text for c in " =\"'"):
        return text
    return repr(text) if isinstance(value, str) else text
