"""Where a capture works, and where each step writes.

A capture works in ``<output>/hangwatch-<id>.<owner>.partial``, mode 0700, on the disk that receives
the bundle. Each step writes into a room of its own below it; when the step has ended, however it
ended, what lies in its room is moved to its place. A worker that was abandoned and comes back
later writes into nothing that counts. Nothing in here looks like a bundle, and what a killed
capture left behind is swept away by a later one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, Self

from hangwatch.errors import OutputError
from hangwatch.model.capture import Artifact, CollectorError, FailureKind, Settled, Sink, Step
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs
from hangwatch.system.attaching import Note, settle_left
from hangwatch.system.clock import boot_id

SUFFIX: Final = ".partial"

QUOTA: Final = 32 << 20
"""Bytes that one step may write: 48 threads with 60 frames are 0.7 MB of JSON."""

MAX_AGE: Final = 86_400.0
"""Seconds after which work of another boot or machine is dead: no capture takes a day."""

_OWNER: Final = re.compile(r"\.([0-9a-f]{8})-(\d+)-(\d+)\.partial$")
_STEPS: Final = ".steps"
_NOTES: Final = ".attached"
_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.@:+=-]{0,120}(?:/[A-Za-z0-9_][\w.@:+=-]{0,120})?")


class StepRoom:
    """A ``Room``: where one step may write; lives in the worker."""

    def __init__(
        self, directory: Path, earlier: Path, note: Path | None = None, quota: int = QUOTA
    ) -> None:
        """Give a step its room.

        Args:
            directory: The empty folder it writes into.
            earlier: Where the files of steps that ended lie, for the same folder of the bundle.
            note: Where it is noted what the step attaches to, while it does; ``None``: beside it.
            quota: Bytes.
        """
        self.note = note if note is not None else directory.with_suffix(".note")
        self._directory = directory
        self._earlier = earlier
        self._left = quota
        self.complete: list[str] = []
        self.pause_ms = 0.0
        self.settled: Settled | None = None

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Open a new file *name* (one folder deep at most); bounded in size.

        Raises:
            CollectorError: ``TOO_LARGE`` when the step's quota is used up.
            ValueError: The name could lead elsewhere.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for an artifact")
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb", buffering=0) as file:
            yield _Bounded(self, file)
        self.complete.append(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.create(name) as out:
            out.write(data)

    def earlier(self, name: str) -> bytes | None:
        """Return what an earlier step left as *name* in this step's folder, or ``None``."""
        try:
            return (self._earlier / name).read_bytes()
        except FileNotFoundError:
            return None

    def paused(self, milliseconds: float) -> None:
        """Say how long the target stood still for a part of this step."""
        self.pause_ms += milliseconds

    def take(self, size: int) -> int:
        """Use up to *size* bytes of the quota; return how many were left to use."""
        allowed = min(size, self._left)
        self._left -= allowed
        return allowed


class _Bounded:
    """A file that takes what the quota of its room allows, and says when it is used up."""

    def __init__(self, room: StepRoom, file: BinaryIO) -> None:
        self._room = room
        self._file = file

    def write(self, data: bytes, /) -> int:
        allowed = self._room.take(len(data))
        written = 0
        while written < allowed:
            written += self._file.write(memoryview(data)[written:allowed])
        if allowed < len(data):
            raise CollectorError(
                FailureKind.TOO_LARGE, "it is larger than one step may write; the head was kept"
            )
        return written

    def flush(self) -> None:
        """Nothing waits in a buffer of ours."""


