"""What a reader knows of a process, as bytes: a later reader begins where an earlier one ended.

A process that is watched is read in quiet times. Where its runtime is, its layout, its code objects
with their names and lines, and which pages a reading needs, is known then; when it hangs, only
memory is left to be read, most of it by one system call.

Nothing of it is believed. The process must be the same and run the same program; the layout proves
itself on the living target as ever; a code object counts only after its words, its names and its
table of lines were compared with what lies there now; and pages are merely read earlier than they
would be anyway. What does not hold is found out anew, at the price of a first reading.
"""

from __future__ import annotations

import binascii
import dataclasses
import marshal
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hangwatch.remote.frames import Code, Head
from hangwatch.remote.layouts import LAYOUTS
from hangwatch.remote.objects import Table
from hangwatch.remote.results import Frame
from hangwatch.remote.runtime import Runtime, differences, with_words

FORMAT: Final = b"hangwatch.known/1\n"

MAX_CODES: Final = 5_000
"""Code objects that are kept of a process; each takes half a kilobyte."""

MAX_PAGES: Final = 4_096

_SUM: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of one process.

    Attributes:
        start_ticks: When it started.
        program: Where its code and its stack begin; see ``procfs.program``.
        runtime: Where its runtime is, and the layout that it proved.
        proof_pages: Addresses of the pages that the proof needs.
        pages: Those that a reading needs.
        places: Where in its dicts names are; see ``Objects.places``.
        codes: Its code objects.
    """

    start_ticks: int
    program: tuple[int, int]
    runtime: Runtime
    proof_pages: tuple[int, ...]
    pages: tuple[int, ...]
    places: Mapping[int, tuple[Table, dict[str, int]]]
    codes: tuple[Code, ...]


def pack(known: Known) -> bytes:
    """Return what is known as bytes for ``unpack``, of this version of hangwatch alone."""
    found = known.runtime
    plain = (
        known.start_ticks,
        known.program,
        (found.address, found.version, found.path, found.notes, differences(found.layout)),
        known.proof_pages,
        known.pages[:MAX_PAGES],
        [(at, tuple(table), names) for at, (table, names) in known.places.items()],
        [_plain(code) for code in known.codes[:MAX_CODES]],
    )
    data = marshal.dumps(plain)
    return FORMAT + _SUM.pack(binascii.crc32(data)) + data


def unpack(data: bytes) -> Known | None:
    """Return what ``pack`` packed; ``None`` if it is damaged, or of another version."""
    body = data[len(FORMAT) + _SUM.size :]
    if not data.startswith(FORMAT) or not body:
        return None
    # ``marshal`` trusts what it reads: nothing but whole and unchanged bytes of ours gets there.
    if binascii.crc32(body) != _SUM.unpack_from(data, len(FORMAT))[0]:
        return None
    try:
        ticks, program, runtime, proof_pages, pages, places, codes = marshal.loads(body)  # noqa: S302  # see above
        address, version, path, notes, words = runtime
        return Known(
            start_ticks=ticks,
            program=program,
            runtime=Runtime(
                address=address,
                version=version,
                layout=with_words(LAYOUTS[version], words),
                path=path,
                notes=notes,
            ),
            proof_pages=proof_pages,
            pages=pages,
            places={at: (Table(*table), names) for at, table, names in places},
            codes=tuple(_code(*each) for each in codes),
        )
    except (EOFError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _plain(code: Code) -> tuple[Any, ...]:
    fields = {field.name: getattr(code, field.name) for field in dataclasses.fields(code)}
    shown = [(*key, frame.line) for key, frame in code.shown.items()]
    return {**fields, "head": tuple(code.head), "names": None, "look": 0, "shown": None}, shown


def _code(fields: dict[str, Any], shown: Iterable[tuple[int, str, int | None]]) -> Code:
    code = Code(**{**fields, "head": Head(*fields["head"]), "shown": {}})
    for offset, qualified_name, line in shown:
        code.shown[offset, qualified_name] = Frame(
            function=code.qualified_name or qualified_name or code.name,
            file=code.file,
            line=line,
            kind=code.kind,
        )
    return code
