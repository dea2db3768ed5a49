"""What two readings of asyncio tasks say: who moved, who waits for whom, and which await is odd.

Theory of operation
-------------------

A task is known by its address and its name. It *moved* if anything that a step of it would change
is different: its chain with the lines, what it awaits, the future that will wake it, how much time
its sleep has left. An address that has a new tenant shows as another name or another chain, and a
task that is new in a process that was read before counts as moved. What is the same twice is
*unmoved*, which is as far as two looks can tell: a loop that takes one item after another may be
caught at the same ``queue.get`` twice.

All tasks of a healthy idle server are unmoved, too. So the awaits are ordered by how much they
explain if there is work: a task in a cycle; then one that is in the middle of something (a future
without an answer, a lock that nobody gives back, a full queue); then events and conditions; last
those that wait for their next input, where an idle loop waits, too. A task that waits for another
task explains nothing: the other one does.

Unmoved tasks exclude a long prefill only together with threads that all wait, and only if nothing
is awaited that may be computed meanwhile: an executor's thread, a call on another process, or a
short sleep of a loop that polls (``with_tasks``). The processes' CPU is for ``judge`` to look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hangwatch.core import motion
from hangwatch.core.objects import integer, listed, number, objects, word
from hangwatch.model.dossier import (
    Awaited,
    Citation,
    EngineNumbers,
    Frame,
    TaskMotion,
    TaskReading,
    TaskRecord,
    ThreadMotion,
)
from hangwatch.model.identity import Role
from hangwatch.model.vitals import Motion, StackVital

SCHEMA: Final = "hangwatch.tasks/1"

_BEGINNING: Final = re.compile(rb'"schema"\s*:\s*"hangwatch\.tasks/1"')
_PID: Final = re.compile(rb'"pid"\s*:\s*(\d{1,10})\b')
_PYTHON: Final = re.compile(rb'"python"\s*:\s*"(\d[\w.+]{0,20})"')

OVER: Final = frozenset(("done", "cancelled"))

COMPUTED: Final = frozenset(
    ("executor", "ray", "process", "running", "ready", "not_started", "unknown", "")
)
"""Kinds of await that may well be over as soon as something has been computed."""

LONG_SLEEP: Final = 0.5
"""Seconds left of a sleep that is a timer's; loops that poll sleep for less."""

# How much an await explains where work does not get done; the first explains most.
_SUSPICION: Final = {
    "future": 1,
    "lock": 1,
    "semaphore": 1,
    "executor": 1,
    "ray": 1,
    "event": 2,
    "condition": 2,
    "barrier": 2,
    "process": 2,
    "unknown": 3,
    "queue": 4,
    "stream": 5,
    "sleep": 6,
}
_CONSEQUENCE: Final = 7
"""It waits for another task, which explains more."""

_MIDDLE_OF_SOMETHING: Final = 1
_TAKES_INPUT: Final = re.compile(r"\.get:")
_ACTOR: Final = re.compile(r"a call on actor ([0-9a-f]{32})")

# The nearer to the model, the less a wait is somebody else's.
_NEAREST: Final = (Role.ENGINE_WORKER, Role.ENGINE, Role.RAY_WORKER, Role.API_SERVER)


# ---------------------------------------------------------------------- parsing


