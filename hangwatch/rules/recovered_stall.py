"""A stall that ended by itself."""

from __future__ import annotations

from hangwatch.core.questions import seconds, wall
from hangwatch.model.dossier import Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence

NAME = "recovered-stall"
MOST = 5


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the longest gaps between beats that ended by themselves."""
    longest = sorted(dossier.stalls, key=lambda stall: -stall.seconds)[:MOST]
    return tuple(
        Finding(
            rule=NAME,
            sentence=(
                f"{stall.instance.name} stalled for {seconds(stall.seconds)} from "
                f"{wall(dossier, stall.since):%H:%M:%S} and went on by itself."
            ),
            confidence=Confidence.HIGH,
        )
        for stall in longest
    )


RULE = Rule(name=NAME, title="a stall ended by itself", examine=examine)
