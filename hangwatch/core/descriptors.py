"""What a descriptor is: the link in ``/proc/PID/fd``, and what ``/proc/PID/fdinfo`` adds."""

from __future__ import annotations

import re
from typing import Any, Final

MAX_WATCHES: Final = 256
"""Descriptors of one epoll that are listed."""

_DELETED: Final = " (deleted)"
_ANONYMOUS: Final = re.compile(r"anon_inode:\[?(?P<name>[\w-]+)\]?")
_NUMBERED: Final = re.compile(r"(?P<kind>pipe|socket):\[(?P<inode>\d+)\]")
_FOLDERS: Final = (
    ("/dev/shm/", "file"),  # noqa: S108  # shared memory: semaphores, ``SharedMemory``
    ("/dev/", "device"),
    ("/memfd:", "memfd"),
    ("/proc/", "kernel"),
    ("/sys/", "kernel"),
)
_MODES: Final = ("r", "w", "rw")
# Numbers of include/uapi/asm-generic/fcntl.h that are the same on x86-64 and aarch64.
_FLAGS: Final = {0o2000: "append", 0o4000: "nonblock", 0o2000000: "cloexec", 0o10000000: "path"}
_WATCH: Final = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_TIME: Final = re.compile(r"^it_(value|interval): \((\d+), (\d+)\)", re.MULTILINE)
_LOCK: Final = re.compile(r"^lock:\s*(\S.*)$", re.MULTILINE)
_FIELD: Final = re.compile(r"^([\w -]+):[ \t]*(\S+)$", re.MULTILINE)


def kind(link: str) -> str:
    """Return what a descriptor is, by its link.

    ``pipe``, ``socket``, ``file``, ``device``, ``memfd``, ``kernel`` (a file of ``/proc`` or
    ``/sys``), the kernel's word for anything else (``eventfd``, ``eventpoll``, ``timerfd``,
    ``inotify``, ``pidfd``, ``io_uring``), or ``""``. A named pipe looks like any file.
    """
    if match := _NUMBERED.fullmatch(link):
        return match["kind"]
    if match := _ANONYMOUS.match(link):
        return match["name"]
    if link.startswith("/"):
        return next((word for folder, word in _FOLDERS if link.startswith(folder)), "file")
    return ""


def inode(link: str) -> int | None:
    """Return the inode of a pipe or socket, by its link; ``None`` for anything else."""
    match = _NUMBERED.fullmatch(link)
    return int(match["inode"]) if match else None


def describe(fd: int, link: str, info: str) -> dict[str, Any]:
    """Return what is known of one descriptor; what is not is left out.

    Args:
        fd: Its number.
        link: What its link leads to.
        info: What ``fdinfo`` says of it, or ``""``.
    """
    found: dict[str, Any] = {"fd": fd, "kind": kind(link), "link": link.removesuffix(_DELETED)}
    if link.startswith("/") and link.endswith(_DELETED):
        found["deleted"] = True
    said = dict(_FIELD.findall(info))
    if "flags" in said:
        flags = int(said["flags"], 8)
        found["mode"] = (*_MODES, "")[flags & 3]
        found["flags"] = [name for bit, name in _FLAGS.items() if flags & bit]
    if found["kind"] in ("file", "memfd") and "pos" in said:
        found["position"] = int(said["pos"])
    if locks := _LOCK.findall(info):
        found["locks"] = locks
    if "eventfd-count" in said:
        found["count"] = int(said["eventfd-count"], 16)
    if found["kind"] == "eventpoll":
        found["watches"] = sorted(map(int, _WATCH.findall(info)))[:MAX_WATCHES]
    if found["kind"] == "inotify":
        found["watches"] = info.count("inotify wd:")
    if "Pid" in said:
        found["pid"] = int(said["Pid"])
    for name, seconds, nanoseconds in _TIME.findall(info):
        key = "due_in_s" if name == "value" else "interval_s"
        found[key] = int(seconds) + int(nanoseconds) / 1e9
    if "ticks" in said:
        found["ticks"] = int(said["ticks"])
    return found


def locks(info: str) -> list[str]:
    """Return the locks that were taken through a descriptor, as ``/proc/locks`` has them."""
    return _LOCK.findall(info)
