"""File locks: who holds one, who waits for it.

Theory of operation. ``/proc/locks`` names the process that *took* a lock. A POSIX lock belongs to
that process and goes with it. A lock by ``flock`` belongs to the open file, which children
inherit: whoever has that file open holds it, even when the taker is long dead. ``fdinfo`` of a
descriptor lists the locks of its open file, so it says who holds one; a thread in the system call
says who waits. ``/proc/locks`` leaves out what was taken by processes that cannot be seen from
here, ``fdinfo`` does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_LINE: Final = re.compile(
    r"(?P<id>\d+):(?P<blocked> *->)? *(?P<kind>\w+) +\w+ +(?P<mode>\w+) +(?P<pid>-?\d+) "
    r"(?P<device>[0-9a-f]+:[0-9a-f]+):(?P<inode>\d+) (?P<start>\d+) (?P<end>\d+|EOF)"
)
_KINDS: Final[Mapping[str, str]] = {"FLOCK": "flock", "POSIX": "posix", "OFDLCK": "ofd"}

WAITS: Final = frozenset(("LOCK_SH", "LOCK_EX", "F_SETLKW", "F_OFD_SETLKW"))
"""Operations of ``flock`` and ``fcntl`` that wait for a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of ``/proc/locks``, or of the locks in ``fdinfo``.

    Attributes:
        kind: ``flock``, ``posix``, ``ofd`` (of an open file), or the kernel's word.
        mode: ``read`` or ``write``.
        pid: Who took it, or asked for it; -1 where the kernel does not say, 0 who is not in our
            pid namespace.
        file: Device and inode.
        span: Its bytes, first and last; the last is ``None`` for the end of the file.
        blocked: Whether it is asked for, not held.
    """

    kind: str
    mode: str
    pid: int
    file: tuple[str, int]
    span: tuple[int, int | None]
    blocked: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it one lock, whoever has a share in it."""
        owner = self.pid if self.kind == "posix" else 0
        return self.kind, self.mode, self.file, self.span, owner


def parse(text: str) -> tuple[Line, ...]:
    """Return the locks of ``/proc/locks`` or of lines of ``fdinfo``; others are passed over."""
    return tuple(
        Line(
            kind=_KINDS.get(match["kind"], match["kind"].lower()),
            mode=match["mode"].lower(),
            pid=int(match["pid"]),
            file=(match["device"], int(match["inode"])),
            span=(int(match["start"]), None if match["end"] == "EOF" else int(match["end"])),
            blocked=match["blocked"] is not None,
        )
        for match in _LINE.finditer(text)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A lock in the open file of a descriptor."""

    pid: int
    fd: int
    path: str
    lock: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A thread that waits for a lock on the file of a descriptor.

    Its inode is 0 where it is not known: ``fdinfo`` has it since Linux 5.14.
    """

    pid: int
    tid: int
    fd: int
    path: str
    inode: int
    operation: str


def table(
    lines: Iterable[Line], holds: Iterable[Hold], waits: Iterable[Wait], living: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the locks that were found in a descriptor or are waited for, contended ones first.

    Args:
        lines: ``/proc/locks``.
        holds: What descriptors hold.
        waits: Who waits.
        living: Names of the processes that took locks and live, by pid.
    """
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    waits = tuple(waits)
    waited = {wait.inode for wait in waits}

    def entry(line: Line, path: str = "") -> dict[str, Any]:
        record = found.setdefault(line.key, _record(line))
        if path and not record.get("path"):
            record["path"] = path
        if line.pid > 0:
            alive = line.pid in living
            name = {"comm": living[line.pid]} if alive else {}
            record["taken_by"] = {"pid": line.pid, "alive": alive, **name}
        return record

    for hold in holds:
        entry(hold.lock, hold.path)["holders"].append({"pid": hold.pid, "fd": hold.fd})
    for line in lines:
        if not line.blocked and (line.key in found or line.file[1] in waited):
            entry(line)
    for wait in waits:
        by_flock = wait.operation.startswith("LOCK")
        asked = [
            record
            for record in found.values()
            if _is_of(record, wait) and (record["kind"] == "flock") == by_flock
        ]
        # Two file systems can have a file of one number each.
        asked = [record for record in asked if record.get("path") == wait.path] or asked
        if not asked:  # nobody that can be seen from here has it
            unseen = {"kind": "flock" if by_flock else "posix", "inode": wait.inode}
            asked = [
                found.setdefault(
                    (wait.inode or wait.path, by_flock), unseen | {"holders": [], "waiters": []}
                )
            ]
        for record in asked:
            record.setdefault("path", wait.path)
            record["waiters"].append(
                {"pid": wait.pid, "tid": wait.tid, "fd": wait.fd, "operation": wait.operation}
            )
    return sorted(found.values(), key=lambda record: -len(record["waiters"]))


def _is_of(record: Mapping[str, Any], wait: Wait) -> bool:
    """Say whether a lock is of the file that somebody waits for, as far as is known."""
    if wait.inode:
        return bool(record["inode"] == wait.inode)
    return bool(wait.path) and record.get("path") == wait.path


def _record(line: Line) -> dict[str, Any]:
    return {
        "kind": line.kind,
        "mode": line.mode,
        "device": line.file[0],
        "inode": line.file[1],
        "span": list(line.span),
        "holders": [],
        "waiters": [],
    }
