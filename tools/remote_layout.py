"""Read the layout of a CPython build from its debug information, for ``hangwatch/remote/layouts``.

    python tools/remote_layout.py PYTHON            # print a layout file for the build
    python tools/remote_layout.py PYTHON --check    # compare with the layout that is known

PYTHON is an interpreter that you trust (it is run) and that has DWARF, as pyenv's builds have; gdb
must be there. Offsets come from DWARF, sizes of types from ``__basicsize__``. What no debug
information tells is copied from the nearest known version and has to be checked by hand: the
values of a frame's state, the opcodes of an await, how deep the awaited object lies, which owners
of a frame are no Python frames.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hangwatch.remote.layouts import LAYOUTS
from hangwatch.remote.layouts.schema import Layout

FIELDS: dict[str, tuple[str, ...]] = {
    "runtime.size": ("_PyRuntimeState",),
    "runtime.interpreters_head": ("_PyRuntimeState.interpreters.head",),
    "interpreter.next": ("PyInterpreterState.next",),
    "interpreter.id": ("PyInterpreterState.id",),
    "interpreter.threads": ("PyInterpreterState.threads.head", "PyInterpreterState.tstate_head"),
    "interpreter.modules": ("PyInterpreterState.imports.modules", "PyInterpreterState.modules"),
    "interpreter.tasks_head": ("PyInterpreterState.asyncio_tasks_head",),
    "thread.size": ("PyThreadState",),
    "thread.next": ("PyThreadState.next",),
    "thread.ident": ("PyThreadState.thread_id",),
    "thread.native_id": ("PyThreadState.native_thread_id",),
    "thread.dict": ("PyThreadState.dict",),
    "thread.frame": ("PyThreadState.frame", "PyThreadState.current_frame"),
    "thread.cframe": ("PyThreadState.cframe",),
    "thread.cframe_frame": ("_PyCFrame.current_frame",),
    "thread.running_loop": ("_PyThreadStateImpl.asyncio_running_loop",),
    "thread.running_task": ("_PyThreadStateImpl.asyncio_running_task",),
    "thread.tasks_head": ("_PyThreadStateImpl.asyncio_tasks_head",),
    "code.size": ("PyCodeObject",),
    "code.flags": ("PyCodeObject.co_flags",),
    "code.first_line": ("PyCodeObject.co_firstlineno",),
    "code.stack_size": ("PyCodeObject.co_stacksize",),
    "code.file": ("PyCodeObject.co_filename",),
    "code.name": ("PyCodeObject.co_name",),
    "code.qualified_name": ("PyCodeObject.co_qualname",),
    "code.line_table": ("PyCodeObject.co_linetable",),
    "code.instructions": ("PyCodeObject.co_code_adaptive",),
    "code.locals_count": ("PyCodeObject.co_nlocalsplus",),
    "code.names": ("PyCodeObject.co_localsplusnames",),
    "code.kinds": ("PyCodeObject.co_localspluskinds",),
    "code.bytecode": ("PyCodeObject.co_code",),
    "code.variables": ("PyCodeObject.co_varnames",),
    "code.cells": ("PyCodeObject.co_cellvars",),
    "code.free": ("PyCodeObject.co_freevars",),
    "frame_object.size": ("PyFrameObject.f_localsplus",),
    "frame_object.back": ("PyFrameObject.f_back",),
    "frame_object.code": ("PyFrameObject.f_code",),
    "frame_object.value_stack": ("PyFrameObject.f_valuestack",),
    "frame_object.depth": ("PyFrameObject.f_stackdepth",),
    "frame_object.generator": ("PyFrameObject.f_gen",),
    "frame_object.last": ("PyFrameObject.f_lasti",),
    "frame_object.state": ("PyFrameObject.f_state",),
    "frame_object.locals": ("PyFrameObject.f_localsplus",),
    "frame.code": ("_PyInterpreterFrame.f_executable", "_PyInterpreterFrame.f_code"),
    "frame.previous": ("_PyInterpreterFrame.previous",),
    "frame.instruction": ("_PyInterpreterFrame.instr_ptr", "_PyInterpreterFrame.prev_instr"),
    "frame.owner": ("_PyInterpreterFrame.owner",),
    "frame.locals": ("_PyInterpreterFrame.localsplus",),
    "frame.stack_top": ("_PyInterpreterFrame.stacktop",),
    "frame.stack_pointer": ("_PyInterpreterFrame.stackpointer",),
    "generator.qualified_name": ("PyCoroObject.cr_qualname",),
    "generator.frame_object": ("PyCoroObject.cr_frame",),
    "generator.frame": ("PyCoroObject.cr_iframe",),
    "generator.state": ("PyCoroObject.cr_frame_state",),
    "future.size": ("FutureObj",),
    "future.state": ("FutureObj.fut_state",),
    "future.loop": ("FutureObj.fut_loop",),
    "future.callback": ("FutureObj.fut_callback0",),
    "future.callbacks": ("FutureObj.fut_callbacks",),
    "task.size": ("TaskObj",),
    "task.waiter": ("TaskObj.task_fut_waiter",),
    "task.coroutine": ("TaskObj.task_coro",),
    "task.name": ("TaskObj.task_name",),
    "task.must_cancel": ("TaskObj.task_must_cancel",),
    "task.node": ("TaskObj.task_node",),
    "mapping.entries_count": ("PyDictKeysObject.dk_nentries",),
    "mapping.indices": ("PyDictKeysObject.dk_indices",),
    "mapping.values": ("PyDictValues.values",),
    "type.size": ("PyTypeObject",),
    "type.cached_keys": ("PyHeapTypeObject.ht_cached_keys",),
    "type.name": ("PyTypeObject.tp_name",),
    "type.basic_size": ("PyTypeObject.tp_basicsize",),
    "type.flags": ("PyTypeObject.tp_flags",),
    "type.members": ("PyTypeObject.tp_members",),
    "type.base": ("PyTypeObject.tp_base",),
    "type.dict": ("PyTypeObject.tp_dict",),
    "type.dict_offset": ("PyTypeObject.tp_dictoffset",),
    "text.ascii_size": ("PyASCIIObject",),
    "text.compact_size": ("PyCompactUnicodeObject",),
    "tuple_items": ("PyTupleObject.ob_item",),
}
"""Field of a layout to its possible places in C: a path is an offset, a bare type its size."""

GDB = """
import gdb, json

