"""Symbols of a program, from its mapped image.

A dynamically linked program, and a static one that exports symbols for its extension modules
(every CPython does), carries its dynamic symbol table inside its mapped segments. Reading it from
the target's memory needs no file: it works for a deleted or replaced ``libpython``, in another
container, in a chroot, and for stripped binaries, for stripping removes ``.symtab`` only.

The way: ELF header, program header ``PT_DYNAMIC``, its entries ``DT_SYMTAB``, ``DT_STRTAB`` and
``DT_GNU_HASH``, then one look-up in the hash table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hangwatch.remote.errors import UnreadableError
from hangwatch.remote.memory import Memory
from hangwatch.remote.procfs import open_regular

PT_LOAD: Final = 1
PT_DYNAMIC: Final = 2
DT_STRTAB: Final = 5
DT_SYMTAB: Final = 6
DT_GNU_HASH: Final = 0x6FFFFEF5
SHT_SYMTAB: Final = 2
SHT_DYNSYM: Final = 11

MAX_PROGRAM_HEADERS: Final = 64
MAX_SECTIONS: Final = 512
MAX_CHAIN: Final = 65_536
MAX_SYMBOLS_FILE: Final = 64 << 20

_SYMBOL: Final = struct.Struct("<IBBHQQ")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """Where a symbol lies in the target, and how long it says it is."""

    address: int
    size: int


class Image:
    """One mapped ELF file."""

    def __init__(self, memory: Memory, base: int) -> None:
        """Read the headers of the file mapped at *base*.

        Raises:
            UnreadableError: It is not a 64-bit ELF image with a dynamic section.
        """
        self._memory = memory
        header = memory.read(base, 64)
        if header[:5] != b"\x7fELF\x02":
            raise UnreadableError("not a 64-bit ELF image")
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        if count > MAX_PROGRAM_HEADERS or size < 56:
            raise UnreadableError("absurd program headers")
        dynamic: tuple[int, int] | None = None
        first: int | None = None
        headers = memory.read(base + table, size * count)
        for i in range(count):
            kind, _, offset, address, _, _, length, _ = struct.unpack_from(
                "<IIQQQQQQ", headers, i * size
            )
            if kind == PT_LOAD and first is None:
                first = address - offset
            elif kind == PT_DYNAMIC:
                dynamic = (address, length)
        if dynamic is None:
            raise UnreadableError("no dynamic section")
        self.bias = base - (first or 0)
        entries = memory.read(self.bias + dynamic[0], min(dynamic[1], 4096))
        self._dynamic: dict[int, int] = {}
        for i in range(0, len(entries) - 15, 16):
            tag, value = struct.unpack_from("<qQ", entries, i)
            if tag == 0:
                break
            self._dynamic.setdefault(tag, value)

    def symbol(self, name: str) -> Symbol | None:
        """Look up a dynamic symbol that is defined here."""
        table, strings = self._pointer(DT_SYMTAB), self._pointer(DT_STRTAB)
        hashes = self._pointer(DT_GNU_HASH)
        if not (table and strings and hashes):
            raise UnreadableError("no GNU hash table")
        memory = self._memory
        wanted = name.encode() + b"\0"
        code = gnu_hash(name)
        buckets, first, bloom, _ = struct.unpack("<IIII", memory.read(hashes, 16))
        if not buckets:
            return None
        bucket_list = hashes + 16 + bloom * 8
        chains = bucket_list + 4 * buckets
        index = _half(memory, bucket_list + 4 * (code % buckets))
        if index < first:
            return None
        for _ in range(MAX_CHAIN):
            link = _half(memory, chains + 4 * (index - first))
            if link | 1 == code | 1:
                at, _, _, section, value, size = _SYMBOL.unpack(memory.read(table + 24 * index, 24))
                if section and memory.read(strings + at, len(wanted)) == wanted:
                    return Symbol(address=self.bias + value, size=size)
            if link & 1:
                return None
            index += 1
        raise UnreadableError("the symbol hash table does not end")

    def _pointer(self, tag: int) -> int:
        """Return an address: glibc relocates these entries in memory, musl does not."""
        value = self._dynamic.get(tag, 0)
        return value + self.bias if 0 < value < self.bias else value


def gnu_hash(name: str) -> int:
    """Return the hash under which ``DT_GNU_HASH`` keeps a symbol."""
    code = 5381
    for byte in name.encode():
        code = (code * 33 + byte) & 0xFFFFFFFF
    return code


def _half(memory: Memory, address: int) -> int:
    value: int = struct.unpack("<I", memory.read(address, 4))[0]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of an ELF file: what it is called, and where it goes."""

    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


def file_symbol(path: Path, name: str) -> Symbol | None:
    """Look a symbol up in a file, for programs that export none. The address has no bias yet.

    Raises:
        OSError: The file cannot be read.
        UnreadableError: It is not an ELF file.
    """
    wanted = name.encode() + b"\0"
    with open_regular(str(path)) as file:
        sections = list(_sections(file.read(64), path))
        for section in sections:
            if section.kind not in (SHT_SYMTAB, SHT_DYNSYM) or section.size > MAX_SYMBOLS_FILE:
                continue
            if not section.link < len(sections):
                continue
            names = sections[section.link]
            if names.size > MAX_SYMBOLS_FILE:
                continue
            file.seek(section.offset)
            symbols = file.read(section.size)
            file.seek(names.offset)
            strings = file.read(names.size)
            for i in range(0, len(symbols) - 23, 24):
                at, _, _, defined, value, size = _SYMBOL.unpack_from(symbols, i)
                if defined and strings.startswith(wanted, at):
                    return Symbol(address=value, size=size)
    return None


def _sections(header: bytes, path: Path) -> Iterator[Section]:
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        raise UnreadableError(f"{path} is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count, names = struct.unpack_from("<HHH", header, 58)
    if not table or count > MAX_SECTIONS or size != _SECTION.size or names >= count:
        raise UnreadableError(f"{path} has no section table")
    with open_regular(str(path)) as file:
        file.seek(table)
        raw = file.read(size * count)
        if len(raw) < size * count:
            raise UnreadableError(f"{path} is cut off")
        rows = [_SECTION.unpack_from(raw, i * size) for i in range(count)]
        file.seek(rows[names][4])
        strings = file.read(min(rows[names][5], MAX_SYMBOLS_FILE))
    for at, kind, _, address, offset, length, link, *_ in rows:
        label = strings[at:].split(b"\0", 1)[0].decode("ascii", "replace")
        yield Section(name=label, kind=kind, address=address, offset=offset, size=length, link=link)
