"""A snapshot for people: grouped, as a tree, or as a graph. Pure.

Names, files and functions come out of another process: whatever a terminal could take for a
command is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from hangwatch.remote.awaits import count_of
from hangwatch.remote.graph import behind
from hangwatch.remote.grouping import Group, Motion, groups
from hangwatch.remote.results import (
    Frame,
    Loop,
    Snapshot,
    StateTable,
    StateValue,
    Task,
    Thread,
)

NAMES_SHOWN: Final = 3
PLUMBING: Final = frozenset({"ray/util/tracing/tracing_helper.py"})
"""Files whose frames stand between any two of the program's own and say nothing."""
TREE_DEPTH: Final = 64
ROWS_SHOWN: Final = 8
WIDTH: Final = 100


def plain(text: str) -> str:
    """Return *text* with every control and invisible character escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def summary(snapshot: Snapshot) -> Iterator[str]:
    """Yield what was read, the deadlocks, and what everybody waits for."""
    yield (
        f"Python {plain(snapshot.python)}, process {snapshot.pid}: "
        f"{count_of(len(snapshot.tasks), 'task')} on {count_of(len(snapshot.loops), 'loop')}, "
        f"read in {snapshot.elapsed:.3f} s without stopping it"
    )
    tasks = {task.id: task for task in snapshot.tasks}
    for cycle in snapshot.waits.cycles:
        yield f"DEADLOCK: {' -> '.join(_name(tasks, id_) for id_ in (*cycle, cycle[0]))}"
        for id_ in cycle:
            yield f"  {_name(tasks, id_)} waits: {_awaits(tasks[id_], tasks)}"
    waiting = behind(snapshot.waits.edges, snapshot.waits.roots[:NAMES_SHOWN])
    for root in snapshot.waits.roots[:NAMES_SHOWN]:
        if waiting[root] > 1:
            yield (
                f"ROOT: {count_of(waiting[root], 'task')} wait behind {_name(tasks, root)}, "
                f"which waits for no task: {_awaits(tasks[root], tasks)}"
            )
    torn = sum(1 for task in snapshot.tasks if task.torn)
    if torn:
        yield f"{count_of(torn, 'task')} moved while being read: this process is alive"


def grouped(snapshot: Snapshot, threads: Sequence[Thread] = ()) -> Iterator[str]:
    """Yield the tasks of each loop, equal chains once, odd ones first."""
    tasks = {task.id: task for task in snapshot.tasks}
    names = {thread.ident: thread.name for thread in threads if thread.name}
    for loop in snapshot.loops:
        yield ""
        yield _loop(loop, names)
        for group in groups(snapshot, loop.id):
            yield ""
            yield from _group(group, tasks)


def state(snapshot: Snapshot) -> Iterator[str]:
    """Yield the numbers that state probes read, if there are any."""
    tables = [table for table in snapshot.state or () if table.rows or table.absent]
    if not tables:
        return
    yield ""
    yield "state"
    for table in tables:
        if len(table.rows) > 1:
            yield from _columns(table)
        for row in table.rows if len(table.rows) == 1 else ():
            yield from _wrapped(plain(table.name), _numbers(row.values, row.moved))
        missing = dict.fromkeys(name for row in table.rows for name in row.absent)
        if table.absent:
            yield f"  {plain(table.name)}: absent: {plain(table.absent)}"
        elif missing:
            yield from _wrapped(f"{plain(table.name)}, absent", [plain(each) for each in missing])


def tree(snapshot: Snapshot) -> Iterator[str]:
    """Yield each task that nobody awaits, and below it those that it awaits."""
    tasks = {task.id: task for task in snapshot.tasks}
    awaited = {edge.awaited for edge in snapshot.waits.edges}
    below: dict[int, list[int]] = {}
    for edge in snapshot.waits.edges:
        below.setdefault(edge.waiter, []).append(edge.awaited)
    alive = [task for task in snapshot.tasks if task.state in ("pending", "running")]
    tops = [task.id for task in alive if task.id not in awaited]
    # A deadlock has no top: one of its members has to do.
    tops += [cycle[0] for cycle in snapshot.waits.cycles]
    shown: set[int] = set()
    for loop in snapshot.loops:
        yield ""
        yield _loop(loop, {})
        for top in tops:
            if tasks[top].loop == loop.id:
                yield from _branch(top, below, tasks, shown)


def graph(snapshot: Snapshot) -> Iterator[str]:
    """Yield one line for each wait of one task for another."""
    tasks = {task.id: task for task in snapshot.tasks}
    yield ""
    for edge in snapshot.waits.edges:
        through = f" {edge.object:#x}" if edge.object and edge.kind in ("lock", "semaphore") else ""
        any_of = ", or another" if edge.alternative else ""
        yield (
            f"{_name(tasks, edge.waiter)} -> {_name(tasks, edge.awaited)}  "
            f"({edge.kind}{through}{any_of})"
        )
    if not snapshot.waits.edges:
        yield "no task waits for another one"


def stacks(threads: Sequence[Thread]) -> Iterator[str]:
    """Yield the stack of every thread, innermost frame first, and the lock that it waits for."""
    by_ident = {thread.ident: thread for thread in threads}
    for thread in threads:
        yield ""
        loop = ", runs an event loop" if thread.loop else ""
        gil = ", holds the GIL" if thread.holds_gil else ""
        yield f"{_thread(thread)}{loop}{gil}"
        if thread.waits:
            owner = by_ident.get(thread.waits.owner)
            held = f", held by {_thread(owner)}" if owner else ""
            yield f"    waits for {plain(thread.waits.type)} {thread.waits.object:#x}{held}"
        for frame in thread.frames:
            yield f"    {_frame(frame)}"
        if thread.torn:
            yield f"    torn: {plain(thread.torn)}"


def _thread(thread: Thread) -> str:
    name = f" {plain(thread.name)!r}" if thread.name else ""
    return f"thread {thread.thread_id or '?'}{name}"


def problems(snapshot: Snapshot) -> Iterator[str]:
    """Yield what could not be read, torn tasks left out: they are marked where they stand."""
    for problem in snapshot.problems:
        if problem.kind != "torn" or "task" not in problem.where:
            yield plain(str(problem))


def difference(snapshot: Snapshot, motion: Motion) -> Iterator[str]:
    """Yield what moved since the last reading, and which loops tick."""
    tasks = {task.id: task for task in snapshot.tasks}
    yield (
        f"{len(motion.moved)} moved, {len(motion.still)} did not, "
        f"{len(motion.new)} new, {len(motion.gone)} gone"
    )
    for loop in snapshot.loops:
        count = motion.loops.get(loop.id)
        ticks = "unknown" if count is None else f"{count_of(count, 'wake-up')} of its thread"
        yield f"  loop {loop.id:#x}: {ticks}"
    for label, ids in (("moved", motion.moved), ("new", motion.new)):
        for id_ in ids[:10]:
            yield f"  {label} {_name(tasks, id_)}: {_awaits(tasks[id_], tasks)}"
        if len(ids) > 10:
            yield f"  {label}: {len(ids) - 10} more"


def state_difference(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield which numbers changed between two readings, and that none did."""
    if not after.state:
        return
    old = {(table.name, row.id): row for table in before.state or () for row in table.rows}
    changed: list[str] = []
    for table in after.state:
        for row in table.rows:
            known = old.get((table.name, row.id))
            changes = [
                f"{plain(name)} {_value(known.values[name])} -> {_value(value)}"
                for name, value in row.values.items()
                if known is not None
                and name in known.values
                and known.values[name] != value
                # ages always grow
                and not isinstance(value, float)
            ]
            if changes:
                changed += _wrapped(plain(table.name), changes)
    yield from changed[:ROWS_SHOWN]
    if len(changed) > ROWS_SHOWN:
        yield f"  state: {len(changed) - ROWS_SHOWN} more lines"
    if not changed:
        yield "  state: no number changed"


