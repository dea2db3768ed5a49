"""Which parts of a long log are worth keeping: its end, and what surrounds a moment before that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final

from hangwatch.core import stamps

BLOCK: Final = 32 << 10
"""Bytes that are looked at for a stamp: some hundred lines."""


def parts(
    read: Callable[[int, int], bytes], size: int, *, limit: int, around: datetime | None
) -> tuple[tuple[int, int], ...]:
    """Return the parts of a log (begin, end in bytes) to keep, *limit* bytes in all.

    That is the end alone, unless the end begins after the moment *around*: then half of the limit
    goes to what surrounds it, found by the stamps of lines, which rise from line to line. Parts may
    begin and end in the middle of a line.

    Args:
        read: Gives the bytes from an offset on, of a length.
        size: Bytes of the log.
        limit: Bytes to keep.
        around: An aware moment in the log's own time zone (lines have naive stamps), or ``None``.
    """
    if size <= limit:
        return ((0, size),) if size else ()
    tail = size - limit
    if around is None or not _is_later(read(tail, BLOCK), around):
        return ((tail, size),)
    low, high = 0, tail
    while high - low > limit // 16:
        middle = (low + high) // 2
        if _is_later(read(middle, BLOCK), around):
            high = middle
        else:
            low = middle
    begin = max(0, high - limit // 4)
    end = begin + limit // 2
    tail = size - limit // 2
    if end >= tail:
        return ((begin, size),)
    return ((begin, end), (tail, size))


def _is_later(block: bytes, moment: datetime) -> bool:
    """Say whether the first stamp of a block is after *moment*; a block without one is not."""
    for line in block.split(b"\n")[1:]:
        stamp = stamps.find(line, near=moment)
        if stamp is not None:
            naive = stamp.tzinfo is None
            return stamp > (moment.replace(tzinfo=None) if naive else moment)
    return False


def whole_lines(piece: bytes, *, first: bool) -> bytes:
    """Return a part without the line that it begins in the middle of, if it has any other."""
    return piece if first else piece.partition(b"\n")[2] or piece