class Rooms:
    """The work directory of one capture; lives in the process that conducts it."""

    def __init__(self, path: Path, continued: tuple[Note, ...] = ()) -> None:
        """Work in a directory that exists.

        Args:
            path: It.
            continued: Processes that a dead capture had left stopped, and that were told to go on.
        """
        self.path = path
        self.continued = continued
        self._opened = 0

    @classmethod
    def create(cls, output: Path, name: str) -> Self:
        """Make a work directory below *output*, and sweep those whose captures are dead.

        Raises:
            OutputError: It cannot be made: no such directory, not writable, disk full.
        """
        safe = re.sub(r"[^\w.-]", "_", name)[:80]
        me = procfs.identify(os.getpid())
        owner = f"{_here()}-{me.pid}-{me.start_ticks}"
        path = output / f"hangwatch-{safe}.{owner}{SUFFIX}"
        continued: list[Note] = []
        try:
            output.mkdir(parents=True, exist_ok=True)
            sweep(output, continued.append)
            shutil.rmtree(path, ignore_errors=True)  # an earlier one of ours: it has ended
            path.mkdir(mode=0o700)
            (path / _STEPS).mkdir()
        except OSError as error:
            raise OutputError(
                f"cannot write into {output}: {(error.strerror or str(error)).lower()}; "
                "choose another directory with --output, or make room there"
            ) from error
        return cls(path, tuple(continued))

    def open(self) -> Path:
        """Return a fresh room."""
        self._opened += 1
        room = self.path / _STEPS / str(self._opened)
        with contextlib.suppress(
            OSError
        ):  # a full disk fails the step that writes, not the capture
            room.mkdir()
        return room

    def note(self, room: Path) -> Path:
        """Return where the step of *room* notes what it attaches to."""
        return self.path / _NOTES / room.name

    def place(self, folder: PurePosixPath) -> Path:
        """Return where the files of *folder* lie."""
        return self.path / folder

    def keep(self, step: Step, room: Path, complete: frozenset[str]) -> tuple[Artifact, ...]:
        """Move what a step left to its place; empty files are dropped.

        Args:
            step: It.
            room: Its room; gone afterwards.
            complete: Names that the worker had finished writing.
        """
        artifacts = []
        for path in sorted(item for item in room.rglob("*") if item.is_file()):
            name = path.relative_to(room).as_posix()
            size = path.stat().st_size
            if size == 0:
                continue
            target = self.place(step.folder) / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
            except OSError:  # no space even for a folder: the evidence lists what was kept
                continue
            artifacts.append(
                Artifact(path=step.folder / name, size=size, complete=name in complete)
            )
        shutil.rmtree(room, ignore_errors=True)
        return tuple(artifacts)

    def finish(self) -> None:
        """Remove all but the evidence."""
        shutil.rmtree(self.path / _STEPS, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything, but for notes of processes that are traced to this moment."""
        _remove(self.path)


def sweep(output: Path, continued: Callable[[Note], None] = lambda _note: None) -> tuple[Path, ...]:
    """Remove the work directories of captures that died; return which.

    The directory may be shared with other machines and pid namespaces: what they work on is
    removed only when it is a day old.

    Args:
        output: Where captures work.
        continued: Told each process that was left stopped, and was sent SIGCONT.
    """
    swept = []
    for path in output.glob(f"hangwatch-*{SUFFIX}"):
        owner = _OWNER.search(path.name)
        if owner is None:
            continue
        if owner[1] == _here():
            dead = not procfs.is_same(ProcessId(int(owner[2]), int(owner[3])))
        else:
            dead = _age(path) > MAX_AGE
        if dead and owner[1] == _here():
            _remove(path, continued)
        elif dead:
            shutil.rmtree(path, ignore_errors=True)  # its notes mean nobody who is here
        if dead:
            swept.append(path)
    return tuple(swept)


def _remove(work: Path, continued: Callable[[Note], None] = lambda _note: None) -> None:
    """Remove a work directory once the processes that its steps attached to run as before."""
    traced = False
    for path in (work / _NOTES).glob("*"):
        note = Note.read(path) if path.suffix != ".new" else None
        if note is None:
            continue
        settled = settle_left(path, 0.0)
        traced = traced or settled is Settled.TRACED
        if settled is Settled.CONTINUED:
            continued(note)
    if not traced:
        shutil.rmtree(work, ignore_errors=True)
        return
    for path in work.iterdir():
        if path.name != _NOTES:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _age(path: Path) -> float:
    try:
        # Wall time: a file system knows no other.
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _here() -> str:
    """Return what a process number means something in: this boot and pid namespace."""
    namespace = procfs.read_link(os.getpid(), "ns/pid")
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()[:8]


def is_full(error: OSError) -> bool:
    """Say whether the disk, or our share of it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
