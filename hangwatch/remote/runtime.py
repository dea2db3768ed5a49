"""Finding CPython in a process, and deciding which layout to believe.

Four questions, in this order, each answered by the target's own memory:

1. *Where is the runtime?* Every CPython exports ``_PyRuntime``, one big static structure from
   which interpreters, threads and modules are reached. See ``elf`` for the look-up.
2. *Which version is it?* ``Py_Version`` holds it (3.11 on). From 3.13 on, ``_PyRuntime`` begins
   with ``_Py_DebugOffsets``: the cookie ``xdebugpy``, the version, and whether the build is
   free-threaded. 3.10 has neither; there the table is tried and must prove itself.
3. *What does the target say about its own layout?* The words of ``_Py_DebugOffsets`` and of
   ``.AsyncioDebug`` replace those of the table. This is what carries across patch releases.
4. *Does it hold?* ``interpreter.modules`` must be a dictionary with ``sys`` and ``builtins``;
   ``sys.version`` must name the version; ``tp_basicsize`` of every type whose insides are read
   must be the one known for the version.

Any "no" is an ``UnknownLayoutError`` with the sentence that says which. Nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hangwatch.remote import elf, procfs
from hangwatch.remote.errors import NotPythonError, UnknownLayoutError, UnreadableError
from hangwatch.remote.layouts import LAYOUTS
from hangwatch.remote.layouts.schema import Layout
from hangwatch.remote.memory import LONGEST_READ, Memory

COOKIE: Final = b"xdebugpy"
RELEASE_LEVEL_FINAL: Final = 0xF
MAX_MODULES_TRIED: Final = 400
MAX_SCAN: Final = 32 << 20
MAX_OFFSET: Final = 1 << 22
"""A word of the target's own tables above this is garbage, not an offset."""

