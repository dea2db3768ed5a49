"""Who stopped first: the black box puts processes in order, heartbeats engines of one group.

Beats come every ten seconds, so they tell who was first only of engines that stop one after the
other. The black box tells it of all processes, to a fraction of a second. A process that all
instances share, and that stopped before any of them, is what they wait for.
"""

from __future__ import annotations

from hangwatch.core.grouping import TOGETHER
from hangwatch.core.questions import (
    alarmed,
    beat_citation,
    collective,
    interval,
    listed,
    number_of,
    precedence,
    rank_of,
    stopped_at,
)
from hangwatch.model.dossier import (
    Citation,
    Culprit,
    Dossier,
    Finding,
    InstanceRecord,
    Rule,
)
from hangwatch.model.recording import Change
from hangwatch.model.verdict import Confidence

NAME = "first-to-stop"
CAUSE = "collective-mismatch"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return who stopped clearly before the others, by either witness."""
    return (*_by_black_box(dossier), *_by_beats(dossier))


def _by_black_box(dossier: Dossier) -> tuple[Finding, ...]:
    found = precedence(dossier)
    if found is None or not alarmed(dossier):
        return ()
    first, later, unsure = found.lead.first, found.lead.later, found.lead.unsure
    does = {Change.QUIET: "fell quiet", Change.SPINNING: "began to spin", Change.ENDED: "ended"}
    did = does[first[0].change] if len({stop.change for stop in first}) == 1 else "changed"
    others = len(later) + len(unsure)
    whom = f"{len(later)} of {others} others" if unsure else number_of(len(later), "other process")
    after = f"{did} {found.before} before {whom}"
    citations = tuple(s.citation for s in (*first, later[0]) if s.citation is not None)
    if not found.shared:
        sentence = f"By the black box {found.who} {after}."
        sure = Confidence.MEDIUM
        return (Finding(rule=NAME, sentence=sentence, confidence=sure, citations=citations),)
    untold = f"; with {number_of(len(unsure), 'other')} no order can be told" if unsure else ""
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"{found.who[:1].upper()}{found.who[1:]}, which they share, {after}{untold}: "
                "look there first."
            ),
            confidence=Confidence.MEDIUM,
            cause=TOGETHER,
            verdict=dossier.verdict.word,
            culprit=Culprit(pid=first[0].pid),
            citations=citations,
            next_step=f"read the stacks and tasks of process {first[0].pid}, and what it waits for",
        ),
    )


def _by_beats(dossier: Dossier) -> tuple[Finding, ...]:
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


RULE = Rule(name=NAME, title="who stopped first", examine=examine)