# ---------------------------------------------------------------------- pieces


def _numbers(values: Mapping[str, StateValue], moved: Collection[str] = ()) -> list[str]:
    return [
        f"{plain(name)} {_value(value)}{' (moving)' if name in moved else ''}"
        for name, value in values.items()
    ]


def _columns(table: StateTable) -> Iterator[str]:
    """Yield what all rows have in common, and then what tells them apart, one row a line."""
    rows = table.rows
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    same = {
        name: rows[0].values[name]
        for name in names
        if all(name in row.values and row.values[name] == rows[0].values.get(name) for row in rows)
    }
    yield from _wrapped(f"{len(rows) + table.left_out} x {plain(table.name)}", _numbers(same))
    names = [name for name in names if name not in same]
    lines = [[plain(name) for name in names]]
    for row in rows[:ROWS_SHOWN]:
        cells = [_value(row.values[name]) if name in row.values else "-" for name in names]
        moving = [name in row.moved for name in names]
        lines.append(
            [f"{cell}~" if moves else cell for cell, moves in zip(cells, moving, strict=True)]
        )
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines if names else ():
        yield (
            "      "
            + "  ".join(
                cell.ljust(width) for cell, width in zip(line, widths, strict=True)
            ).rstrip()
        )
    hidden = len(rows) + table.left_out - ROWS_SHOWN
    if names and hidden > 0:
        yield f"      and {hidden} more"


