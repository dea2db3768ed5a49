"""One step along an await chain.

An await chain is a singly linked list through the heap: a suspended coroutine keeps the object
that it awaits on top of its frame's value stack; that object is another coroutine, a generator, an
async generator's ``asend``, a wrapper around one of these, or the iterator of a future, where the
chain ends. ``Steps.take`` reads one link.

How to know that a suspended frame *awaits* something, rather than merely yields:

- 3.10: the next instruction is ``YIELD_FROM``.
- 3.11, 3.12: the next instruction is ``RESUME`` with an argument of 2 (yield from) or 3 (await).
- 3.13 on: the frame's state byte says so.

Cython compiles coroutines to C. Their type tells where its fields are (``tp_members`` name
``cr_await``, ``gi_yieldfrom`` or ``ag_await``, which in CPython's own types are getsets, never
members), and the fields between have kept their order since Cython 0.29. They keep no line, but
the number of the await point, in source order.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from hangwatch.remote.errors import UnreadableError
from hangwatch.remote.frames import Frames, FrameView, Witness
from hangwatch.remote.layouts import schema
from hangwatch.remote.objects import HEAP_TYPE, TypeInfo
from hangwatch.remote.results import Frame

NATIVE: Final = frozenset({"coroutine", "generator", "async_generator"})
WRAPPERS: Final = frozenset(
    {
        "async_generator_asend",
        "async_generator_athrow",
        "async_generator_aclose",
        "anext_awaitable",
        "coroutine_wrapper",
    }
)
"""The last part of their type's name; Cython has its own types of the same names."""

FUTURE_ITERATORS: Final = frozenset({"_asyncio.FutureIter", "FutureIter"})
OBJECT_CODES: Final = (6, 16)
"""``T_OBJECT`` and ``T_OBJECT_EX`` of ``PyMemberDef``."""
BOOL_CODE: Final = 14
MAX_AWAIT_POINTS: Final = 10_000

EndKind = Literal["future", "yield", "running", "created", "finished", "unknown", "cut"]

_WORD: Final = struct.Struct("<Q")
_INT: Final = struct.Struct("<i")
_BYTE: Final = struct.Struct("<b")


@dataclass(frozen=True, slots=True)
class End:
    """Where a chain ends.

    Attributes:
        kind: ``future``: at ``address``. ``yield``: nothing is awaited, the task was told to come
            again. ``running``: it executes. ``created``: not started. ``finished``: over, which a
            pending task should not be. ``unknown``: an object of unknown type. ``cut``: too long.
        address: The object.
        detail: The unknown type's name.
    """

    kind: EndKind
    address: int = 0
    detail: str = ""


@dataclass(slots=True)
class Step:
    """One link: perhaps a frame, and then the next object or the end."""

    frame: Frame | None = None
    view: FrameView | None = None
    next: int = 0
    end: End | None = None
    witnesses: list[Witness] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CythonFields:
    """Where a Cython coroutine type keeps what a chain needs."""

    size: int
    awaited: int
    qualified_name: int
    module: int
    code: int
    label: int


