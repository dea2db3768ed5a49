"""What a thread asked the kernel for: ``/proc/PID/task/TID/syscall``, decoded.

The kernel writes ``running``; or number, six arguments, stack pointer and program counter; or -1
for a thread that is in no call and not on a core. If it sleeps, that is in a page fault, for memory
that has to come from a file; one that was stopped outside of any call, or has ended, has -1 too.
Arguments are registers: a descriptor or a number can be told, what a pointer leads to cannot (the
list of ``poll``, the time of ``ppoll``), for that would take the target's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hangwatch.core.syscall_numbers import NAMES

FAULT: Final = "page_fault"
"""The name we give to what a thread does that sleeps in the kernel without a call."""

SLEEPING: Final = frozenset("SD")
"""Letters of states in which a thread sleeps."""

FUTEX_WAITS: Final[Mapping[int, str]] = {
    0: "wait",
    6: "lock_pi",
    9: "wait_bitset",
    11: "wait_requeue_pi",
    13: "lock_pi2",
}
"""Operations of ``futex`` that wait (``include/uapi/linux/futex.h``)."""

_FUTEX_PRIVATE: Final = 128
_FUTEX_COMMAND: Final = 127
_CLONE_VFORK: Final = 0x4000

_READS: Final = frozenset(
    (
        "read", "readv", "pread64", "preadv", "preadv2", "recvfrom", "recvmsg", "recvmmsg",
        "accept", "accept4",
    )
)  # fmt: skip
_WRITES: Final = frozenset(
    (
        "write", "writev", "pwrite64", "pwritev", "pwritev2", "sendto", "sendmsg", "sendmmsg",
        "connect",
    )
)  # fmt: skip
# Which argument is a descriptor that the call is about.
_FD: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        (
            *_READS, *_WRITES, "epoll_wait", "epoll_pwait", "epoll_pwait2", "epoll_ctl", "flock",
            "fcntl", "ioctl", "fsync", "fdatasync", "sync_file_range", "syncfs", "ftruncate",
            "fallocate", "fstat", "fstatfs", "getdents64", "lseek", "close", "shutdown",
            "io_uring_enter", "sendfile", "splice", "tee", "copy_file_range",
        ),
        0,
    ),
    "mmap": 4,
}  # fmt: skip
_SECOND_FD: Final[Mapping[str, int]] = {
    "sendfile": 1, "tee": 1, "splice": 2, "copy_file_range": 2, "epoll_ctl": 2,
}  # fmt: skip
# Which argument is the longest time to wait: in milliseconds, or a pointer (none is for ever).
_TIMEOUT_MS: Final[Mapping[str, int]] = {"epoll_wait": 3, "epoll_pwait": 3, "poll": 2}
_TIMEOUT_POINTER: Final[Mapping[str, int]] = {
    "epoll_pwait2": 3, "ppoll": 2, "select": 4, "pselect6": 4, "rt_sigtimedwait": 2, "recvmmsg": 4,
    "io_getevents": 4, "io_pgetevents": 4, "futex_waitv": 3, "semtimedop": 3,
    "futex_wait": 4,
}  # fmt: skip
_FOR_EVER: Final = frozenset(
    ["pause", "rt_sigsuspend", "wait4", "waitid", "flock", "msgrcv", "semop", "vfork"]
)
_FCNTL: Final[Mapping[int, str]] = {
    5: "F_GETLK", 6: "F_SETLK", 7: "F_SETLKW", 36: "F_OFD_GETLK", 37: "F_OFD_SETLK",
    38: "F_OFD_SETLKW",
}  # fmt: skip
_FLOCK: Final[Mapping[int, str]] = {1: "LOCK_SH", 2: "LOCK_EX", 8: "LOCK_UN"}
_WAITID: Final[Mapping[int, str]] = {0: "any", 1: "pid", 2: "group", 3: "pidfd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A system call that a thread is in.

    Attributes:
        name: Of the call; its number as text where that is not known here.
        fds: Descriptors that it is about.
        timeout_ms: How long it waits at most; ``None`` for ever, or not known.
        limited: Whether it waits for a limited time; ``None`` if not known.
        detail: What else its arguments say, by name.
    """

    name: str
    fds: tuple[int, ...] = ()
    timeout_ms: int | None = None
    limited: bool | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> bool:
        """Whether it waits for what somebody else sends."""
        return self.name in _READS

    @property
    def writes(self) -> bool:
        """Whether it waits for somebody else to take, or to accept."""
        return self.name in _WRITES

    def document(self) -> dict[str, Any]:
        """Return it for a file: what is not known is left out, no limit is ``null``."""
        found: dict[str, Any] = {"name": self.name}
        if self.fds:
            found["fds"] = list(self.fds)
        if self.timeout_ms is not None or self.limited is False:
            found["timeout_ms"] = self.timeout_ms
        return {**found, **self.detail}


