"""Durations as people write them: ``90``, ``90s``, ``20m``, ``1h30m``."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = r"(\d{1,9}(?:\.\d{1,6})?)"
_DURATION: Final = re.compile(
    rf"(?=.)(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?|{_NUMBER}", re.ASCII
)
_SECONDS: Final = (86_400.0, 3600.0, 60.0, 1.0, 1.0)
"""Of each group of ``_DURATION``; a bare number is seconds."""


def seconds_of(text: str) -> float:
    """Return the seconds that *text* says.

    Raises:
        ValueError: It says none; the message is a sentence with the remedy.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no duration: write 90, 90s, 20m or 1h30m")
    parts = zip(found.groups(), _SECONDS, strict=True)
    return sum(float(number) * unit for number, unit in parts if number is not None)


def spelled(seconds: float) -> str:
    """Return *seconds* as ``seconds_of`` reads them, whole ones: ``1h30m``."""
    left = round(seconds)
    parts = []
    for unit, length in (("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
