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


def page(diagnosis: Diagnosis, *, colour: bool = False, brief: bool = False) -> str:
    """Return the page.

    Args:
        diagnosis: What to tell.
        colour: Whether to use escape sequences: ours, and nobody else's.
        brief: Whether one screen must do: what happened, why, where, and who.
    """
    told = _Page(tell(diagnosis), colour=colour)
    return "\n".join(told.brief() if brief else told.lines()).rstrip() + "\n"


class _Page:
    def __init__(self, story: Story, *, colour: bool) -> None:
        self._story = story
        self._colour = colour

    def lines(self) -> Iterator[str]:
        yield from self._top()
        yield from self._why()
        yield from self._rivals()
        parts = (self._tasks, self._stacks)
        for part in parts if self._story.lead in self._story.tasks else reversed(parts):
            yield from part()
        yield from self._tables()
        yield from self._rest()

    def brief(self) -> Iterator[str]:
        story = self._story
        yield from self._top()
        for finding in story.explanations[:1]:
            yield ""
            # What is, was said above; behind the colon stands how that is known.
            known = finding.sentence.split(": ", 1)[-1] if story.now else finding.sentence
            yield from _wrapped(f"{known[:1].upper()}{known[1:]}")
            yield from _next(finding, "")
        if story.rivals:
            yield from self._title("What else it could be")
            for rival in story.rivals:
                fact = f" Against it: {rival.con}." if rival.con else ""
                fact = fact or (f" For it: {rival.pro}." if rival.pro else "")
                yield from _wrapped(f"{rival.sentence}{fact}", "  - ", "    ")
        if story.lead is not None:
            yield from self._title("Where they stand (innermost frame first)")
            yield from self._shape(story.lead)
        yield from self._table("Servers", story.instances)

    def _top(self) -> Iterator[str]:
        story = self._story
        for line in _wrapped(story.headline):
            yield self._paint(line, _RED if story.alarm else _GREEN)
        yield from _wrapped(story.now)
        yield ""
        yield self._paint(printable(story.label), _DIM)

    def _paint(self, text: str, style: str) -> str:
        return f"{style}{text}{_END}" if self._colour and text else text

    def _title(self, text: str) -> Iterator[str]:
        yield ""
        yield self._paint(text, _BOLD)

    def _why(self) -> Iterator[str]:
        found = (*self._story.explanations, *self._story.remarks)
        if found:
            yield from self._title("What the evidence says")
        for finding in found:
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

    def _tasks(self) -> Iterator[str]:
        if self._story.tasks:
            yield from self._title("What their tasks await (innermost frame first)")
        for shape in self._story.tasks:
            yield from self._shape(shape)
        if self._story.more_tasks:
            yield self._paint(f"  … {self._story.more_tasks} more distinct chains", _DIM)
        if self._story.numbers:
            yield from self._title("What the engines' own numbers say")
        for line in self._story.numbers:
            yield from _wrapped(line, "  - ", "    ")

    def _stacks(self) -> Iterator[str]:
        if self._story.shapes:
            yield from self._title("Where their threads stand (innermost frame first)")
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
        yield from self._table("Servers", self._story.instances)
        yield from self._table("Last heartbeats", self._story.beats)

    def _table(self, title: str, rows: tuple[tuple[str, ...], ...]) -> Iterator[str]:
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


def _next(finding: Finding, indent: str = "    ") -> Iterator[str]:
    if finding.next_step:
        yield from _wrapped(f"next: {finding.next_step}", indent, f"{indent}      ")


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