def decode(text: str, machine: str, state: str = "S") -> Call | None:
    """Return the call that *text* of ``/proc/PID/task/TID/syscall`` tells of.

    Args:
        text: It, as the kernel writes it.
        machine: Whose numbers it has, as ``uname -m`` names it.
        state: Letter of the thread's state.

    Returns:
        ``None`` for a thread that runs, was stopped outside of any call, or has ended, and where
        nothing could be read.
    """
    words = text.split()
    if not words or words[0] == "running":
        return None
    try:
        number = int(words[0])
        arguments = tuple(int(word, 16) for word in words[1:7])
    except ValueError:
        return None
    if number == -1 or len(arguments) < 6:
        return Call(name=FAULT) if state in SLEEPING else None
    name = NAMES.get(machine, {}).get(number, str(number))
    timeout_ms, limited = _timeout(name, arguments)
    detail = _DETAILS[name](arguments) if name in _DETAILS else {}
    if name == "futex" and "operation" in detail:
        limited = arguments[3] != 0
    return Call(
        name=name,
        fds=_fds(name, arguments),
        timeout_ms=timeout_ms,
        limited=limited,
        detail=detail,
    )


def _fds(name: str, arguments: tuple[int, ...]) -> tuple[int, ...]:
    if name == "waitid" and _WAITID.get(arguments[0]) == "pidfd":
        return (_signed(arguments[1]),)
    places = (place for table in (_FD, _SECOND_FD) if (place := table.get(name)) is not None)
    return tuple(fd for place in places if (fd := _signed(arguments[place])) >= 0)


def _timeout(name: str, arguments: tuple[int, ...]) -> tuple[int | None, bool | None]:
    if name in _TIMEOUT_MS:
        limit = _signed(arguments[_TIMEOUT_MS[name]])
        return (limit, True) if limit >= 0 else (None, False)
    if name in _TIMEOUT_POINTER:
        return None, arguments[_TIMEOUT_POINTER[name]] != 0
    if name in _FOR_EVER:
        return None, False
    return None, True if name in ("nanosleep", "clock_nanosleep") else None


def _signed(register: int) -> int:
    """Return a C ``int`` in a register, whatever its upper half holds."""
    low = register & 0xFFFFFFFF
    return low - (1 << 32) if low & 0x80000000 else low


def _futex(arguments: tuple[int, ...]) -> dict[str, Any]:
    operation = FUTEX_WAITS.get(arguments[1] & _FUTEX_COMMAND)
    if operation is None:
        return {}
    return {
        "operation": operation,
        "address": hex(arguments[0]),
        "shared": not arguments[1] & _FUTEX_PRIVATE,
    }


def _vfork(arguments: tuple[int, ...]) -> dict[str, Any]:
    return {"vfork": True} if arguments[0] & _CLONE_VFORK else {}


_DETAILS: Final[Mapping[str, Callable[[tuple[int, ...]], dict[str, Any]]]] = {
    "futex": _futex,
    "futex_wait": lambda a: {
        "operation": "wait",
        "address": hex(a[0]),
        "shared": not a[3] & _FUTEX_PRIVATE,
    },
    "poll": lambda a: {"count": a[1]},
    "ppoll": lambda a: {"count": a[1]},
    "wait4": lambda a: {"child": _signed(a[0])},
    "waitid": lambda a: {
        "which": _WAITID.get(a[0], str(a[0])),
        **({"child": _signed(a[1])} if _WAITID.get(a[0]) in ("pid", "group") else {}),
    },
    "flock": lambda a: {"operation": _FLOCK.get(a[1] & 11, str(a[1]))},
    "fcntl": lambda a: {"operation": _FCNTL.get(a[1], str(a[1]))},
    "ioctl": lambda a: {"request": hex(a[1] & 0xFFFFFFFF)},
    "clone": _vfork,
}
