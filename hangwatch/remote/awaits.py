"""What an await is about, and what a task holds.

The innermost frames of a chain that belong to asyncio itself say it: ``Queue.get`` has a ``self``,
``sleep`` has a timer. Frames of asyncio further out, around the program's own code, say nothing
about what is awaited, so the look stops at the first frame that is not asyncio's. Where no such
frame says it, the future at the end of the chain does: its type, or what will be called when it is
done (``shield`` and ``run_in_executor`` leave a closure there).

Ownership is not recorded by asyncio. But a frame inside ``async with lock:`` keeps ``__aexit__``,
bound to the lock, on its saved value stack until the block ends (from 3.14 on the unbound method
and, in the next slot, the lock). A task that called ``await lock.acquire()`` without a block
leaves no such trace; then the owner is not known, and is said not to be.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hangwatch.remote.coroutines import End
from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.frames import Frames, FrameView
from hangwatch.remote.layouts import schema
from hangwatch.remote.results import Awaits, Hold
from hangwatch.remote.tasks import TaskView

INNERMOST: Final = 8
"""Frames of asyncio looked at; the deepest nesting inside it is four."""
MAX_CHILDREN: Final = 5000
MAX_CALLBACKS: Final = 32
EXITS: Final = frozenset({"__aexit__", "__exit__"})
RETURN_WHEN: Final = frozenset({"FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"})

LOCK_KINDS: Final = {
    "Event": "event",
    "Lock": "lock",
    "Condition": "condition",
    "Semaphore": "semaphore",
    "Barrier": "barrier",
}

OVER: Final = Awaits(kind="nothing", detail="it is over")
TOLD_BY_END: Final = {
    "running": Awaits(kind="running", detail="it executes at this moment"),
    "created": Awaits(kind="not_started", detail="its loop has not yet run it"),
}

RAY_ID: Final = 32
RAY_ID_SIZE: Final = 28
RAY_ACTOR: Final = slice(8, 24)
"""In an ObjectID: 8 bytes of its own, 16 of the actor that the call went to, an index."""

_WORD: Final = struct.Struct("<Q")


@dataclass(slots=True)
class Held:
    """A hold, and the other objects that are held with it (a condition's lock)."""

    hold: Hold
    objects: tuple[int, ...]


class Explainer:
    """Explains the awaits of tasks that have just been read."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.objects = frames.objects
        self.memory = frames.objects.memory
        self.layout = frames.layout
        # By module of asyncio and function; "" for any function of the module.
        self._askers: dict[tuple[str, str], Callable[[FrameView], Awaits | None]] = {
            ("locks.py", "wait"): self._lock,
            ("locks.py", "acquire"): self._lock,
            ("locks.py", "wait_for"): self._lock,
            ("queues.py", "get"): self._queue,
            ("queues.py", "put"): self._queue,
            ("queues.py", "join"): self._queue,
            ("tasks.py", "sleep"): self._sleep,
            ("tasks.py", "_wait"): self._wait,
            ("tasks.py", "wait_for"): self._wait_for,
            ("taskgroups.py", "__aexit__"): self._task_group,
            ("taskgroups.py", "_aexit"): self._task_group,
            ("streams.py", ""): self._stream,
            ("selector_events.py", ""): self._stream,
            ("base_subprocess.py", ""): self._process,
        }

    # ------------------------------------------------------------------ awaits

    def awaits(self, task: TaskView) -> Awaits:
        """Return what the innermost await of a task is about; never raises for bad memory."""
        end = task.end
        if task.state != "pending" or end is None:
            return OVER
        if end.kind in TOLD_BY_END:
            return TOLD_BY_END[end.kind]
        try:
            found = self._by_frames(task)
            future = end.address if end.kind == "future" else task.waiter
            if found is None and future:
                found = self._by_future(future)
        except ExhaustedError:
            raise
        except (UnreadableError, KeyError, struct.error) as error:
            found = Awaits(kind="unknown", detail=f"unreadable: {error}")
        return found or _by_end(end)

    def _by_frames(self, task: TaskView) -> Awaits | None:
        """Ask the innermost frames that belong to asyncio."""
        inner: list[FrameView] = []
        for view in reversed(task.views[-INNERMOST:]):
            if view is None or not view.code.library:
                break
            inner.append(view)
        for view in reversed(inner):
            # These two wait through an event or a condition of their own: they come first.
            name = view.code.name
            if view.code.library == "asyncio/queues.py" and name == "join":
                return self._queue(view)
            if view.code.library == "asyncio/locks.py" and self._self_is(view, "Barrier"):
                return self._lock(view)
        for view in inner:
            ask = self._asker(view)
            found = ask(view) if ask else None
            if found is not None:
                return found
        return None

    def _asker(self, view: FrameView) -> Callable[[FrameView], Awaits | None] | None:
        """Return who can tell by a frame of asyncio what is awaited, if anybody can."""
        library = view.code.library.removeprefix("asyncio/")
        return self._askers.get((library, view.code.name)) or self._askers.get((library, ""))

    def _self_is(self, view: FrameView, name: str) -> bool:
        this = self.frames.locals(view, {"self"}).get("self", 0)
        return bool(this) and name in self.objects.type_of(this).lineage

    def _lock(self, view: FrameView) -> Awaits | None:
        this = self.frames.locals(view, {"self"}).get("self", 0)
        if not this:
            return None
        lineage = self.objects.type_of(this).lineage
        kind = next((LOCK_KINDS[name] for name in lineage if name in LOCK_KINDS), "")
        if not kind:
            return None
        attributes = self.objects.attributes(this)
        parts = []
        if kind == "barrier":
            parts.append(f"{self._count(attributes, '_count')} of")
            parts.append(f"{self._count(attributes, '_parties')} are there")
        elif kind == "semaphore":
            parts.append(f"value {self._count(attributes, '_value')},")
        elif kind == "lock":
            locked = attributes.get("_locked", 0)
            held = bool(locked and self.objects.integer(locked))
            parts.append("locked," if held else "not locked,")
        elif kind == "event":
            value = attributes.get("_value", 0)
            parts.append("set," if value and self.objects.integer(value) else "not set,")
        if kind != "barrier":
            waiters = attributes.get("_waiters", 0)
            count = 0
            if waiters and not self.objects.is_none(waiters):
                count = self.objects.length(waiters)
            parts.append(count_of(count, "waiter"))
        name = f"{lineage[0]}.{view.code.name}"
        return Awaits(kind=kind, detail=f"{name}: {' '.join(parts)}", object=this)

    def _count(self, attributes: dict[str, int], name: str) -> str:
        return self.objects.brief(attributes.get(name, 0))

    def _queue(self, view: FrameView) -> Awaits | None:
        this = self.frames.locals(view, {"self"}).get("self", 0)
        if not this:
            return None
        attributes = self.objects.attributes(this)
        size = self.objects.length(attributes["_queue"]) if "_queue" in attributes else "?"
        limit = self._count(attributes, "_maxsize")
        parts = [f"{size} items" if limit in ("0", "?") else f"{size} of {limit} items"]
        parts += [
            count_of(self.objects.length(attributes[name]), name[1:-1])
            for name in ("_getters", "_putters")
            if name in attributes
        ]
        if view.code.name == "join":
            parts.append(f"{self._count(attributes, '_unfinished_tasks')} unfinished")
        name = f"{self.objects.type_of(this).name}.{view.code.name}"
        return Awaits(kind="queue", detail=f"{name}: {', '.join(parts)}", object=this)

    def _sleep(self, view: FrameView) -> Awaits | None:
        found = self.frames.locals(view, {"delay", "h"})
        delay = self.objects.brief(found.get("delay", 0))
        if "h" not in found:
            return Awaits(kind="ready", detail=f"sleep({delay}): it waits for nothing but its turn")
        when = self.objects.slot(found["h"], "_when")
        if not when or "float" not in self.objects.type_of(when).lineage:
            return Awaits(kind="sleep", detail=f"sleep({delay})")
        due = self.objects.real(when) - time.clock_gettime(time.CLOCK_MONOTONIC)
        word = f"due in {due:.1f} s" if due >= 0 else f"overdue by {-due:.1f} s"
        return Awaits(kind="sleep", detail=f"sleep({delay}), {word}", due_in=due)

    def _wait(self, view: FrameView) -> Awaits | None:
        found = self.frames.locals(view, {"fs", "timeout", "return_when"})
        if "fs" not in found:
            return None
        pending = self._pending(self.objects.members(found["fs"], MAX_CHILDREN))
        when = ""
        if "return_when" in found:
            text = self.objects.text(found["return_when"], 32)
            when = text if text in RETURN_WHEN else ""
        detail = f"wait: {count_of(len(pending), 'future')} pending"
        if when and when != "ALL_COMPLETED":
            detail += f", {when}"
        return Awaits(
            kind="wait",
            detail=detail + self._timeout(found),
            tasks=pending,
            any_of=when == "FIRST_COMPLETED",
        )

    def _wait_for(self, view: FrameView) -> Awaits | None:
        """Up to 3.11 the awaited task is a local; from 3.12 on the chain itself leads to it."""
        found = self.frames.locals(view, {"fut", "timeout"})
        if "fut" not in found or not self._is_future(found["fut"]):
            return None
        detail = f"wait_for{self._timeout(found)}"
        return Awaits(kind="wait_for", detail=detail, object=found["fut"], tasks=(found["fut"],))

    def _timeout(self, found: dict[str, int]) -> str:
        value = found.get("timeout", 0)
        if not value or self.objects.is_none(value):
            return ""
        return f", timeout {self.objects.brief(value)} s"

    def _task_group(self, view: FrameView) -> Awaits | None:
        this = self.frames.locals(view, {"self"}).get("self", 0)
        tasks = self.objects.attribute(this, "_tasks") if this else 0
        if not tasks:
            return None
        members = self._pending(self.objects.members(tasks, MAX_CHILDREN))
        detail = f"TaskGroup: {count_of(len(members), 'task')} pending"
        return Awaits(kind="task_group", detail=detail, object=this, tasks=members)

    def _stream(self, view: FrameView) -> Awaits | None:
        return Awaits(kind="stream", detail=view.shown().function)

    def _process(self, view: FrameView) -> Awaits | None:
        return Awaits(kind="process", detail=view.shown().function)

    # ------------------------------------------------------------------ futures

    def _by_future(self, future: int) -> Awaits | None:
        kind = self.objects.type_of(future)
        if "_asyncio.Task" in kind.lineage or "_coro" in (
            self.objects.attributes(future) if "Future" in kind.lineage else ()
        ):
            return Awaits(kind="task", detail="a task", object=future, tasks=(future,))
        if kind.name == "_GatheringFuture":
            return self._gather(future)
        for callback in self._callbacks(future):
            name, cells = self._closure(callback)
            if name.endswith("_outer_done_callback") and "inner" in cells:
                inner = cells["inner"]
                return Awaits(kind="shield", detail="shield", object=inner, tasks=(inner,))
            if name.endswith("._call_check_cancel") and "source" in cells:
                return self._executor(cells["source"])
        return Awaits(kind="future", detail=f"a {kind.name.rsplit('.', 1)[-1]}", object=future)

    def _gather(self, future: int) -> Awaits:
        children = self.objects.attribute(future, "_children")
        members = self.objects.items(children, MAX_CHILDREN) if children else ()
        pending = self._pending(members)
        detail = f"gather: {len(pending)} of {len(members)} pending"
        return Awaits(kind="gather", detail=detail, object=future, tasks=pending)

    def _executor(self, source: int) -> Awaits:
        """Explain a future that follows one of ``concurrent.futures``."""
        attributes = self.objects.attributes(source)
        state = "?"
        if "_state" in attributes:
            state = self.objects.text(attributes["_state"], 32).lower()
        reference = attributes.get("object_ref", 0)
        if reference and self.objects.type_of(reference).name.endswith("ObjectRef"):
            identity = self.memory.read(reference + RAY_ID, RAY_ID_SIZE)
            actor = identity[RAY_ACTOR]
            detail = f"Ray ObjectRef {identity.hex()}"
            if actor[:12] != b"\xff" * 12:
                detail += f", a call on actor {actor.hex()}"
            return Awaits(kind="ray", detail=f"{detail}, {state}", object=source)
        name = self.objects.type_of(source).name
        detail = f"a {state} {name} of an executor or another thread"
        return Awaits(kind="executor", detail=detail, object=source)

    def resolves(self, task: int) -> int:
        """Return the future of ``concurrent.futures`` that the end of a task resolves, or 0.

        ``run_coroutine_threadsafe`` leaves it in a cell of a callback of the task.
        """
        try:
            for callback in self._callbacks(task):
                name, cells = self._closure(callback)
                if name.endswith("._call_set_state") and "destination" in cells:
                    return cells["destination"]
        except ExhaustedError:
            raise
        except UnreadableError:
            pass
        return 0

    def _callbacks(self, future: int) -> Iterable[int]:
        """Return what will be called when a future is done."""
        kind = self.objects.type_of(future)
        where = self.layout.future
        if {"_asyncio.Future", "_asyncio.Task"} & set(kind.lineage):
            first = self.memory.word(future + where.callback)
            more = self.memory.word(future + where.callbacks)
            if first:
                yield first
        else:
            more = self.objects.attribute(future, "_callbacks")
        if more and not self.objects.is_none(more):
            for pair in self.objects.items(more, MAX_CALLBACKS):
                items = self.objects.items(pair, 2)
                if items:
                    yield items[0]

    def _closure(self, callback: int) -> tuple[str, dict[str, int]]:
        """Return the qualified name of a Python function, and what its cells hold."""
        if self.objects.type_of(callback).name != "function":
            return "", {}
        name = self.objects.text(self.memory.word(callback + schema.FUNCTION_QUALIFIED_NAME))
        closure = self.memory.word(callback + schema.FUNCTION_CLOSURE)
        if not closure:
            return name, {}
        code = self.frames.code(self.memory.word(callback + schema.FUNCTION_CODE))
        cells = self.objects.items(closure, 64)
        return name, {
            variable: self.memory.word(cell + schema.CELL_CONTENTS)
            for variable, cell in zip(self.frames.free_variables(code), cells, strict=False)
        }

    def _is_future(self, address: int) -> bool:
        return bool({"_asyncio.Future", "Future"} & set(self.objects.type_of(address).lineage))

    def _pending(self, futures: Sequence[int]) -> tuple[int, ...]:
        """Return those that are not done."""
        self.memory.prefetch(futures, self.layout.future.size)
        return tuple(future for future in futures if self._is_pending(future))

    def _is_pending(self, future: int) -> bool:
        try:
            if {"_asyncio.Future", "_asyncio.Task"} & set(self.objects.type_of(future).lineage):
                return not self.memory.read(future + self.layout.future.state, 4).strip(b"\0")
            state = self.objects.attribute(future, "_state")
            return not state or self.objects.text(state, 32) == "PENDING"
        except ExhaustedError:
            raise
        except UnreadableError:
            return False

    # ------------------------------------------------------------------ holds

    def holds(self, task: TaskView) -> list[Held]:
        """Return the context managers that a task is inside of; never raises for bad memory."""
        found: list[Held] = []
        for i, view in enumerate(task.views):
            if view is None or view.depth == 0 or (view.depth == 1 and task.end is not None):
                # Only the awaited object lies there.
                continue
            try:
                found += self.of_frame(view, task.views[i + 1 :])
            except ExhaustedError:
                raise
            except (UnreadableError, struct.error):
                continue
        return found

    def of_frame(self, view: FrameView, inner: Sequence[FrameView | None]) -> list[Held]:
        """Return the context managers that one frame is inside of; *inner* are those it called."""
        values, certain = self.frames.values(view)
        found: list[Held] = []
        for i, value in enumerate(values):
            owner = self._exits(value, values[i + 1] if i + 1 < len(values) else 0)
            if not owner or self._not_yet(owner, inner):
                continue
            kind = self.objects.type_of(owner)
            objects = [owner]
            if kind.name == "Condition":
                objects.append(self.objects.attribute(owner, "_lock"))
            hold = Hold(object=owner, type=kind.name.rsplit(".", 1)[-1], certain=certain)
            found.append(Held(hold, tuple(objects)))
        return found

    def _exits(self, value: int, above: int) -> int:
        """Return the context manager if *value* is the exit of one, else 0."""
        if value & 7 or not value:
            return 0
        try:
            name = self.objects.type_of(value).name
            if name == "method":
                function = self.memory.word(value + schema.METHOD_FUNCTION)
                text = self.objects.text(self.memory.word(function + schema.FUNCTION_NAME))
                owner = self.memory.word(value + schema.METHOD_SELF)
            elif name == "builtin_function_or_method":
                definition = self.memory.word(value + schema.BUILTIN_METHOD_DEF)
                text = self.memory.text(self.memory.word(definition), 32)
                owner = self.memory.word(value + schema.BUILTIN_SELF)
            elif self.layout.frame is None or not self.layout.frame.tagged or not above:
                return 0
            elif name == "function":
                text = self.objects.text(self.memory.word(value + schema.FUNCTION_NAME))
                owner = above
            elif name == "method_descriptor":
                text = self.objects.text(self.memory.word(value + schema.DESCRIPTOR_NAME))
                owner = above
            else:
                return 0
        except ExhaustedError:
            raise
        except UnreadableError:
            return 0
        return owner if text in EXITS else 0

    def _not_yet(self, owner: int, inner: Sequence[FrameView | None]) -> bool:
        """Whether *owner* is only being entered, or is a condition that waits, its lock free."""
        for depth, view in enumerate(inner):
            if view is None:
                return False
            name = view.code.name
            if depth == 0 and name in ("__aenter__", "acquire"):
                this = self.frames.locals(view, {"self"}).get("self", 0)
                if this == owner or (this and owner in self.objects.attributes(this).values()):
                    return True
                # ``async with condition``: its ``acquire`` is the lock's own.
                if this and this in self.objects.attributes(owner).values():
                    return True
            if not view.code.library:
                return False
            if view.code.library == "asyncio/locks.py" and name == "wait":
                return self.frames.locals(view, {"self"}).get("self", 0) == owner
        return False


def _by_end(end: End) -> Awaits:
    if end.kind == "yield":
        return Awaits(kind="ready", detail="it waits for nothing but its turn")
    if end.kind == "unknown" and end.detail:
        return Awaits(kind="unknown", detail=f"a {end.detail}", object=end.address)
    return Awaits(kind="unknown", detail="its chain could not be followed to its end")


def count_of(count: int, noun: str) -> str:
    """Return ``1 waiter``, ``2 waiters``: a number and its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
