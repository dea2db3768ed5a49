"""One process, read once: its threads by the kernel, its Python stacks, its asyncio tasks.

Each part becomes one line of JSON behind its name, as soon as it is read, so that what comes later
can be lost alone. A part has a limit in bytes; what does not fit is thinned: of stacks, or of
chains, that are equal, some go first, and the part says how many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from hangwatch.remote import Limits, RemoteError, Snapshot, Thread, attach, probes
from hangwatch.remote.document import document
from hangwatch.rescue import kernel, numbers

BYTES: Final = 256 << 20
"""Copied from one process at a time; the memory of 20,000 tasks is a fifth of it."""

MAX_ROWS: Final = 100
"""Of one table of the engine's numbers."""

Item = dict[str, Any]


def parts(pid: int, start_ticks: int, *, seconds: float, limit: int) -> Iterator[bytes]:
    """Yield ``kernel``, ``threads`` and ``tasks`` with their JSON, and ``problem`` with a sentence.

    Args:
        pid: The process.
        start_ticks: When it started: its number may be another's by now.
        seconds: What reading its memory may take.
        limit: Bytes of all parts.
    """
    try:
        same = kernel.read_stat(pid).start_ticks == start_ticks
    except kernel.GONE:
        same = False
    if not same:
        yield b"problem it has ended"
        return
    threads = list(kernel.threads_now(pid))
    yield b"kernel " + _fit(threads, lambda thread: thread["wchan"], limit // 5, lambda kept: kept)
    on_processor = {thread["tid"] for thread in threads if thread["state"] == "R"}
    try:
        process = attach(pid, limits=Limits(seconds=seconds / 2, bytes=BYTES))
        stacks = process.threads()
        snapshot = process.tasks(state=probes.tables(numbers.PLAIN))
    except RemoteError as error:
        yield f"problem {error}".encode("utf-8", "replace")
        return
    shown = [_stack(pid, thread, thread.thread_id in on_processor) for thread in stacks]
    yield b"threads " + _fit(shown, lambda it: it["frames"], 3 * limit // 10, lambda kept: kept)
    yield b"tasks " + _tasks(snapshot, limit // 2)


def _stack(pid: int, thread: Thread, active: bool) -> Item:
    """Return a thread in the form of ``py-spy dump --json``, with what it waits for."""
    found: Item = {
        "pid": pid,
        "thread_id": thread.ident,
        "thread_name": thread.name or None,
        "os_thread_id": thread.thread_id or None,
        "active": active,
        "owns_gil": thread.holds_gil,
        "frames": [
            {"name": frame.function, "filename": frame.file, "line": frame.line or 0}
            for frame in thread.frames
        ],
    }
    if thread.torn:
        found["torn"] = thread.torn
    if thread.waits is not None:
        found["waits"] = {"type": thread.waits.type, "owner_thread_id": thread.waits.owner or None}
    return found


def _tasks(snapshot: Snapshot, limit: int) -> bytes:
    whole = document(snapshot)
    for table in whole.get("state", ()):
        table["left_out"] += max(0, len(table["rows"]) - MAX_ROWS)
        del table["rows"][MAX_ROWS:]
    told = {id_ for cycle in snapshot.waits.cycles for id_ in cycle}
    told.update(snapshot.waits.roots[:20])

    def around(kept: list[Item]) -> Item:
        ids = {task["id"] for task in kept}
        found = {
            **whole,
            "tasks": kept,
            "edges": [edge for edge in whole["edges"] if edge["from_id"] in ids],
            "problems": whole["problems"][:50],
            "roots": whole["roots"][:200],
            "root_ids": whole["root_ids"][:200],
        }
        if len(kept) < len(whole["tasks"]):
            message = f"{len(whole['tasks'])} tasks, of which {len(kept)} were kept"
            problem = {"kind": "truncated", "where": "the rescue", "message": message}
            found["problems"] = [problem, *found["problems"]]
        return found

    tasks = sorted(whole["tasks"], key=lambda task: task["id"] not in told)
    return _fit(tasks, lambda task: (task["state"], task["chain"]), limit, around)


def _fit(
    items: list[Item],
    likeness: Callable[[Item], object],
    limit: int,
    around: Callable[[list[Item]], object],
) -> bytes:
    """Return as much of *items* as fits, as JSON: fewer and fewer of those that are alike."""
    text = _dump(around(items))
    for each in (64, 16, 4, 1):
        if len(text) <= limit:
            return text
        counts: dict[str, int] = {}
        kept = []
        for item in items:
            key = repr(likeness(item))
            counts[key] = counts.get(key, 0) + 1
            if counts[key] <= each:
                kept.append(item)
        text = _dump(around(kept))
        items = kept
    while len(text) > limit and items:
        items = items[: len(items) // 2]
        text = _dump(around(items))
    return text


def _dump(value: object) -> bytes:
    # ASCII: it passes every terminal, log and locale between there and here.
    return json.dumps(value, separators=(",", ":")).encode("ascii")


__all__ = ["parts"]
