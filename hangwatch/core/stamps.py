"""Stamps in log lines, and the arrival of lines that nobody saw arrive."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

_STAMP: Final = re.compile(
    rb"(?P<date>\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d)"
    rb"(?:[.,](?P<fraction>\d{1,9}))?(?P<offset>Z|[+-]\d\d:?\d\d)?"
)

SEARCHED: Final = 200
"""Bytes at the beginning of a line in which its own stamp stands; later ones are data."""


def find(line: bytes) -> datetime | None:
    """Return the first stamp near the beginning of *line*, aware only if it has an offset."""
    match = _STAMP.search(line, 0, SEARCHED)
    if match is None:
        return None
    fraction = (match["fraction"] or b"0")[:6].ljust(6, b"0")
    offset = (match["offset"] or b"").replace(b"Z", b"+00:00")
    text = b"%b %b.%b%b" % (match["date"], match["time"], fraction, offset)
    try:
        return datetime.fromisoformat(text.decode("ascii"))
    except ValueError:
        return None  # the right shape, but no moment
