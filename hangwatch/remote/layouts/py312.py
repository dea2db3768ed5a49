"""CPython 3.12. Read from the DWARF of 3.12.1; 3.12.10 (python-build-standalone) is the same."""

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
    version=(3, 12),
    runtime=RuntimeLayout(size=459944, interpreters_head=40),
    interpreter=InterpreterLayout(next=0, id=8, threads=72, modules=944),
    thread=ThreadLayout(
        size=288, next=8, ident=136, native_id=144, dict=112, cframe=56, cframe_frame=0
    ),
    code=CodeLayout(
        size=200,
        flags=48,
        first_line=68,
        stack_size=64,
        file=112,
        name=120,
        qualified_name=128,
        line_table=136,
        instructions=192,
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
        created=-2,
        suspended=frozenset({-1}),
        executing=0,
        cleared=4,
        # RESUME and INSTRUMENTED_RESUME.
        resume=frozenset({151, 240}),
    ),
    future=FutureLayout(size=128, state=88),
    task=TaskLayout(
        size=176,
        waiter=128,
        coroutine=136,
        name=144,
        must_cancel=160,
        must_cancel_mask=0xFFFFFFFF,
    ),
    mapping=DictLayout(attributes="tagged"),
    type=TypeLayout(size=416, cached_keys=880),
    text=TextLayout(ascii_size=40, compact_size=56),
    sizes={
        "coroutine": 144,
        "generator": 144,
        "async_generator": 144,
        "code": 192,
        "dict": 48,
        "set": 200,
        "frame": 120,
        "str": 64,
        "tuple": 24,
        "_asyncio.Task": 176,
        "_asyncio.Future": 128,
    },
    gil=384,
)
