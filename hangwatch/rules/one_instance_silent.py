"""Some servers stopped while others of the same kind go on."""

from __future__ import annotations

from hangwatch.core.questions import (
    alarmed,
    beat_citation,
    in_flight,
    listed,
    number_of,
    present,
    together,
)
from hangwatch.model.dossier import Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence

NAME = "one-instance-silent"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return who stopped, when others go on."""
    stopped, there = alarmed(dossier), present(dossier)
    if not stopped or len(stopped) == len(there) or together(dossier, stopped):
        return ()
    names = listed([record.instance.name for record in stopped])
    work = in_flight(stopped)
    with_work = f" with {number_of(work, 'request')} in flight" if work else ""
    own = len(stopped) == 1
    same = dossier.verdict.cause == NAME
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"{'Server' if own else 'Servers'} {names} stopped{with_work} while "
                f"{len(there) - len(stopped)} of {len(there)} go on: the cause lies "
                f"in {'it' if own else 'them'} and not in what all share."
            ),
            confidence=dossier.verdict.confidence if same else Confidence.MEDIUM,
            cause=NAME,
            verdict=dossier.verdict.word,
            citations=tuple(c for record in stopped for c in beat_citation(record)),
            next_step=(
                f"hangwatch attach --pid {stopped[0].instance.pid or 'PID'} --now; compare its "
                "stacks with those of a server that goes on"
            ),
        ),
    )


RULE = Rule(name=NAME, title="one server stopped, its siblings go on", examine=examine)
