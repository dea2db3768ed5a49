"""One process, attached to: what it runs, and who waits for whom in it.

``attach`` finds the runtime, binds a layout and lets the target prove it. From then on each call
(``tasks()``, ``threads()``, ``waits()``) is one reading of the live target, within ``Limits``. What
does not change (types, code, the layout) is kept between readings; everything else is read anew.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from hangwatch.remote import actors, graph, procfs, runtime
from hangwatch.remote.awaits import Explainer, Held
from hangwatch.remote.coroutines import Steps
from hangwatch.remote.errors import (
    ExhaustedError,
    NotPermittedError,
    NotPythonError,
    ProcessGoneError,
    RemoteError,
    UnknownLayoutError,
    UnreadableError,
)
from hangwatch.remote.frames import Frames, FrameView
from hangwatch.remote.known import Known, pack, unpack
from hangwatch.remote.memory import Limits, Memory, ProcessSource, Source
from hangwatch.remote.objects import Objects
from hangwatch.remote.probes import Places, Probes, Table
from hangwatch.remote.registries import Registries
from hangwatch.remote.results import (
    Awaits,
    Edge,
    Frame,
    Hold,
    Interpreter,
    Loop,
    Problem,
    Snapshot,
    StateTable,
    Task,
    Thread,
    ThreadWait,
    Waits,
)
from hangwatch.remote.runtime import Runtime
from hangwatch.remote.tasks import PORTION, Tasks, TaskView
from hangwatch.remote.thread_locks import Gil, ThreadLocks
from hangwatch.remote.threads import Threads, ThreadView

MAX_INTERPRETERS: Final = 64
ATTEMPTS: Final = 5
OWNED: Final = frozenset({"lock", "semaphore"})
"""Kinds of await whose object somebody holds."""
PROOFS: Final = {
    "builtins": ("dict", "set", "str", "tuple"),
    "types": (
        "CoroutineType",
        "GeneratorType",
        "AsyncGeneratorType",
        "CodeType",
        "FrameType",
    ),
    "_asyncio": ("Task", "Future"),
}
"""Types whose insides are read, by the module and name where the target keeps them."""


MODULES: Final = frozenset({"sys", "threading", "asyncio.tasks", actors.MODULE, *PROOFS})
"""Modules that are looked into."""


@dataclass(frozen=True, slots=True)
class _InterpreterView:
    """One interpreter as it was read.

    Attributes:
        imported: How many modules it has imported.
        modules: Addresses of those that are looked into.
    """

    address: int
    id: int
    imported: int
    modules: Mapping[str, int]

    def shown(self) -> Interpreter:
        return Interpreter(
            id=self.id, modules=self.imported, asyncio="asyncio.tasks" in self.modules
        )


@dataclass(slots=True)
class _Part:
    """What was read of one interpreter, before tasks are joined to each other."""

    interpreter: _InterpreterView
    places: Places
    tasks: list[Task] = field(default_factory=list)
    held: dict[int, list[Held]] = field(default_factory=dict)
    threads: list[ThreadView] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    actors: tuple[str, ...] = ()

    @property
    def id(self) -> int:
        return self.interpreter.id


class RemotePython:
    """A running CPython process, read from outside. Made by ``attach``.

    Attributes:
        pid: Its process id.
        start_ticks: When it started: a reused pid is noticed.
        python: Its full version, ``3.11.7``.
        runtime: Where its runtime is, and the layout that is believed.
    """

    def __init__(
        self,
        pid: int,
        source: Source,
        limits: Limits,
        found: Runtime,
        start_ticks: int,
        *,
        known: Known | None = None,
    ) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.runtime = found
        self.limits = limits
        self._memory = Memory(source, limits)
        self._objects = Objects(self._memory, found.layout)
        self._frames = Frames(self._objects)
        self._steps = Steps(self._frames)
        self._explainer = Explainer(self._frames)
        self._probes = Probes(self._steps)
        self._threads = Threads(self._frames, limits.depth)
        self._locks = ThreadLocks(self._explainer, found.address)
        self._chains: dict[tuple[int, ...], tuple[Frame, ...]] = {}
        self._live = source if isinstance(source, ProcessSource) else None
        self._program = procfs.program(self._live.tid) if self._live else (0, 0)
        if known is not None:
            self._frames.codes = {code.address: code for code in known.codes}
            self._objects.places = dict(known.places)
            self._memory.prefetch(known.proof_pages, 1)
        self.python = self._prove()
        if known is not None:
            self._memory.touched = set(known.pages)

    # ------------------------------------------------------------------ what is asked for

    @property
    def interpreters(self) -> tuple[Interpreter, ...]:
        """The interpreters of the process, the main one among them."""
        self._begin()
        return tuple(view.shown() for view in self._interpreters([]))

    def threads(self, *, locks: bool = True) -> tuple[Thread, ...]:
        """Return every thread that Python knows, with its stack.

        Args:
            locks: Find out which locks blocked threads wait for, and who holds them.

        Raises:
            ProcessGoneError: The process has ended, or runs another program now.
            NotPermittedError: It may not be read any more.
        """
        self._begin()
        found: list[Thread] = []
        try:
            for interpreter in self._interpreters([]):
                found += self._threads_of(interpreter, locks=locks)
        except ExhaustedError:
            if not found:
                self._raise_if_lost()
        return tuple(found)

    def _threads_of(self, interpreter: _InterpreterView, *, locks: bool) -> list[Thread]:
        outer = procfs.outer_thread_ids(self.pid) if self._live else {}
        names = self._threads.names(interpreter.modules)
        views = self._threads.read(interpreter.address, shown=True)
        gil = self._locks.gil(interpreter.address) if locks else None
        waits = self._thread_waits(views, outer, gil) if locks else {}
        return [
            Thread(
                thread_id=outer.get(view.native_id, view.native_id),
                ident=view.ident,
                name=names.get(view.ident, ""),
                interpreter=interpreter.id,
                frames=tuple(view.frames),
                loop=view.loop,
                torn=view.torn,
                waits=waits.get(view.address),
                holds_gil=gil is not None and gil.locked and gil.holder == view.address,
            )
            for view in views
        ]

    def _thread_waits(
        self, views: Sequence[ThreadView], outer: Mapping[int, int], gil: Gil | None
    ) -> dict[int, ThreadWait]:
        futexes = {
            view.address: procfs.futex(self.pid, outer.get(view.native_id, view.native_id))
            for view in views
            if self._live
        }
        idents = {view.address: view.ident for view in views}
        return {
            at: dataclasses.replace(wait, owner=idents.get(wait.owner, 0))
            for at, wait in self._locks.waits(views, futexes, gil).items()
        }

    def tasks(self, *, state: Sequence[Table] | None = None, threads: bool = False) -> Snapshot:
        """Return every asyncio task with its await chain, and who waits for whom.

        Args:
            state: Numbers of the program that are wanted as well; see ``remote.probes``.
            threads: Read the threads as well, with their stacks and the locks they wait for.

        A process that ends while it is read leaves what was read by then, and a problem that
        says so.

        Raises:
            ProcessGoneError: The process has ended, or runs another program now, and nothing of
                it was read.
            NotPermittedError: It may not be read any more.
        """
        started = time.monotonic()
        calls, copied = self._memory.cost.calls, self._memory.cost.bytes
        self._begin()
        problems: list[Problem] = []
        parts: list[_Part] = []
        stacks: list[Thread] = []
        seen: set[int] = set()
        places = Places(frozenset().union(*(table.functions for table in state or ())))
        try:
            for interpreter in self._interpreters(problems):
                part = _Part(interpreter, places)
                parts.append(part)
                if threads:
                    # First, and at once: a stack has nothing by which to see whether it moved.
                    stacks += self._threads_of(interpreter, locks=True)
                part.actors = actors.actors_of(self._objects, interpreter.modules)
                if "asyncio.tasks" in interpreter.modules:
                    self._read_part(part, seen)
        except ExhaustedError as error:
            problems.append(Problem(kind="truncated", where="process", message=str(error)))
        _settle(parts)
        tasks = self._across_loops([task for part in parts for task in part.tasks])
        held = {at: holds for part in parts for at, holds in part.held.items()}
        tasks, edges = _join(tasks, held)
        on_stacks = (
            frozenset(f.function for each in stacks for f in each.frames) if threads else None
        )
        found = None if state is None else self._state(state, places, on_stacks, problems)
        problems += [problem for part in parts for problem in part.problems]
        if not tasks and not stacks:
            self._raise_if_lost()
        problems += self._interruption(problems)
        return Snapshot(
            pid=self.pid,
            python=self.python,
            interpreters=tuple(part.interpreter.shown() for part in parts),
            loops=self._loops(parts),
            tasks=tuple(tasks),
            waits=graph.waits(edges),
            state=found,
            threads=tuple(stacks) if threads else None,
            actors=tuple(actor for part in parts for actor in part.actors),
            notes=self.runtime.notes,
            problems=tuple(problems),
            elapsed=time.monotonic() - started,
            calls=self._memory.cost.calls - calls,
            bytes=self._memory.cost.bytes - copied,
        )

    def waits(self) -> Waits:
        """Return who waits for whom; ``tasks().waits`` has the same beside the tasks."""
        return self.tasks().waits

    def learn(self, *, state: Sequence[Table] | None = None) -> bytes:
        """Return what ``attach`` can begin with, another time; see ``remote.known``.

        Reads everything once more for it, as a later reader will: what that needs is what counts.

        Raises:
            ProcessGoneError: The process has ended, or runs another program now.
            NotPermittedError: It may not be read any more.
            UnknownLayoutError: It makes no sense any more.
        """
        self.forget()
        self._objects.types.clear()
        self._memory.touched.clear()
        self._memory.restart()
        self._prove()
        proof_pages = self._memory.needed()
        self.forget()
        self._memory.touched.clear()
        self.tasks(state=state, threads=True)
        return pack(
            Known(
                start_ticks=self.start_ticks,
                program=self._program,
                runtime=self.runtime,
                proof_pages=tuple(sorted(proof_pages)),
                pages=tuple(sorted(self._memory.needed())),
                places=self._objects.places,
                codes=tuple(self._frames.used),
            )
        )

    def forget(self) -> None:
        """Give back the memory that only the last reading needed.

        What makes the next reading faster is kept: the layout, types and code objects.
        """
        self._memory.forget()
        self._objects.forget()
        self._frames.forget()
        self._steps.forget()
        self._probes.forget()
        self._chains.clear()

    # ------------------------------------------------------------------ a reading

    def _begin(self) -> None:
        """Begin a reading: new budget, nothing old but what cannot change."""
        if self._live:
            if procfs.start_ticks(self.pid) != self.start_ticks:
                raise ProcessGoneError(f"process {self.pid} has ended; its number was used again")
            # The thread that it was read through may have ended since.
            self._live.tid = procfs.readable_thread(self.pid)
            self._live.lost = None
            if self._replaced():
                raise ProcessGoneError(
                    f"process {self.pid} has begun another program; attach to it anew"
                )
        self.forget()
        self._memory.restart()

    def _raise_if_lost(self) -> None:
        """Raise why nothing more can be read, if that is so."""
        if self._live and self._live.lost:
            raise _explained(self.pid, self._live.lost)

    def _interruption(self, said: Sequence[Problem]) -> list[Problem]:
        """Return what befell the process while it was read, unless that is said already."""
        message = ""
        if self._live and self._live.lost:
            message = str(self._live.lost)
        elif self._replaced():
            message = f"process {self.pid} began another program while it was read"
        if not message or any(message in problem.message for problem in said):
            return []
        return [Problem(kind="truncated", where="process", message=message)]

    def _replaced(self) -> bool:
        """Whether the process has executed another program since ``attach``."""
        if self._live is None:
            return False
        try:
            code, stack = procfs.program(self._live.tid)
        except ProcessGoneError:
            return False  # reading fails as well, and says so
        # No stack: it is ending, or may not be read any more.
        return bool(stack) and (code, stack) != self._program

    def _interpreters(self, problems: list[Problem]) -> Iterator[_InterpreterView]:
        """Yield each interpreter, the main one first."""
        where = self.runtime.layout.interpreter
        seen: list[int] = []
        try:
            at = self._memory.word(
                self.runtime.address + self.runtime.layout.runtime.interpreters_head
            )
            while at and at not in seen and len(seen) < MAX_INTERPRETERS:
                seen.append(at)
                at = self._memory.word(at + where.next)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            problems.append(
                Problem(kind="unreadable", where="the interpreters", message=str(error))
            )
        # New ones are put in front: the main interpreter is the last of the list.
        for at in reversed(seen):
            number = -1
            try:
                number = self._memory.word(at + where.id)
                table = self._memory.word(at + where.modules)
                imported, modules = self._objects.used(table), self._objects.find(table, MODULES)
            except ExhaustedError:
                raise
            except UnreadableError as error:
                name = f"interpreter {number}" if number >= 0 else "an interpreter"
                problems.append(Problem(kind="unreadable", where=name, message=str(error)))
                continue
            yield _InterpreterView(at, number, imported, modules)

    def _read_part(self, part: _Part, seen: set[int]) -> None:
        interpreter, modules = part.interpreter.address, part.interpreter.modules
        where = f"interpreter {part.id}"
        registries = Registries(self._objects, where, self.limits.tasks)
        python_task = 0
        try:
            part.threads = self._threads.read(interpreter)
            registries.read(interpreter, modules)
            module = modules["asyncio.tasks"]
            python_task = self._objects.in_module(module, ("_PyTask",)).get("_PyTask", 0)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            part.problems.append(Problem(kind="unreadable", where=where, message=str(error)))
        part.problems += registries.problems
        # Up to 3.11 all interpreters share the registries of the C module.
        addresses = tuple(at for at in registries.found if at not in seen)
        seen.update(addresses)
        if len(addresses) > self.limits.tasks:
            message = f"{len(addresses)} tasks, of which {self.limits.tasks} were read"
            part.problems.append(Problem(kind="truncated", where=where, message=message))
            addresses = addresses[: self.limits.tasks]
        reader = Tasks(self._steps, python_task, self.limits.depth)
        for start in range(0, len(addresses), PORTION):
            if start:
                # What was read for the last portion is old by now, and would only use memory.
                self._memory.forget()
            try:
                self._read_portion(reader, interpreter, part, addresses[start : start + PORTION])
            except ExhaustedError as error:
                message = f"{error} after {start} of {len(addresses)} tasks"
                part.problems.append(Problem(kind="truncated", where=where, message=message))
                return

    def _read_portion(
        self, reader: Tasks, interpreter: int, part: _Part, addresses: Sequence[int]
    ) -> None:
        views, failed = reader.read(addresses)
        ended = len(addresses) - len(views) - len(failed)
        if ended:
            message = f"{ended} tasks ended before they were read"
            part.problems.append(
                Problem(kind="torn", where=f"interpreter {part.id}", message=message)
            )
        for address, message in failed.items():
            part.problems.append(
                Problem(kind="unreadable", where=f"the task at {address:#x}", message=message)
            )
        running = [view for view in views if view.end is not None and view.end.kind == "running"]
        if running:
            try:
                self._extend(interpreter, running)
            except ExhaustedError:
                raise
            except UnreadableError as error:
                for view in running:
                    view.torn = view.torn or str(error)
        for view in views:
            part.places.note(view.address, view.views)
            awaits = self._explainer.awaits(view)
            holds = self._explainer.holds(view) if view.state == "pending" else []
            if holds:
                part.held[view.address] = holds
            part.tasks.append(self._task(view, awaits, holds, part.id))
            where = f"task {view.name!r}"
            if view.torn:
                part.problems.append(Problem(kind="torn", where=where, message=view.torn))
            elif view.end is not None and view.end.kind == "unknown":
                part.problems.append(
                    Problem(kind="unknown awaitable", where=where, message=awaits.detail)
                )
            elif view.end is not None and view.end.kind == "cut":
                message = f"its chain was cut after {len(view.chain)} frames"
                part.problems.append(Problem(kind="truncated", where=where, message=message))

    def _extend(self, interpreter: int, running: Sequence[TaskView]) -> None:
        """Follow the chains of running tasks on the stacks of the threads that run them."""
        threads = self._threads.read(interpreter, stacks=True)
        for task in running:
            outer = task.views[-1] if task.views else None
            for thread in threads:
                inner = _inside(thread, task.loop, outer)
                task.chain += [view.shown() for view in inner]
                task.views += inner
                if inner:
                    task.torn = task.torn or thread.torn

    def _task(
        self, view: TaskView, awaits: Awaits, holds: Sequence[Held], interpreter: int
    ) -> Task:
        # Thousands of tasks have equal chains: they share one. Equal frames are one object.
        chain = self._chains.setdefault(tuple(map(id, view.chain)), tuple(view.chain))
        return Task(
            id=view.address,
            name=view.name,
            state="running" if awaits.kind == "running" else view.state,
            loop=view.loop,
            interpreter=interpreter,
            chain=chain,
            awaits=awaits,
            holds=tuple(held.hold for held in holds),
            waiter=view.waiter,
            must_cancel=view.must_cancel,
            torn=view.torn,
        )

    def _across_loops(self, tasks: list[Task]) -> list[Task]:
        """Name the tasks of other loops that resolve what tasks wait for."""
        wanted = {task.awaits.object for task in tasks if task.awaits.kind == "executor"}
        if not wanted:
            return tasks
        if len(tasks) > PORTION:
            self._memory.forget()
        resolvers: dict[int, int] = {}
        try:
            for task in tasks:
                resolved = self._explainer.resolves(task.id) if task.state != "done" else 0
                if resolved in wanted:
                    resolvers[resolved] = task.id
        except ExhaustedError:
            pass
        return [
            dataclasses.replace(
                task,
                awaits=dataclasses.replace(task.awaits, tasks=(resolvers[task.awaits.object],)),
            )
            if task.awaits.kind == "executor" and task.awaits.object in resolvers
            else task
            for task in tasks
        ]

    def _state(
        self,
        wanted: Sequence[Table],
        places: Places,
        on_stacks: frozenset[str] | None,
        problems: list[Problem],
    ) -> tuple[StateTable, ...]:
        """Read state probes, in what the tasks have left of the limits."""
        found, message = self._probes.read(wanted, places.found, self._stacks, on_stacks)
        if message:
            problems.append(Problem(kind="truncated", where="state", message=message))
        return found

    def _stacks(self) -> Iterator[FrameView]:
        """Yield the frames of all threads."""
        for interpreter in self._interpreters([]):
            for thread in self._threads.read(interpreter.address, stacks=True):
                yield from thread.views

    def _loops(self, parts: Sequence[_Part]) -> tuple[Loop, ...]:
        outer = procfs.outer_thread_ids(self.pid) if self._live else {}
        found: dict[int, Loop] = {}
        threads = {thread.loop: thread for part in parts for thread in part.threads if thread.loop}
        for part in parts:
            for at in (thread.loop for thread in part.threads if thread.loop):
                found[at] = self._loop(at, part.id, threads[at], outer)
        for part in parts:
            for task in part.tasks:
                if task.loop and task.loop not in found:
                    found[task.loop] = self._loop(task.loop, part.id, None, outer)
        return tuple(found.values())

    def _loop(
        self, address: int, interpreter: int, thread: ThreadView | None, outer: Mapping[int, int]
    ) -> Loop:
        kind, ready, scheduled, closed = "?", None, None, False
        try:
            kind = self._objects.type_of(address).name
            attributes = self._objects.attributes(address)
            if "_ready" in attributes and "_scheduled" in attributes:
                ready = self._objects.length(attributes["_ready"])
                scheduled = self._objects.length(attributes["_scheduled"])
            if "_closed" in attributes:
                closed = bool(self._objects.integer(attributes["_closed"]))
        except UnreadableError:
            pass
        return Loop(
            id=address,
            type=kind,
            interpreter=interpreter,
            thread_id=outer.get(thread.native_id, thread.native_id) if thread else None,
            thread_ident=thread.ident if thread else None,
            ready=ready,
            scheduled=scheduled,
            closed=closed,
        )

    # ------------------------------------------------------------------ the proof

    def _prove(self) -> str:
        """Let the target confirm its layout; return its full version.

        Raises:
            UnknownLayoutError: It does not.
        """
        major, minor = self.runtime.version
        claim = f"this Python {major}.{minor} ({self.runtime.path})"
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                return self._prove_once(claim)
            except UnreadableError as error:
                # It may be importing at this very moment.
                reason = str(error)
                self._memory.forget()
        raise UnknownLayoutError(f"{claim} has an unknown layout: {reason}")

    def _prove_once(self, claim: str) -> str:
        problems: list[Problem] = []
        parts = list(self._interpreters(problems))
        if problems:
            raise UnreadableError(problems[0].message)
        modules = parts[0].modules if parts else {}
        if not modules:
            raise NotPythonError(f"process {self.pid}: its Python has not started, or has ended")
        if not {"sys", "builtins"} <= modules.keys():
            raise UnknownLayoutError(f"{claim} has an unknown layout: its modules are not found")
        text = self._objects.in_module(modules["sys"], ("version",)).get("version", 0)
        version = self._objects.text(text).split(" ", 1)[0].rstrip("+")
        major, minor = self.runtime.version
        if not version.startswith(f"{major}.{minor}."):
            raise UnknownLayoutError(f"{claim} has an unknown layout: sys.version is not found")
        self._check_sizes(modules, claim)
        return version

    def _check_sizes(self, modules: Mapping[str, int], claim: str) -> None:
        known = self.runtime.layout.sizes
        for module, names in PROOFS.items():
            if module not in modules:
                continue
            found = self._objects.in_module(modules[module], names)
            for name in names:
                if not found.get(name):
                    continue
                kind = self._objects.type_at(found[name])
                expected = known.get(kind.name, kind.basic_size)
                if kind.basic_size != expected:
                    raise UnknownLayoutError(
                        f"{claim} has an unknown layout: a {kind.name} is of {kind.basic_size} "
                        f"bytes, not {expected}"
                    )


def _settle(parts: Sequence[_Part]) -> None:
    """Say of each task which interpreter runs it: up to 3.11 they all share one register."""
    homes = {thread.loop: part.id for part in parts for thread in part.threads if thread.loop}
    for part in parts:
        part.tasks = [
            dataclasses.replace(task, interpreter=homes[task.loop])
            if homes.get(task.loop, task.interpreter) != task.interpreter
            else task
            for task in part.tasks
        ]


def _inside(thread: ThreadView, loop: int, outer: FrameView | None) -> list[FrameView]:
    """Return the frames of a thread that a running task's innermost known frame has called."""
    if outer is not None:
        places = [view.address for view in thread.views]
        end = places.index(outer.address) if outer.address in places else 0
    elif thread.loop == loop:
        # The chain ends in a coroutine of Cython, which has no frame: all coroutines are its own.
        kinds = [view.code.kind for view in thread.views]
        end = max((i + 1 for i, kind in enumerate(kinds) if kind != "function"), default=0)
    else:
        end = 0
    return thread.views[:end][::-1]


