"""Frames and code of another process: which line, which locals, what lies on the value stack.

CPython 3.10 keeps a frame in an object of its own; from 3.11 on a frame is a plain structure, in a
thread's chunk of stack, or inside the coroutine that it belongs to. Both become a ``FrameView``.

A frame that is suspended, or that has called another Python function, has saved its instruction
and stack pointers; a frame that executes keeps its stack pointer in a register, so its value
stack can only be guessed at, and is marked so.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from hangwatch.remote import linetable
from hangwatch.remote.errors import UnreadableError
from hangwatch.remote.layouts import schema
from hangwatch.remote.layouts.schema import FrameObjectLayout, InterpreterFrameLayout
from hangwatch.remote.objects import BYTES, Objects
from hangwatch.remote.results import Frame, FrameKind

MAX_TABLE: Final = 1 << 22
MAX_CODES: Final = 20_000
"""Code objects kept between readings; beyond it, all are decoded anew."""
MAX_LOCALS: Final = 4096
MAX_STACK: Final = 1024

# Kinds of a local, ``co_localspluskinds``.
PLAIN: Final = 0x20
CELL: Final = 0x40
FREE: Final = 0x80

# Bits of ``co_flags``.
GENERATOR: Final = 0x20
COROUTINE: Final = 0x80
ASYNC_GENERATOR: Final = 0x200

_WORD: Final = struct.Struct("<Q")
_SIGNED: Final = struct.Struct("<q")
_INT: Final = struct.Struct("<i")
_BYTE: Final = struct.Struct("<b")

Witness = tuple[int, bytes]
"""An address and what was read there: compared with a second reading to see whether it moved."""


@dataclass(slots=True)
class Code:
    """One code object, decoded once.

    Attributes:
        address: Where it is.
        kind: What calling it makes, by its flags.
        head: Its bytes without the reference count: tells whether it is still the same.
        start: Address of its first instruction; 0 in 3.10.
        bytecode: Its instructions, in 3.10.
        names, kinds: Of its locals; empty until asked for.
    """

    address: int
    head: bytes
    file: str
    name: str
    qualified_name: str
    first_line: int
    kind: FrameKind
    stack_size: int
    locals_count: int
    table: bytes
    start: int = 0
    bytecode: bytes = b""
    names: tuple[str, ...] | None = None
    kinds: bytes = b""
    shown: dict[tuple[int, str], Frame] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """``asyncio/locks.py`` for a module of asyncio, else ``""``."""
        head, _, name = self.file.rpartition("/")
        return f"asyncio/{name}" if head.endswith("/asyncio") or head == "asyncio" else ""


@dataclass(slots=True)
class FrameView:
    """One frame as it was read.

    Attributes:
        address: The frame object (3.10) or interpreter frame (3.11 on).
        offset: Byte offset of the instruction in the code.
        locals: Address of the first local.
        stack: Address of the bottom of the value stack.
        depth: Values on it; -1 while the stack pointer lives in a register.
        back: The frame that called it, 0 for none.
        witness: What it was read from.
    """

    address: int
    code: Code
    offset: int
    locals: int
    stack: int
    depth: int
    back: int
    witness: Witness
    qualified_name: str = ""

    def shown(self) -> Frame:
        """Return the frame for people; equal frames are one object."""
        key = (self.offset, self.qualified_name)
        known = self.code.shown.get(key)
        if known is None:
            line_of = linetable.line_of_locations if self.code.start else linetable.line_of_pairs
            known = Frame(
                function=self.code.qualified_name or self.qualified_name or self.code.name,
                file=self.code.file,
                line=line_of(self.code.table, self.code.first_line, max(0, self.offset)),
                kind=self.code.kind,
            )
            self.code.shown[key] = known
        return known


def _kind(flags: int) -> FrameKind:
    if flags & ASYNC_GENERATOR:
        return "async_generator"
    if flags & COROUTINE:
        return "coroutine"
    return "generator" if flags & GENERATOR else "function"


class Frames:
    """Reads frames through one set of objects."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.layout = objects.layout
        self._codes: dict[int, Code] = {}
        self._trusted: set[int] = set()

    def forget(self) -> None:
        """Check every code object again before it is used: its address may have a new tenant."""
        self._trusted.clear()
        if len(self._codes) > MAX_CODES:
            self._codes.clear()

    def untag(self, reference: int) -> int:
        """Return the object of a stack reference; 0 for none, or for a tagged integer."""
        if self.layout.frame is None or not self.layout.frame.tagged:
            return reference
        return 0 if reference & 3 == 3 else reference & ~3

    # ------------------------------------------------------------------ code

    def code(self, address: int) -> Code:
        """Return the code object at *address*, from earlier readings where it is the same."""
        known = self._codes.get(address)
        if known is not None and address in self._trusted:
            return known
        where = self.layout.code
        head = self.objects.memory.read(address, where.size)[8:]
        if known is not None and known.head[: where.line_table - 8] == head[: where.line_table - 8]:
            self._trusted.add(address)
            return known
        if self.objects.type_at(_WORD.unpack_from(head, 0)[0]).name != "code":
            raise UnreadableError(f"{address:#x} is no code")
        code = self._decode(address, head)
        self._codes[address] = code
        self._trusted.add(address)
        return code

    def _decode(self, address: int, head: bytes) -> Code:
        where = self.layout.code
        objects = self.objects

        def word(offset: int) -> int:
            value: int = _WORD.unpack_from(head, offset - 8)[0]
            return value

        def number(offset: int) -> int:
            value: int = _INT.unpack_from(head, offset - 8)[0]
            return value

        code = Code(
            address=address,
            head=head,
            file=objects.text(word(where.file)),
            name=objects.text(word(where.name)),
            qualified_name="",
            first_line=number(where.first_line),
            kind=_kind(number(where.flags)),
            stack_size=max(0, min(number(where.stack_size), MAX_STACK)),
            locals_count=0,
            table=self._bytes(word(where.line_table)),
        )
        if where.qualified_name is not None:
            code.qualified_name = objects.text(word(where.qualified_name))
        if where.instructions is not None and where.locals_count is not None:
            code.start = address + where.instructions
            code.locals_count = number(where.locals_count)
        elif where.bytecode is not None:
            code.bytecode = self._bytes(word(where.bytecode))
            self._name_locals(code)
            code.locals_count = len(code.names or ())
        if not 0 <= code.locals_count <= MAX_LOCALS:
            raise UnreadableError(f"code at {address:#x} has {code.locals_count} locals")
        return code

    def _bytes(self, address: int) -> bytes:
        memory = self.objects.memory
        if not self.objects.type_of(address).flags & BYTES:
            raise UnreadableError(f"{address:#x} is no bytes object")
        length = _SIGNED.unpack(memory.read(address + 16, 8))[0]
        if not 0 <= length <= MAX_TABLE:
            raise UnreadableError(f"bytes of length {length} at {address:#x}")
        return memory.read(address + 32, length)

    def _name_locals(self, code: Code) -> tuple[str, ...]:
        if code.names is not None:
            return code.names
        where = self.layout.code
        objects = self.objects
        names: list[str] = []
        kinds: list[int] = []
        if where.names is not None and where.kinds is not None:
            names = [
                objects.text(item)
                for item in objects.items(_WORD.unpack_from(code.head, where.names - 8)[0])
            ]
            kinds = list(self._bytes(_WORD.unpack_from(code.head, where.kinds - 8)[0]))
        else:
            for offset, kind in ((where.variables, PLAIN), (where.cells, CELL), (where.free, FREE)):
                assert offset is not None
                for item in objects.items(_WORD.unpack_from(code.head, offset - 8)[0], MAX_LOCALS):
                    names.append(objects.text(item))
                    kinds.append(kind)
        code.names, code.kinds = tuple(names), bytes(kinds)
        return code.names

    def free_variables(self, code: Code) -> tuple[str, ...]:
        """Return the names of the cells of a closure, in their order."""
        names = self._name_locals(code)
        return tuple(name for name, kind in zip(names, code.kinds, strict=False) if kind & FREE)

    # ------------------------------------------------------------------ frames

    def frame(self, address: int) -> FrameView | None:
        """Return the frame at *address*; ``None`` for a C shim between Python frames."""
        view, _ = self.frame_and_back(address)
        return view

    def frame_and_back(self, address: int) -> tuple[FrameView | None, int]:
        """Return the frame at *address*, if it is one, and the address of its caller's."""
        if self.layout.frame_object is not None:
            view = self._frame_object(address, self.layout.frame_object)
            return view, view.back
        assert self.layout.frame is not None
        return self._interpreter_frame(address, self.layout.frame)

    def _interpreter_frame(
        self, address: int, where: InterpreterFrameLayout
    ) -> tuple[FrameView | None, int]:
        data = self.objects.memory.read(address, where.locals)
        if data[where.owner] in where.skipped_owners:
            return None, _WORD.unpack_from(data, where.previous)[0]
        view = self.decode(address, data)
        return view, view.back

    def decode(self, address: int, data: bytes) -> FrameView:
        """Return the interpreter frame that was read from *address* (3.11 on)."""
        where = self.layout.frame
        assert where is not None
        code = self.code(self.untag(_WORD.unpack_from(data, where.code)[0]))
        first = address + where.locals
        stack = first + 8 * code.locals_count
        if where.stack_top is not None:
            depth = _INT.unpack_from(data, where.stack_top)[0] - code.locals_count
        else:
            assert where.stack_pointer is not None
            depth = (_WORD.unpack_from(data, where.stack_pointer)[0] - stack) // 8
        if not 0 <= depth <= code.stack_size:
            depth = -1
        return FrameView(
            address=address,
            code=code,
            offset=_WORD.unpack_from(data, where.instruction)[0] - code.start,
            locals=first,
            stack=stack,
            depth=depth,
            back=_WORD.unpack_from(data, where.previous)[0],
            witness=(address, data),
        )

    def _frame_object(self, address: int, where: FrameObjectLayout) -> FrameView:
        data = self.objects.memory.read(address, where.size)
        if self.objects.type_at(_WORD.unpack_from(data, 8)[0]).name != "frame":
            raise UnreadableError(f"{address:#x} is no frame")
        code = self.code(_WORD.unpack_from(data, where.code)[0])
        depth = _INT.unpack_from(data, where.depth)[0]
        if not 0 <= depth <= code.stack_size or self.state_of_frame_object(data) == 0:
            depth = -1
        # Code objects of 3.10 have no qualified name, but generators do.
        owner = _WORD.unpack_from(data, where.generator)[0]
        name = ""
        if owner:
            at = self.objects.memory.word(owner + self.layout.generator.qualified_name)
            name = self.objects.text(at)
        return FrameView(
            address=address,
            code=code,
            qualified_name=name,
            offset=2 * _INT.unpack_from(data, where.last)[0],
            locals=address + where.locals,
            stack=_WORD.unpack_from(data, where.value_stack)[0],
            depth=depth,
            back=_WORD.unpack_from(data, where.back)[0],
            witness=(address + 8, data[8 : where.state + 1]),
        )

    def state_of_frame_object(self, data: bytes) -> int:
        """Return the state byte of a 3.10 frame object."""
        assert self.layout.frame_object is not None
        value: int = _BYTE.unpack_from(data, self.layout.frame_object.state)[0]
        return value

    # ------------------------------------------------------------------ locals and values

    def locals(self, view: FrameView, wanted: Collection[str] | None) -> dict[str, int]:
        """Return those of the *wanted* locals that are set, the contents of cells among them.

        ``None`` wants all.
        """
        names = self._name_locals(view.code)
        found: dict[str, int] = {}
        if len(names) > MAX_LOCALS:
            raise UnreadableError("absurd number of locals")
        for i, name in enumerate(names):
            if wanted is not None and name not in wanted:
                continue
            value = self.untag(self.objects.memory.word(view.locals + 8 * i))
            kind = view.code.kinds[i] if i < len(view.code.kinds) else PLAIN
            if value and kind & (CELL | FREE) and self.objects.type_of(value).name == "cell":
                value = self.objects.memory.word(value + schema.CELL_CONTENTS)
            if value:
                found[name] = value
        return found

    def values(self, view: FrameView) -> tuple[tuple[int, ...], bool]:
        """Return the value stack, bottom first, and whether it is certain.

        Of an executing frame every slot is returned: above the true top they are stale.
        """
        depth = view.depth if view.depth >= 0 else view.code.stack_size
        if not depth:
            return (), True
        words = struct.unpack(f"<{depth}Q", self.objects.memory.read(view.stack, 8 * depth))
        return tuple(self.untag(word) for word in words), view.depth >= 0
