"""Sums over many tasks: equal ones counted, and what moved between two readings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.remote.results import Frame, Loop, Snapshot, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tasks with the same state, await chain and kind of await, on the same loop.

    Attributes:
        chain: Their common chain, outermost first.
        tasks: They, in the order of the snapshot.
        deadlocked: One of them is part of a deadlock.
    """

    chain: tuple[Frame, ...]
    tasks: tuple[Task, ...]
    deadlocked: bool


def groups(snapshot: Snapshot, loop: int | None = None) -> tuple[Group, ...]:
    """Group the tasks (of one loop): deadlocked ones first, then the odd ones, crowds last."""
    in_cycles = {member for cycle in snapshot.waits.cycles for member in cycle}
    found: dict[tuple[object, ...], list[Task]] = {}
    for task in snapshot.tasks:
        if loop is None or task.loop == loop:
            key = (task.state, task.chain, task.awaits.kind, bool(task.torn), task.loop)
            found.setdefault(key, []).append(task)
    made = [
        Group(
            chain=members[0].chain,
            tasks=tuple(members),
            deadlocked=any(task.id in in_cycles for task in members),
        )
        for members in found.values()
    ]
    # Tasks that are over come last: they explain nothing.
    return tuple(
        sorted(
            made,
            key=lambda group: (
                not group.deadlocked,
                group.tasks[0].state in ("done", "cancelled"),
                len(group.tasks),
                group.tasks[0].name,
            ),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """What differs between two readings of one process.

    Attributes:
        moved: Ids of tasks that are elsewhere than before, or moved while they were read.
        still: Ids of tasks that are where they were.
        new: Ids of tasks that were not there before.
        gone: Ids of tasks that are there no more.
        loops: Wake-ups of each loop's thread in between, by id; ``None`` if unknown.
    """

    moved: tuple[int, ...]
    still: tuple[int, ...]
    new: tuple[int, ...]
    gone: tuple[int, ...]
    loops: dict[int, int | None]


def motion(
    before: Snapshot,
    after: Snapshot,
    switches_before: dict[int, int],
    switches_after: dict[int, int],
) -> Motion:
    """Compare two readings; the switches are those of each thread, by kernel id."""
    old = {task.id: task for task in before.tasks}
    new = {task.id: task for task in after.tasks}
    common = [task for task in after.tasks if task.id in old]
    moved = tuple(task.id for task in common if _moved(old[task.id], task))
    elsewhere = set(moved)
    return Motion(
        moved=moved,
        still=tuple(task.id for task in common if task.id not in elsewhere),
        new=tuple(task.id for task in after.tasks if task.id not in old),
        gone=tuple(id_ for id_ in old if id_ not in new),
        loops={loop.id: _ticks(loop, switches_before, switches_after) for loop in after.loops},
    )


def _moved(old: Task, new: Task) -> bool:
    # An id may have a new tenant: then the name differs, or the chain does.
    same = (old.name, old.state, old.chain, old.waiter) == (
        new.name,
        new.state,
        new.chain,
        new.waiter,
    )
    return not same or bool(old.torn or new.torn)


def _ticks(loop: Loop, before: dict[int, int], after: dict[int, int]) -> int | None:
    tid = loop.thread_id
    if tid is None or tid not in before or tid not in after:
        return None
    return after[tid] - before[tid]
