"""What the kernel says about the target: mappings, threads, and why reading is forbidden.

The few files of ``/proc`` that the reader needs, and nothing else. ``maps`` can block for as long
as the target holds its memory map, so a watchdog reads in a child that it may abandon.
"""

from __future__ import annotations

import errno
import os
import platform
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from hangwatch.remote.errors import NotPermittedError, ProcessGoneError

MAX_MAPS: Final = 16 << 20
CAP_SYS_PTRACE: Final = 19
FUTEX: Final = b"202"
"""Number of the system call on x86-64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """One line of ``maps``."""

    start: int
    end: int
    permissions: str
    offset: int
    path: str


def open_regular(path: str) -> BinaryIO:
    """Open a regular file to read it; a named pipe or a device is never opened.

    Raises:
        OSError: It is not there, not a regular file, or may not be read.
    """
    looked_at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(looked_at).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return Path(f"/proc/self/fd/{looked_at}").open("rb")
    finally:
        os.close(looked_at)


def mappings(pid: int) -> tuple[Mapping, ...]:
    """Return the mapped files and regions of a process.

    Raises:
        ProcessGoneError: It has ended.
        NotPermittedError: The kernel does not show them to us.
    """
    try:
        with Path(f"/proc/{pid}/maps").open("rb") as file:
            raw = file.read(MAX_MAPS)
    except PermissionError:
        raise NotPermittedError(explain_refusal(pid)) from None
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessGoneError(f"there is no process {pid}") from None
    found = []
    for line in raw.decode("utf-8", "surrogateescape").splitlines():
        parts = line.split(None, 5)
        if len(parts) < 5 or "-" not in parts[0]:
            continue
        start, end = parts[0].split("-")
        found.append(
            Mapping(
                start=int(start, 16),
                end=int(end, 16),
                permissions=parts[1],
                offset=int(parts[2], 16),
                path=parts[5] if len(parts) > 5 else "",
            )
        )
    return tuple(found)


def executable(pid: int) -> str:
    """Return the path of the program as the target sees it, or ``""``."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks after boot: tells a reused number.

    Raises:
        ProcessGoneError: There is no such process.
    """
    return int(_stat(pid)[19])


def program(tid: int) -> tuple[int, int]:
    """Return where its code and its stack begin: an ``exec`` changes both, nothing else does.

    Zeros and ones where the kernel does not show them to us. Where address randomization is
    switched off, a process that executes the same program again looks the same.

    Raises:
        ProcessGoneError: There is no such process.
    """
    fields = _stat(tid)
    return int(fields[23]), int(fields[25])


def readable_thread(pid: int) -> int:
    """Return a thread whose memory can be read: the leader, or another one if it is a zombie.

    Raises:
        ProcessGoneError: There is no such process, or all of it is dead.
    """
    if _stat(pid)[0] not in ("Z", "X"):
        return pid
    for tid in thread_ids(pid):
        try:
            if _stat(tid)[0] not in ("Z", "X"):
                return tid
        except ProcessGoneError:
            continue
    raise ProcessGoneError(f"process {pid} is a zombie: it has ended, its parent has not noticed")


def thread_ids(pid: int) -> tuple[int, ...]:
    """Return the kernel's ids of its threads, none if it is gone."""
    try:
        return tuple(sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return ()


def outer_thread_ids(pid: int) -> dict[int, int]:
    """Map the thread ids that the target knows to those that we see.

    Empty where both are the same: only a pid namespace tells them apart.
    """
    found: dict[int, int] = {}
    for tid in thread_ids(pid):
        inner = _status(tid).get("NSpid", "").split()
        if len(inner) < 2:
            return {}
        found[int(inner[-1])] = tid
    return found


def futex(pid: int, tid: int) -> int:
    """Return the address that a thread sleeps on in the ``futex`` system call, 0 if it does not."""
    try:
        text = _short(f"/proc/{pid}/task/{tid}/syscall").split()
    except OSError:
        return 0
    return int(text[1], 16) if len(text) > 1 and text[0] == FUTEX else 0


def switches(pid: int) -> dict[int, int]:
    """Return how often each thread gave up the processor by itself: an event loop's wake-ups."""
    found: dict[int, int] = {}
    for tid in thread_ids(pid):
        count = _status(tid).get("voluntary_ctxt_switches", "")
        if count.isdigit():
            found[tid] = int(count)
    return found


def explain_refusal(pid: int) -> str:
    """Say why the memory of a process may not be read, and what would help."""
    ours, theirs = _status("self"), _status(pid)
    refused = f"reading the memory of process {pid} is not permitted"
    capable = bool(int(ours.get("CapEff", "0") or "0", 16) >> CAP_SYS_PTRACE & 1)
    if capable and _namespace("self") != _namespace(pid):
        return (
            f"{refused}: it lives in another user namespace, where our CAP_SYS_PTRACE does not "
            "count; run hangwatch inside it (`nsenter --user -t "
            f"{pid}`) or in its parent namespace"
        )
    if capable:
        return (
            f"{refused}, although we have CAP_SYS_PTRACE: a security module or a seccomp filter "
            "forbids it; allow the `process_vm_readv` system call"
        )
    cure = "add SYS_PTRACE to the container's capabilities, or run hangwatch as root with sudo"
    if not theirs:
        return f"{refused}; {cure}"
    same = ours.get("Uid", "").split()[:1] == theirs.get("Uid", "").split()[:1]
    if not same:
        return f"{refused}: it belongs to another user; {cure}"
    scope = _first_line("/proc/sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0"):
        return (
            f"{refused}: the kernel's Yama module lets only ancestors read it (ptrace_scope is "
            f"{scope}); {cure}, or set `sysctl kernel.yama.ptrace_scope=0`"
        )
    return (
        f"{refused}: it has capabilities that we lack, or has made itself undumpable "
        f"(PR_SET_DUMPABLE, a set-uid program); {cure}"
    )


def machine_is_known() -> bool:
    """Whether the layouts hold on this machine: they were verified on x86-64 only."""
    return platform.machine() == "x86_64"


def _stat(pid: int) -> list[str]:
    """Return the fields of ``stat`` from the third on: the second may hold anything."""
    try:
        text = _short(f"/proc/{pid}/stat").decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessGoneError(f"there is no process {pid}") from None
    return text[text.rindex(")") + 2 :].split()


def _short(path: str) -> bytes:
    """Return a file of ``/proc`` that is a line; ``pathlib`` takes as long as the kernel does."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _status(pid: int | str) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _namespace(pid: int | str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/user").readlink())
    except OSError:
        return ""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
