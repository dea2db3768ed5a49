"""The report as Markdown: ``REPORT.md`` of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from hangwatch.core.plain import code, fenced, markdown, table
from hangwatch.core.story import Shape, Story, tell
from hangwatch.model.dossier import Citation, Diagnosis, Finding, Renderer


def render(diagnosis: Diagnosis) -> str:
    """Return the report."""
    story = tell(diagnosis)
    blocks = [*_top(story), *_findings(story), *_stacks(story), *_tables(story), *_rest(story)]
    return "\n\n".join(blocks) + "\n"


def _top(story: Story) -> Iterator[str]:
    yield f"# {markdown(story.headline)}"
    if story.now:
        yield f"**{markdown(story.now)}**"
    yield f"Verdict: {markdown(story.label)}"


def _findings(story: Story) -> Iterator[str]:
    if story.explanations or story.remarks:
        yield "## What the evidence says"
        yield "\n".join(_item(finding) for finding in (*story.explanations, *story.remarks))
    if story.rivals:
        yield "## What else it could be"
        yield _grid(
            (
                ("explanation", "for", "against"),
                *((rival.sentence, rival.pro or "-", rival.con or "-") for rival in story.rivals),
            )
        )


def _item(finding: Finding) -> str:
    lines = [f"- {markdown(finding.sentence)} ({finding.confidence} confidence)"]
    if finding.citations:
        lines.append(f"  - Rests on: {_places(finding.citations)}")
    if finding.next_step:
        lines.append(f"  - Next: {markdown(finding.next_step)}")
    return "\n".join(lines)


def _places(citations: Sequence[Citation], most: int = 8) -> str:
    told = [code(f"{c.path}:{c.line}" if c.line is not None else c.path) for c in citations[:most]]
    more = f" and {len(citations) - most} more" if len(citations) > most else ""
    return ", ".join(told) + more


def _stacks(story: Story) -> Iterator[str]:
    """Yield what tells most first: await chains, or threads."""
    parts = (_await_chains, _threads)
    for part in parts if story.lead in story.tasks else reversed(parts):
        yield from part(story)
    if story.shared:
        yield "## Processes that they share"
        yield "\n".join(f"- {markdown(line)}" for line in story.shared)


def _await_chains(story: Story) -> Iterator[str]:
    if story.tasks:
        yield "## What their tasks await"
        yield "Innermost frame first."
    for shape in story.tasks:
        yield from _shape(shape)
    if story.more_tasks:
        yield f"… {story.more_tasks} more distinct chains."
    if story.numbers:
        yield "## What the engines' own numbers say"
        yield "\n".join(f"- {markdown(line)}" for line in story.numbers)


def _threads(story: Story) -> Iterator[str]:
    if story.shapes:
        yield "## Where their threads stand"
        yield "Innermost frame first."
    for shape in story.shapes:
        yield from _shape(shape)


def _shape(shape: Shape) -> Iterator[str]:
    yield f"**{markdown(shape.title)}**: {shape.state}"
    more = [f"… {shape.more} more"] if shape.more else []
    yield fenced([*shape.frames, *more])
    if shape.facts:
        yield "\n".join(f"- {markdown(fact)}" for fact in shape.facts)


def _tables(story: Story) -> Iterator[str]:
    if story.instances:
        yield "## Servers"
        yield _grid(story.instances)
    if story.beats:
        yield "## Last heartbeats"
        yield fenced(table(story.beats))


def _rest(story: Story) -> Iterator[str]:
    if story.captured or story.missing:
        yield "## Capture"
        if story.captured:
            yield markdown(story.captured)
        if story.missing:
            yield "\n".join(f"- {markdown(line)}" for line in story.missing)
    if story.provenance:
        yield "## Versions and limits"
        yield "\n".join(f"- {markdown(line)}" for line in story.provenance)
    if story.caveats:
        yield "## Read with care"
        yield "\n".join(f"- {markdown(line)}" for line in story.caveats)


def _grid(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[markdown(cell) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


RENDERER: Final = Renderer(
    name="markdown", title="the report as Markdown (REPORT.md)", suffix=".md", render=render
)