def place(path):
    name, *fields = path.split(".")
    try:
        kind = gdb.lookup_type(name)
    except gdb.error:
        try:
            kind = gdb.lookup_type("struct " + name)
        except gdb.error:
            return None
    if not fields:
        return kind.strip_typedefs().sizeof
    offset = 0
    for wanted in fields:
        kind = kind.strip_typedefs()
        field = next((each for each in flat(kind) if each[0] == wanted), None)
        if field is None:
            return None
        offset += field[1] // 8
        kind = field[2]
    return offset

def flat(kind, base=0):
    for field in kind.fields():
        if field.name:
            yield field.name, base + field.bitpos, field.type
        else:
            yield from flat(field.type.strip_typedefs(), base + field.bitpos)

print(json.dumps({path: place(path) for path in PATHS}))
"""

ASK = """
import asyncio, json, sys, sysconfig, types, _asyncio
kinds = [types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType, types.CodeType, dict,
         set, types.FrameType, str, tuple, _asyncio.Task, _asyncio.Future]
name = lambda kind: ("_asyncio." if kind.__module__ == "_asyncio" else "") + kind.__name__
path = next((line.split(None, 5)[5].strip() for line in open("/proc/self/maps")
             if "/libpython" in line), sys.executable)
print(json.dumps({"version": list(sys.version_info[:2]), "library": path,
                  "asyncio": getattr(_asyncio, "__file__", path),
                  "sizes": {name(kind): kind.__basicsize__ for kind in kinds}}))
