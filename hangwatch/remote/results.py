"""What a reading returns: frozen values, and every failure an item among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

State: TypeAlias = Literal["pending", "running", "done", "cancelled"]
"""``running`` is a pending task whose coroutine is executing at this moment."""

ProblemKind: TypeAlias = Literal["torn", "unreadable", "unknown awaitable", "truncated"]
"""``torn``: it changed while it was read. ``unreadable``: memory that makes no sense.
``unknown awaitable``: the chain ends in an object of a type that is not known here.
``truncated``: a limit was reached."""

FrameKind: TypeAlias = Literal["function", "coroutine", "generator", "async_generator", "cython"]

StateValue: TypeAlias = int | float | bool | str | Mapping[str, int] | None
"""What a state probe read. A string is the name of a type or of an enum member; a mapping has
lengths by the names of enum members; ``None`` is ``None`` in the process as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One Python frame.

    Attributes:
        function: Qualified name (``Queue.get``); plain where the version keeps no other.
        file: File name as compiled into the code.
        line: Current line; for a Cython coroutine the line of its ``def``; ``None`` if unknown.
        kind: What the frame belongs to.
        note: ``await point 2`` for a Cython coroutine, whose lines are not kept; else ``""``.
    """

    function: str
    file: str
    line: int | None
    kind: FrameKind = "function"
    note: str = ""

    @property
    def short_file(self) -> str:
        """The path from the package or the standard library on."""
        for mark in ("/site-packages/", "/dist-packages/"):
            if mark in self.file:
                return self.file.split(mark, 1)[1]
        _, _, tail = self.file.partition("/lib/python3")
        if "/" in tail:
            return tail.split("/", 1)[1]
        return self.file

    def __str__(self) -> str:
        return f"{self.function} ({self.short_file}:{self.line or '?'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that could not be read, or not for certain.

    Attributes:
        kind: The class of problem.
        where: What it is about: ``task 'worker-3'``, ``interpreter 0``.
        message: What was seen, one sentence.
    """

    kind: ProblemKind
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaits:
    """What the innermost await of a task is about.

    Attributes:
        kind: ``sleep``, ``lock``, ``event``, ``condition``, ``semaphore``, ``barrier``,
            ``queue``, ``gather``, ``wait``, ``wait_for``, ``task_group``, ``shield``, ``task``,
            ``executor``, ``ray``, ``stream``, ``process``, ``future``, ``ready`` (it will be
            resumed without waiting for anything), ``running``, ``not_started``, ``nothing`` (a
            task that is over) or ``unknown``.
        detail: What is known of it, for people: ``Queue.get: 0 of 10 items, 3 getters``.
        object: Address of the awaited object (lock, queue, future), 0 if there is none.
        tasks: Ids of the tasks that it waits for, the holders of a lock among them.
        any_of: One of ``tasks`` suffices (``asyncio.wait`` for the first).
        due_in: Seconds until a sleep ends, by the monotonic clock; negative: overdue.
    """

    kind: str
    detail: str = ""
    object: int = 0
    tasks: tuple[int, ...] = ()
    any_of: bool = False
    due_in: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A context manager that a task is inside of, read off its saved value stack.

    Attributes:
        object: Its address.
        type: Its type: ``Lock``.
        certain: ``False`` where the frame is executing, and the slot may be a stale one.
    """

    object: int
    type: str
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One asyncio task.

    Attributes:
        id: Address of the task, the same as ``id(task)`` in the target.
        name: ``task.get_name()``.
        state: See ``State``.
        loop: Id of its event loop.
        interpreter: Id of its interpreter.
        chain: Its await chain, outermost coroutine first; for a running task down to the
            function that executes.
        awaits: What its innermost await is about.
        holds: Locks and other context managers that it is inside of.
        waiter: Address of the future that will wake it, 0 for none.
        must_cancel: A cancellation is requested and not yet delivered.
        torn: How it changed while it was read; ``""`` means that all of it was there at once.
    """

    id: int
    name: str
    state: State
    loop: int
    interpreter: int
    chain: tuple[Frame, ...]
    awaits: Awaits
    holds: tuple[Hold, ...] = ()
    waiter: int = 0
    must_cancel: bool = False
    torn: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One event loop.

    Attributes:
        id: Its address, the same as ``id(loop)`` in the target.
        type: Its type: ``_UnixSelectorEventLoop``, ``Loop`` (uvloop).
        interpreter: Id of its interpreter.
        thread_id: Kernel id of the thread that runs it, as we see it; ``None``: not running.
        thread_ident: ``threading.get_ident()`` of that thread.
        ready: Callbacks ready to run, ``None`` if it does not say (uvloop).
        scheduled: Timers that are set, ``None`` if it does not say.
        closed: Whether it is closed.
    """

    id: int
    type: str
    interpreter: int
    thread_id: int | None = None
    thread_ident: int | None = None
    ready: int | None = None
    scheduled: int | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadWait:
    """What a blocked thread waits for.

    Attributes:
        type: ``Lock``, ``RLock`` or ``GIL``. Conditions, events, queues and futures of
            ``threading`` wait for a ``Lock`` of their own, which nobody holds.
        object: Address of the lock.
        owner: ``ident`` of the thread that holds it, 0 if unknown or nobody.
    """

    type: str
    object: int
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread that Python knows.

    Attributes:
        thread_id: Kernel id, as we see it; 0 if unknown.
        ident: ``threading.get_ident()``.
        name: ``threading.Thread.name``, ``""`` if unknown.
        interpreter: Id of its interpreter.
        frames: Its stack, innermost first. The thread runs: frames may be torn.
        loop: Id of the event loop that runs in it, 0 for none.
        torn: How the stack broke off; ``""`` if it was read to its end.
        waits: The lock that it waits for, ``None`` if it waits for none, or for one that could
            not be found.
        holds_gil: Whether it had the GIL.
    """

    thread_id: int
    ident: int
    name: str
    interpreter: int
    frames: tuple[Frame, ...]
    loop: int = 0
    torn: str = ""
    waits: ThreadWait | None = None
    holds_gil: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One task cannot go on before another one does something.

    Attributes:
        waiter: Id of the task that waits.
        awaited: Id of the task that it waits for.
        kind: How: the kind of ``Awaits``.
        object: Address of the lock or future in between, 0 for none.
        alternative: Any one of several such edges suffices (a semaphore with several holders,
            ``asyncio.wait`` for the first).
    """

    waiter: int
    awaited: int
    kind: str
    object: int = 0
    alternative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Who waits for whom.

    Attributes:
        edges: Every edge between two pending tasks.
        cycles: Deadlocks: ids of tasks in waiting order, each waiting for the next, the last for
            the first.
        roots: Ids of the tasks that others wait for and that wait for no task themselves, those
            with the most tasks behind them first.
    """

    edges: tuple[Edge, ...] = ()
    cycles: tuple[tuple[int, ...], ...] = ()
    roots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """One interpreter of the process.

    Attributes:
        id: Its number; the main interpreter is 0.
        modules: How many modules it has imported.
        asyncio: Whether ``asyncio`` is among them.
    """

    id: int
    modules: int
    asyncio: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """Numbers of one object of the program.

    Attributes:
        id: Its address, the same as ``id()`` in the target; of a frame, the frame's.
        task: Id of the task in whose chain it was found, 0 if on a thread's stack.
        values: By the probe's name.
        absent: Probes that led to no value, and why.
        moved: Probes whose value changed while it was read: the last one is given.
    """

    id: int
    task: int = 0
    values: Mapping[str, StateValue] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """What the state probes of one table read.

    Attributes:
        name: Of the table: ``scheduler``.
        where: The place that led to its objects; ``""`` if none did.
        rows: One for each object.
        left_out: Objects beyond the limit, which were not read.
        absent: Why no place led to an object, ``""`` if one did.
    """

    name: str
    where: str = ""
    rows: tuple[StateRow, ...] = ()
    left_out: int = 0
    absent: str = ""

    def marked(self, before: Mapping[tuple[str, int], StateRow]) -> StateTable:
        """Return the table with the differences from an earlier look marked as moved."""
        rows = []
        for row in self.rows:
            old = before.get((self.name, row.id), StateRow(id=row.id))
            names = dict.fromkeys((*row.values, *row.absent))
            moved = tuple(
                name
                for name in names
                if (name in row.values, row.values.get(name))
                != (name in old.values, old.values.get(name))
            )
            rows.append(dataclasses.replace(row, moved=moved))
        return dataclasses.replace(self, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All tasks of a process at about one moment.

    Attributes:
        pid: The process.
        python: Its version: ``3.11.7``.
        interpreters, loops, tasks: What there is.
        waits: Who waits for whom.
        state: What state probes read; ``None`` if none were asked for.
        threads: Their stacks, and what they wait for; ``None`` if they were not asked for.
        actors: Ids of the Ray actors that live in the process, hexadecimal.
        notes: What differs from the layout known for this version and was taken from the target.
        problems: What could not be read, or not for certain.
        elapsed: Seconds that the reading took.
        calls: System calls that read memory.
        bytes: Bytes copied.
    """

    pid: int
    python: str
    interpreters: tuple[Interpreter, ...] = ()
    loops: tuple[Loop, ...] = ()
    tasks: tuple[Task, ...] = ()
    waits: Waits = Waits()
    state: tuple[StateTable, ...] | None = None
    threads: tuple[Thread, ...] | None = None
    actors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    elapsed: float = 0.0
    calls: int = 0
    bytes: int = 0

    def task(self, id_: int) -> Task | None:
        """Return the task of that id."""
        return next((task for task in self.tasks if task.id == id_), None)
