"""Stamps in log lines, and the years that some of them leave out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Final

# vLLM has no year, but always a level before its stamp (vllm/logger.py, _DATE_FORMAT).
_STAMP: Final = re.compile(
    rb"(?:(?P<year>\d{4})-|(?<=[A-Z] ))(?P<date>\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d)"
    rb"(?:[.,](?P<fraction>\d{1,9}))?(?P<offset>Z|[+-]\d\d:?\d\d)?"
)

SEARCHED: Final = 200
"""Bytes at the beginning of a line in which its own stamp stands; later ones are data."""


def find(line: bytes, *, near: datetime | None = None) -> datetime | None:
    """Return the first stamp near the beginning of *line*, aware only if it has an offset.

    Args:
        line: The line.
        near: A moment not far from it: a stamp without a year is of the year that brings it
            nearest. ``None`` leaves such stamps out.
    """
    match = _STAMP.search(line, 0, SEARCHED)
    if match is None:
        return None
    fraction = (match["fraction"] or b"0")[:6].ljust(6, b"0")
    offset = (match["offset"] or b"").replace(b"Z", b"+00:00")
    text = b"%b %b.%b%b" % (match["date"], match["time"], fraction, offset)
    if match["year"] is not None:
        return _moment(match["year"] + b"-" + text)
    if near is None:
        return None
    return min(_in_years_around(near, text), key=lambda stamp: _distance(stamp, near), default=None)


def _in_years_around(near: datetime, text: bytes) -> Iterator[datetime]:
    for year in (near.year - 1, near.year, near.year + 1):
        if (stamp := _moment(b"%04d-%b" % (year, text))) is not None:
            yield stamp


def _distance(stamp: datetime, near: datetime) -> float:
    # Zones do not matter for the choice of a year.
    return abs((stamp.replace(tzinfo=None) - near.replace(tzinfo=None)).total_seconds())


def _moment(text: bytes) -> datetime | None:
    try:
        return datetime.fromisoformat(text.decode("ascii"))
    except ValueError:
        return None  # the right shape, but no moment
