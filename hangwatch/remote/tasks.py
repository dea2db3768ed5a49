"""Tasks and their await chains, and whether they held still while they were read.

The target runs while it is read. What keeps the result honest:

1. Tasks are read in portions, so that little time passes between the parts of one task.
2. Chains are walked breadth first: one step of every chain of a portion, then the next step, so
   that each level costs a few system calls for all.
3. Each read on which a chain rests is kept as a *witness*: address and bytes. After the portion,
   a second look at the target compares every witness. A task whose bytes differ is ``torn``.
4. A chain must agree with itself: a suspended task whose chain ends in a future must name that
   future as its waiter; the chain of a pending task must not end in something finished.

A task that passes was, but for the same bytes returning in between, all there at one moment. On a
hung engine nothing is torn, so the number of torn tasks is itself a sign of life.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hangwatch.remote.coroutines import End, Step, Steps
from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.frames import FrameView, Witness
from hangwatch.remote.memory import Memory
from hangwatch.remote.results import Frame, State

PORTION: Final = 512
"""Tasks read and verified together: about 20 ms."""
OBJECT_PREFETCH: Final = 320
"""Bytes of a coroutine that usually hold its frame, locals and value stack."""

STATES: Final[dict[int, State]] = {0: "pending", 1: "cancelled", 2: "done"}
STATE_NAMES: Final[dict[str, State]] = {
    "PENDING": "pending",
    "CANCELLED": "cancelled",
    "FINISHED": "done",
}

_WORD: Final = struct.Struct("<Q")
_INT: Final = struct.Struct("<i")
_UNSIGNED: Final = struct.Struct("<I")


@dataclass(slots=True)
class TaskView:
    """One task as it was read.

    Attributes:
        views: The frames of ``chain`` that can be looked into; ``None`` for Cython's.
        end: Where the chain ends; ``None`` while it is walked, and for tasks that are over.
    """

    address: int
    name: str
    state: State
    loop: int
    coroutine: int
    waiter: int
    must_cancel: bool
    chain: list[Frame] = field(default_factory=list)
    views: list[FrameView | None] = field(default_factory=list)
    end: End | None = None
    torn: str = ""
    witnesses: list[Witness] = field(default_factory=list)


class Tasks:
    """Reads tasks of one interpreter.

    Args:
        steps: Reads the links of chains.
        python_task: Address of ``asyncio.tasks._PyTask``, or 0: the type of tasks in pure Python.
    """

    def __init__(self, steps: Steps, python_task: int, depth: int) -> None:
        self.steps = steps
        self.objects = steps.objects
        self.memory = steps.memory
        self.layout = steps.layout
        self.python_task = python_task
        self.depth = depth

    def read(self, addresses: Sequence[int]) -> tuple[list[TaskView], dict[int, str]]:
        """Read a portion of tasks with their chains, verified.

        Returns:
            The tasks, and for each object that is registered yet no readable task, why. Tasks
            that ended since they were listed are in neither.
        """
        where, drops = self.layout, self.memory.drops
        self.memory.prefetch(addresses, where.task.size)
        self._prefetch_parts(addresses)
        found: list[TaskView] = []
        failed: dict[int, str] = {}
        for address in addresses:
            try:
                found.append(self._task(address))
            except ExhaustedError:
                raise
            except (UnreadableError, KeyError) as error:
                failed[address] = str(error)
        self._walk(found)
        look = self.memory.again()
        self._verify(found, look, whole=self.memory.drops == drops)
        return found, {at: why for at, why in failed.items() if self._is_there(at, look)}

    def _is_there(self, address: int, look: Memory) -> bool:
        """Whether what could not be read as a task is one of a foreign kind, not one that ended."""
        try:
            kind = self.objects.type_at(look.type_word(address))
        except ExhaustedError:
            raise
        except UnreadableError:
            return False
        # Anything else is the next tenant of a task's memory.
        return any(name.endswith("Task") for name in kind.lineage)

    # ------------------------------------------------------------------ the task itself

    def _prefetch_parts(self, addresses: Iterable[int]) -> None:
        """Bring the coroutines, futures and names of all tasks in, by a few calls."""
        task = self.layout.task
        coroutines: list[int] = []
        others: list[int] = []
        for address in addresses:
            try:
                coroutines.append(self.memory.word(address + task.coroutine))
                others.append(self.memory.word(address + task.waiter))
                others.append(self.memory.word(address + task.name))
            except ExhaustedError:
                raise
            except UnreadableError:
                continue
        self.memory.prefetch(coroutines, OBJECT_PREFETCH)
        self.memory.prefetch(others, self.layout.future.size)

    def _task(self, address: int) -> TaskView:
        kind = self.objects.type_of(address)
        if "_asyncio.Task" in kind.lineage:
            return self._native(address)
        if self.python_task and self.python_task in kind.addresses:
            return self._python(address)
        raise UnreadableError(f"a {kind.name} is registered, which is no task that is known here")

    def _native(self, address: int) -> TaskView:
        task, future = self.layout.task, self.layout.future
        data = self.memory.read(address, task.size)

        def word(offset: int) -> int:
            value: int = _WORD.unpack_from(data, offset)[0]
            return value

        state = _INT.unpack_from(data, future.state)[0]
        if state not in STATES:
            raise UnreadableError(f"its state is {state}")
        must_cancel = _UNSIGNED.unpack_from(data, task.must_cancel)[0]
        name, waiter, torn = "?", word(task.waiter), ""
        try:
            name = self._name(word(task.name))
            waiter = self._not_none(waiter)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            # Its name or its future has just been freed: it is over, or moves.
            torn = str(error)
        return TaskView(
            address=address,
            name=name,
            state=STATES[state],
            loop=word(future.loop),
            coroutine=word(task.coroutine),
            waiter=waiter,
            torn=torn,
            must_cancel=bool(must_cancel & task.must_cancel_mask),
            # Type and loop; state; waiter, coroutine and name. Callbacks may come and go.
            witnesses=[
                (address + 8, data[8:24]),
                (address + future.state, data[future.state : future.state + 4]),
                (address + task.waiter, data[task.waiter : task.name + 8]),
            ],
        )

    def _python(self, address: int) -> TaskView:
        """Read a task written in Python: its fields are attributes."""
        attributes = self.objects.attributes(address)
        # ``_state`` is an attribute of the class until it changes.
        state = self.objects.text(attributes["_state"]) if "_state" in attributes else "PENDING"
        if state not in STATE_NAMES:
            raise UnreadableError("its state is no state of a task")
        cancel = attributes.get("_must_cancel", 0)
        return TaskView(
            address=address,
            name=self._name(attributes.get("_name", 0)),
            state=STATE_NAMES[state],
            loop=attributes.get("_loop", 0),
            coroutine=self._not_none(attributes.get("_coro", 0)),
            waiter=self._not_none(attributes.get("_fut_waiter", 0)),
            must_cancel=bool(cancel and self.objects.integer(cancel)),
        )

    def _name(self, address: int) -> str:
        """Return the name; from 3.12 on it may still be the number that it will be made of."""
        try:
            return self.objects.text(address, 256)
        except ExhaustedError:
            raise
        except UnreadableError:
            return f"Task-{self.objects.integer(address)}"

    def _not_none(self, address: int) -> int:
        return 0 if not address or self.objects.is_none(address) else address

    # ------------------------------------------------------------------ the chain

    def _walk(self, tasks: Sequence[TaskView]) -> None:
        live = [(task, task.coroutine) for task in tasks if task.state == "pending"]
        seen: set[tuple[int, int]] = set()
        level = 0
        while live:
            level += 1
            self.memory.prefetch((at for _, at in live), OBJECT_PREFETCH)
            following: list[tuple[TaskView, int]] = []
            for task, at in live:
                if (task.address, at) in seen:
                    task.torn, task.end = "its chain runs in a circle", End("cut", at)
                elif level > self.depth * 2 or len(task.chain) >= self.depth:
                    # Wrappers are steps without a frame: hence twice the depth.
                    task.end = End("cut", at)
                else:
                    seen.add((task.address, at))
                    next_at = self._step(task, at)
                    if task.end is None:
                        following.append((task, next_at))
            live = following

    def _step(self, task: TaskView, at: int) -> int:
        """Take one step; return the next address, where the chain does not end here."""
        if not at:
            # A task drops its coroutine when it is over.
            task.end = End("finished")
            return 0
        try:
            step: Step = self.steps.take(at)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            task.torn, task.end = str(error), End("unknown", at)
            return 0
        task.witnesses += step.witnesses
        if step.frame is not None:
            task.chain.append(step.frame)
            task.views.append(step.view)
        task.end = step.end
        return step.next

    # ------------------------------------------------------------------ did it hold still?

    def _verify(self, tasks: Sequence[TaskView], look: Memory, *, whole: bool) -> None:
        """Mark what moved; *whole* says that the pages of the first look are all still there."""
        look.prefetch((at for task in tasks for at, data in task.witnesses), 160)
        # Where no page differs, no witness does: so it is on a process that hangs.
        still = whole and look.equals(self.memory)
        for task in tasks:
            if not task.torn:
                task.torn = ("" if still else self._moved(task, look)) or self._contradiction(task)

    def _moved(self, task: TaskView, look: Memory) -> str:
        for at, data in task.witnesses:
            try:
                if look.read(at, len(data)) != data:
                    return "it moved while it was read"
            except ExhaustedError:
                raise
            except UnreadableError:
                return "it ended while it was read"
        return ""

    def _contradiction(self, task: TaskView) -> str:
        end = task.end
        if task.state != "pending" or end is None:
            return ""
        if end.kind == "finished":
            return "it is pending, yet its chain ends in something finished"
        if end.kind == "future" and end.address != task.waiter:
            if not task.waiter:
                return "its chain ends in a future, yet it waits for none"
            return "its chain ends in another future than the one that it waits for"
        return ""
