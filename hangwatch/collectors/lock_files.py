"""Lock files that mean something by being there: who made one has it open, or is dead.

``torch.utils.file_baton.FileBaton`` is such a lock: a process that builds an extension creates
the file and removes it when done, and all others sleep until it is gone. When the builder dies they
sleep for ever, and nothing of that stands in ``/proc/locks``. The folders that are looked into are
those that such locks are known to lie in; they are of the target's file system, which may block.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Final

from hangwatch.model.capture import Collector, Room, Scope, Stage, Step
from hangwatch.system import procfs

MAX_ENTRIES: Final = 2000

PLACES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    # torch/utils/cpp_extension.py, _get_build_directory: with the version between, or without.
    ("TORCH_EXTENSIONS_DIR", "", ("*", "lock")),
    ("TORCH_EXTENSIONS_DIR", "", ("*", "*", "lock")),
    ("HOME", ".cache/torch_extensions", ("*", "*", "lock")),
    ("XDG_CACHE_HOME", "torch_extensions", ("*", "*", "lock")),
    # aiter/jit/core.py
    ("AITER_JIT_DIR", "build", ("lock_*",)),
    ("HOME", ".aiter/build", ("lock_*",)),
    ("", "/tmp/aiter_configs", ("*.lock",)),  # noqa: S108  # theirs
)
"""Variable that names a folder, what is below it, and the names from there on."""


def _collect(step: Step, room: Room) -> None:
    found: dict[str, dict[str, Any]] = {}
    seen: set[tuple[str, PurePosixPath, tuple[str, ...]]] = set()
    pids = [t.process.pid for t in step.targets if t.python and procfs.is_same(t.process)]
    for pid in pids:
        with contextlib.suppress(OSError):
            root = procfs.read_link(pid, "ns/mnt")
            for folder, names in _folders(procfs.read_environment(pid)):
                if (root, folder, names) not in seen:
                    seen.add((root, folder, names))
                    found |= _files(pid, folder, names)
    if not found:
        return
    open_in, hidden = _openers(found, {root for root, *_ in seen})
    for path, said in found.items():
        said |= {"holder_pid": open_in.get(path), "not_readable": hidden}
    room.write("fs.json", (json.dumps(found, indent=1) + "\n").encode("utf-8", "replace"))


def _folders(
    variables: Mapping[str, str],
) -> Iterator[tuple[PurePosixPath, tuple[str, ...]]]:
    for variable, below, names in PLACES:
        base = variables.get(variable, "") if variable else "/"
        if base.startswith("/"):
            yield PurePosixPath(base, below), names


def _files(pid: int, folder: PurePosixPath, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the files of these names below a folder of the target's root, with their age."""
    name, *rest = names
    found: dict[str, dict[str, Any]] = {}
    try:
        entries = procfs.list_inside(pid, folder)[:MAX_ENTRIES]
    except OSError:
        return found
    for entry in entries:
        if not fnmatchcase(entry, name):
            continue
        path = folder / entry
        if rest:
            found |= _files(pid, path, tuple(rest))
            continue
        with contextlib.suppress(OSError):
            # Wall time: a file system knows no other.
            age = time.time() - procfs.stat_inside(pid, path).st_mtime
            found[str(path)] = {"exists": True, "age_s": round(age, 1)}
    return found


def _openers(paths: Mapping[str, Any], roots: Collection[str]) -> tuple[dict[str, int], int]:
    """Return who has these files open, and how many processes could not be looked at.

    Args:
        paths: The files.
        roots: Mount namespaces in which they have these names.
    """
    found: dict[str, int] = {}
    hidden = 0
    for row in procfs.read_table():
        if row.kernel or row.state in ("Z", "X"):
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            links = procfs.links(row.pid)
            hidden += not links and procfs.has_hidden_links(row.pid)
            held = {link: row.pid for link in links.values() if link in paths}
            if held and procfs.read_link(row.pid, "ns/mnt") in roots:
                found |= held
    return found, hidden


COLLECTOR: Final = Collector(
    name="lock_files",
    title="Lock files of extension builds, and whether who made them is still there",
    scope=Scope.NODE,
    rung=8,
    stage=Stage.B,
    timeout=8.0,
    needs="the processes' files through /proc/PID/root (Linux 5.6)",
    waits=True,
    collect=_collect,
)
