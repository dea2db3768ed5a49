"""Which lock a blocked thread waits for, and which thread holds it.

A thread that waits for a lock sleeps in the ``futex`` system call, and the kernel tells its
argument (``/proc/PID/task/TID/syscall``). That is the address of a word of the very lock, so the
match is a proof:

- A lock that is a ``PyMutex`` (``Lock`` from 3.13.5 on, ``RLock`` from 3.14 on) has its waiters in
  a parking lot. The futex is a semaphore on the waiter's own C stack; the word before it holds
  the address of the mutex, which lies inside the lock.
- An older lock points to a semaphore on the C heap. That pointer is compared for the locks that
  the thread's own frames can reach: locals, value stacks, and attributes of these.
- The GIL is a condition variable and two mutexes at a known place.

The owner of an ``RLock`` is recorded in it. The owner of a ``Lock`` is found as for asyncio: by the
``__exit__`` that waits on the value stack of a frame inside ``with lock:``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hangwatch.remote.awaits import Explainer
from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.frames import FrameView
from hangwatch.remote.objects import HEAP_TYPE, TypeInfo
from hangwatch.remote.results import ThreadWait
from hangwatch.remote.threads import FRAMES_SEARCHED, ThreadView

LOCK: Final = "_thread.lock"
RLOCK: Final = "_thread.RLock"
MUTEX_SIZES: Final = {LOCK: 24, RLOCK: 40}
"""``tp_basicsize`` of locks that are a ``PyMutex``; semaphores make them larger."""
LOCK_WORD: Final = 16
RLOCK_OWNER: Final = 24
INNER: Final = frozenset({"_lock", "mutex", "_cond", "_block"})
"""Attributes in which ``threading`` and ``queue`` keep the lock that an object is made of."""

GIL_SIZE: Final = 208
GIL_HOLDER: Final = 8
GIL_LOCKED: Final = 16

OBJECTS_SEARCHED: Final = 400
LEVELS_SEARCHED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gil:
    """The lock of an interpreter: where it is, and the thread state that had it last."""

    address: int
    holder: int
    locked: bool


class ThreadLocks:
    """Explains what the threads of an interpreter wait for."""

    def __init__(self, explainer: Explainer, runtime: int) -> None:
        self.explainer = explainer
        self.frames = explainer.frames
        self.objects = explainer.objects
        self.memory = explainer.memory
        self.layout = explainer.layout
        self.runtime = runtime

    def gil(self, interpreter: int) -> Gil | None:
        """Return the GIL of an interpreter, ``None`` if it cannot be read."""
        try:
            if self.layout.version < (3, 12):
                at = self.runtime + self.layout.gil
            else:
                at = self.memory.word(interpreter + self.layout.gil)
            data = self.memory.read(at, GIL_SIZE)
        except ExhaustedError:
            raise
        except UnreadableError:
            return None
        holder, locked = struct.unpack_from("<Q", data, GIL_HOLDER)[0], data[GIL_LOCKED]
        return Gil(address=at, holder=holder, locked=locked == 1)

    def waits(
        self, threads: Sequence[ThreadView], futexes: Mapping[int, int], gil: Gil | None
    ) -> dict[int, ThreadWait]:
        """Return what each thread waits for, by address of its state.

        Args:
            threads: With their stacks.
            futexes: The address that each thread sleeps on, by address of its state.
            gil: Of their interpreter.
        """
        found: dict[int, ThreadWait] = {}
        wanted: dict[int, int] = {}
        for thread in threads:
            futex = futexes.get(thread.address, 0)
            if futex and gil is not None and gil.address <= futex < gil.address + GIL_SIZE:
                owner = gil.holder if gil.locked and gil.holder != thread.address else 0
                found[thread.address] = ThreadWait(type="GIL", object=gil.address, owner=owner)
            elif futex:
                lock = self._parked(futex) or self._reachable(thread, futex)
                if lock:
                    wanted[thread.address] = lock
        owners = self._owners(threads, wanted)
        idents = {thread.ident: thread.address for thread in threads}
        for address, lock in wanted.items():
            try:
                kind = self.objects.type_of(lock).name
                owner = owners.get(lock, 0)
                if kind == RLOCK:
                    owner = idents.get(self.memory.word(lock + RLOCK_OWNER), 0)
            except ExhaustedError:
                raise
            except UnreadableError:
                continue
            found[address] = ThreadWait(
                type="RLock" if kind == RLOCK else "Lock", object=lock, owner=owner
            )
        return found

    def _parked(self, futex: int) -> int:
        """Return the lock in whose parking lot a thread sleeps, 0 if it is none."""
        try:
            lock = self.memory.word(futex - 8) - LOCK_WORD
            kind = self.objects.type_of(lock)
        except ExhaustedError:
            raise
        except UnreadableError:
            return 0
        return lock if MUTEX_SIZES.get(kind.name) == kind.basic_size else 0

    def _reachable(self, thread: ThreadView, futex: int) -> int:
        """Search a thread's own frames for the lock whose semaphore it sleeps on."""
        budget = OBJECTS_SEARCHED
        seen: set[int] = set()
        for view in thread.views[:FRAMES_SEARCHED]:
            level = [*self._values(view)]
            for _ in range(LEVELS_SEARCHED):
                following: list[int] = []
                for at in level:
                    if at in seen or budget <= 0:
                        continue
                    seen.add(at)
                    budget -= 1
                    try:
                        kind = self.objects.type_of(at)
                        if kind.name in MUTEX_SIZES:
                            if self.memory.word(at + LOCK_WORD) == futex:
                                return at
                        else:
                            following += self._inside(at, kind)
                    except ExhaustedError:
                        raise
                    except UnreadableError:
                        continue
                level = following
        return 0

    def _values(self, view: FrameView) -> Iterator[int]:
        try:
            yield from self.frames.locals(view, None).values()
            values, _ = self.frames.values(view)
            yield from (value for value in values if value and not value & 7)
        except ExhaustedError:
            raise
        except UnreadableError:
            return

    def _inside(self, address: int, kind: TypeInfo) -> list[int]:
        """Return what an object leads to: the self of a method, or its attributes."""
        if kind.name in ("method", "builtin_function_or_method"):
            # Both keep their ``self`` at the same place.
            return [self.memory.word(address + 24)]
        if kind.flags & HEAP_TYPE and kind.name != "type":
            return [*self.objects.attributes(address).values()]
        return []

    def _owners(self, threads: Sequence[ThreadView], wanted: Mapping[int, int]) -> dict[int, int]:
        """Map each lock that a frame is inside of to the state of the thread of that frame.

        A thread that waits to enter ``with lock:`` has its ``__exit__`` on the stack already.
        """
        found: dict[int, int] = {}
        for thread in threads:
            for view in thread.views:
                try:
                    held = self.explainer.of_frame(view, ())
                except ExhaustedError:
                    raise
                except (UnreadableError, struct.error):
                    continue
                for each in held:
                    for lock in self._locks_of(each.hold.object):
                        if wanted.get(thread.address) == lock:
                            continue
                        if each.hold.certain or lock not in found:
                            found[lock] = thread.address
        return found

    def _locks_of(self, owner: int) -> list[int]:
        """Return an object if it is a lock, and the locks that it is made of."""
        found = [owner]
        if self.objects.type_of(owner).name not in MUTEX_SIZES:
            attributes = self.objects.attributes(owner)
            found += [value for name, value in attributes.items() if name in INNER]
        return found