def documents(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each reading of a file that holds one or several, and its line, from 1.

    The last one may have been cut short.

    Raises:
        ValueError: There is something, and it does not begin as a reading does.
    """
    if data.strip() and not data.lstrip().startswith((b"{", b"[")):
        raise ValueError("no reading of the form that hangwatch tasks --json writes")
    if len(_BEGINNING.findall(data)) <= 1:
        yield data, 1
        return
    whole = [line for raw, line in objects(data) if raw.get("schema") == SCHEMA]
    rows = data.split(b"\n")
    for line, following in zip(whole, [*whole[1:], len(rows) + 1], strict=True):
        yield b"\n".join(rows[line - 1 : following - 1]), line


def parse(
    data: bytes, pid: int | None, sample: int, path: str = "", first: int = 1
) -> tuple[tuple[TaskRecord, ...], TaskReading]:
    """Return the tasks of one reading, and what it says beside them.

    Args:
        data: A document ``hangwatch.tasks/1``; one that was cut short gives the whole tasks.
        pid: Process, where the document does not name it.
        sample: 1 or 2.
        path: Where it lies, for citations.
        first: Line of the file on which *data* begins.
    """
    # Lists are taken one by one: what was cut off costs only itself, and nothing is parsed twice.
    own = _PID.search(data)
    whose = int(own[1]) if own is not None else (pid or 0)
    python = _PYTHON.search(data)
    cycles = tuple(
        tuple(id_ for id_ in cycle if isinstance(id_, int))
        for cycle, _ in listed(data, "cycle_ids")
        if isinstance(cycle, list)
    )
    threads = {
        id_: tid
        for loop, _ in listed(data, "loops")
        if isinstance(loop, Mapping)
        and (id_ := integer(loop.get("id"))) is not None
        and (tid := integer(loop.get("thread_id"))) is not None
    }
    reading = TaskReading(
        pid=whose,
        sample=sample,
        python=python[1].decode("ascii") if python is not None else "",
        threads=threads,
        cycles=cycles,
        numbers=tuple(_numbers(data, path, first)),
        actors=tuple(word(actor) for actor, _ in listed(data, "actors")),
        problems=tuple(
            f"{word(problem.get('where'))}: {word(problem.get('message'))}"
            for problem, _ in listed(data, "problems")
            if isinstance(problem, Mapping) and problem.get("kind") == "truncated"
        ),
        citation=Citation(path=path, line=first) if path else None,
    )
    return (
        tuple(
            _task(item, whose, sample, path, first - 1 + line)
            for item, line in listed(data, "tasks")
            if isinstance(item, Mapping)
        ),
        reading,
    )


def _numbers(data: bytes, path: str, first: int) -> Iterator[EngineNumbers]:
    """Yield the tables of numbers that hold any."""
    for table, line in listed(data, "state"):
        if not isinstance(table, Mapping):
            continue
        rows = tuple(
            {
                word(name): value if isinstance(value, bool | int | float) else word(value)
                for name, value in values.items()
            }
            for row in _list(table, "rows")
            if isinstance(row, Mapping) and isinstance(values := row.get("values"), Mapping)
        )
        if any(rows):
            yield EngineNumbers(
                name=word(table.get("name")),
                rows=rows,
                left_out=integer(table.get("left_out")) or 0,
                citation=Citation(path=path, line=first - 1 + line) if path else None,
            )


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    return value if isinstance(value, list) else []


def _task(raw: Mapping[str, Any], pid: int, sample: int, path: str, line: int) -> TaskRecord:
    awaits = raw.get("awaits")
    awaits = awaits if isinstance(awaits, Mapping) else {}
    name, detail = word(raw.get("name")), word(awaits.get("detail"))
    kind = word(awaits.get("kind"))
    return TaskRecord(
        pid=pid,
        sample=sample,
        id=integer(raw.get("id")) or 0,
        name=name,
        state=word(raw.get("state")),
        chain=tuple(
            Frame(
                function=word(frame.get("function")) or "?",
                file=word(frame.get("file")),
                line=integer(frame.get("line")) or 0,
            )
            for frame in _list(raw, "chain")
            if isinstance(frame, Mapping)
        ),
        awaits=Awaited(
            kind=kind,
            detail=detail,
            object=integer(awaits.get("object")),
            tasks=tuple(
                id_
                for item in _list(awaits, "tasks")
                if isinstance(item, Mapping) and (id_ := integer(item.get("id"))) is not None
            ),
            due_in=number(awaits.get("due_in_s")),
        ),
        loop=integer(raw.get("loop")) or 0,
        waiter=integer(raw.get("waiter")),
        torn=word(raw.get("torn")),
        citation=Citation(path=path, line=line, text=f"task {name} awaits {detail or kind}"[:200])
        if path
        else None,
    )


# ---------------------------------------------------------------------- over time


def tasks(
    records: Iterable[TaskRecord], readings: Iterable[TaskReading] = ()
) -> tuple[TaskMotion, ...]:
    """Return the tasks of each process as of its last sample, compared with the one before."""
    samples: dict[int, dict[int, dict[tuple[int, str], TaskRecord]]] = {}
    cycles: dict[int, tuple[int, frozenset[int]]] = {}
    for reading in readings:
        samples.setdefault(reading.pid, {}).setdefault(reading.sample, {})
        if reading.sample >= cycles.get(reading.pid, (0, frozenset()))[0]:
            members = frozenset(id_ for cycle in reading.cycles for id_ in cycle)
            cycles[reading.pid] = (reading.sample, members)
    for record in records:
        of_sample = samples.setdefault(record.pid, {}).setdefault(record.sample, {})
        of_sample[record.id, record.name] = record
    found = []
    for pid, by_sample in samples.items():
        *earlier, last = sorted(by_sample)
        before = by_sample[earlier[-1]] if earlier else None
        _, members = cycles.get(pid, (0, frozenset()))
        for key, record in by_sample[last].items():
            found.append(
                TaskMotion(
                    pid=pid,
                    id=record.id,
                    name=record.name,
                    state=record.state,
                    chain=record.chain,
                    awaits=record.awaits,
                    loop=record.loop,
                    moved=None if before is None else _moved(before.get(key), record),
                    deadlocked=record.id in members,
                    citation=record.citation,
                )
            )
    return tuple(found)


def _moved(old: TaskRecord | None, new: TaskRecord) -> bool:
    if old is None or old.torn or new.torn:
        return True
    if _place(old) != _place(new):
        return True
    # The time that a sleep has left only grows if it is another sleep.
    before, after = old.awaits.due_in, new.awaits.due_in
    return before is not None and after is not None and after > before


def _place(record: TaskRecord) -> tuple[object, ...]:
    awaits = record.awaits
    # Where there is a timer, its text tells the time that is left.
    detail = awaits.detail if awaits.due_in is None else ""
    return (record.state, record.chain, record.waiter, awaits.kind, awaits.object, detail)


# ---------------------------------------------------------------------- which await is odd


def pending(found: Iterable[TaskMotion]) -> tuple[TaskMotion, ...]:
    """Return the tasks that are not over."""
    return tuple(task for task in found if task.state not in OVER)


def innermost(task: TaskMotion) -> Frame | None:
    """Return the frame with the await itself: the innermost one that is not standard library."""
    return motion.telling_frame(reversed(task.chain))


def caller(task: TaskMotion) -> Frame | None:
    """Return who awaits the innermost frame: the next one outwards, of another package best."""
    frames = task.chain[::-1]
    frame = innermost(task)
    return motion.caller(frames, frame) if frame is not None else None


def suspicion(task: TaskMotion) -> int:
    """Return how little its await explains: 0 for a deadlock, more for less."""
    if task.deadlocked:
        return 0
    awaits = task.awaits
    if awaits.tasks:
        return _CONSEQUENCE
    if awaits.kind == "queue" and not _TAKES_INPUT.search(awaits.detail):
        return _MIDDLE_OF_SOMETHING
    return _SUSPICION.get(awaits.kind, _CONSEQUENCE)


def waits_for_input(task: TaskMotion) -> bool:
    """Say whether it waits where a loop with nothing to do waits, too."""
    return suspicion(task) >= _SUSPICION["queue"]


def suspects(found: Iterable[TaskMotion], roles: Mapping[int, Role]) -> tuple[TaskMotion, ...]:
    """Return the tasks that stand still, the one whose await explains most first.

    Args:
        found: Tasks of processes that have work to do.
        roles: What each process does.
    """
    still = [task for task in pending(found) if task.moved is not True and task.chain]
    return tuple(sorted(still, key=lambda task: _suspicion_order(task, roles)))


def _suspicion_order(task: TaskMotion, roles: Mapping[int, Role]) -> tuple[int, int, int, int]:
    role = roles.get(task.pid, Role.OTHER)
    nearness = _NEAREST.index(role) if role in _NEAREST else len(_NEAREST)
    own = [frame for frame in task.chain if not motion.STANDARD_LIBRARY.search(frame.file)]
    how = suspicion(task)
    # What only waits for its input explains nothing, however near to the model it is.
    return (
        0 if how == 0 else 1 if how < _SUSPICION["queue"] else 2,
        nearness,
        how,
        -len(own),
    )


def awaited_actor(task: TaskMotion) -> str:
    """Return the id of the Ray actor whose answer a task awaits, or ``""``."""
    match = _ACTOR.search(task.awaits.detail)
    return match[1] if match is not None else ""


def told(task: TaskMotion) -> str:
    """Return the await for people: ``ModelAgent.done (agent.py:17)``."""
    frame = innermost(task)
    return str(frame) if frame is not None else task.awaits.detail


def with_tasks(
    vital: StackVital,
    found: Sequence[TaskMotion],
    threads: Iterable[ThreadMotion],
    roles: Mapping[int, Role],
) -> StackVital:
    """Return what the stacks of one instance amount to, its tasks taken in.

    Args:
        vital: What its threads say.
        found: Tasks of its processes.
        threads: Threads of its processes.
        roles: What each process does.
    """
    if vital.motion is not Motion.WAITING:
        return vital
    if may_be_computed(found, roles):
        return vital
    there = _of_engines(found, roles)
    pids = {task.pid for task in there}
    if any(
        not thread.idle or thread.moved is not False for thread in threads if thread.pid in pids
    ):
        return vital
    odd = [
        task for task in suspects(there, roles) if task.moved is False and not waits_for_input(task)
    ]
    if not odd:
        return vital
    return replace(vital, suspended=told(odd[0]), pid=odd[0].pid)


def may_be_computed(found: Iterable[TaskMotion], roles: Mapping[int, Role]) -> bool:
    """Say whether engines await something that may well be over once it has been computed."""
    return any(_is_computed(task) for task in _of_engines(found, roles))


def _of_engines(found: Iterable[TaskMotion], roles: Mapping[int, Role]) -> tuple[TaskMotion, ...]:
    """Return the tasks that compute; all of them where no process is known for an engine."""
    there = pending(found)
    return tuple(task for task in there if roles.get(task.pid) in _NEAREST[:3]) or there


def _is_computed(task: TaskMotion) -> bool:
    awaits = task.awaits
    if awaits.kind == "sleep":
        return awaits.due_in is None or awaits.due_in < LONG_SLEEP
    return awaits.kind in COMPUTED or task.moved is None
