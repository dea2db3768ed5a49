"""The engines work and one of their logs does not: no hang."""

from __future__ import annotations

from hangwatch.core.questions import beat_citation, present
from hangwatch.model.dossier import Dossier, Finding, Rule
from hangwatch.model.verdict import LogStalled

NAME = "log-pipeline"
CAUSE = "not-a-hang:log-pipeline"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return that the log stalled, when the detector found the engines moving elsewhere."""
    if not isinstance(dossier.verdict, LogStalled):
        return ()
    there = present(dossier)
    files = sorted({r.last_beat.source for r in there if r.last_beat is not None})
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"The log stream stalled, the engines did not: the worker files still advance "
                f"({len(files)} of them, {len(there)} engines)."
            ),
            confidence=dossier.verdict.confidence,
            cause=CAUSE,
            verdict=LogStalled.word,
            citations=tuple(c for record in there for c in beat_citation(record)),
            next_step=(
                "restart what streams the log, not the engines; Ray before pull request 56902 "
                "loses a log after its rotation"
            ),
        ),
    )


RULE = Rule(name=NAME, title="the path of the log is dead, the engines move", examine=examine)
