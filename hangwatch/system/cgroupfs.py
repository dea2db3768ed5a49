"""Finds the control groups of a process, and reads their files.

A container sees its own groups at its own ``/sys/fs/cgroup``, and from another container their
paths lead nowhere. So a group is looked for where we have it mounted, and then where its process
has, through ``/proc/PID/root``. Files here can wait for locks of the kernel: read them in a process
that may be killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from hangwatch.core import cgroups, mountinfo
from hangwatch.system import procfs

MAX_FILE: Final = 64 << 10

MAX_ANCESTORS: Final = 8
"""A pod lies four groups deep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A control group that can be read.

    Attributes:
        version: 1 or 2.
        controllers: Of version 1: what it controls.
        path: Its path, as ``/proc/PID/cgroup`` has it.
        reader: Whose root its files are read in.
        folder: Where they are, in that root.
        top: Where the group file system begins, in that root.
    """

    version: int
    controllers: tuple[str, ...]
    path: str
    reader: int
    folder: PurePosixPath
    top: PurePosixPath


def groups(pid: int) -> Iterator[Group]:
    """Yield the groups of a process that can be read, each before those that it lies in.

    Raises:
        OSError: The process is gone.
    """
    ours = tuple(_trees(os.getpid()))
    theirs: tuple[mountinfo.Mount, ...] | None = None
    text = procfs.read_file(pid, "cgroup").decode("utf-8", "replace")
    for version, controllers, path in cgroups.memberships(text):
        if version == 1 and not set(controllers) & _WANTED:
            continue
        where, reader = place(ours, version, controllers, path), os.getpid()
        if where is None:
            if theirs is None:
                theirs = tuple(_trees(pid))
            where, reader = place(theirs, version, controllers, path), pid
        if where is not None:
            folder, top = where
            group = Group(
                version=version,
                controllers=controllers,
                path=path,
                reader=reader,
                folder=folder,
                top=top,
            )
            yield from _with_ancestors(group)


_WANTED: Final = frozenset({"memory", "cpu", "cpuacct", "cpuset", "pids", "freezer", "blkio"})


def _with_ancestors(group: Group) -> Iterator[Group]:
    for _ in range(MAX_ANCESTORS):
        yield group
        if group.folder == group.top:
            return
        group = Group(
            version=group.version,
            controllers=group.controllers,
            path=str(PurePosixPath(group.path).parent),
            reader=group.reader,
            folder=group.folder.parent,
            top=group.top,
        )


def _trees(pid: int) -> Iterator[mountinfo.Mount]:
    """Yield the mounts of group file systems that a process sees; none where it may not be told."""
    try:
        text = procfs.mounts(pid)
    except OSError:
        return
    for mount in mountinfo.parse(text):
        if mount.kind in ("cgroup", "cgroup2"):
            yield mount


def place(
    trees: tuple[mountinfo.Mount, ...], version: int, controllers: tuple[str, ...], path: str
) -> tuple[PurePosixPath, PurePosixPath] | None:
    """Return where a group lies below one of the *trees*, and where that begins."""
    for tree in trees:
        same = tree.kind == "cgroup2" if version == 2 else set(controllers) <= set(tree.options)
        root = tree.root.rstrip("/")
        if not same or not (path == tree.root or path.startswith(f"{root}/")):
            continue
        rest = path.removeprefix(root).strip("/")
        if ".." not in PurePosixPath(rest).parts:
            return PurePosixPath(tree.point, rest), PurePosixPath(tree.point)
    return None


def read(group: Group) -> dict[str, str]:
    """Return the files of a group that are there and may be read."""
    found = {}
    for name in cgroups.FILES[group.version]:
        if group.version == 1 and name.partition(".")[0] not in group.controllers:
            continue
        try:
            data = procfs.read_inside(group.reader, group.folder / name, MAX_FILE)
        except OSError:
            continue
        found[name] = data.decode("utf-8", "replace")
    return found
