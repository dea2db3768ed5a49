"""CPython 3.13. Read from the DWARF of 3.13.0, confirmed on 3.13.5, 3.13.15 and 3.13.18.

``PyThreadState`` grew from 304 to 312 bytes within the minor version, and what follows it moved:
the target's own ``_Py_DebugOffsets`` say where.
"""

from __future__ import annotations

from typing import Final

from hangwatch.remote.layouts.schema import (
    CodeLayout,
    DictLayout,
    FutureLayout,
    GeneratorLayout,
    InterpreterFrameLayout,
    InterpreterLayout,
    Layout,
    RuntimeLayout,
    TaskLayout,
    TextLayout,
    ThreadLayout,
    TypeLayout,
)

LAYOUT: Final = Layout(
    version=(3, 13),
    runtime=RuntimeLayout(size=283320, interpreters_head=632),
    interpreter=InterpreterLayout(next=7264, id=7272, threads=7344, modules=7656),
    thread=ThreadLayout(
        size=304, next=8, ident=152, native_id=160, dict=128, frame=72, running_loop=304
    ),
    code=CodeLayout(
        size=208,
        flags=48,
        first_line=68,
        stack_size=64,
        file=112,
        name=120,
        qualified_name=128,
        line_table=136,
        instructions=200,
        locals_count=72,
        names=96,
        kinds=104,
    ),
    frame=InterpreterFrameLayout(
        code=0,
        previous=8,
        instruction=56,
        owner=70,
        locals=72,
        stack_top=64,
        skipped_owners=frozenset({3}),
    ),
    generator=GeneratorLayout(
        qualified_name=32,
        frame=72,
        state=67,
        created=-3,
        suspended=frozenset({-2, -1}),
        executing=0,
        cleared=4,
        yielding_from=frozenset({-1}),
    ),
    future=FutureLayout(size=104, state=96),
    task=TaskLayout(
        size=144, waiter=112, coroutine=120, name=128, must_cancel=100, must_cancel_mask=0x4
    ),
    mapping=DictLayout(attributes="inline", values=8),
    type=TypeLayout(size=416, cached_keys=880),
    text=TextLayout(ascii_size=40, compact_size=56),
    sizes={
        "coroutine": 144,
        "generator": 144,
        "async_generator": 144,
        "code": 200,
        "dict": 48,
        "set": 200,
        "frame": 136,
        "str": 64,
        "tuple": 24,
        "_asyncio.Task": 144,
        "_asyncio.Future": 104,
    },
    words={
        "runtime.size": 24,
        "runtime.interpreters_head": 40,
        "interpreter.next": 64,
        "interpreter.id": 56,
        "interpreter.threads": 72,
        "interpreter.modules": 88,
        "thread.size": 152,
        "thread.next": 168,
        "thread.ident": 192,
        "thread.native_id": 200,
        "thread.frame": 184,
        "code.size": 272,
        "code.first_line": 312,
        "code.file": 280,
        "code.name": 288,
        "code.qualified_name": 296,
        "code.line_table": 304,
        "code.instructions": 344,
        "code.names": 328,
        "code.kinds": 336,
        "frame.code": 240,
        "frame.previous": 232,
        "frame.instruction": 248,
        "frame.owner": 264,
        "frame.locals": 256,
        "type.size": 368,
        "type.name": 376,
        "type.flags": 392,
        "text.ascii_size": 560,
        "tuple_items": 408,
        "gil": 112,
        "thread.running_loop": 152,
    },
    gil=16,
)
