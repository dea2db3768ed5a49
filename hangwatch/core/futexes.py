"""Threads that wait at one address: candidates for a lock that nobody gives back.

A private futex is an address of one process. A shared one (semaphores of ``multiprocessing``, of
POSIX) lies in a file that several processes have in memory, each at an address of its own: it is
known by the file and the place in it. One that a thread calls shared, but that lies in memory of
its process alone, is private: so ``pthread_join`` waits for the end of a thread. Who holds the lock
stands in no file of ``/proc``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

_MAPPING: Final = re.compile(
    r"^(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S{3}s (?P<offset>[0-9a-f]+) "
    r"(?P<device>\S+) (?P<inode>\d+) *(?P<path>.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A thread that waits for a futex.

    Attributes:
        pid: Its process.
        tid: It.
        comm: Its name.
        address: Where the futex is in its process.
        shared: Whether other processes may use it.
        operation: ``wait``, ``lock_pi``, …
        limited: Whether it waits for a limited time.
    """

    pid: int
    tid: int
    comm: str
    address: int
    shared: bool
    operation: str
    limited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a shared futex is: a byte of a file in memory."""

    path: str
    device: str
    inode: int
    offset: int


def place(maps: str, address: int) -> Place | None:
    """Return what shared file has *address* in a memory map, and where in it."""
    for match in _MAPPING.finditer(maps):
        begin = int(match["begin"], 16)
        if begin <= address < int(match["end"], 16):
            return Place(
                path=match["path"].removesuffix(" (deleted)"),
                device=match["device"],
                inode=int(match["inode"]),
                offset=int(match["offset"], 16) + address - begin,
            )
    return None


def placed(waiter: Waiter, maps: str) -> tuple[Waiter, Place | None]:
    """Return a waiter at a futex that it calls shared with where that is.

    Args:
        waiter: It.
        maps: The memory map of its process, or ``""``: then it is taken at its word.
    """
    where = place(maps, waiter.address)
    return replace(waiter, shared=where is not None or not maps), where


def groups(waiters: Iterable[tuple[Waiter, Place | None]]) -> list[dict[str, Any]]:
    """Return who waits at the same place, the most first; who waits alone is left out.

    Of a shared futex one waiter is enough: who is to wake it is another process.
    """
    found: dict[object, dict[str, Any]] = {}
    for waiter, where in waiters:
        key = where if where is not None else (waiter.pid, waiter.address)
        group = found.setdefault(key, {"shared": waiter.shared, "waiters": []})
        if where is not None:
            group["file"] = {
                "path": where.path,
                "device": where.device,
                "inode": where.inode,
                "offset": where.offset,
            }
        group["waiters"].append(
            {
                "pid": waiter.pid,
                "tid": waiter.tid,
                "comm": waiter.comm,
                "address": hex(waiter.address),
                "operation": waiter.operation,
                "limited": waiter.limited,
            }
        )
    kept = [group for group in found.values() if group["shared"] or len(group["waiters"]) > 1]
    return sorted(kept, key=lambda group: -len(group["waiters"]))