_PYTHON_NAME: Final = re.compile(r"python(\d)\.(\d+)")
_WORD: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Where CPython is in the target, and how to read it.

    Attributes:
        address: ``_PyRuntime``.
        version: Major and minor.
        layout: Bound to the target: its own words have replaced the table's.
        path: File that it was mapped from, as the target sees it.
        notes: What differed from the table and was taken from the target, for people.
    """

    address: int
    version: tuple[int, int]
    layout: Layout
    path: str
    notes: tuple[str, ...] = ()


def find(memory: Memory, pid: int) -> Runtime:
    """Find the runtime of process *pid* and bind the layout of its version.

    Raises:
        NotPythonError: There is none.
        UnknownLayoutError: It is one that is not known here.
    """
    maps = procfs.mappings(pid)
    if not procfs.machine_is_known():
        raise UnknownLayoutError("layouts are known for x86-64 only")
    tried = 0
    for path, base in _candidates(maps, procfs.executable(pid)):
        tried += 1
        found = _symbols(memory, pid, path, base)
        if found is not None:
            return _bind(memory, maps, path, *found)
    if not maps:
        raise NotPythonError(f"process {pid} has no memory: a kernel thread, or one that has ended")
    raise NotPythonError(
        f"process {pid} is not a CPython that can be read: none of its {tried} mapped files "
        "exports _PyRuntime"
    )


def _candidates(maps: Sequence[procfs.Mapping], program: str) -> Iterable[tuple[str, int]]:
    """Return mapped files, the likely ones first: libpython, the program, then all others."""
    bases: dict[str, int] = {}
    for mapping in maps:
        if mapping.offset == 0 and mapping.path.startswith("/"):
            bases.setdefault(mapping.path, mapping.start)

    def rank(path: str) -> int:
        name = path.removesuffix(" (deleted)").rsplit("/", 1)[-1]
        if name.startswith("libpython"):
            return 0
        if path == program:
            return 1
        return 2 if name.startswith("python") else 3

    return sorted(bases.items(), key=lambda item: rank(item[0]))[:MAX_MODULES_TRIED]


def _symbols(
    memory: Memory, pid: int, path: str, base: int
) -> tuple[elf.Symbol, elf.Symbol | None] | None:
    """Return ``_PyRuntime`` and, if there is one, ``Py_Version``."""
    try:
        image = elf.Image(memory, base)
    except UnreadableError:
        return None
    try:
        runtime = image.symbol("_PyRuntime")
        if runtime is not None:
            return runtime, image.symbol("Py_Version")
    except UnreadableError:
        pass
    name = path.rsplit("/", 1)[-1]
    if "python" not in name and path != procfs.executable(pid):
        return None
    return _symbols_of_file(Path(f"/proc/{pid}/root{path}"), image)


def _symbols_of_file(path: Path, image: elf.Image) -> tuple[elf.Symbol, elf.Symbol | None] | None:
    """The last resort, for programs that export nothing: ``.symtab`` of the file."""
    try:
        runtime = elf.file_symbol(path, "_PyRuntime")
        version = elf.file_symbol(path, "Py_Version")
    except (OSError, UnreadableError):
        return None
    if runtime is None:
        return None
    bias = image.bias

    def placed(symbol: elf.Symbol) -> elf.Symbol:
        return elf.Symbol(address=symbol.address + bias, size=symbol.size)

    return placed(runtime), placed(version) if version else None


def _bind(
    memory: Memory,
    maps: Sequence[procfs.Mapping],
    path: str,
    symbol: elf.Symbol,
    version_symbol: elf.Symbol | None,
) -> Runtime:
    version = _version(memory, path, symbol, version_symbol)
    layout = LAYOUTS.get(version)
    if layout is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in LAYOUTS)
        raise UnknownLayoutError(
            f"Python {version[0]}.{version[1]} is not known here; known are {known}"
        )
    notes: list[str] = []
    if layout.words:
        layout = _bind_debug_offsets(memory, symbol.address, layout, notes)
    elif symbol.size not in (0, layout.runtime.size):
        notes.append(
            f"_PyRuntimeState has {symbol.size} bytes, not {layout.runtime.size}: another patch "
            "release or build option"
        )
    if layout.asyncio_words:
        layout = _bind_asyncio_debug(memory, maps, path, layout, notes)
    return Runtime(
        address=symbol.address, version=version, layout=layout, path=path, notes=tuple(notes)
    )


def _version(
    memory: Memory, path: str, runtime: elf.Symbol, version: elf.Symbol | None
) -> tuple[int, int]:
    """Return major and minor; the table of 3.10 is tried where nothing tells."""
    if version is not None:
        word = memory.word(version.address)
        return word >> 24 & 0xFF, word >> 16 & 0xFF
    head = memory.read(runtime.address, 16)
    if head.startswith(COOKIE):
        word = _WORD.unpack_from(head, 8)[0]
        return word >> 24 & 0xFF, word >> 16 & 0xFF
    named = _PYTHON_NAME.search(path.rsplit("/", 1)[-1])
    if named:
        return int(named[1]), int(named[2])
    return 3, 10


def _bind_debug_offsets(memory: Memory, runtime: int, layout: Layout, notes: list[str]) -> Layout:
    """Replace the table's words by those of the target's ``_Py_DebugOffsets``.

    The order of its fields is fixed within a minor version only, so its version must match.
    """
    head = memory.read(runtime, max(*layout.words.values(), 16) + 8)
    major, minor = layout.version
    if not head.startswith(COOKIE):
        raise UnknownLayoutError(
            f"_PyRuntime of this Python {major}.{minor} does not begin with _Py_DebugOffsets"
        )
    word, free_threaded = struct.unpack_from("<QQ", head, 8)
    if (word >> 24 & 0xFF, word >> 16 & 0xFF) != layout.version:
        raise UnknownLayoutError(
            f"_Py_DebugOffsets are those of version {word:#x}, not of {major}.{minor}"
        )
    if free_threaded:
        raise UnknownLayoutError(
            f"this is a free-threaded build of Python {major}.{minor}: its structures are not "
            "known here; use a build with the GIL, or py-spy for the thread stacks"
        )
    if word >> 4 & 0xF != RELEASE_LEVEL_FINAL:
        notes.append(f"this is a pre-release of {major}.{minor} ({word:#x}): layouts may differ")
    found = {name: _WORD.unpack_from(head, offset)[0] for name, offset in layout.words.items()}
    return _replace_words(layout, found, notes, "_Py_DebugOffsets")


def _bind_asyncio_debug(
    memory: Memory,
    maps: Sequence[procfs.Mapping],
    path: str,
    layout: Layout,
    notes: list[str],
) -> Layout:
    """Replace the table's words by those of the target's ``.AsyncioDebug``.

    The symbol is local and section headers are not mapped. Its first seven words are however
    known (sizes and offsets in ``TaskObj``), so it is found by its contents, in the data of
    ``_asyncio`` or, where that is built in, of the interpreter. No file is opened.
    """
    task = layout.task
    if task.node is None:
        return layout
    start = struct.pack("<QQ", task.size, task.name)
    count = max(layout.asyncio_words.values()) + 1
    for mapping in maps:
        name = mapping.path.rsplit("/", 1)[-1]
        size = mapping.end - mapping.start
        if not (name.startswith("_asyncio.") or mapping.path == path):
            continue
        if "x" in mapping.permissions or "r" not in mapping.permissions:
            continue
        if size > min(MAX_SCAN, LONGEST_READ):
            continue
        try:
            data = memory.read(mapping.start, size)
        except UnreadableError:
            continue
        at = data.find(start)
        while at >= 0:
            if at % 8 == 0 and at + 8 * count <= len(data):
                words = struct.unpack_from(f"<{count}Q", data, at)
                if (words[5], words[6]) == (task.coroutine, task.node) and max(words) < MAX_OFFSET:
                    found = {field: words[i] for field, i in layout.asyncio_words.items()}
                    return _replace_words(layout, found, notes, ".AsyncioDebug")
            at = data.find(start, at + 1)
    if any(m.path.rsplit("/", 1)[-1].startswith("_asyncio.") for m in maps):
        notes.append(".AsyncioDebug was not found: the lists of tasks are taken from the table")
    return layout


def differences(layout: Layout) -> dict[str, int]:
    """Return the words of a bound layout that are not those of the table, by name."""
    table = LAYOUTS[layout.version]
    names = (*layout.words, *layout.asyncio_words)
    return {
        name: _word(layout, name) for name in names if _word(layout, name) != _word(table, name)
    }


def with_words(layout: Layout, words: Mapping[str, int]) -> Layout:
    """Return the layout of the table with words that a target had."""
    return _replace_words(layout, words, [], "what is known of the target")


def _word(layout: Layout, name: str) -> int:
    structure, _, attribute = name.partition(".")
    owner: Any = getattr(layout, structure)
    value: int = getattr(owner, attribute) if attribute else owner
    return value


def _replace_words(
    layout: Layout, words: Mapping[str, int], notes: list[str], source: str
) -> Layout:
    """Return *layout* with each named field replaced; zero means that the target has none."""
    for name, value in words.items():
        structure, _, attribute = name.partition(".")
        owner: Any = getattr(layout, structure) if attribute else layout
        field = attribute or structure
        known = getattr(owner, field)
        if value == known or (value == 0 and known):
            continue
        if value > MAX_OFFSET:
            raise UnknownLayoutError(f"{source} says that {name} is {value}: garbage")
        notes.append(f"{name} is {value}, not {known}: {source} of the target is believed")
        changed = dataclasses.replace(owner, **{field: value})
        layout = dataclasses.replace(layout, **{structure: changed}) if attribute else changed
    return layout
