"""Where asyncio keeps its tasks, in each version.

========  ==============================================================================
3.10, 11  ``asyncio.tasks._all_tasks``, a ``WeakSet``
3.12, 13  ``_scheduled_tasks``, a ``WeakSet``; ``_eager_tasks``, a set
3.14 on   a linked list of C tasks for each thread, and one for the tasks of ended threads;
          ``_scheduled_tasks`` and ``_eager_tasks`` for tasks written in Python
========  ==============================================================================

``_current_tasks`` (up to 3.13), or a field of the thread (3.14 on), names the task that runs on
each loop. Tasks of other implementations that register themselves are found as well.

A set that is resized while it is read makes no sense for a moment; it is then read again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.layouts import schema
from hangwatch.remote.objects import Objects
from hangwatch.remote.results import Problem

WEAK_SETS: Final = ("_all_tasks", "_scheduled_tasks")
EAGER_SET: Final = "_eager_tasks"
CURRENT: Final = "_current_tasks"
ATTEMPTS: Final = 5
MAX_THREADS: Final = 10_000


class Registries:
    """Finds the tasks of one interpreter.

    Attributes:
        found: Addresses of tasks, in the order of the registries.
        current: Task to loop, for the tasks that run now.
        problems: What could not be read.
    """

    def __init__(self, objects: Objects, where: str, limit: int) -> None:
        self.objects = objects
        self.memory = objects.memory
        self.layout = objects.layout
        self.where = where
        self.limit = limit
        self.current: dict[int, int] = {}
        self.problems: list[Problem] = []
        self._found: dict[int, None] = {}

    @property
    def found(self) -> tuple[int, ...]:
        """Addresses of tasks, each once."""
        return tuple(self._found)

    def read(self, interpreter: int, modules: Mapping[str, int]) -> None:
        """Read every registry of an interpreter."""
        if self.layout.task.node is not None:
            self._lists(interpreter, self.layout.task.node)
        seen: set[int] = set()
        for module in ("asyncio.tasks", "_asyncio"):
            if module not in modules:
                continue
            names = self.objects.in_module(modules[module], (*WEAK_SETS, EAGER_SET, CURRENT))
            for name in (*WEAK_SETS, EAGER_SET):
                registry = names.get(name, 0)
                if registry and registry not in seen:
                    seen.add(registry)
                    self._set(name, registry)
            if names.get(CURRENT):
                self._current(names[CURRENT])

    def _set(self, name: str, registry: int) -> None:
        def once() -> tuple[int, ...]:
            if name == EAGER_SET:
                return self.objects.members(registry)
            data = self.objects.attribute(registry, "data")
            references = self.objects.members(data)
            self.memory.prefetch(references, 24)
            found = []
            for reference in references:
                try:
                    found.append(self.memory.word(reference + schema.WEAK_REFERENCE_OBJECT))
                except UnreadableError:
                    continue
            return tuple(found)

        self._add(self._insist(name, once))

    def _current(self, registry: int) -> None:
        def once() -> tuple[int, ...]:
            pairs = self.objects.pairs(registry)
            self.current.update({task: loop for loop, task in pairs})
            return tuple(task for _, task in pairs)

        self._add(self._insist(CURRENT, once))

    def _insist(self, name: str, once: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Read a registry, again if it was being changed."""
        error = ""
        for _ in range(ATTEMPTS):
            try:
                return once()
            except ExhaustedError:
                raise
            except UnreadableError as caught:
                error = str(caught)
                self.memory.forget()
        self._problem(f"{name}: {error}")
        return ()

    def _lists(self, interpreter: int, node: int) -> None:
        """Walk the linked lists of 3.14: of the interpreter, and of each thread."""
        heads = []
        if self.layout.interpreter.tasks_head is not None:
            heads.append(interpreter + self.layout.interpreter.tasks_head)
        where = self.layout.thread
        assert where.tasks_head is not None
        assert where.running_task is not None
        assert where.running_loop is not None
        thread = self.memory.word(interpreter + self.layout.interpreter.threads)
        seen: set[int] = set()
        while thread and thread not in seen and len(seen) < MAX_THREADS:
            seen.add(thread)
            heads.append(thread + where.tasks_head)
            task = self.memory.word(thread + where.running_task)
            if task:
                self.current[task] = self.memory.word(thread + where.running_loop)
            thread = self.memory.word(thread + where.next)
        for head in heads:
            for _ in range(ATTEMPTS):
                if self._list(head, node):
                    break
                self.memory.forget()
            else:
                self._problem("the list of tasks changed each time that it was read")
        self._add(tuple(self.current))

    def _list(self, head: int, node: int) -> bool:
        """Walk one list; return whether it held together."""
        links: list[int] = []
        seen = {head}
        before, at = head, 0
        try:
            at = self.memory.word(head)
            while at not in seen and at and len(links) <= self.limit:
                seen.add(at)
                following, previous = struct.unpack("<QQ", self.memory.read(at, 16))
                if previous != before:
                    break
                links.append(at - node)
                before, at = at, following
        except ExhaustedError:
            raise
        except UnreadableError:
            at = 0
        self._add(tuple(links))
        return at == head or len(links) > self.limit

    def _add(self, tasks: tuple[int, ...]) -> None:
        self._found.update(dict.fromkeys(task for task in tasks if task))

    def _problem(self, message: str) -> None:
        self.problems.append(Problem(kind="torn", where=self.where, message=message))
