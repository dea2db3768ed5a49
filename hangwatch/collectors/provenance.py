"""Which of the engine's files are not those that were published, and the lines that stacks show.

"0.18.0" may be anything, and a patch in site-packages is seen by no commit. The installed files of
the engine's package are compared with the hashes that its wheel brought, first those that stand in
captured stacks, because they matter most. Once for each installation, not for each process; within
bounds of time and bytes, and what was not looked at is counted.

Only packages of engines are read, through the root of a process that runs them. Lines of source are
kept of files that their wheel lists; of code that runs from somebody's working tree only the name
that git gives to the content.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from hangwatch.core import objects, provenance
from hangwatch.core.provenance import Recorded
from hangwatch.model.capture import (
    Collector,
    Room,
    Scope,
    Sink,
    Stage,
    Step,
    Target,
)
from hangwatch.model.identity import NEEDED
from hangwatch.system import packages, procfs
from hangwatch.system.packages import Distribution

SECONDS: Final = 6.0
"""For all files together."""

MAX_FILE: Final = 4 << 20
"""Bytes of a file that is hashed; of larger ones, libraries, the size is compared."""

MAX_BYTES: Final = 256 << 20

MAX_RECORD: Final = 4 << 20

MAX_NAMED: Final = 200
"""Files that are named as different or missing."""

MAX_PIECES: Final = 400

_STACKS: Final = ("threads.json", "threads2.json", "tasks.json", "tasks2.json")


@dataclass(slots=True)
class _Installation:
    """One package of an engine, as one or several processes have it.

    Attributes:
        name: The package.
        folder: What the paths of its files are relative to.
        reader: A process through whose root it is read.
        known: What its metadata say; empty for a working tree without any.
        recorded: Its files by path, as published; empty for a working tree.
        processes: Who runs it.
        lines: Lines of its files that stand in stacks, by full path.
        tree: Working tree that it is installed from in place, or ``""``.
    """

    name: str
    folder: str
    reader: int
    known: dict[str, Any] = field(default_factory=dict)
    recorded: dict[str, Recorded] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)
    lines: dict[str, set[int]] = field(default_factory=dict)
    tree: str = ""

    def as_published(self, path: str) -> Recorded | None:
        """Return the record of a file by its full path."""
        return self.recorded.get(path.removeprefix(f"{self.folder}/"))


def _collect(step: Step, room: Room) -> None:
    found = _installations(step, room)
    files = _Files()
    pieces: list[dict[str, Any]] = []
    with room.create("environment/provenance.json") as out:
        out.write(b"[")
        _write(out, [_head(each) for each in found], first=True)
        for each in found:
            _write(out, _stack_files(each, files, pieces))
        if pieces:
            room.write("environment/sources.json", objects.lines(pieces))
        for each in found:
            if each.recorded:
                _write(out, [_check(each, files)])
        out.write(b"\n]\n")


def _write(out: Sink, items: Iterable[dict[str, Any]], *, first: bool = False) -> None:
    """Write items, each on a line of its own: what a kill cuts off is the tail."""
    for item in items:
        text = json.dumps(item, ensure_ascii=False)
        out.write(f"{'' if first else ','}\n {text}".encode("utf-8", "surrogateescape"))
        first = False


class _Files:
    """Reads files within the bounds of the step."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + SECONDS
        self._left = MAX_BYTES

    @property
    def exhausted(self) -> bool:
        """Whether no more is to be read."""
        return self._left <= 0 or time.monotonic() >= self._ends_at

    def read(self, pid: int, path: str) -> bytes:
        """Return the beginning of a file: more than ``MAX_FILE`` bytes mean that it is not whole.

        Raises:
            OSError: It cannot be read.
        """
        data = procfs.read_inside(pid, path, MAX_FILE + 1)
        self._left -= len(data)
        return data


def _installations(step: Step, room: Room) -> list[_Installation]:
    found: dict[tuple[str, str, str], _Installation] = {}
    for target in step.targets:
        if not target.python or not procfs.is_same(target.process):
            continue
        with suppress(OSError):
            own = _installed(target, found)
            documents = (room.earlier(f"{target.folder}/{name}") for name in _STACKS)
            stacks = provenance.places(data for data in documents if data is not None)
            for path, lines in stacks.items():
                installation = _of(path, target, own, found)
                if installation is not None:
                    installation.lines.setdefault(path, set()).update(lines)
                    if target.process.pid not in installation.processes:
                        installation.processes.append(target.process.pid)
    # A package of the interpreter's own may lie beside the one that runs; without stacks, which
    # one it is cannot be said.
    running = [each for each in found.values() if each.processes]
    return running or list(found.values())


