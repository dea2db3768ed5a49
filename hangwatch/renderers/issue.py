"""The text of an issue, in the form that the engine's tracker asks for: ``issue.md``.

LMDeploy's form has the fields Checklist, Describe the bug, Reproduction, Environment and Error
traceback (``.github/ISSUE_TEMPLATE/1-bug-report.yml``). What only the reporter can know is left
to be filled in, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from hangwatch.core.plain import code, fenced, markdown, table
from hangwatch.core.story import Shape, Story, tell, warnings
from hangwatch.model.dossier import Diagnosis, Renderer

MAX_CHARACTERS: Final = 60_000
"""GitHub takes 65,536."""

_TITLES: Final = {"lmdeploy": "LMDeploy", "vllm": "vLLM", "sglang": "SGLang"}

_FILL_IN: Final = "_Please fill in: {what}._"


def render(diagnosis: Diagnosis) -> str:
    """Return the text of the issue."""
    story = tell(diagnosis)
    text = "\n\n".join(
        (
            *_title(diagnosis, story),
            *(f"**{line[:1].upper()}{line[1:]}.**" for line in warnings(diagnosis)),
            *_checklist(diagnosis),
            *_description(diagnosis, story),
            *_reproduction(diagnosis),
            *_environment(story),
            *_traceback(story),
        )
    )
    if len(text) <= MAX_CHARACTERS:
        return text + "\n"
    cut = text[:MAX_CHARACTERS].rsplit("\n", 1)[0]
    # The cut may fall into a code block; an open one would swallow what follows.
    fence = "```\n" if sum(line.startswith("```") for line in cut.split("\n")) % 2 else ""
    return f"{cut}\n{fence}\n(cut: the bundle has the rest)\n"


def _title(diagnosis: Diagnosis, story: Story) -> Iterator[str]:
    engine = _TITLES.get(diagnosis.dossier.profile, diagnosis.dossier.profile)
    version = next(
        (line for line in story.provenance if line.startswith(f"{diagnosis.dossier.profile} ")), ""
    )
    name = f"{engine}{version[len(diagnosis.dossier.profile) :]}"
    stopped = story.headline.split(" between ")[0].split(" at 2")[0].rstrip(".")
    yield f"Title: {code(f'[Bug] {name}: {stopped} ({diagnosis.cause})')}"


def _checklist(diagnosis: Diagnosis) -> Iterator[str]:
    yield "### Checklist"
    yield "\n".join(
        (
            "- [ ] 1. I have searched related issues but cannot get the expected help.",
            "- [ ] 2. The bug has not been fixed in the latest version.",
            (
                "- [ ] 3. Please note that if the bug-related issue you submitted lacks "
                "corresponding environment info and a minimal reproducible demo, it will be "
                "challenging for us to reproduce and resolve the issue, reducing the likelihood "
                "of receiving feedback."
            ),
        )
        if diagnosis.dossier.profile == "lmdeploy"
        else ("- [ ] I have searched related issues.",)
    )


def _description(diagnosis: Diagnosis, story: Story) -> Iterator[str]:
    yield "### Describe the bug"
    yield markdown(story.headline)
    if story.now:
        yield markdown(story.now)
    said = [f"- {markdown(f.sentence)}" for f in (*story.explanations, *story.remarks)]
    if said:
        yield "What was seen:"
        yield "\n".join(said)
    if story.rivals:
        yield "What remains possible:"
        yield "\n".join(
            f"- {markdown(rival.sentence)}"
            + (f" For: {markdown(rival.pro)}." if rival.pro else "")
            + (f" Against: {markdown(rival.con)}." if rival.con else "")
            for rival in story.rivals
        )
    if story.beats:
        yield "The last heartbeats:"
        yield fenced(table(story.beats))
    yield (
        f"Captured by hangwatch before any restart; verdict {code(diagnosis.verdict)}, cause "
        f"{code(diagnosis.cause)}, {diagnosis.confidence} confidence. The bundle is attached "
        f"({code(diagnosis.dossier.origin)})."
    )


def _reproduction(diagnosis: Diagnosis) -> Iterator[str]:
    yield "### Reproduction"
    launches = [
        str(data["arguments"])
        for path, data in sorted(diagnosis.dossier.extra.items())
        if path.endswith("launch.json")
        and "/ray_system-" not in path  # how Ray starts itself is nobody's question
        and isinstance(data, dict)
        and data.get("arguments")
    ]
    distinct = list(dict.fromkeys(launches))[:6]
    if distinct:
        yield "How the processes were started (redacted):"
        yield fenced(distinct, "shell")
    yield _FILL_IN.format(what="what the clients send, and what you changed in the code")


def _environment(story: Story) -> Iterator[str]:
    yield "### Environment"
    yield fenced(story.provenance or ("unknown",), "shell")
    yield _FILL_IN.format(what="the output of `lmdeploy check_env`, and the model")


def _traceback(story: Story) -> Iterator[str]:
    yield "### Error traceback"
    if not story.shapes and not story.tasks:
        yield "No exception was printed. No stack was captured."
        return
    parts = (_await_chains, _threads)
    for part in parts if story.lead in story.tasks else reversed(parts):
        yield from part(story)


def _await_chains(story: Story) -> Iterator[str]:
    if story.tasks:
        yield "Suspended asyncio tasks at the time, innermost frame first:"
        yield fenced(_lines(story.tasks), "shell")
    if story.numbers:
        yield "The engines' own numbers (both samples where they differ):"
        yield fenced(story.numbers, "shell")


def _threads(story: Story) -> Iterator[str]:
    if story.shapes:
        yield "Stacks of threads at the time, innermost frame first:"
        yield fenced(_lines(story.shapes), "shell")


def _lines(shapes: Sequence[Shape]) -> list[str]:
    lines: list[str] = []
    for shape in shapes:
        lines += [f"{shape.title}: {shape.state}", *(f"    {frame}" for frame in shape.frames)]
        lines += [f"    … {shape.more} more"] if shape.more else []
        lines += [f"  {fact}" for fact in shape.facts] + [""]
    return lines[:-1]


RENDERER: Final = Renderer(
    name="issue", title="text for an issue in the tracker's own form", suffix=".md", render=render
)