def attach(pid: int, *, limits: Limits | None = None, known: bytes = b"") -> RemotePython:
    """Attach to a running CPython process, without stopping it or touching it otherwise.

    Args:
        pid: It.
        limits: How much one reading may cost.
        known: What ``RemotePython.known`` returned earlier, of whatever process.

    Raises:
        ProcessGoneError: There is no such process.
        NotPermittedError: Its memory may not be read; the message says what helps.
        NotPythonError: It is no CPython.
        UnknownLayoutError: It is one whose structures are not known here.
    """
    limits = limits or Limits()
    ticks = procfs.start_ticks(pid)
    tid = procfs.readable_thread(pid)
    source = ProcessSource(tid)
    earlier = unpack(known) if known else None
    if earlier is not None and (earlier.start_ticks, earlier.program) == (
        ticks,
        procfs.program(tid),
    ):
        with suppress(RemoteError, UnreadableError):
            return RemotePython(pid, source, limits, earlier.runtime, ticks, known=earlier)
        source.lost = None
    try:
        found = runtime.find(Memory(source, limits), tid)
        return RemotePython(pid, source, limits, found, ticks)
    except (RemoteError, UnreadableError) as error:
        # What looks like garbage may be the silence of a process that has just ended.
        raise _explained(pid, source.lost or error) from None


