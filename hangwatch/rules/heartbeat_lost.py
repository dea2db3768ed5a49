"""The task that prints heartbeats ended; the engine goes on."""

from __future__ import annotations

from hangwatch.core.questions import beat_citation, listed
from hangwatch.model.dossier import Dossier, Finding, Rule

NAME = "heartbeat-lost"
CAUSE = "not-a-hang:heartbeat-lost"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the engines that work without beats."""
    lost = [record for record in dossier.instances if record.verdict.cause == CAUSE]
    if not lost:
        return ()
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"The heartbeat of {listed([r.instance.name for r in lost])} is lost, the engine "
                "is not: requests still complete, or tokens still flow, after the last beat."
            ),
            confidence=lost[0].verdict.confidence,
            cause=CAUSE,
            verdict="ok",
            citations=tuple(c for record in lost for c in beat_citation(record)),
            next_step=(
                "look for an exception in the server's log after the last beat; the heartbeat "
                "comes back with the next restart, which is not urgent"
            ),
        ),
    )


RULE = Rule(name=NAME, title="the heartbeat's task died, the engine works", examine=examine)