class Steps:
    """Takes steps along await chains."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.objects = frames.objects
        self.memory = frames.objects.memory
        self.layout = frames.layout
        self._takers: dict[int, Callable[[int], Step]] = {}

    def forget(self) -> None:
        """Find out anew how to read each type: an address may have a new tenant."""
        self._takers.clear()

    def take(self, address: int) -> Step:
        """Read the link at *address*.

        Raises:
            UnreadableError: It makes no sense; the chain is torn here.
        """
        at = self.memory.type_word(address)
        take = self._takers.get(at)
        if take is None:
            take = self._takers[at] = self._taker(self.objects.type_at(at))
        return take(address)

    def _taker(self, kind: TypeInfo) -> Callable[[int], Step]:
        """Return how to read a link of that type."""
        fields = self._find_fields(kind)
        if fields is not None:
            return functools.partial(self._cython_step, fields)
        if kind.name in NATIVE and not kind.flags & HEAP_TYPE:
            if self.layout.generator.frame_object is not None:
                return self._generator_310
            return self._generator
        if kind.name in FUTURE_ITERATORS:
            return self._future_iterator
        if kind.name.rsplit(".", 1)[-1] in WRAPPERS:
            return self._wrapper
        return functools.partial(self._unknown, kind.name)

    def _wrapper(self, address: int) -> Step:
        data = self.memory.read(address + 8, schema.WRAPPED_GENERATOR)
        inner = _WORD.unpack_from(data, schema.WRAPPED_GENERATOR - 8)[0]
        return Step(next=inner, witnesses=[(address + 8, data)])

    def _unknown(self, name: str, address: int) -> Step:
        return Step(
            end=End("unknown", address, name),
            witnesses=[(address + 8, self.memory.read(address + 8, 8))],
        )

    def _future_iterator(self, address: int) -> Step:
        data = self.memory.read(address + 8, schema.FUTURE_ITERATOR_FUTURE)
        future = _WORD.unpack_from(data, schema.FUTURE_ITERATOR_FUTURE - 8)[0]
        # An exhausted iterator has dropped its future.
        end = End("future", future) if future else End("finished", address)
        return Step(end=end, witnesses=[(address + 8, data)])

    # ------------------------------------------------------------------ CPython's own

    def _generator(self, address: int) -> Step:
        where = self.layout.generator
        assert where.state is not None
        assert where.frame is not None
        assert self.layout.frame is not None
        data = self.memory.read(address, where.frame + self.layout.frame.locals)
        state = _BYTE.unpack_from(data, where.state)[0]
        witnesses: list[Witness] = [(address + 8, data[8:])]
        if state == where.cleared:
            return Step(end=End("finished", address), witnesses=witnesses)
        view = self.frames.decode(address + where.frame, data[where.frame :])
        step = Step(frame=view.shown(), view=view, witnesses=witnesses)
        if state in where.suspended:
            self._follow(step, view, self._awaits(view, state))
        elif state == where.executing:
            view.depth = -1
            step.end = End("running", address)
        elif state == where.created:
            step.end = End("created", address)
        else:
            step.end = End("finished", address)
        return step

    def _awaits(self, view: FrameView, state: int) -> bool:
        """Whether a suspended frame awaits, rather than yields (3.11 on)."""
        where = self.layout.generator
        if where.yielding_from is not None:
            return state in where.yielding_from
        opcode, argument = self.memory.read(view.code.start + view.offset + 2, 2)
        return opcode in where.resume and argument & 3 >= 2

    def _generator_310(self, address: int) -> Step:
        where = self.layout.generator
        assert where.frame_object is not None
        data = self.memory.read(address, where.frame_object + 8)
        at = _WORD.unpack_from(data, where.frame_object)[0]
        witnesses: list[Witness] = [(address + 8, data[8:])]
        if not at:
            return Step(end=End("finished", address), witnesses=witnesses)
        view = self.frames.frame(at)
        assert view is not None
        witnesses.append(view.witness)
        step = Step(frame=view.shown(), view=view, witnesses=witnesses)
        state = _BYTE.unpack(view.witness[1][-1:])[0]
        if state == where.executing:
            step.end = End("running", address)
        elif state == where.created:
            step.end = End("created", address)
        elif state not in where.suspended:
            step.end = End("finished", address)
        else:
            following = view.code.bytecode[view.offset + 2 : view.offset + 3]
            awaits = view.offset >= 0 and following == bytes([where.yield_from or 0])
            self._follow(step, view, awaits)
        return step

    def _follow(self, step: Step, view: FrameView, awaits: bool) -> None:
        """Set the next link of a suspended frame."""
        slot = self.layout.generator.awaited_slot
        if awaits and view.depth >= slot:
            at = view.stack + 8 * (view.depth - slot)
            data = self.memory.read(at, 8)
            step.witnesses.append((at, data))
            step.next = self.frames.untag(_WORD.unpack(data)[0])
            if not step.next:
                raise UnreadableError(f"the frame at {view.address:#x} awaits nothing")
            return
        step.end = End("yield")
        if view.code.name == "__await__" and view.code.kind == "generator":
            # A future in pure Python: ``yield self``.
            future = self.frames.locals(view, {"self"}).get("self", 0)
            if future and "Future" in self.objects.type_of(future).lineage:
                step.end = End("future", future)

    # ------------------------------------------------------------------ Cython's

    def _find_fields(self, kind: TypeInfo) -> CythonFields | None:
        """Return the layout of a Cython coroutine type, ``None`` for any other type."""
        if not kind.members:
            return None
        members = self.objects.members_of(kind)
        awaited = next(
            (members[name] for name in ("cr_await", "gi_yieldfrom", "ag_await") if name in members),
            None,
        )
        if awaited is None or awaited[0] not in OBJECT_CODES:
            return None
        code = next(
            (members[name][1] for name in ("cr_code", "gi_code", "ag_code") if name in members), 0
        )
        running = next(
            (
                members[name][1]
                for name in ("cr_running", "gi_running")
                if name in members and members[name][0] == BOOL_CODE
            ),
            0,
        )
        if "__module__" in members:
            module = members["__module__"][1]
        else:
            # Cython 0.29: generators have ``gi_code`` after it, async generators nothing.
            module = code - 8 if code else awaited[1] + 24
        # ``yieldfrom``, perhaps ``yieldfrom_am_send``, ``gi_name``, ``gi_qualname``, module.
        if module - 16 - awaited[1] not in (8, 16):
            return None
        if running:
            label = running - 4
        elif "ag_await" in members:
            label = module + 24
        else:
            label = kind.basic_size - 8
        if not module < label <= kind.basic_size - 8:
            return None
        return CythonFields(
            size=kind.basic_size,
            awaited=awaited[1],
            qualified_name=module - 8,
            module=module,
            code=code,
            label=label,
        )

    def _cython_step(self, fields: CythonFields, address: int) -> Step:
        data = self.memory.read(address, fields.size)

        def word(offset: int) -> int:
            value: int = _WORD.unpack_from(data, offset)[0]
            return value

        label = _INT.unpack_from(data, fields.label)[0]
        running = data[fields.label + 4]
        if not -1 <= label < MAX_AWAIT_POINTS or running > 1:
            raise UnreadableError(f"the Cython coroutine at {address:#x} is in no known state")
        module = word(fields.module)
        file, line = (f"<cython {self.objects.text(module)}>" if module else "<cython>"), None
        if fields.code and word(fields.code):
            try:
                code = self.frames.code(word(fields.code))
                file, line = code.file, code.first_line
            except UnreadableError:
                pass
        frame = Frame(
            function=self.objects.text(word(fields.qualified_name)),
            file=file,
            line=line,
            kind="cython",
            note=f"await point {label}" if label > 0 and not running else "",
        )
        step = Step(frame=frame, witnesses=[(address + 8, data[8:])])
        step.next = word(fields.awaited)
        if running:
            # Cython leaves the awaited object set while that runs.
            if not step.next:
                step.end = End("running", address)
        elif label == 0:
            step.next, step.end = 0, End("created", address)
        elif label < 0:
            step.next, step.end = 0, End("finished", address)
        elif not step.next:
            step.end = End("yield")
        return step
