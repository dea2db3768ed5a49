"""Every engine is without work, and the job that should bring some lives: look there."""

from __future__ import annotations

from hangwatch.core.loose import role_of
from hangwatch.core.questions import listed, number_of, present, wall
from hangwatch.core.starvation import STARVED
from hangwatch.model.dossier import Dossier, Finding, ProcessRecord, Rule
from hangwatch.model.identity import Role
from hangwatch.model.verdict import Idle

NAME = "starved-upstream"

PRODUCERS = (Role.DRIVER, Role.SESSION_SERVER, Role.STORE)
"""Who brings work, or is asked on the way."""


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the notice that nobody brings work, with what the producer says of itself."""
    if dossier.verdict.cause != STARVED:
        return ()
    producers = [row for row in dossier.processes if role_of(row.role) in PRODUCERS]
    quoted = dossier.producer[-3:]
    sentence = (
        f"{number_of(len(present(dossier)), 'engine')} are idle since "
        f"{wall(dossier, dossier.verdict.since):%H:%M:%S} and nothing is wrong with them: what "
        "should send them work does not"
    )
    if producers:
        sentence += f", although it lives ({listed([_told(row) for row in producers])})"
    if quoted:
        sentence += f". Its log says “{quoted[-1].text}”"
    return (
        Finding(
            rule=NAME,
            sentence=f"{sentence}.",
            confidence=dossier.verdict.confidence,
            cause=STARVED,
            verdict=Idle.word,
            citations=(
                *quoted,
                *(row.citation for row in producers if row.citation is not None),
            ),
            next_step=(
                "read the producer's tasks and stacks, and what it waits for: a proxy, a session "
                "server, a training step, the shared store"
            ),
        ),
    )


def _told(row: ProcessRecord) -> str:
    return f"{role_of(row.role)} {row.pid}"


RULE = Rule(name=NAME, title="all engines idle while a job lives", examine=examine)
