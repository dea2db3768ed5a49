"""What happens, as lines for people: the events of ``Watch``, and of our own log.

The same sentences stand below the live table and, where there is no terminal, by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol, Self

from hangwatch.core.board import seconds
from hangwatch.core.plain import printable
from hangwatch.system.logs import Format, LineWriter, configure, divert, facts

NEWS: Final = 50
"""Sentences that are kept; a page shows the last few."""

TOLD: Final = frozenset(
    f"hangwatch.{name}"
    for name in (
        "watching", "verdict_changed", "incident_began", "incident_closed", "stall_ended",
        "bundle_written", "capture_failed", "stopping",
    )
)  # fmt: skip
"""Events of our log that are told otherwise, or that the page shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the daemon told so far, as far as a page shows it.

    Attributes:
        news: The latest sentences, oldest first.
        captures: How far each running capture is, by incident.
    """

    news: tuple[str, ...] = ()
    captures: Mapping[str, str] = field(default_factory=dict)

    def event(self, event: Mapping[str, Any]) -> Heard:
        """Return what is known after *event* of ``Watch``."""
        captures = dict(self.captures)
        match event["event"]:
            case "capture":
                captures[event["incident"]] = _progress(event)
            case "bundle" | "capture_failed":
                captures.pop(event["incident"], None)
            case _:
                pass
        heard = replace(self, captures=captures)
        said = sentence(event)
        return heard.say(said) if said else heard

    def say(self, line: str) -> Heard:
        """Return what is known after *line*."""
        return replace(self, news=(*self.news[1 - NEWS :], line))


def sentence(event: Mapping[str, Any]) -> str:
    """Return an event of ``Watch`` as a line for people, or ``""`` if it is none of theirs."""
    at = datetime.fromisoformat(event["at"])
    match event["event"]:
        case "transition":
            changed = event["before"] not in (None, event["after"])
            before = f"{event['before']} -> " if changed else ""
            why = "; ".join(event["because"][:1])
            verdict = f"{before}{event['after']} ({event['confidence']}), {event['cause']}"
            said = f"{event['instance']}: {verdict}: {why}"
        case "incident":
            said = f"incident {event['incident']}: {event['verdict']}, {event['cause']}"
        case "bundle":
            said = f"bundle written: {event['bundle']}"
        case "capture_failed":
            remedy = f"; {event['hint']}" if event["hint"] else ""
            said = f"no bundle: {event['error']}{remedy}"
        case "closed":
            said = f"incident {event['incident']} is over"
        case "stall":
            silent = seconds(event["seconds"])
            said = f"{event['instance']} beats again, after {silent} of silence"
        case "lease_taken":
            until = f"{datetime.fromisoformat(event['until']):%H:%M:%S}"
            reason = f": {event['reason']}" if event["reason"] else ""
            said = f"{event['holder']} announced a pause until {until}{reason}"
        case "lease_returned" | "lease_ended":
            said = f"the pause that {event['holder']} announced is over"
        case "stopping":
            said = "told to end"
        case _:
            return ""
    return _line(at, said)


def note(event: Mapping[str, Any]) -> str:
    """Return an event of our own log as a line for people, or ``""`` if it is none of theirs."""
    name = str(event["event"])
    if name in TOLD or event["level"] == "info":
        return ""
    at = datetime.fromisoformat(str(event["timestamp"])).astimezone()
    return _line(at, f"{name.removeprefix('hangwatch.').replace('_', ' ')}: {facts(event)}")


def _line(at: datetime, text: str) -> str:
    return f"{at:%H:%M:%S}  {printable(text)}"


def _progress(event: Mapping[str, Any]) -> str:
    steps = f", {event['done']} of {event['total']} steps" if event["total"] else ""
    failed = f", {event['failed']} failed" if event["failed"] else ""
    return f"capture: {event['part']}{steps}{failed}, {seconds(event['elapsed_s'])}"


class View(Protocol):
    """Shows what is heard; never blocks whoever tells it."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event of ``Watch``."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(self, *_: object) -> None:
        """Show the end."""


class Log:
    """Leaves it to our own log."""

    def __init__(self, form: Format) -> None:
        """Write it to standard error in that form."""
        self._form = form

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event of ``Watch``; the log has it, too."""

    def __enter__(self) -> Self:
        self._writer = configure(form=self._form)
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


class Lines:
    """Prints a line an event: for a pipe, a file, or a terminal that can do no more."""

    def __init__(self, fd: int) -> None:
        """Print to *fd*."""
        self._writer = LineWriter(fd)
        divert(self.logged)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event of ``Watch``."""
        self._say(sentence(event))

    def logged(self, event: Mapping[str, Any]) -> None:
        """Take an event of our own log."""
        self._say(note(event))

    def _say(self, line: str) -> None:
        if line:
            self._writer.write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
