"""A dossier and rules to a diagnosis.

The detector's verdict is the start; a rule may name a better cause, or correct the verdict, if it
is at least as sure as what it corrects. A cause that says only how a stall looks from outside gives
way to any that accuses somebody. Among equals the finding that accuses somebody goes first, then
the order of the rules' names, so that the same dossier always gives the same diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.model.dossier import Culprit, Diagnosis, Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence

FROM_OUTSIDE = frozenset(("one-instance-silent", "simultaneous-silence"))
"""Causes that say who stopped and when, and nothing of why."""

ALARM_WORDS = frozenset(("suspected_hang", "hung", "blocked", "dead"))
"""The verdicts that make a command exit with 3."""

_SURE = {Confidence.LOW: 0, Confidence.MEDIUM: 1, Confidence.HIGH: 2}


def diagnose(dossier: Dossier, rules: Iterable[Rule]) -> Diagnosis:
    """Return what *rules* make of *dossier*.

    A rule that raises costs only its own findings and leaves a problem.
    """
    findings: list[Finding] = []
    problems: list[str] = []
    for rule in rules:
        try:
            findings += rule.examine(dossier)
        except Exception as error:  # noqa: BLE001  # the border to plug-ins
            problems.append(f"rule {rule.name} failed: {type(error).__name__}: {error}")
    findings.sort(key=_order)
    verdict, cause, confidence = _conclude(dossier, findings)
    culprit = next(
        (
            finding.culprit
            for finding in findings
            if finding.culprit is not None and finding.cause == cause
        ),
        Culprit(),
    )
    return Diagnosis(
        dossier=dossier,
        verdict=verdict,
        cause=cause,
        confidence=confidence,
        culprit=culprit,
        findings=tuple(findings),
        problems=tuple(problems),
    )


def _order(finding: Finding) -> tuple[int, int, int, str]:
    """Explanations before rivals before remarks; the surest first."""
    return (
        0 if finding.cause and not _is_rival(finding) else 1 if _is_rival(finding) else 2,
        -_SURE[finding.confidence],
        0 if finding.culprit is not None else 1,
        finding.rule,
    )


def _is_rival(finding: Finding) -> bool:
    return bool(finding.pro or finding.con)


def _conclude(dossier: Dossier, findings: Iterable[Finding]) -> tuple[str, str, Confidence]:
    said = dossier.verdict
    best = (said.word, said.cause, said.confidence)
    for finding in findings:
        if not finding.cause or _is_rival(finding):
            continue
        agrees = finding.verdict in ("", said.word)
        surer = _SURE[finding.confidence] > _SURE[said.confidence]
        as_sure = _SURE[finding.confidence] == _SURE[said.confidence]
        if finding.cause == said.cause and agrees and said.cause not in FROM_OUTSIDE:
            break
        if agrees and said.cause in FROM_OUTSIDE and finding.culprit is not None:
            return finding.verdict or said.word, finding.cause, finding.confidence
        if (agrees and (surer or (as_sure and finding.culprit is not None))) or (
            not agrees and (surer or as_sure) and finding.culprit is not None
        ):
            return finding.verdict or said.word, finding.cause, finding.confidence
    return best


def rivals(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """Return the explanations that remain beside the first one, each with its facts."""
    return tuple(finding for finding in diagnosis.findings if _is_rival(finding))


def explanations(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """Return the findings that argue for a cause, the surest first."""
    return tuple(
        finding for finding in diagnosis.findings if finding.cause and not _is_rival(finding)
    )


def remarks(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """Return the findings that argue for nothing."""
    return tuple(
        finding for finding in diagnosis.findings if not finding.cause and not _is_rival(finding)
    )
