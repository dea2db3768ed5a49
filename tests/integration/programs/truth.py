"""What a program says of its own tasks, by Python's introspection. For the programs here."""

import asyncio
import gc
import types

GENERATORS = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
WRAPPERS = ("coroutine_wrapper", "async_generator_asend", "anext_awaitable")


def follow(link):
    """Return the frames of an await chain, and the future in which it ends, or 0."""
    frames = []
    while True:
        kind = type(link).__name__
        if isinstance(link, types.CoroutineType):
            frame, following = link.cr_frame, link.cr_await
        elif isinstance(link, types.GeneratorType):
            frame, following = link.gi_frame, link.gi_yieldfrom
        elif isinstance(link, types.AsyncGeneratorType):
            frame, following = link.ag_frame, link.ag_await
        elif kind in WRAPPERS:
            link = next(
                each
                for each in gc.get_referents(link)
                if isinstance(each, GENERATORS) or type(each).__name__ in WRAPPERS
            )
            continue
        elif kind == "FutureIter":
            targets = [each for each in gc.get_referents(link) if not isinstance(each, type)]
            return frames, id(targets[0]) if targets else 0
        else:
            return frames, 0
        if frame is None:
            return frames, 0
        name = getattr(frame.f_code, "co_qualname", link.__qualname__)
        frames.append([name, frame.f_code.co_filename, frame.f_lineno])
        if following is None:
            this = frame.f_locals.get("self")
            is_future = frame.f_code.co_name == "__await__" and asyncio.isfuture(this)
            return frames, id(this) if is_future else 0
        link = following


def of(task):
    """Return what a task is, for JSON."""
    waiter = task._fut_waiter
    frames, end = ([], 0) if task.done() else follow(task.get_coro())
    return {
        "name": task.get_name(),
        "state": "cancelled" if task.cancelled() else "done" if task.done() else "pending",
        "chain": frames,
        "end": end,
        "waiter": id(waiter) if waiter is not None else 0,
        "loop": id(task.get_loop()),
        "must_cancel": bool(task._must_cancel),
    }
