"""Plain Python objects in another process: types, strings, numbers, containers, attributes.

Every function takes addresses and returns addresses or Python values. Each checks what it reads:
a type's name must be printable, a length within bounds, a hash table a power of two. What fails
is an ``UnreadableError``, and the caller's object is spoiled, nothing more. No function calls
itself on what it reads, so garbage cannot make it run away.

No string is read unless a caller asks for that very string: names of types, attributes, code and
tasks are identifiers of the program; the *values* of strings may be a user's data.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.layouts import schema
from hangwatch.remote.layouts.schema import Layout
from hangwatch.remote.memory import Memory

MAX_ITEMS: Final = 200_000
MAX_SET_SLOTS: Final = 1 << 22
MAX_DICT_LOG2: Final = 22
MAX_TEXT: Final = 4096
MAX_BASES: Final = 32
MAX_PLACES: Final = 1024
"""Dicts whose places are remembered."""
MAX_DIGITS: Final = 8
MAX_MEMBERS: Final = 32

# Bits of ``tp_flags``.
INLINE_VALUES: Final = 1 << 2
MANAGED_DICT: Final = 1 << 4
HEAP_TYPE: Final = 1 << 9
INTEGER: Final = 1 << 24
LIST: Final = 1 << 25
TUPLE: Final = 1 << 26
BYTES: Final = 1 << 27
TEXT: Final = 1 << 28
DICT: Final = 1 << 29

_WORD: Final = struct.Struct("<Q")
_SIGNED: Final = struct.Struct("<q")
_PAIR: Final = struct.Struct("<QQ")
_MEMBER: Final = struct.Struct("<QiiQ")
_ENTRY: Final = struct.Struct("<8xQQ")

ENCODINGS: Final = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeInfo:
    """A type of the target.

    Attributes:
        name: ``tp_name``: dotted for types written in C, plain for classes.
        lineage: Its name and those of its first bases, nearest first.
        addresses: The same as addresses.
        keys: Shared attribute names of its instances, or 0.
        members: ``tp_members``, or 0.
    """

    address: int
    name: str
    flags: int
    basic_size: int
    item_size: int
    dict_offset: int
    keys: int
    members: int
    lineage: tuple[str, ...]
    addresses: tuple[int, ...]


class Table(NamedTuple):
    """The entries of a dict: where the first one is, how many they are, and bytes of each."""

    address: int
    entries: int
    width: int

    def entry(self, memory: Memory, place: int) -> tuple[int, int]:
        """Return key and value of one entry."""
        data = memory.read(self.address + self.width * place, self.width)
        key, value = _PAIR.unpack_from(data, self.width - _PAIR.size)
        return key, value


class Objects:
    """Reads objects through one memory, with one layout.

    Attributes:
        places: By dict, where its table was and in which places of it names that were wanted are,
            -1 for one that it did not have.
        types: Types by address.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self.memory = memory
        self.layout = layout
        self.places: dict[int, tuple[Table, dict[str, int]]] = {}
        self.types: dict[int, TypeInfo] = {}
        self._shared_names: dict[tuple[int, bytes], tuple[str, ...]] = {}
        self._texts: dict[int, str] = {}
        self._slots: dict[tuple[int, str], int] = {}

    def forget(self) -> None:
        """Drop what may have changed; keep the types that are part of the interpreter."""
        if len(self.places) > MAX_PLACES:
            self.places.clear()
        self._texts.clear()
        self._slots.clear()
        self._shared_names.clear()
        self.types = {at: kind for at, kind in self.types.items() if not kind.flags & HEAP_TYPE}

    # ------------------------------------------------------------------ types

    def type_of(self, address: int) -> TypeInfo:
        """Return the type of the object at *address*."""
        at = self.memory.word(address + 8)
        return self.types.get(at) or self.type_at(at)

    def type_at(self, address: int) -> TypeInfo:
        """Return the type object at *address*."""
        known = self.types.get(address)
        if known is not None:
            return known
        chain: list[tuple[int, bytes]] = []
        at = address
        base: TypeInfo | None = None
        while at and len(chain) < MAX_BASES:
            base = self.types.get(at)
            if base is not None:
                break
            if at & 7:
                raise UnreadableError(f"{at:#x} is no type")
            data = self.memory.read(at, self.layout.type.size)
            chain.append((at, data))
            at = _WORD.unpack_from(data, self.layout.type.base)[0]
        for at, data in reversed(chain):
            base = self._decode_type(at, data, base)
            self.types[at] = base
        if base is None:
            raise UnreadableError(f"{address:#x} is no type")
        return base

    def _decode_type(self, address: int, data: bytes, base: TypeInfo | None) -> TypeInfo:
        where = self.layout.type
        basic_size = _SIGNED.unpack_from(data, where.basic_size)[0]
        if not 0 < basic_size < 1 << 20:
            raise UnreadableError(f"{address:#x} is no type: instances of {basic_size} bytes")
        name = self.memory.text(_WORD.unpack_from(data, where.name)[0])
        if not name or not name.isprintable():
            raise UnreadableError(f"{address:#x} is no type: its name is not printable")
        flags = _WORD.unpack_from(data, where.flags)[0]
        keys = 0
        if flags & HEAP_TYPE:
            keys = self.memory.word(address + where.cached_keys)
        return TypeInfo(
            address=address,
            name=name,
            flags=flags,
            basic_size=basic_size,
            item_size=_SIGNED.unpack_from(data, where.item_size)[0],
            dict_offset=_SIGNED.unpack_from(data, where.dict_offset)[0],
            keys=keys,
            members=_WORD.unpack_from(data, where.members)[0],
            lineage=(name, *(base.lineage if base else ())),
            addresses=(address, *(base.addresses if base else ())),
        )

    def members_of(self, kind: TypeInfo) -> dict[str, tuple[int, int]]:
        """Return ``tp_members`` of a type: name to type code and offset."""
        found: dict[str, tuple[int, int]] = {}
        at = kind.members
        while at and len(found) < MAX_MEMBERS:
            name, code, _, offset = _MEMBER.unpack(self.memory.read(at, 24))
            if not name:
                break
            found[self.memory.text(name)] = (code, offset)
            at += 40
        return found

    # ------------------------------------------------------------------ values

    def is_none(self, address: int) -> bool:
        """Whether the object is ``None``."""
        return self.type_of(address).name == "NoneType"

    def text(self, address: int, limit: int = MAX_TEXT) -> str:
        """Return a ``str``, cut at *limit* characters."""
        known = self._texts.get(address)
        if known is not None:
            return known
        head = self.memory.read(address, 40)
        if not self.type_at(_WORD.unpack_from(head, 8)[0]).flags & TEXT:
            raise UnreadableError(f"{address:#x} is no str")
        length, state = _SIGNED.unpack_from(head, 16)[0], head[32]
        width = state >> 2 & 7
        if not 0 <= length < 1 << 32 or width not in ENCODINGS:
            raise UnreadableError(f"{address:#x} is no sound str")
        sizes = self.layout.text
        if not state >> 5 & 1:
            at = self.memory.word(address + sizes.compact_size)
        else:
            at = address + (sizes.ascii_size if state >> 6 & 1 else sizes.compact_size)
        data = self.memory.read(at, min(length, limit) * width) if length else b""
        value = data.decode(ENCODINGS[width], "replace")
        self._texts[address] = value
        return value

    def integer(self, address: int) -> int:
        """Return an ``int`` (or ``bool``) of up to 240 bits."""
        if not self.type_of(address).flags & INTEGER:
            raise UnreadableError(f"{address:#x} is no int")
        if self.layout.tagged_integers:
            tag = self.memory.word(address + 16)
            digits, sign = tag >> 3, 1 - (tag & 3)
        else:
            size = _SIGNED.unpack(self.memory.read(address + 16, 8))[0]
            digits, sign = abs(size), -1 if size < 0 else 1
        if digits > MAX_DIGITS:
            raise UnreadableError(f"the int at {address:#x} has {digits} digits")
        data = self.memory.read(address + 24, 4 * digits)
        return int(sign) * sum(
            int(digit) << (30 * i) for i, digit in enumerate(struct.unpack(f"<{digits}I", data))
        )

    def real(self, address: int) -> float:
        """Return a ``float``."""
        kind = self.type_of(address)
        if "float" not in kind.lineage:
            raise UnreadableError(f"{address:#x} is no float")
        value: float = struct.unpack("<d", self.memory.read(address + 16, 8))[0]
        return value

    def number(self, address: int) -> float | int | None:
        """Return an ``int`` or ``float``, ``None`` for anything else."""
        kind = self.type_of(address)
        if kind.flags & INTEGER:
            return self.integer(address)
        return self.real(address) if "float" in kind.lineage else None

    def brief(self, address: int) -> str:
        """Say what a value is: a number as it is, anything else by its type."""
        if not address:
            return "?"
        kind = self.type_of(address)
        if kind.name == "NoneType":
            return "None"
        if kind.name == "bool":
            return str(bool(self.integer(address)))
        value = self.number(address)
        return f"a {kind.name}" if value is None else f"{value:g}"

    # ------------------------------------------------------------------ containers

    def items(self, address: int, limit: int = MAX_ITEMS) -> tuple[int, ...]:
        """Return the items of a list or tuple, the first *limit* of them."""
        kind = self.type_of(address)
        length = _SIGNED.unpack(self.memory.read(address + 16, 8))[0]
        if not 0 <= length < 1 << 32:
            raise UnreadableError(f"{address:#x} has {length} items")
        if kind.flags & LIST:
            at = self.memory.word(address + schema.LIST_ITEMS)
        elif kind.flags & TUPLE:
            at = address + self.layout.tuple_items
        else:
            raise UnreadableError(f"{address:#x} is a {kind.name}, no list or tuple")
        length = min(length, limit)
        if not length:
            return ()
        return struct.unpack(f"<{length}Q", self.memory.read(at, 8 * length))

    def length(self, address: int) -> int:
        """Return how many items a list, tuple, deque or other variable-sized object has."""
        value: int = _SIGNED.unpack(self.memory.read(address + schema.DEQUE_LENGTH, 8))[0]
        if not 0 <= value < 1 << 40:
            raise UnreadableError(f"{address:#x} has {value} items")
        return value

    def members(self, address: int, limit: int = MAX_ITEMS) -> tuple[int, ...]:
        """Return the members of a set or frozenset, the first *limit* of them."""
        kind = self.type_of(address)
        if "set" not in kind.lineage and "frozenset" not in kind.lineage:
            raise UnreadableError(f"{address:#x} is a {kind.name}, no set")
        mask = _SIGNED.unpack(self.memory.read(address + schema.SET_MASK, 8))[0]
        table = self.memory.word(address + schema.SET_TABLE)
        if not 0 < mask < MAX_SET_SLOTS or mask & (mask + 1):
            raise UnreadableError(f"{address:#x} is no sound set")
        data = self.memory.read(table, 16 * (mask + 1))
        words = struct.unpack(f"<{2 * (mask + 1)}Q", data)
        # A slot is a key and its hash; a removed one keeps a dummy key with hash -1.
        return tuple(
            key
            for key, code in zip(words[::2], words[1::2], strict=True)
            if key and code != 0xFFFFFFFFFFFFFFFF
        )[:limit]

    def pairs(self, address: int, limit: int = MAX_ITEMS) -> list[tuple[int, int]]:
        """Return keys and values of a dict, the first *limit* of them."""
        kind = self.type_of(address)
        if not kind.flags & DICT:
            raise UnreadableError(f"{address:#x} is a {kind.name}, no dict")
        keys, values = _PAIR.unpack(self.memory.read(address + schema.DICT_KEYS, 16))
        entries = self._entries(keys, limit)
        if values:
            held = self._values(values + self.layout.mapping.values, len(entries))
            return [(key, value) for (key, _), value in zip(entries, held, strict=True) if value]
        return [(key, value) for key, value in entries if key and value]

    def names(self, address: int) -> dict[str, int]:
        """Return a dict whose keys are strings; others are left out."""
        found: dict[str, int] = {}
        pairs = self.pairs(address)
        self.memory.prefetch((key for key, _ in pairs), 96)
        for key, value in pairs:
            try:
                found[self.text(key)] = value
            except UnreadableError:
                continue
        return found

    def find(self, address: int, wanted: Collection[str]) -> dict[str, int]:
        """Return the entries of a dict whose keys are the *wanted* strings.

        Of all other keys only the length is looked at: a program has thousands of modules. And that
        once: a key that is added makes the table longer, so while it has its length, nothing was.
        """
        if not self.type_of(address).flags & DICT:
            raise UnreadableError(f"{address:#x} is no dict")
        keys, values = _PAIR.unpack(self.memory.read(address + schema.DICT_KEYS, 16))
        table = self._table(keys, MAX_ITEMS)
        known = self.places.get(address) if not values else None
        if known is not None and known[0] == table and known[1].keys() >= set(wanted):
            found = self._there(table, {name: known[1][name] for name in wanted})
            if found is not None:
                return found
        found, places = {}, dict.fromkeys(wanted, -1)
        sizes = {len(name) for name in wanted}
        pairs = self.pairs(address) if values else self._listed(table)
        self.memory.prefetch((key for key, _ in pairs), 96)
        word = self.memory.word
        for place, (key, value) in enumerate(pairs):
            if not value:
                continue
            try:
                if word(key + schema.TEXT_LENGTH) in sizes and (name := self.text(key)) in wanted:
                    found[name], places[name] = value, place
            except ExhaustedError:
                raise
            except UnreadableError:
                continue
        self.places[address] = (table, places)
        return found

    def _there(self, table: Table, places: Mapping[str, int]) -> dict[str, int] | None:
        """Return what lies at known places of a table; ``None`` if one has another key now."""
        found: dict[str, int] = {}
        for name, place in places.items():
            if place < 0:
                continue
            try:
                key, value = table.entry(self.memory, place)
                if not value or self.text(key) != name:
                    return None
            except ExhaustedError:
                raise
            except UnreadableError:
                return None
            found[name] = value
        return found

    def used(self, address: int) -> int:
        """Return how many entries a dict has."""
        if not self.type_of(address).flags & DICT:
            raise UnreadableError(f"{address:#x} is no dict")
        return self.memory.word(address + schema.DICT_USED)

    def _entries(self, keys: int, limit: int) -> list[tuple[int, int]]:
        """Return the entries of a keys object, in order; 0 for values kept elsewhere."""
        return self._listed(self._table(keys, limit))

    def _listed(self, table: Table) -> list[tuple[int, int]]:
        data = self.memory.read(table.address, table.width * table.entries)
        return list((_ENTRY if table.width == _ENTRY.size else _PAIR).iter_unpack(data))

    def _table(self, keys: int, limit: int) -> Table:
        """Return where the entries of a keys object are, the first *limit* of them."""
        where = self.layout.mapping
        head = self.memory.read(keys, 48)
        count = _SIGNED.unpack_from(head, where.entries_count)[0]
        if where.log2:
            size_log2, index_log2, kind = head[8], head[9], head[10]
            if size_log2 > MAX_DICT_LOG2 or index_log2 > MAX_DICT_LOG2 + 3 or kind > 2:
                raise UnreadableError(f"{keys:#x} holds no sound dict keys")
            size, index_bytes, general = 1 << size_log2, 1 << index_log2, kind == 0
        else:
            size = _SIGNED.unpack_from(head, 8)[0]
            if not 0 < size <= 1 << MAX_DICT_LOG2 or size & (size - 1):
                raise UnreadableError(f"{keys:#x} holds no sound dict keys")
            width = 1 if size <= 0xFF else 2 if size <= 0xFFFF else 4
            index_bytes, general = size * width, True
        if not 0 <= count <= size:
            raise UnreadableError(f"{keys:#x} holds no sound dict keys")
        return Table(
            keys + where.indices + index_bytes,
            min(count, limit),
            _ENTRY.size if general else _PAIR.size,
        )

    def _values(self, address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}Q", self.memory.read(address, 8 * count)) if count else ()

    # ------------------------------------------------------------------ attributes

    def attributes(self, address: int) -> dict[str, int]:
        """Return what is in an instance's ``__dict__``, whether or not the dict exists yet."""
        kind = self.type_of(address)
        how = self.layout.mapping.attributes
        if how == "offset" or not kind.flags & MANAGED_DICT:
            offset = kind.dict_offset
            if offset < 0:
                # Behind the items of an object of variable size: a member of an ``IntEnum``.
                items = abs(_SIGNED.unpack(self.memory.read(address + 16, 8))[0])
                if items > MAX_ITEMS:
                    raise UnreadableError(f"{address:#x} has {items} items")
                offset += (kind.basic_size + items * kind.item_size + 7) & ~7
            if offset <= 0:
                return {}
            at = self.memory.word(address + offset)
            return self.names(at) if at else {}
        if how == "before":
            values, at = _PAIR.unpack(self.memory.read(address - 32, 16))
        elif how == "tagged":
            word = self.memory.word(address - 24)
            values, at = (word + 1, 0) if word & 1 else (0, word)
        else:
            at = self.memory.word(address - 24)
            values = 0
            if not at and kind.flags & INLINE_VALUES:
                inline = address + kind.basic_size
                # Byte 3 says whether the values behind the object are in use.
                values = inline if self.memory.read(inline, 4)[3] else 0
        if at:
            return self.names(at)
        return self._shared(kind, values + self.layout.mapping.values) if values else {}

    def attribute(self, address: int, name: str) -> int:
        """Return one attribute, 0 if the instance has none of that name."""
        return self.attributes(address).get(name, 0)

    def _shared(self, kind: TypeInfo, values: int) -> dict[str, int]:
        """Return attributes whose names the instances of a class share."""
        # The keys object grows with new attributes: its head is part of what is remembered.
        mark = (kind.keys, self.memory.read(kind.keys, 40)[8:])
        known = self._shared_names.get(mark)
        if known is None:
            entries = self._entries(kind.keys, 256)
            self.memory.prefetch((key for key, _ in entries), 96)
            known = tuple(self.text(key) if key else "" for key, _ in entries)
            self._shared_names[mark] = known
        held = self._values(values, len(known))
        return {name: value for name, value in zip(known, held, strict=True) if name and value}

    def slot(self, address: int, name: str) -> int:
        """Return the value of a ``__slots__`` member, 0 if there is none of that name."""
        kind = self.type_of(address)
        offset = self._slots.get((kind.address, name))
        if offset is None:
            offset = self._slots[kind.address, name] = self._slot(kind, name)
        return self.memory.word(address + offset) if offset else 0

    def _slot(self, kind: TypeInfo, name: str) -> int:
        """Return where instances keep a ``__slots__`` member, 0 if there is none of that name."""
        for at in kind.addresses:
            namespace = self.memory.word(at + self.layout.type.dict)
            if not namespace:
                return 0
            descriptor = self.find(namespace, (name,)).get(name, 0)
            if descriptor and self.type_of(descriptor).name == "member_descriptor":
                definition = self.memory.word(descriptor + schema.MEMBER_DESCRIPTOR_DEF)
                return self.memory.word(definition + 16)
        return 0

    def in_module(self, module: int, wanted: Collection[str]) -> dict[str, int]:
        """Return the *wanted* names of a module's namespace, as far as it has them."""
        return self.find(self.memory.word(module + schema.MODULE_DICT), wanted)
