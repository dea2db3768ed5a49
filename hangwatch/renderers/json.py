"""The diagnosis as data: the contract ``hangwatch.diagnose/1``."""

from __future__ import annotations

import json
from typing import Any, Final

from hangwatch.core import contracts
from hangwatch.core.questions import server_pid, stopped_at
from hangwatch.core.story import headline
from hangwatch.model.dossier import Citation, Diagnosis, Dossier, Finding, InstanceRecord, Renderer
from hangwatch.model.time import Instant
from hangwatch.model.verdict import ALARMS, StopWindow

SCHEMA: Final = "hangwatch.diagnose/1"


def render(diagnosis: Diagnosis) -> str:
    """Return the document as text."""
    return json.dumps(document(diagnosis), indent=2, ensure_ascii=True) + "\n"


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the document; times are RFC 3339 with offset."""
    dossier = diagnosis.dossier
    culprit = diagnosis.culprit
    return {
        "schema": SCHEMA,
        "origin": dossier.origin,
        "now": contracts.moment(dossier.now),
        "headline": headline(diagnosis),
        "verdict": diagnosis.verdict,
        "cause": diagnosis.cause,
        "confidence": str(diagnosis.confidence),
        "since": _time(dossier, dossier.verdict.since),
        "window": _window(dossier, dossier.window),
        "because": list(dossier.verdict.because),
        "instances": [_instance(dossier, record) for record in dossier.instances],
        "culprit": {
            "pid": culprit.pid,
            "rank": culprit.rank,
            "thread": culprit.thread,
            "frame": culprit.frame,
        },
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "stalls": [
            {
                "instance": stall.instance.name,
                "since": _time(dossier, stall.since),
                "seconds": round(stall.seconds, 3),
            }
            for stall in dossier.stalls
        ],
        "notes": list(dossier.notes),
        "problems": [*dossier.problems, *diagnosis.problems],
    }


def _instance(dossier: Dossier, record: InstanceRecord) -> dict[str, Any]:
    last = record.last_beat
    alarm = isinstance(record.verdict, ALARMS)
    return {
        "name": record.instance.name,
        "pid": server_pid(dossier, record),
        "host": record.instance.host or None,
        "engine": record.instance.tag or None,
        "verdict": record.verdict.word,
        "cause": record.verdict.cause,
        "confidence": str(record.verdict.confidence),
        "last_heartbeat": contracts.last_heartbeat(dossier.epoch, last),
        "since": _time(dossier, record.verdict.since),
        "stopped_at": _time(dossier, stopped_at(record)) if alarm else None,
        "window": _window(dossier, record.window) if alarm else None,
        "in_flight": last.in_flight if last is not None else None,
        "because": list(record.verdict.because),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    document: dict[str, Any] = {
        "rule": finding.rule,
        "sentence": finding.sentence,
        "confidence": str(finding.confidence),
        "citations": [_citation(citation) for citation in finding.citations],
        "cause": finding.cause or None,
        "verdict": finding.verdict or None,
        "next_step": finding.next_step or None,
    }
    if finding.pro or finding.con:
        document |= {"pro": finding.pro, "con": finding.con}
    return document


def _citation(citation: Citation) -> dict[str, Any]:
    return {"path": citation.path, "line": citation.line, "text": citation.text}


def _window(dossier: Dossier, window: StopWindow | None) -> list[str] | None:
    return contracts.window(dossier.epoch, window)


def _time(dossier: Dossier, at: Instant | None) -> str | None:
    return None if at is None else contracts.instant(dossier.epoch, at)


RENDERER: Final = Renderer(
    name="json", title="the diagnosis as data (hangwatch.diagnose/1)", suffix=".json", render=render
)
