"""A snapshot as JSON: the contracts ``hangwatch.tasks/1`` and ``hangwatch.stacks/1``. Pure.

Ids are addresses in the target, the same as ``id()`` there. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hangwatch.remote.grouping import Motion
from hangwatch.remote.results import Frame, Loop, Snapshot, StateRow, StateTable, Task, Thread

SCHEMA: Final = "hangwatch.tasks/1"
STACKS_SCHEMA: Final = "hangwatch.stacks/1"


def document(
    snapshot: Snapshot, threads: Sequence[Thread] | None = None, motion: Motion | None = None
) -> dict[str, Any]:
    """Return a snapshot as what ``json.dumps`` takes."""
    names = {task.id: task.name for task in snapshot.tasks}
    chains: dict[int, list[dict[str, Any]]] = {}
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "pid": snapshot.pid,
        "python": snapshot.python,
        "elapsed_s": round(snapshot.elapsed, 6),
        "interpreters": [
            {"id": each.id, "modules": each.modules, "asyncio": each.asyncio}
            for each in snapshot.interpreters
        ],
        "loops": [_loop(loop) for loop in snapshot.loops],
        "tasks": [_task(task, names, chains) for task in snapshot.tasks],
        "edges": [
            {
                "from": names.get(edge.waiter),
                "to": names.get(edge.awaited),
                "from_id": edge.waiter,
                "to_id": edge.awaited,
                "kind": edge.kind,
                "object": edge.object or None,
                "alternative": edge.alternative,
            }
            for edge in snapshot.waits.edges
        ],
        "cycles": [[names.get(id_) for id_ in cycle] for cycle in snapshot.waits.cycles],
        "cycle_ids": [list(cycle) for cycle in snapshot.waits.cycles],
        "roots": [names.get(id_) for id_ in snapshot.waits.roots],
        "root_ids": list(snapshot.waits.roots),
        "actors": list(snapshot.actors),
        "notes": list(snapshot.notes),
        "problems": [
            {"kind": each.kind, "where": each.where, "message": each.message}
            for each in snapshot.problems
        ],
    }
    if snapshot.state is not None:
        found["state"] = [_state(table) for table in snapshot.state]
    if threads is not None:
        found["threads"] = [_thread(thread) for thread in threads]
    if motion is not None:
        found["motion"] = {
            "moved": list(motion.moved),
            "still": list(motion.still),
            "new": list(motion.new),
            "gone": list(motion.gone),
            "wakeups": {str(id_): count for id_, count in motion.loops.items()},
        }
    return found


def stacks(snapshot: Snapshot) -> dict[str, Any]:
    """Return the threads of a snapshot by themselves: ``hangwatch.stacks/1``.

    Stacks of one program have most of their frames in common. Each is there once, and a thread has
    their numbers, innermost first.
    """
    numbers: dict[int, int] = {}
    frames: list[dict[str, Any]] = []
    threads = []
    for thread in snapshot.threads or ():
        for frame in thread.frames:
            if id(frame) not in numbers:
                numbers[id(frame)] = len(frames)
                frames.append(_frame(frame))
        threads.append(
            {**_thread(thread), "frames": [numbers[id(frame)] for frame in thread.frames]}
        )
    return {
        "schema": STACKS_SCHEMA,
        "pid": snapshot.pid,
        "python": snapshot.python,
        "frames": frames,
        "threads": threads,
    }


def _loop(loop: Loop) -> dict[str, Any]:
    return {
        "id": loop.id,
        "thread_id": loop.thread_id,
        "thread_ident": loop.thread_ident,
        "interpreter": loop.interpreter,
        "type": loop.type,
        "ready": loop.ready,
        "scheduled": loop.scheduled,
        "closed": loop.closed,
    }


def _task(
    task: Task, names: Mapping[int, str], chains: dict[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    # Thousands of tasks have equal chains: they share one here as well.
    chain = chains.get(id(task.chain))
    if chain is None:
        chain = chains[id(task.chain)] = [_frame(frame) for frame in task.chain]
    awaited = [id_ for id_ in task.awaits.tasks if id_ in names]
    due = task.awaits.due_in
    return {
        "id": task.id,
        "name": task.name,
        "state": task.state,
        "loop": task.loop,
        "interpreter": task.interpreter,
        "chain": chain,
        "awaits": {
            "kind": task.awaits.kind,
            "detail": task.awaits.detail,
            "task": names[awaited[0]] if len(awaited) == 1 else None,
            "tasks": [{"id": id_, "name": names[id_]} for id_ in awaited],
            "object": task.awaits.object or None,
            "due_in_s": None if due is None else round(due, 3),
        },
        "holds": [
            {"object": hold.object, "type": hold.type, "certain": hold.certain}
            for hold in task.holds
        ],
        "waiter": task.waiter or None,
        "must_cancel": task.must_cancel,
        "torn": task.torn or None,
    }


def _frame(frame: Frame) -> dict[str, Any]:
    found: dict[str, Any] = {
        "function": frame.function,
        "file": frame.file,
        "line": frame.line,
        "kind": frame.kind,
    }
    if frame.note:
        found["note"] = frame.note
    return found


def _thread(thread: Thread) -> dict[str, Any]:
    return {
        "thread_id": thread.thread_id,
        "thread_ident": thread.ident,
        "name": thread.name,
        "interpreter": thread.interpreter,
        "loop": thread.loop or None,
        "frames": [_frame(frame) for frame in thread.frames],
        "torn": thread.torn or None,
        "holds_gil": thread.holds_gil,
        "waits": {
            "type": thread.waits.type,
            "object": thread.waits.object,
            "owner_ident": thread.waits.owner or None,
        }
        if thread.waits
        else None,
    }


def _state(table: StateTable) -> dict[str, Any]:
    return {
        "name": table.name,
        "where": table.where or None,
        "rows": [_row(row) for row in table.rows],
        "left_out": table.left_out,
        "absent": table.absent or None,
    }


def _row(row: StateRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "task_id": row.task or None,
        "values": dict(row.values),
        "absent": dict(row.absent),
        "moved": list(row.moved),
    }
