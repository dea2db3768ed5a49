"""What the engines' own monitors say, in their own words."""

from __future__ import annotations

import re

from hangwatch.core.questions import health_of, listed, present
from hangwatch.model.dossier import Dossier, Finding, HealthRecord, Rule
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.verdict import Confidence
from hangwatch.model.vitals import Outcome

NAME = "health-says"

MEANING = {
    HealthMeaning.LOOP_BLOCKED: "the engine's event loop does not run",
    HealthMeaning.NO_PROGRESS: "the engine's event loop runs and dispatches nothing",
    HealthMeaning.LOST_REQUEST: "requests were handed out that the scheduler does not know",
    HealthMeaning.DEAD: "a needed process or task ended",
    HealthMeaning.UNHEALTHY: "its reason is not known to us",
}
OUTCOME = {
    Outcome.TIMED_OUT: "HTTP does not answer: the server's own loop is blocked, or all its "
    "request slots are taken",
    Outcome.REFUSED: "nobody listens there",
}


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return one remark for each distinct answer that is not a healthy one."""
    groups: dict[str, list[tuple[str, HealthRecord]]] = {}
    for record in present(dossier):
        answer = health_of(dossier, record)
        if answer is None or not _explained(answer):
            continue
        words = answer.health.message or answer.health.status or "no answer"
        key = re.sub(r"\d+(?:\.\d+)?", "N", words)
        groups.setdefault(key, []).append((record.instance.name, answer))
    return tuple(_remark(group) for group in groups.values())


def _explained(answer: HealthRecord) -> str:
    meaning = answer.health.meaning
    if meaning is not None:
        return MEANING.get(meaning, "")
    return OUTCOME.get(answer.health.outcome, "")


def _remark(group: list[tuple[str, HealthRecord]]) -> Finding:
    first = group[0][1]
    words = first.health.message or first.health.status or "no answer"
    return Finding(
        rule=NAME,
        sentence=(
            f"/health of {listed([name for name, _ in group])} says “{words}”: {_explained(first)}."
        ),
        confidence=Confidence.HIGH,
        citations=tuple(a.citation for _, a in group if a.citation is not None)[:8],
    )


RULE = Rule(name=NAME, title="what the engines' own monitors say", examine=examine)
