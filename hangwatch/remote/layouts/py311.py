"""CPython 3.11. Read from the DWARF of 3.11.7; 3.11.2 (Debian) is the same."""

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
    version=(3, 11),
    runtime=RuntimeLayout(size=166688, interpreters_head=40),
    interpreter=InterpreterLayout(next=0, id=48, threads=16, modules=888),
    thread=ThreadLayout(
        size=360, next=8, ident=152, native_id=160, dict=128, cframe=56, cframe_frame=8
    ),
    code=CodeLayout(
        size=192,
        flags=48,
        first_line=72,
        stack_size=68,
        file=112,
        name=120,
        qualified_name=128,
        line_table=136,
        instructions=184,
        locals_count=76,
        names=96,
        kinds=104,
    ),
    frame=InterpreterFrameLayout(
        code=32, previous=48, instruction=56, owner=69, locals=72, stack_top=64
    ),
    generator=GeneratorLayout(
        qualified_name=40,
        frame=80,
        state=75,
        created=-2,
        suspended=frozenset({-1}),
        executing=0,
        cleared=4,
        # RESUME and RESUME_QUICK.
        resume=frozenset({151, 150}),
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
    mapping=DictLayout(attributes="before"),
    type=TypeLayout(size=408, cached_keys=872),
    text=TextLayout(ascii_size=48, compact_size=72),
    tagged_integers=False,
    sizes={
        "coroutine": 152,
        "generator": 152,
        "async_generator": 152,
        "code": 184,
        "dict": 48,
        "set": 200,
        "frame": 120,
        "str": 80,
        "tuple": 24,
        "_asyncio.Task": 176,
        "_asyncio.Future": 128,
    },
    gil=360,
)
