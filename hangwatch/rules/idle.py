"""Silence without work is idleness."""

from __future__ import annotations

from hangwatch.core.questions import beat_citation, health_of, listed
from hangwatch.model.dossier import Dossier, Finding, Rule
from hangwatch.model.verdict import Idle

NAME = "idle"
CAUSE = "not-a-hang:idle"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the engines that have nothing to do."""
    idle = [
        record
        for record in dossier.instances
        if isinstance(record.verdict, Idle) and record.verdict.cause == CAUSE
    ]
    if not idle:
        return ()
    answers = [health_of(dossier, record) for record in idle]
    reason = next((text for record in idle for text in record.verdict.because), "")
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"{listed([record.instance.name for record in idle])} "
                f"{'is' if len(idle) == 1 else 'are'} idle: {reason or 'there is no work'}. "
                "Such an engine prints nothing."
            ),
            confidence=idle[0].verdict.confidence,
            cause=CAUSE,
            verdict=Idle.word,
            citations=(
                *(c for record in idle for c in beat_citation(record)),
                *(a.citation for a in answers if a is not None and a.citation is not None),
            ),
            next_step="if there should be work, look at what sends it",
        ),
    )


RULE = Rule(name=NAME, title="there is no work", examine=examine)
