"""Several fields of a structure with one call, in an order of ours.

Where a field lies differs between versions of CPython, and with it the order of the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter


class Words:
    """Some fields of a structure.

    Attributes:
        size: Bytes from the beginning of the structure to the end of the last field.
        read: Returns the fields of the structure that some bytes begin with, in the order given.
    """

    def __init__(self, fields: Sequence[tuple[int | None, str]]) -> None:
        """Take offset and format (as of ``struct``) of each field, two at least.

        A field without an offset is one that this version does not have; it is always 0.
        """
        there = sorted((at, format_) for at, format_ in fields if at is not None)
        text, end = "<", 0
        for at, format_ in there:
            text += f"{at - end}x{format_}"
            end = at + struct.calcsize(f"<{format_}")
        self.size = end
        unpack = struct.Struct(text).unpack_from
        places = {at: number for number, (at, _) in enumerate(there)}
        pick = itemgetter(*(-1 if at is None else places[at] for at, _ in fields))
        self.read: Callable[[bytes], tuple[int, ...]] = lambda data: pick((*unpack(data), 0))
        if there == list(fields):
            self.read = unpack
