"""What a layout is: where the fields of CPython's structures lie in one minor version.

Offsets are bytes from the start of a structure, for x86-64 and a default build with the GIL.
``None`` means that this version has no such field. Names follow CPython's, spelled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLayout:
    """``_PyRuntimeState``."""

    size: int
    interpreters_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterLayout:
    """``PyInterpreterState``.

    Attributes:
        tasks_head: List of the asyncio tasks whose thread has ended (3.14 on).
    """

    next: int
    id: int
    threads: int
    modules: int
    tasks_head: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadLayout:
    """``PyThreadState`` and, from 3.13 on, ``_PyThreadStateImpl`` around it.

    Attributes:
        ident: The pthread handle; ``threading.get_ident()``.
        native_id: The kernel's thread id.
        dict: The thread-state dictionary, where asyncio keeps the running loop up to 3.12.
        frame: The current frame: a frame object in 3.10, an interpreter frame from 3.13 on.
        cframe: A C structure that leads to the interpreter frame, in 3.11 and 3.12.
        cframe_frame: Where in that structure.
        running_loop: The running asyncio loop, from 3.13 on.
        running_task: The task that runs on it, from 3.14 on.
        tasks_head: List of the asyncio tasks made in this thread, from 3.14 on.
    """

    size: int
    next: int
    ident: int
    native_id: int | None
    dict: int
    frame: int | None = None
    cframe: int | None = None
    cframe_frame: int = 0
    running_loop: int | None = None
    running_task: int | None = None
    tasks_head: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLayout:
    """``PyCodeObject``.

    Attributes:
        instructions: Where the instructions begin inside the object (3.11 on).
        bytecode: A bytes object with the instructions (3.10).
        names: Tuple of the names of all locals, cells and free variables (3.11 on).
        kinds: Bytes object that says which of them are what (3.11 on).
        variables, cells, free: Tuples of names (3.10).
    """

    size: int
    flags: int
    first_line: int
    stack_size: int
    file: int
    name: int
    line_table: int
    qualified_name: int | None = None
    instructions: int | None = None
    locals_count: int | None = None
    names: int | None = None
    kinds: int | None = None
    bytecode: int | None = None
    variables: int | None = None
    cells: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameObjectLayout:
    """``PyFrameObject`` of 3.10, which is the frame itself.

    Attributes:
        last: Index of the last instruction, in code units.
        depth: How many values lie on the value stack.
    """

    size: int
    back: int
    code: int
    value_stack: int
    depth: int
    generator: int
    last: int
    state: int
    locals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterFrameLayout:
    """``_PyInterpreterFrame``, from 3.11 on.

    Attributes:
        instruction: Pointer to the previous (3.11, 3.12) or current (3.13 on) instruction.
        stack_top: Index of the value stack's top in ``locals`` (up to 3.13).
        stack_pointer: Pointer to it; ``NULL`` while it lives in a register (3.14 on).
        owner: Who owns the frame.
        skipped_owners: Values of ``owner`` that mark C shims, which are no Python frames.
        tagged: Whether references carry tag bits (3.14 on).
    """

    code: int
    previous: int
    instruction: int
    owner: int
    locals: int
    stack_top: int | None = None
    stack_pointer: int | None = None
    skipped_owners: frozenset[int] = frozenset()
    tagged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLayout:
    """``PyGenObject``, ``PyCoroObject`` and ``PyAsyncGenObject``: one prefix for all three.

    Attributes:
        frame_object: Pointer to a frame object (3.10).
        frame: The interpreter frame inside the object (3.11 on).
        state: One byte that says what the frame does.
        created, suspended, executing, cleared: Its values; any other means completed.
        yielding_from: Values of ``state`` that say that it awaits something (3.13 on).
        resume: Opcodes of ``RESUME``; one with an argument of 2 or 3 follows an await
            (3.11, 3.12).
        yield_from: Opcode of ``YIELD_FROM`` (3.10).
        awaited_slot: How deep below the top of the value stack the awaited object lies.
    """

    qualified_name: int
    created: int
    suspended: frozenset[int]
    executing: int
    cleared: int | None
    frame_object: int | None = None
    frame: int | None = None
    state: int | None = None
    yielding_from: frozenset[int] | None = None
    resume: frozenset[int] = frozenset()
    yield_from: int | None = None
    awaited_slot: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureLayout:
    """``FutureObj``; the front part of ``TaskObj`` too."""

    size: int
    state: int
    loop: int = 16
    callback: int = 24
    callbacks: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLayout:
    """What ``TaskObj`` adds to a future.

    Attributes:
        must_cancel: Where, and with which mask: a whole int, or a bit.
        node: Its link in a list of all tasks (3.14 on).
    """

    size: int
    waiter: int
    coroutine: int
    name: int
    must_cancel: int
    must_cancel_mask: int
    node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DictLayout:
    """``PyDictKeysObject``, and how an instance keeps its attributes.

    Attributes:
        log2: Whether sizes are kept as logarithms (3.11 on).
        values: Where the values begin in ``PyDictValues``.
        attributes: Where an instance's attributes are.
            ``offset``: a dict at ``tp_dictoffset`` (3.10).
            ``before``: two words before the object: values, or a dict (3.11).
            ``tagged``: one word before it: values if its lowest bit is set, else a dict (3.12).
            ``inline``: a dict in a word before it, else values behind the object (3.13 on).
    """

    attributes: str
    log2: bool = True
    entries_count: int = 24
    indices: int = 32
    values: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeLayout:
    """``PyTypeObject`` and ``PyHeapTypeObject``."""

    size: int
    cached_keys: int
    name: int = 24
    basic_size: int = 32
    item_size: int = 40
    flags: int = 168
    members: int = 240
    base: int = 256
    dict: int = 264
    dict_offset: int = 288


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLayout:
    """``PyASCIIObject`` and ``PyCompactUnicodeObject``: their sizes are where characters begin."""

    ascii_size: int
    compact_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One minor version of CPython.

    Attributes:
        version: Major and minor.
        tuple_items: Where the items of a tuple begin.
        tagged_integers: Whether ``int`` keeps sign and length in one tag word (3.12 on).
        sizes: ``tp_basicsize`` of types whose insides are read: the same in every build of a
            minor version that was seen, so a difference means an unknown layout.
        words: Where ``_Py_DebugOffsets`` of the target keeps the true value of a field, by
            ``structure.field``: the target's own word replaces the table's (3.13 on).
        asyncio_words: The same for ``.AsyncioDebug``, by index of the word (3.14 on).
        gil: Offset of ``_gil_runtime_state`` in the runtime (3.10, 3.11), or of the pointer to it
            in the interpreter (3.12 on).
    """

    version: tuple[int, int]
    runtime: RuntimeLayout
    interpreter: InterpreterLayout
    thread: ThreadLayout
    code: CodeLayout
    frame_object: FrameObjectLayout | None = None
    frame: InterpreterFrameLayout | None = None
    generator: GeneratorLayout
    future: FutureLayout
    task: TaskLayout
    mapping: DictLayout
    type: TypeLayout
    text: TextLayout
    tuple_items: int = 24
    tagged_integers: bool = True
    sizes: Mapping[str, int]
    words: Mapping[str, int] = field(default_factory=dict)
    asyncio_words: Mapping[str, int] = field(default_factory=dict)
    gil: int


# The same in every version from 3.10 to 3.15.
MODULE_DICT = 16
CELL_CONTENTS = 16
WEAK_REFERENCE_OBJECT = 16
FUTURE_ITERATOR_FUTURE = 16
WRAPPED_GENERATOR = 16
LIST_ITEMS = 24
SET_USED = 24
SET_MASK = 32
SET_TABLE = 40
DICT_KEYS = 32
DEQUE_LENGTH = 16
DICT_USED = 16
TEXT_LENGTH = 16
FUNCTION_NAME = 32
FUNCTION_QUALIFIED_NAME = 40
FUNCTION_CODE = 48
FUNCTION_CLOSURE = 72
METHOD_FUNCTION = 16
METHOD_SELF = 24
BUILTIN_METHOD_DEF = 16
BUILTIN_SELF = 24
DESCRIPTOR_NAME = 24
MEMBER_DESCRIPTOR_DEF = 40
