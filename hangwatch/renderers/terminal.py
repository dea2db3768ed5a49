"""The first page, for a terminal or any place that shows plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from hangwatch.core.plain import printable, printable_line, table
from hangwatch.core.story import Shape, Story, tell
from hangwatch.model.dossier import Citation, Diagnosis, Finding, Renderer

WIDTH: Final = 96

_BOLD, _RED, _GREEN, _DIM, _END = "\x1b[1m", "\x1b[1;31m", "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def render(diagnosis: Diagnosis) -> str:
    """Return the page without colour."""
    return page(diagnosis, colour=False)


def page(diagnosis: Diagnosis, *, colour: bool) -> str:
    """Return the page; with *colour*, escape sequences of ours and of nobody else are in it."""
    return "\n".join(_Page(tell(diagnosis), colour=colour).lines()).rstrip() + "\n"


class _Page:
    def __init__(self, story: Story, *, colour: bool) -> None:
        self._story = story
        self._colour = colour

    def lines(self) -> Iterator[str]:
        story = self._story
        for line in _wrapped(story.headline):
            yield self._paint(line, _RED if story.alarm else _GREEN)
        if story.now:
            yield from _wrapped(story.now)
        yield ""
        yield self._paint(printable(story.label), _DIM)
        yield from self._why()
        yield from self._rivals()
        yield from self._stacks()
        yield from self._tables()
        yield from self._rest()

    def _paint(self, text: str, style: str) -> str:
        return f"{style}{text}{_END}" if self._colour and text else text

    def _title(self, text: str) -> Iterator[str]:
        yield ""
        yield self._paint(text, _BOLD)

    def _why(self) -> Iterator[str]:
        found = self._story.explanations
        if found:
            yield from self._title("What the evidence says")
        for finding in found:
            yield from _wrapped(finding.sentence, "  - ", "    ")
            yield from self._sources(finding.citations)
            yield from _next(finding)
        for finding in self._story.remarks:
            yield from _wrapped(finding.sentence, "  - ", "    ")
            yield from self._sources(finding.citations)
            yield from _next(finding)

    def _sources(self, citations: tuple[Citation, ...]) -> Iterator[str]:
        places = [
            f"{c.path}:{c.line}" if c.line is not None else c.path for c in citations if c.path
        ]
        if places:
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            for line in _wrapped(f"[{', '.join(places[:3])}{more}]", "    ", "    "):
                yield self._paint(line, _DIM)

    def _rivals(self) -> Iterator[str]:
        if self._story.rivals:
            yield from self._title("What else it could be")
        for finding in self._story.rivals:
            yield from _wrapped(finding.sentence, "  - ", "    ")
            if finding.pro:
                yield from _wrapped(f"for: {finding.pro}", "      ", "           ")
            if finding.con:
                yield from _wrapped(f"against: {finding.con}", "      ", "               ")

    def _stacks(self) -> Iterator[str]:
        if self._story.shapes:
            yield from self._title("Where they stand (innermost frame first)")
        for shape in self._story.shapes:
            yield from self._shape(shape)
        if self._story.shared:
            yield from self._title("Processes that they share")
            for line in self._story.shared:
                yield from _wrapped(line, "  - ", "    ")

    def _shape(self, shape: Shape) -> Iterator[str]:
        yield from _wrapped(f"{shape.title}: {shape.state}", "  ", "    ")
        for frame in shape.frames:
            yield f"      {printable(frame)}"
        if shape.more:
            yield self._paint(f"      … {shape.more} more", _DIM)
        for fact in shape.facts:
            yield from _wrapped(fact, "    · ", "      ")

    def _tables(self) -> Iterator[str]:
        for title, rows in (
            ("Servers", self._story.instances),
            ("Last heartbeats", self._story.beats),
        ):
            if rows:
                yield from self._title(title)
                yield from (f"  {line}" for line in table(rows))

    def _rest(self) -> Iterator[str]:
        story = self._story
        if story.captured or story.missing:
            yield from self._title("Capture")
            yield from _wrapped(story.captured, "  ", "  ")
            for line in story.missing:
                yield from _wrapped(line, "  - ", "    ")
        if story.provenance:
            yield from self._title("Versions and limits")
            for line in story.provenance:
                yield from _wrapped(line, "  ", "    ")
        if story.caveats:
            yield from self._title("Read with care")
            for line in story.caveats:
                yield from _wrapped(line, "  - ", "    ")


def _next(finding: Finding) -> Iterator[str]:
    if finding.next_step:
        yield from _wrapped(f"next: {finding.next_step}", "    ", "          ")


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    text = printable_line(text)
    if not text:
        return []
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


RENDERER: Final = Renderer(
    name="terminal", title="the first page as plain text", suffix=".txt", render=render
)