"""


def places(path: str) -> dict[str, int]:
    """Return every place that the debug information of a file tells."""
    paths = sorted({each for candidates in FIELDS.values() for each in candidates})
    code = f"PATHS = {paths!r}\n{GDB}"
    done = subprocess.run(
        ["gdb", "-nx", "-batch", "-ex", f"python exec({code!r})", path],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, int | None] = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: place for name, place in found.items() if place is not None}


def read(python: str) -> tuple[tuple[int, int], dict[str, int], dict[str, int]]:
    """Return version, fields and type sizes of a build."""
    asked = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True)
    about = json.loads(asked.stdout)
    found = {**places(about["asyncio"]), **places(about["library"])}
    fields = {
        name: next(found[each] for each in candidates if each in found)
        for name, candidates in FIELDS.items()
        if any(each in found for each in candidates)
    }
    return (about["version"][0], about["version"][1]), fields, about["sizes"]


def flatten(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout by dotted name."""
    found: dict[str, Any] = {"tuple_items": layout.tuple_items}
    for field in dataclasses.fields(layout):
        part = getattr(layout, field.name)
        if dataclasses.is_dataclass(part):
            for inner in dataclasses.fields(part):
                found[f"{field.name}.{inner.name}"] = getattr(part, inner.name)
    return found


def check(layout: Layout, fields: dict[str, int], sizes: dict[str, int]) -> int:
    """Print what differs; return how much."""
    known = flatten(layout)
    differences = [
        f"{name}: known {known[name]}, DWARF {value}"
        for name, value in fields.items()
        if name in known and known[name] is not None and known[name] != value
    ]
    differences += [
        f"sizes[{name}]: known {layout.sizes[name]}, __basicsize__ {value}"
        for name, value in sizes.items()
        if layout.sizes.get(name) != value
    ]
    compared = sum(1 for name in fields if known.get(name) is not None)
    print(f"{compared} fields and {len(sizes)} sizes compared, {len(differences)} differ")
    print("\n".join(differences), end="\n" if differences else "")
    return len(differences)


def source(
    version: tuple[int, int], fields: dict[str, int], sizes: dict[str, int], model: Layout
) -> str:
    """Return a layout file, what DWARF does not tell taken from *model*."""
    ours, theirs = (".".join(map(str, each)) for each in (version, model.version))
    lines = [
        f'"""CPython {ours}. Read from DWARF; the rest from {theirs}, to be checked."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Final",
        "",
        "from hangwatch.remote.layouts.schema import *  # to be spelled out",
        "",
        "LAYOUT: Final = Layout(",
        f"    version={version!r},",
    ]
    for field in dataclasses.fields(model):
        part = getattr(model, field.name)
        if field.name == "version":
            continue
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            inner = ", ".join(
                f"{each.name}={fields.get(f'{field.name}.{each.name}', getattr(part, each.name))!r}"
                for each in dataclasses.fields(part)
            )
            lines.append(f"    {field.name}={type(part).__name__}({inner}),")
        else:
            value = sizes if field.name == "sizes" else fields.get(field.name, part)
            lines.append(f"    {field.name}={value!r},")
    return "\n".join([*lines, ")"])


def main() -> None:
    """Read a build and compare it, or print its layout."""
    parser = argparse.ArgumentParser(description="Read a CPython build's layout from its DWARF.")
    parser.add_argument("python", help="an interpreter with debug information; it is run")
    parser.add_argument("--check", action="store_true", help="compare with the known layout")
    arguments = parser.parse_args()
    version, fields, sizes = read(str(Path(arguments.python)))
    if not fields:
        sys.exit(f"{arguments.python} has no debug information")
    if arguments.check:
        sys.exit(1 if check(LAYOUTS[version], fields, sizes) else 0)
    model = LAYOUTS.get(version) or LAYOUTS[max(LAYOUTS)]
    print(source(version, fields, sizes, model))


if __name__ == "__main__":
    main()
