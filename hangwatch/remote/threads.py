"""Threads of another process: their stacks, their names, and the event loops that they run.

A thread's stack is a list of frames from ``PyThreadState``. The thread runs while it is read, so
a stack may be torn: frames of two moments. A hung thread's stack is not. Two readings tell.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.frames import Frames, FrameView
from hangwatch.remote.results import Frame

MAX_THREADS: Final = 10_000
RUNNING_LOOP_KEY: Final = "__asyncio_running_event_loop__"
ACTIVE: Final = "_active"
"""``threading``'s own dict of running threads, by ident."""
RUNNING_LOOP_HOLDER: Final = 16
FRAMES_SEARCHED: Final = 8
"""Innermost frames of a blocked thread in which its lock is searched."""
PTHREAD_TID: Final = 720
"""``struct pthread.tid`` in glibc on x86-64: 3.10 keeps no kernel id of its own."""

_WORD: Final = struct.Struct("<Q")


@dataclass(slots=True)
class ThreadView:
    """One thread as it was read.

    Attributes:
        frames: Its stack, innermost first.
        views: Those of the frames that were wanted as views, in the same order.
    """

    address: int
    ident: int
    native_id: int
    loop: int
    frames: list[Frame] = field(default_factory=list)
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

    def read(
        self, interpreter: int, *, stacks: bool = False, shown: bool = False
    ) -> list[ThreadView]:
        """Return its threads.

        Args:
            interpreter: Address of the interpreter.
            stacks: Read every frame as a view.
            shown: Read every frame for people, as views only those that locks can be found in.
        """
        where = self.layout.thread
        found: list[ThreadView] = []
        seen: set[int] = set()
        at = self.memory.word(interpreter + self.layout.interpreter.threads)
        while at and at not in seen and len(found) < MAX_THREADS:
            seen.add(at)
            try:
                data = self.memory.read(at, where.size)
                thread = self._thread(at, data)
                if stacks or shown:
                    searched = sys.maxsize if stacks else FRAMES_SEARCHED
                    stack = self.frames.trace(self._top(data), self.depth * 8, searched)
                    thread.frames, thread.views, thread.torn = stack
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
            if not names:
                return 0
            value = self.objects.find(names, (RUNNING_LOOP_KEY,)).get(RUNNING_LOOP_KEY, 0)
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

    def names(self, modules: Mapping[str, int]) -> dict[int, str]:
        """Return the names that ``threading`` gave to threads, by ident."""
        found: dict[int, str] = {}
        if "threading" not in modules:
            return found
        try:
            active = self.objects.in_module(modules["threading"], (ACTIVE,)).get(ACTIVE, 0)
            for key, thread in self.objects.pairs(active) if active else ():
                name = self.objects.attribute(thread, "_name")
                if name:
                    found[self.objects.integer(key)] = self.objects.text(name, 128)
        except ExhaustedError:
            raise
        except UnreadableError:
            pass
        return found
