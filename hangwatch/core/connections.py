"""Pipes and sockets between processes: who holds which end, how full, who waits for whom.

Theory of operation. An *end* is what descriptors lead to: a socket, or one of the two sides of a
pipe. Children inherit descriptors, so an end can have many holders. A unix socket knows its other
end; two TCP sockets are the ends of one connection if each has the other's address for the far
one, in one network namespace. A thread in a call that reads or writes waits for whoever holds the
other end: that is an edge of the wait-for graph, and one from a process to itself is none the less
a fault (a reader that holds the writing side too never sees the end).

How full a pipe is the kernel tells nobody who does not open it. But who waits to write into one
says that it is full, and who waits to read, that it is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hangwatch.core.syscalls import Call

MAX_CONNECTIONS: Final = 4096
"""A server may have thousands of clients; the ends that matter come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A descriptor of a process that leads to an end."""

    pid: int
    fd: int

    def document(self) -> dict[str, int]:
        """Return it for a file."""
        return {"pid": self.pid, "fd": self.fd}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a connection.

    Attributes:
        inode: Of the socket or pipe; 0 for an end that is not on this machine.
        mode: ``r`` or ``w`` for a side of a pipe, else ``rw``.
        holders: Whose descriptors lead to it.
        said: What the kernel says of it: ``address``, ``unread``, ``unsent``, ``room`` (bytes).
    """

    inode: int
    mode: str = "rw"
    holders: tuple[Holder, ...] = ()
    said: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Two ends; a listener has one."""

    kind: str
    ends: tuple[End, ...]
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A thread in a call about a pipe or socket."""

    pid: int
    tid: int
    call: Call
    fd: int
    inode: int


def edge(waiting: Waiting, connection: Connection) -> dict[str, Any]:
    """Return whom a thread waits for, as far as that is known."""
    near, far = _sides(waiting, connection)
    return {
        "pid": waiting.pid,
        "tid": waiting.tid,
        "call": waiting.call.name,
        "fd": waiting.fd,
        "kind": connection.kind,
        "inode": waiting.inode,
        "for": [holder.document() for end in far for holder in end.holders],
        **{
            name: end.said[name]
            for end in near
            for name in ("unread", "unsent")
            if name in end.said
        },
    }


def _sides(waiting: Waiting, connection: Connection) -> tuple[tuple[End, ...], tuple[End, ...]]:
    """Return the end that a thread waits at, and the other one."""
    if connection.kind == "pipe":
        mine = "w" if waiting.call.writes else "r"
        near = tuple(end for end in connection.ends if end.mode == mine)
    else:
        near = tuple(end for end in connection.ends if end.inode == waiting.inode)
    return near, tuple(end for end in connection.ends if end not in near)


def fullness(connection: Connection, waits: Iterable[Waiting]) -> str:
    """Return ``full`` or ``empty`` for a pipe that somebody waits at, else ``""``."""
    if connection.kind != "pipe":
        return ""
    (inode, *_) = [end.inode for end in connection.ends]
    here = [waiting for waiting in waits if waiting.inode == inode]
    if any(waiting.call.writes for waiting in here):
        return "full"
    return "empty" if any(waiting.call.reads for waiting in here) else ""


def document(connection: Connection, full: str) -> dict[str, Any]:
    """Return a connection for a file; what is not known is left out."""
    said: dict[str, Any] = {"kind": connection.kind}
    if connection.state or full:
        said["state"] = connection.state or full
    said["ends"] = [
        {
            **({"inode": end.inode} if end.inode else {}),
            **({"mode": end.mode} if connection.kind == "pipe" else {}),
            "holders": [holder.document() for holder in end.holders],
            **end.said,
        }
        for end in connection.ends
    ]
    return said


def importance(connection: Connection, waited: frozenset[int], targets: frozenset[int]) -> int:
    """Return how late a connection may come, 0 for what a thread waits at."""
    if any(end.inode in waited for end in connection.ends):
        return 0
    if any(end.said.get("unsent") or end.said.get("unread") for end in connection.ends):
        return 1
    inside = all(any(h.pid in targets for h in end.holders) for end in connection.ends)
    return 2 if inside and len(connection.ends) == 2 else 3
