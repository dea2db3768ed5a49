"""A task of the engine ended with an error while its processes live."""

from __future__ import annotations

import re

from hangwatch.core.questions import alarmed_by, beat_citation, health_of
from hangwatch.model.dossier import Dossier, Finding, InstanceRecord, Rule
from hangwatch.model.verdict import Dead

NAME = "engine-task-dead"

_TASK = re.compile(r"Task <[^<>]+> failed|loop task has stopped: \[[^\]]*\]|\w+Loop failed")


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the instances whose engine ended by an error of its own."""
    return tuple(
        _finding(dossier, record)
        for record in alarmed_by(dossier, NAME)
        if isinstance(record.verdict, Dead)
    )


def _finding(dossier: Dossier, record: InstanceRecord) -> Finding:
    answer = health_of(dossier, record)
    told = " ".join((*record.verdict.because, answer.health.message if answer else ""))
    task = _TASK.search(told)
    said = f": {task[0]}" if task else ""
    return Finding(
        rule=NAME,
        sentence=(
            f"The engine of {record.instance.name} ended with an error while its server lives"
            f"{said}. This is no silent stop: a traceback stands in the log."
        ),
        confidence=record.verdict.confidence,
        cause=NAME,
        verdict=Dead.word,
        citations=(
            *beat_citation(record),
            *((answer.citation,) if answer is not None and answer.citation else ()),
        ),
        next_step="read the traceback in its log at the last beat, then restart the server",
    )


RULE = Rule(name=NAME, title="a task of the engine ended with an error", examine=examine)
