"""From an instruction to a source line, as CPython's own tables have it.

Two formats: pairs of deltas up to 3.10 (``Objects/lnotab_notes.txt``, PEP 626), and the location
table from 3.11 on (``InternalDocs/code_objects.md``).
"""

from __future__ import annotations

NO_LINE = -128

# The entry codes of the 3.11 table; 0 to 9 are short forms.
ONE_LINE_FIRST = 10
ONE_LINE_LAST = 12
NO_COLUMNS = 13
LONG = 14
NONE = 15


def line_of_pairs(table: bytes, first_line: int, offset: int) -> int | None:
    """Return the line of the instruction at byte *offset* in a 3.10 table."""
    line = first_line
    end = 0
    for i in range(0, len(table) - 1, 2):
        delta = table[i + 1] - 256 if table[i + 1] > 127 else table[i + 1]
        end += table[i]
        if delta != NO_LINE:
            line += delta
        if table[i] and offset < end:
            return line
    return line


def line_of_locations(table: bytes, first_line: int, offset: int) -> int | None:
    """Return the line of the instruction at byte *offset* in a 3.11 table, ``None`` for none."""
    line = first_line
    end = 0
    i = 0
    length = len(table)
    while i < length:
        head = table[i]
        i += 1
        code = head >> 3 & 15
        end += 2 * ((head & 7) + 1)
        if code in (NO_COLUMNS, LONG):
            number, i = _varint(table, i)
            line += -(number >> 1) if number & 1 else number >> 1
            for _ in range(3 if code == LONG else 0):
                _, i = _varint(table, i)
        elif ONE_LINE_FIRST <= code <= ONE_LINE_LAST:
            line += code - ONE_LINE_FIRST
            i += 2
        elif code < ONE_LINE_FIRST:
            i += 1
        if offset < end:
            return None if code == NONE else line
    return None


def _varint(table: bytes, i: int) -> tuple[int, int]:
    """Return a number of six-bit digits, lowest first, and where it ends."""
    number = shift = 0
    while i < len(table):
        digit = table[i]
        i += 1
        number |= (digit & 63) << shift
        shift += 6
        if not digit & 64:
            break
    return number, i