def _installed(
    target: Target, found: dict[tuple[str, str, str], _Installation]
) -> list[_Installation]:
    """Return the engines' packages that a process has installed; new ones are added to *found*."""
    pid = target.process.pid
    namespace = procfs.read_link(pid, "ns/mnt")
    searched = tuple(packages.folders(pid, procfs.read_environment(pid)))
    own = []
    for each in packages.distributions(pid, searched, provenance.ENGINES).values():
        key = (namespace, each.folder, each.name)
        if key not in found:
            found[key] = _read(pid, each)
        own.append(found[key])
    return own


def _read(pid: int, distribution: Distribution) -> _Installation:
    text = b""
    with suppress(OSError):
        text = procfs.read_inside(pid, distribution.metadata / "RECORD", MAX_RECORD)
    own = f"{distribution.name}/"
    known = {"version": distribution.version, **packages.origin(pid, distribution)}
    tree = unquote(urlsplit(known["url"]).path) if known.get("editable") else ""
    return _Installation(
        name=distribution.name,
        folder=distribution.folder,
        reader=pid,
        known=known,
        tree=tree.rstrip("/"),
        recorded={
            each.path: each
            for each in provenance.record(text.decode("utf-8", "replace"))
            if each.path.startswith(own)
        },
    )


def _of(
    path: str,
    target: Target,
    own: list[_Installation],
    found: dict[tuple[str, str, str], _Installation],
) -> _Installation | None:
    """Return the installation that a file of a stack belongs to; ``None`` for other code."""
    for each in own:
        in_place = bool(each.tree) and path.startswith(f"{each.tree}/{each.name}/")
        if in_place or each.as_published(path) is not None:
            return each
    pid = target.process.pid
    for root in map(PurePosixPath, provenance.roots(path)):
        key = (procfs.read_link(pid, "ns/mnt"), str(root.parent), root.name)
        if key in found:
            return found[key]
        if _exists(pid, root / "__init__.py"):
            found[key] = _Installation(
                name=root.name,
                folder=str(root.parent),
                reader=pid,
                known={"commit": packages.head(pid, root.parent)},
            )
            return found[key]
    return None


def _exists(pid: int, path: PurePosixPath) -> bool:
    with suppress(OSError):
        procfs.read_inside(pid, path, 0)
        return True
    return False


def _head(installation: _Installation) -> dict[str, Any]:
    return {
        "package": installation.name,
        "folder": installation.folder,
        **installation.known,
        "recorded_files": len(installation.recorded),
        "processes": installation.processes,
    }


def _stack_files(
    installation: _Installation, files: _Files, pieces: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield what is known of the files that stand in stacks; add their lines to *pieces*."""
    for path, lines in sorted(installation.lines.items()):
        item: dict[str, Any] = {"package": installation.name, "file": path, "lines": sorted(lines)}
        known = installation.as_published(path)
        try:
            data = b"" if files.exhausted else files.read(installation.reader, path)
        except OSError as error:
            yield {**item, "error": (error.strerror or "").lower()}
            continue
        if not data or len(data) > MAX_FILE:
            yield {**item, "error": "not read: no time left, or too large"}
            continue
        yield {
            **item,
            "differs": provenance.differs(known, data) if known is not None else None,
            "git_blob": provenance.git_blob(data),
        }
        if known is not None:
            text = data.decode("utf-8", "replace")
            pieces += provenance.excerpts(path, text, lines)
            del pieces[MAX_PIECES:]


def _check(installation: _Installation, files: _Files) -> dict[str, Any]:
    """Compare all recorded files of a package, as far as time and bytes allow."""
    differing: list[str] = []
    missing: list[str] = []
    compared = by_size = 0
    for path, known in installation.recorded.items():
        if files.exhausted:
            break
        full = f"{installation.folder}/{path}"
        try:
            if known.size is not None and known.size > MAX_FILE:
                by_size += 1
                different = procfs.size_inside(installation.reader, full) != known.size
            else:
                different = bool(provenance.differs(known, files.read(installation.reader, full)))
            compared += 1
        except OSError:
            missing.append(path)
            continue
        if different:
            differing.append(path)
    return {
        "package": installation.name,
        "folder": installation.folder,
        "compared": compared,
        "compared_by_size": by_size,
        "not_compared": len(installation.recorded) - compared - len(missing),
        "differing": differing[:MAX_NAMED],
        "missing": missing[:MAX_NAMED],
    }


COLLECTOR: Final = Collector(
    name="provenance",
    title="Which files of the engine's packages were changed, and the lines that stacks show",
    scope=Scope.NODE,
    rung=9,
    stage=Stage.B,
    timeout=15.0,
    needs="the right to read the process; its files through /proc/PID/root (Linux 5.6)",
    roles=NEEDED,
    collect=_collect,
)
