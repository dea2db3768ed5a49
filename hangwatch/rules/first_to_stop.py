"""Engines that compute together stop one after the other: the first is the suspect."""

from __future__ import annotations

from hangwatch.core.questions import (
    alarmed,
    beat_citation,
    collective,
    interval,
    listed,
    rank_of,
    stopped_at,
)
from hangwatch.model.dossier import Citation, Culprit, Dossier, Finding, InstanceRecord, Rule
from hangwatch.model.verdict import Confidence

NAME = "first-to-stop"
CAUSE = "collective-mismatch"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return who of a collective group stopped clearly before the others."""
    stopped = sorted(alarmed(dossier), key=lambda record: stopped_at(record) or 0.0)
    group = collective(dossier, stopped)
    if not group:
        return ()
    moments = [stopped_at(record) or 0.0 for record in stopped]
    gap = moments[1] - moments[0]
    # Beats of engines that stop at one instant lie within one interval, and evenly spread.
    if moments[-1] - moments[0] <= interval(dossier) or gap < interval(dossier) / 2:
        return ()
    return (_finding(group, stopped[0], stopped[1:], gap),)


def _finding(
    group: str, first: InstanceRecord, others: list[InstanceRecord], gap: float
) -> Finding:
    label = first.instance.tag
    return Finding(
        rule=NAME,
        sentence=(
            f"{label} stopped first, {gap:.0f} s before any of "
            f"{listed([record.instance.tag for record in others])}. They compute together "
            f"({group}), so the others may wait in a collective that it never joined."
        ),
        confidence=Confidence.LOW,
        cause=CAUSE,
        verdict=first.verdict.word,
        culprit=Culprit(pid=first.instance.pid, rank=rank_of(first)),
        citations=(
            Citation(path="topology.json", text=group),
            *beat_citation(first),
            *beat_citation(others[0]),
        ),
        next_step=f"compare the whole stacks of {label} with those of the others, frame by frame",
    )


RULE = Rule(name=NAME, title="who of a collective group stopped first", examine=examine)