def _value(value: StateValue) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, Mapping):
        parts = [f"{plain(name)} {count}" for name, count in value.items() if count]
        return f"({', '.join(parts)})" if parts else "(none)"
    return plain(str(value))


def _wrapped(name: str, parts: Sequence[str]) -> Iterator[str]:
    """Yield a name and its parts, in lines of limited width."""
    line = f"  {name}:"
    for i, part in enumerate(parts):
        piece = f" {part}" + ("," if i + 1 < len(parts) else "")
        if len(line) + len(piece) > WIDTH and not line.endswith(":"):
            yield line
            line = "     "
        line += piece
    yield line


def _name(tasks: Mapping[int, Task], id_: int) -> str:
    return f"'{plain(tasks[id_].name)}'" if id_ in tasks else f"task {id_:#x}"


def _names(tasks: Mapping[int, Task], ids: Sequence[int]) -> str:
    shown = ", ".join(_name(tasks, id_) for id_ in ids[:NAMES_SHOWN])
    return f"{shown} and {len(ids) - NAMES_SHOWN} more" if len(ids) > NAMES_SHOWN else shown


def _frame(frame: Frame) -> str:
    note = f"  [{plain(frame.note)}]" if frame.note else ""
    return f"{plain(frame.function)}  {plain(frame.short_file)}:{frame.line or '?'}{note}"


def _awaits(task: Task, tasks: Mapping[int, Task]) -> str:
    awaits = task.awaits
    known = [id_ for id_ in awaits.tasks if id_ in tasks]
    text = plain(awaits.detail)
    if not known:
        return text
    if awaits.kind in ("lock", "semaphore"):
        return f"{text}, held by {_names(tasks, known)}"
    return f"{text}: {_names(tasks, known)}"


def _loop(loop: Loop, names: Mapping[int, str]) -> str:
    name = names.get(loop.thread_ident or 0, "")
    where = f"in thread {loop.thread_id}" if loop.thread_id else "not running"
    if name:
        where += f" '{plain(name)}'"
    state = ""
    if loop.ready is not None and loop.scheduled is not None:
        state = f", {loop.ready} ready, {count_of(loop.scheduled, 'timer')}"
    closed = ", closed" if loop.closed else ""
    return f"loop {plain(loop.type)} {loop.id:#x} {where}{state}{closed}"


def _group(group: Group, tasks: Mapping[int, Task]) -> Iterator[str]:
    first = group.tasks[0]
    names = _names(tasks, [task.id for task in group.tasks])
    count = f"{len(group.tasks)} x " if len(group.tasks) > 1 else ""
    marks = "".join(
        f", {mark}"
        for mark, shown in (
            ("DEADLOCKED", group.deadlocked),
            ("cancellation requested", first.must_cancel),
            (f"torn: {first.torn}", first.torn),
        )
        if shown
    )
    state = "" if first.state == "pending" else f" {first.state}"
    yield f"  {count}{names}{state}{marks}"
    for frame in group.chain:
        if frame.short_file not in PLUMBING:
            yield f"      {_frame(frame)}"
    if first.state == "pending":
        # Members wait for different objects of one kind; one of them is shown.
        same = len({_awaits(task, tasks) for task in group.tasks[:50]}) == 1
        of = "" if same else f"  (of {_name(tasks, first.id)})"
        yield f"      = {_awaits(first, tasks)}{of}"
    held = {f"{hold.type}{'' if hold.certain else ' (perhaps)'}" for hold in first.holds}
    if held:
        yield f"      holds {', '.join(sorted(plain(each) for each in held))}"


def _branch(
    top: int, below: Mapping[int, Sequence[int]], tasks: Mapping[int, Task], shown: set[int]
) -> Iterator[str]:
    """Yield a task and those below it, depth first, without recursion."""
    todo: list[tuple[int, int]] = [(top, 0)]
    path: list[int] = []
    while todo:
        id_, depth = todo.pop()
        del path[depth:]
        indent = "  " + "|   " * depth
        if id_ in path:
            yield f"{indent}+- {_name(tasks, id_)} (waits for itself: a cycle)"
            continue
        task = tasks[id_]
        if id_ in shown or depth >= TREE_DEPTH:
            yield f"{indent}+- {_name(tasks, id_)} (shown above)"
            continue
        shown.add(id_)
        path.append(id_)
        place = f"  {_frame(task.chain[-1])}" if task.chain else ""
        yield f"{indent}+- {_name(tasks, id_)}{place}  = {plain(task.awaits.detail)}"
        todo += [(child, depth + 1) for child in reversed(below.get(id_, ()))]
