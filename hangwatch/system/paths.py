"""Finds the files that a pattern means, without touching a filesystem it should not touch.

``glob`` follows links wherever they lead and stats whatever it meets. Both are wrong here. A
watched container may plant a link to a file that only we may read; and one ``stat`` on a network
filesystem that stalls blocks its caller for ever. So every component is looked at by itself: links
are read and resolved here, and before a path is touched, the mount table (which never blocks) says
on which filesystem it lies.
"""

# Plain calls, because it matters here which of them touches the filesystem, and how often.

from __future__ import annotations

import errno
import fnmatch
import os
import re
import select
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

MAX_LINKS: Final = 40
"""Links on one way; the kernel's own limit."""


def open_regular(path: str) -> int:
    """Return a descriptor to read a regular file by; nothing else is ever opened.

    To open a named pipe lets a process that waits to write into it go on, and kills it when we
    close the pipe again; to open a device can do anything. So it is looked at first, in a way that
    opens nothing, and the very thing that was looked at is opened.

    Raises:
        OSError: It is not there, not a regular file (``EINVAL``), or may not be read.
    """
    looked_at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(looked_at).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return os.open(f"/proc/self/fd/{looked_at}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(looked_at)


_DESCRIPTOR: Final = re.compile(r"/proc/(?P<pid>\d+)/(?:task/\d+/)?fd/(?P<fd>\d+)")
_CONTAINER: Final = re.compile(r"/proc/\d+/(?:root|cwd)(?=/|$)")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Found:
    """A file that a pattern means.

    Attributes:
        name: As the pattern names it.
        real: The same file without a link on the way.
        status: Its status; of the file, not of a link.
        literal: Whether the pattern spells its last component out.
    """

    name: str
    real: str
    status: os.stat_result
    literal: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A link that leads out of the allowed roots."""

    name: str
    target: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A pattern that leads to another filesystem."""

    pattern: str
    mount: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """A place that cannot be looked at now: what it holds is not known."""

    name: str
    error: OSError


Step = Found | Refused | Elsewhere | Trouble


class MountTable:
    """Which mount point a path lies under, by the kernel's table."""

    def __init__(self) -> None:
        self._points: frozenset[str] = frozenset()
        self._fd = -1
        with suppress(OSError):  # not Linux: everything is one filesystem
            self._fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
            self._changed = select.poll()
            self._changed.register(self._fd, select.POLLPRI)
            self._read()
        weakref.finalize(self, _close, self._fd)

    def refresh(self) -> None:
        """Read the table again if it has changed; touches no mounted filesystem."""
        if self._fd >= 0 and self._changed.poll(0):
            self._read()

    def _read(self) -> None:
        os.lseek(self._fd, 0, os.SEEK_SET)
        table = b""
        while block := os.read(self._fd, 1 << 16):
            table += block
        self._points = frozenset(
            _ESCAPED.sub(lambda match: chr(int(match[1], 8)), line.split(" ", 5)[4])
            for line in table.decode("utf-8", "surrogateescape").splitlines()
            if line.count(" ") > 5
        )

    def mount_of(self, path: str) -> str:
        """Return the mount point above *path*, an absolute path without links."""
        while path not in self._points and path != "/":
            path = path.rpartition("/")[0] or "/"
        return path


def descriptor_of(path: str) -> tuple[int, int] | None:
    """Return process and number of a ``/proc/PID/fd/N`` path, or ``None`` for any other."""
    match = _DESCRIPTOR.fullmatch(path)
    return (int(match["pid"]), int(match["fd"])) if match else None


def place_of(pattern: str, mounts: MountTable) -> str:
    """Return the mount that a follower of *pattern* reads first.

    For ``/proc/PID/fd/N`` it is ``mnt_id:`` and the number of the mount that the file lies on:
    such logs are told apart by it, too, although no path of ours leads there.
    """
    if (descriptor := descriptor_of(pattern)) is not None:
        pid, fd = descriptor
        try:
            info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text("ascii", "replace")
        except OSError:
            return "/proc"
        found = re.search(r"^mnt_id:\s*(\d+)", info, re.MULTILINE)
        return f"mnt_id:{found[1]}" if found else "/proc"
    literal = []
    for part in os.path.abspath(pattern).split("/"):
        if _is_wild(part):
            break
        literal.append(part)
    return mounts.mount_of("/".join(literal) or "/")


@dataclass(frozen=True, slots=True)
class _Way:
    """How far a pattern has led.

    Attributes:
        name: The way so far, as the pattern names it.
        real: The same without links.
        border: Directory in which the first link lay, or ``None`` before any.
        links: Links passed.
        wild: Whether the last component of the name was matched, not spelled out.
    """

    name: str
    real: str
    border: str | None = None
    links: int = 0
    wild: bool = False


_Parts = tuple[tuple[str, bool], ...]
"""Components still to go, and whether each belongs to the name or comes out of a link."""


class Expander:
    """Expands patterns within roots and on one mount.

    Args:
        roots: See ``FollowRequest.roots``.
        mount: See ``FollowRequest.mount``.
        mounts: The mount table.
    """

    def __init__(self, *, roots: Sequence[str], mount: str, mounts: MountTable) -> None:
        self._roots = tuple(_beneath(os.path.realpath(root)) for root in roots)
        self._mount = mount
        self._mounts = mounts
        self._titles: dict[str, str] = {}

    def expand(self, pattern: str) -> Iterator[Step]:
        """Yield what *pattern* means now, in the order of names. A vacant name yields nothing."""
        if descriptor_of(pattern) is not None:
            yield from self._descriptor(pattern)
        elif pattern.startswith("/"):
            yield from self._walk(_Way("/", "/"), _parts(pattern, named=True))
        else:
            yield from self._walk(_Way("", os.path.realpath(".")), _parts(pattern, named=True))

    def _descriptor(self, path: str) -> Iterator[Step]:
        # The link is the kernel's: it leads to the very file, whatever its name is now; so the
        # name that it had at first stays its name here.
        try:
            status = os.stat(path)
            if path not in self._titles:
                pid = path.split("/")[2]
                name = os.readlink(path).removesuffix(" (deleted)")
                self._titles[path] = f"{name} (fd of {pid})"
        except FileNotFoundError:
            return
        except OSError as error:
            yield Trouble(path, error)
            return
        yield Found(self._titles[path], path, status, literal=True)

    def _walk(self, way: _Way, parts: _Parts) -> Iterator[Step]:
        if not parts:
            yield from () if way.wild else self._directory(way)
            return
        (part, named), rest = parts[0], parts[1:]
        if named and _is_wild(part):
            yield from self._children(way, rest, _matcher(part))
            return
        called = _join(way.name, part) if named else way.name
        wild = way.wild and not named
        if part == "..":
            top = _CONTAINER.fullmatch(way.real)
            up = way.real if top else way.real.rpartition("/")[0] or "/"
            yield from self._walk(replace(way, name=called, real=up, wild=wild), rest)
        else:
            yield from self._enter(replace(way, name=called, wild=wild), part, rest)

    def _children(
        self, way: _Way, rest: _Parts, matches: Callable[[str], object]
    ) -> Iterator[Step]:
        if way.border is not None and not self._allowed(way.real, way.border):
            yield Refused(way.name, way.real)
            return
        try:
            entries = sorted(entry for entry in os.listdir(way.real) if matches(entry))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            yield Trouble(way.name or ".", error)
            return
        for entry in entries:
            child = replace(way, name=_join(way.name, entry), wild=True)
            yield from self._enter(child, entry, rest)

    def _directory(self, way: _Way) -> Iterator[Step]:
        """Yield the files directly in a directory that the pattern names itself."""
        yield from self._children(way, (), _matcher("*"))

    def _enter(self, way: _Way, part: str, rest: _Parts) -> Iterator[Step]:
        """Go from ``way.real`` into *part*; ``way.name`` already names it."""
        real = _join(way.real, part)
        if not self._may_touch(real):
            yield Elsewhere(_join(real, *(name for name, _ in rest)), self._mounts.mount_of(real))
            return
        try:
            status = os.lstat(real)
            link = stat.S_ISLNK(status.st_mode) and not _CONTAINER.fullmatch(real)
            beyond = self._through(way, os.readlink(real), rest) if link else None
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            yield Trouble(way.name, error)
            return
        way = replace(way, real=real)
        if beyond is not None:
            yield from self._walk(*beyond)
        elif rest:
            yield from self._walk(way, rest)
        elif not stat.S_ISDIR(status.st_mode):
            yield from self._leaf(way, status)
        elif not way.wild:
            yield from self._directory(way)

    def _through(self, way: _Way, target: str, rest: _Parts) -> tuple[_Way, _Parts]:
        """Return how to go on through a link to *target* that lies in ``way.real``."""
        if way.links >= MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), way.name)
        # Inside another container's root an absolute link starts at that root, not at ours.
        container = _CONTAINER.match(way.real)
        start = way.real if not target.startswith("/") else container[0] if container else "/"
        border = way.real if way.border is None else way.border
        way = replace(way, real=start, border=border, links=way.links + 1)
        return way, _parts(target, named=False) + rest

    def _leaf(self, way: _Way, status: os.stat_result) -> Iterator[Step]:
        if way.border is not None and not self._allowed(way.real, way.border):
            yield Refused(way.name, way.real)
        elif self._mount and self._mounts.mount_of(way.real) != self._mount:
            yield Elsewhere(way.real, self._mounts.mount_of(way.real))
        else:
            yield Found(way.name, way.real, status, literal=not way.wild)

    def _allowed(self, real: str, border: str) -> bool:
        roots = self._roots or (_beneath(border),)
        return any(_beneath(real).startswith(root) for root in roots)

    def _may_touch(self, real: str) -> bool:
        # The mounts above ours are on the way to it.
        return not self._mount or _beneath(self._mount).startswith(
            _beneath(self._mounts.mount_of(real))
        )


def nearest(pattern: str) -> str:
    """Return the deepest folder on the way of *pattern* that exists; can block as any look does."""
    path = ""
    for part, _ in _parts(pattern, named=True):
        step = f"{path}/{part}" if path or pattern.startswith("/") else part
        if _is_wild(part) or not os.path.isdir(step):
            break
        path = step
    return path or ("/" if pattern.startswith("/") else ".")


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _beneath(directory: str) -> str:
    return directory.rstrip("/") + "/"


def _parts(path: str, *, named: bool) -> _Parts:
    return tuple((part, named) for part in path.split("/") if part not in {"", "."})


def _join(path: str, *parts: str) -> str:
    return "/".join([path.rstrip("/") if path != "/" else "", *parts]) if path else "/".join(parts)


def _is_wild(part: str) -> bool:
    return any(mark in part for mark in "*?[")


@lru_cache(256)
def _matcher(part: str) -> Callable[[str], object]:
    match = re.compile(fnmatch.translate(part)).match
    if part.startswith("."):
        return match
    return lambda entry: not entry.startswith(".") and match(entry)
