"""Threads of another process: their stacks, their names, and the event loops that they run.

A thread's stack is a list of frames from ``PyThreadState``. The thread runs while it is read, so
a stack may be torn: frames of two moments. A hung thread's stack is not. Two readings tell.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.frames import Frames, FrameView

MAX_THREADS: Final = 10_000
RUNNING_LOOP_KEY: Final = "__asyncio_running_event_loop__"
RUNNING_LOOP_HOLDER: Final = 16
PTHREAD_TID: Final = 720
"""``struct pthread.tid`` in glibc on x86-64: 3.10 keeps no kernel id of its own."""

_WORD: Final = struct.Struct("<Q")


@dataclass(slots=True)
class ThreadView:
    """One thread as it was read; ``views`` innermost first."""

    address: int
    ident: int
    native_id: int
    loop: int
    views: list[FrameView] = field(default_factory=list)
    torn: str = ""


class Threads:
    """Reads the threads of an interpreter."""

    def __init__(self, frames: Frames, depth: int) -> None:
        self.frames = frames
        self.objects = frames.objects
        self.memory = frames.objects.memory
        self.layout = frames.layout
        self.depth = depth

    def read(self, interpreter: int, *, stacks: bool) -> list[ThreadView]:
        """Return its threads, with their stacks if wanted."""
        where = self.layout.thread
        found: list[ThreadView] = []
        seen: set[int] = set()
        at = self.memory.word(interpreter + self.layout.interpreter.threads)
        while at and at not in seen and len(found) < MAX_THREADS:
            seen.add(at)
            try:
                data = self.memory.read(at, where.size)
                thread = self._thread(at, data)
                if stacks:
                    self._stack(thread, self._top(data))
            except ExhaustedError:
                raise
            except UnreadableError:
                break
            found.append(thread)
            at = _WORD.unpack_from(data, where.next)[0]
        return found

    def _thread(self, address: int, data: bytes) -> ThreadView:
        where = self.layout.thread
        ident = _WORD.unpack_from(data, where.ident)[0]
        if where.native_id is not None:
            native = _WORD.unpack_from(data, where.native_id)[0]
        else:
            try:
                native = struct.unpack("<i", self.memory.read(ident + PTHREAD_TID, 4))[0]
            except UnreadableError:
                native = 0
        return ThreadView(
            address=address, ident=ident, native_id=native, loop=self._loop(address, data)
        )

    def _loop(self, address: int, data: bytes) -> int:
        """Return the event loop that runs in a thread, 0 for none."""
        where = self.layout.thread
        try:
            if where.running_loop is not None:
                loop = self.memory.word(address + where.running_loop)
                return 0 if not loop or self.objects.is_none(loop) else loop
            names = _WORD.unpack_from(data, where.dict)[0]
            value = self.objects.names(names).get(RUNNING_LOOP_KEY, 0) if names else 0
            if not value:
                return 0
            kind = self.objects.type_of(value).name
            if kind.endswith("RunningLoopHolder"):
                value = self.memory.word(value + RUNNING_LOOP_HOLDER)
            elif kind == "tuple":
                value = self.objects.items(value, 1)[0]
            return 0 if self.objects.is_none(value) else value
        except ExhaustedError:
            raise
        except (UnreadableError, IndexError):
            return 0

    def _top(self, data: bytes) -> int:
        """Return the address of the innermost frame."""
        where = self.layout.thread
        if where.frame is not None:
            top: int = _WORD.unpack_from(data, where.frame)[0]
            return top
        assert where.cframe is not None
        cframe = _WORD.unpack_from(data, where.cframe)[0]
        return self.memory.word(cframe + where.cframe_frame) if cframe else 0

    def _stack(self, thread: ThreadView, top: int) -> None:
        seen: set[int] = set()
        at = top
        while at:
            if at in seen or len(thread.views) >= self.depth * 8:
                thread.torn = "its stack runs in a circle" if at in seen else "its stack was cut"
                return
            seen.add(at)
            try:
                view, at = self.frames.frame_and_back(at)
            except ExhaustedError:
                raise
            except UnreadableError as error:
                thread.torn = str(error)
                return
            if view is not None:
                thread.views.append(view)

    def names(self, modules: dict[str, int]) -> dict[int, str]:
        """Return the names that ``threading`` gave to threads, by ident."""
        found: dict[int, str] = {}
        if "threading" not in modules:
            return found
        try:
            active = self.objects.module_names(modules["threading"]).get("_active", 0)
            for key, thread in self.objects.pairs(active) if active else ():
                name = self.objects.attribute(thread, "_name")
                if name:
                    found[self.objects.integer(key)] = self.objects.text(name, 128)
        except ExhaustedError:
            raise
        except UnreadableError:
            pass
        return found
