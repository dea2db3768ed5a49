"""What became of the engines after the bundle was written, where somebody looked again."""

from __future__ import annotations

from hangwatch.model.dossier import Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence

NAME = "afterwards"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return one remark for the looks afterwards, the last of them first."""
    looks = sorted(dossier.aftermaths, key=lambda look: look.number)
    if not looks:
        return ()
    told = ". ".join(look.sentence[:1].upper() + look.sentence[1:] for look in looks)
    return (
        Finding(
            rule=NAME,
            sentence=f"{told}.",
            confidence=Confidence.HIGH,
            citations=tuple(look.citation for look in looks if look.citation is not None),
        ),
    )


RULE = Rule(name=NAME, title="what became of the engines after the capture", examine=examine)