def _explained(pid: int, error: RemoteError | UnreadableError) -> RemoteError:
    match error:
        case NotPermittedError():
            return NotPermittedError(procfs.explain_refusal(pid))
        case RemoteError():
            return error
        case _:
            return UnknownLayoutError(f"process {pid} makes no sense: {error}")


def _join(
    tasks: Sequence[Task], held: Mapping[int, Sequence[Held]]
) -> tuple[list[Task], list[Edge]]:
    """Join tasks to those that they wait for: directly, or through what those hold."""
    states = {task.id: task.state for task in tasks}
    alive = {id_ for id_, state in states.items() if state in ("pending", "running")}
    holders: dict[int, list[int]] = {}
    for task_id, holds in held.items():
        for hold in holds:
            for at in hold.objects:
                if at and task_id not in holders.setdefault(at, []):
                    holders[at].append(task_id)
    joined: list[Task] = []
    edges: list[Edge] = []
    for task in tasks:
        awaits = task.awaits
        if awaits.kind in OWNED and awaits.object:
            owners = tuple(holders.get(awaits.object, ()))
            awaits = dataclasses.replace(
                awaits,
                tasks=owners,
                any_of=len(owners) > 1,
                detail=_with_owner(awaits, len(owners)),
            )
        same = awaits is task.awaits
        joined.append(task if same else dataclasses.replace(task, awaits=awaits))
        if task.torn:
            continue
        targets = [target for target in awaits.tasks if target in alive]
        edges += [
            Edge(
                waiter=task.id,
                awaited=target,
                kind=awaits.kind,
                object=awaits.object,
                alternative=awaits.any_of and len(awaits.tasks) > 1,
            )
            for target in targets
        ]
    return joined, edges


def _with_owner(awaits: Awaits, owners: int) -> str:
    if owners or awaits.kind != "lock" or ": locked" not in awaits.detail:
        return awaits.detail
    return f"{awaits.detail}, owner unknown (taken without `async with`)"


__all__ = ["Hold", "RemoteError", "RemotePython", "attach"]
