"""Frames and code of another process: which line, which locals, what lies on the value stack.

CPython 3.10 keeps a frame in an object of its own; from 3.11 on a frame is a plain structure, in a
thread's chunk of stack, or inside the coroutine that it belongs to. Both become a ``FrameView``.

A frame that is suspended, or that has called another Python function, has saved its instruction
and stack pointers; a frame that executes keeps its stack pointer in a register, so its value
stack can only be guessed at, and is marked so.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hangwatch.remote import linetable
from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.layouts import schema
from hangwatch.remote.layouts.schema import CodeLayout, FrameObjectLayout, InterpreterFrameLayout
from hangwatch.remote.objects import BYTES, Objects
from hangwatch.remote.results import Frame, FrameKind
from hangwatch.remote.words import Words

MAX_TABLE: Final = 1 << 22
MAX_CODES: Final = 20_000
"""Code objects kept between readings; beyond it, all are decoded anew."""
MAX_LOCALS: Final = 4096
MAX_STACK: Final = 1024

ENDLESS: Final = "its stack runs in a circle"
CUT: Final = "its stack was cut"

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


class Head(NamedTuple):
    """The words of a code object that are used; 0 for what its version does not have."""

    type: int
    flags: int
    first_line: int
    stack_size: int
    locals_count: int
    file: int
    name: int
    qualified_name: int
    line_table: int
    names: int
    kinds: int
    bytecode: int
    variables: int
    cells: int
    free: int


@dataclass(slots=True)
class Code:
    """One code object, decoded once.

    Attributes:
        address: Where it is.
        kind: What calling it makes, by its flags.
        head: The words of it that are used.
        start: Address of its first instruction; 0 in 3.10.
        bytecode: Its instructions, in 3.10.
        names, kinds: Of its locals; ``None`` until asked for.
        library: ``asyncio/locks.py`` for a module of asyncio, else ``""``.
        look: The reading in which it was last seen to be the same.
    """

    address: int
    kind: FrameKind
    head: Head
    file: str
    name: str
    qualified_name: str
    first_line: int
    stack_size: int
    locals_count: int
    table: bytes
    start: int = 0
    bytecode: bytes = b""
    names: tuple[str, ...] | None = None
    kinds: bytes = b""
    library: str = ""
    look: int = 0
    shown: dict[tuple[int, str], Frame] = field(default_factory=dict)


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


def _heads(where: CodeLayout) -> Words:
    fields: Sequence[tuple[int | None, str]] = [
        (8, "Q"),
        (where.flags, "i"),
        (where.first_line, "i"),
        (where.stack_size, "i"),
        (where.locals_count, "i"),
        *((at, "Q") for at in (where.file, where.name, where.qualified_name, where.line_table)),
        *((at, "Q") for at in (where.names, where.kinds, where.bytecode)),
        *((at, "Q") for at in (where.variables, where.cells, where.free)),
    ]
    return Words(fields)


def _headers(where: InterpreterFrameLayout) -> Words:
    """Return code, caller, instruction, top of the value stack, and owner of a frame."""
    top = (where.stack_pointer, "Q") if where.stack_top is None else (where.stack_top, "i")
    words = ((at, "Q") for at in (where.code, where.previous, where.instruction))
    return Words([*words, top, (where.owner, "B")])


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
        self.codes: dict[int, Code] = {}
        self._look = 1
        self._heads = _heads(self.layout.code)
        self._headers = _headers(self.layout.frame) if self.layout.frame else None

    def forget(self) -> None:
        """Check every code object again before it is used: its address may have a new tenant."""
        self._look += 1
        if len(self.codes) > MAX_CODES:
            self.codes.clear()

    def untag(self, reference: int) -> int:
        """Return the object of a stack reference; 0 for none, or for a tagged integer."""
        if self.layout.frame is None or not self.layout.frame.tagged:
            return reference
        return 0 if reference & 3 == 3 else reference & ~3

    # ------------------------------------------------------------------ code

    def code(self, address: int) -> Code:
        """Return the code object at *address*, from earlier readings where it is the same."""
        known = self.codes.get(address)
        if known is not None and known.look == self._look:
            return known
        head = Head(*self._heads.read(self.objects.memory.read(address, self._heads.size)))
        if known is None or not self._is_same(known, head):
            if self.objects.type_at(head.type).name != "code":
                raise UnreadableError(f"{address:#x} is no code")
            known = self.codes[address] = self._decode(address, head)
        known.look = self._look
        return known

    @property
    def used(self) -> Iterator[Code]:
        """The code objects that this reading has come across."""
        return (code for code in self.codes.values() if code.look == self._look)

    def _is_same(self, code: Code, head: Head) -> bool:
        """Whether a code object is still the one that was decoded.

        Its own words are not enough: what is freed and made again in the same order, as generated
        code is, comes to lie at the same addresses with other names in it.
        """
        if head != code.head:
            return False
        text, data = self.objects.text, self._bytes
        try:
            same = (
                text(head.file) == code.file
                and text(head.name) == code.name
                and (not head.qualified_name or text(head.qualified_name) == code.qualified_name)
                and data(head.line_table) == code.table
                and (not head.bytecode or data(head.bytecode) == code.bytecode)
            )
        except ExhaustedError:
            raise
        except UnreadableError:
            same = False
        # Few frames are asked for their locals: the names are read again when that happens.
        code.names = None
        return same

    def _decode(self, address: int, head: Head) -> Code:
        where = self.layout.code
        objects = self.objects
        code = Code(
            address=address,
            kind=_kind(head.flags),
            head=head,
            file=objects.text(head.file),
            name=objects.text(head.name),
            qualified_name=objects.text(head.qualified_name) if head.qualified_name else "",
            first_line=head.first_line,
            stack_size=max(0, min(head.stack_size, MAX_STACK)),
            locals_count=head.locals_count,
            table=self._bytes(head.line_table),
        )
        if where.instructions is not None:
            code.start = address + where.instructions
        else:
            code.bytecode = self._bytes(head.bytecode)
            code.locals_count = len(self._name_locals(code))
        head_of_path, _, module = code.file.rpartition("/")
        if head_of_path == "asyncio" or head_of_path.endswith("/asyncio"):
            code.library = f"asyncio/{module}"
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
        head, objects = code.head, self.objects
        names: list[str] = []
        kinds: list[int] = []
        if self.layout.code.names is not None:
            names = [objects.text(item) for item in objects.items(head.names)]
            kinds = list(self._bytes(head.kinds))
        else:
            for at, kind in ((head.variables, PLAIN), (head.cells, CELL), (head.free, FREE)):
                for item in objects.items(at, MAX_LOCALS):
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
        assert self._headers is not None
        at, back, instruction, top, _ = self._headers.read(data)
        code = self.codes.get(self.untag(at) if where.tagged else at)
        if code is None or code.look != self._look:
            code = self.code(self.untag(at))
        first = address + where.locals
        stack = first + 8 * code.locals_count
        depth = (top - stack) // 8 if where.stack_top is None else top - code.locals_count
        if not 0 <= depth <= code.stack_size:
            depth = -1
        offset = instruction - code.start
        return FrameView(address, code, offset, first, stack, depth, back, (address, data))

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

    def trace(
        self, top: int, limit: int, searched: int
    ) -> tuple[list[Frame], list[FrameView], str]:
        """Read a whole stack, innermost frame first, with little work for each frame.

        Args:
            top: Address of the innermost frame.
            limit: Frames at which it is cut.
            searched: How many of the innermost frames are wanted as views as well.

        Returns:
            The frames; those of them, as views, that are to be searched or whose value stack is not
            empty; and why there are no more, ``""`` if these are all.
        """
        shown: list[Frame] = []
        views: list[FrameView] = []
        seen: set[int] = set()
        try:
            while top:
                if top in seen or len(shown) >= limit:
                    return shown, views, ENDLESS if top in seen else CUT
                seen.add(top)
                frame, top = self._trace_one(top, views, wanted=len(shown) < searched)
                if frame is not None:
                    shown.append(frame)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            return shown, views, str(error)
        return shown, views, ""

    def _trace_one(
        self, address: int, views: list[FrameView], *, wanted: bool
    ) -> tuple[Frame | None, int]:
        """Return one frame and the address of its caller's; add a view where it may be needed."""
        where = self.layout.frame
        if where is not None and not wanted:
            assert self._headers is not None
            data = self.objects.memory.read(address, where.locals)
            at, back, instruction, top, owner = self._headers.read(data)
            if owner in where.skipped_owners:
                return None, back
            code = self.codes.get(self.untag(at) if where.tagged else at)
            if code is not None and code.look == self._look:
                empty = (
                    code.locals_count
                    if where.stack_pointer is None
                    else (address + where.locals + 8 * code.locals_count)
                )
                known = code.shown.get((instruction - code.start, ""))
                if top == empty and known is not None:
                    return known, back
        view, back = self.frame_and_back(address)
        if view is None:
            return None, back
        if view.depth or wanted:
            views.append(view)
        return view.shown(), back

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
