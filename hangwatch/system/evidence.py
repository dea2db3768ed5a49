"""Evidence from disk: a bundle, an unpacked one, a folder of loose files, single files.

Everything here may come from a stranger. An archive is read in memory and nothing of it is ever
written; links, devices and names that lead out of it are refused; sizes are bounded, by what is
really unpacked and not by what a header says. Logs may be gigabytes: they are named, not read
(``hangwatch.system.logmaterial`` reads them in blocks).
"""

from __future__ import annotations

import gzip
import lzma
import stat
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Final

from hangwatch.core.aftermath import FILE as AFTERMATH_FILE
from hangwatch.core.layout import INCIDENT, MANIFEST, Kind, aftermath_number, place
from hangwatch.core.rescue import is_rescue
from hangwatch.errors import NotABundleError

MAX_FILE: Final = 64 << 20
"""Bytes of one file; 48 threads with 60 frames are 0.7 MB."""

MAX_TOTAL: Final = 512 << 20
"""Bytes of all files: twenty times the size that a bundle may have when packed."""

MAX_FILES: Final = 20_000

RESCUE_HEAD: Final = 256
"""Bytes at the beginning of a file that tell whether it is a document of the rescue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFiles:
    """What was found under the given paths.

    Attributes:
        origin: What to call it.
        files: Contents by path, relative to the given one; logs are not among them.
        sizes: Bytes of every file, logs too.
        logs: Paths on disk to read beats from; empty for a packed bundle.
        problems: What was not read, one sentence each.
        rescues: Documents of ``hangwatch-rescue.py`` by path, not among ``files``; known by
            how they begin, whatever they are called.
    """

    origin: str
    files: Mapping[str, bytes]
    sizes: Mapping[str, int]
    logs: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    rescues: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_bundle(self) -> bool:
        """Whether it is a bundle, packed or unpacked."""
        return MANIFEST in self.files and INCIDENT in self.files


def read(paths: Iterable[Path]) -> EvidenceFiles:
    """Read evidence.

    Args:
        paths: One bundle or one folder, or any number of files.

    Raises:
        NotABundleError: A path is not there, cannot be read, or holds nothing of ours.
    """
    chosen = tuple(paths)
    for path in chosen:
        if not path.exists():
            raise NotABundleError(f"{path} does not exist: check the path")
    try:
        if len(chosen) == 1 and chosen[0].is_dir():
            return _with_aftermaths(_folder(chosen[0]), chosen[0])
        if len(chosen) == 1 and _is_archive(chosen[0]):
            return _with_aftermaths(_archive(chosen[0]), chosen[0])
        return _single(chosen)
    except OSError as error:
        name = error.filename or chosen[0]
        raise NotABundleError(f"{name} cannot be read: {error.strerror or error}") from error


@dataclass(slots=True)
class _Shelf:
    """Collects files within the bounds."""

    files: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rescues: dict[str, bytes] = field(default_factory=dict)
    left: int = MAX_TOTAL

    def put(self, name: str, stream: IO[bytes]) -> None:
        """Read one file, at most ``MAX_FILE`` and what is left of ``MAX_TOTAL``."""
        limit = min(MAX_FILE, self.left)
        data = stream.read(limit + 1)
        if len(data) > limit:
            self.problems.append(f"{name} is larger than {limit} bytes and was not read")
            return
        self.left -= len(data)
        self.sizes[name] = len(data)
        shelf = self.rescues if is_rescue(data[:RESCUE_HEAD]) else self.files
        shelf[name] = data


def _folder(root: Path) -> EvidenceFiles:
    shelf = _Shelf()
    logs: list[Path] = []
    for count, path in enumerate(sorted(root.rglob("*"))):
        if count >= MAX_FILES:
            shelf.problems.append(
                f"{root} holds more than {MAX_FILES} files; the rest was not read"
            )
            break
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            continue
        name = path.relative_to(root).as_posix()
        if place(name).kind is Kind.LOG:
            logs.append(path)
            shelf.sizes[name] = path.stat().st_size
            continue
        try:
            with path.open("rb") as stream:
                shelf.put(name, stream)
        except OSError as error:
            shelf.problems.append(f"{name} cannot be read: {error.strerror}")
    found = EvidenceFiles(
        origin=root.resolve().name,
        files=_without_top(shelf.files),
        sizes=shelf.sizes,
        logs=(root,) if logs else (),
        problems=tuple(shelf.problems),
        rescues=shelf.rescues,
    )
    if not logs and not shelf.rescues and not any(_known(name) for name in shelf.files):
        raise NotABundleError(
            f"{root} holds neither a bundle nor loose evidence: give the folder with "
            "threads.json, procs.json, health.json or a log in it"
        )
    return found


def _archive(path: Path) -> EvidenceFiles:
    shelf = _Shelf()
    try:
        with tarfile.open(path, "r:*") as archive:
            for count, member in enumerate(archive):
                if count >= MAX_FILES:
                    raise NotABundleError(f"{path} holds more than {MAX_FILES} files")
                name = _inside(member.name)
                if not member.isfile() or name is None:
                    if not member.isdir():
                        shelf.problems.append(f"an entry of {path.name} was refused: no plain file")
                    continue
                stream = archive.extractfile(member)
                if stream is not None:
                    shelf.put(name, stream)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise NotABundleError(
            f"{path} is cut short or damaged ({_brief(error)}): copy it again, or give the folder "
            "it was made from"
        ) from error
    files = _without_top(shelf.files)
    if MANIFEST not in files or INCIDENT not in files:
        raise NotABundleError(
            f"{path} is an archive but no hangwatch bundle: unpack it and give the folder"
        )
    return EvidenceFiles(
        origin=path.name,
        files=files,
        sizes={name: len(data) for name, data in files.items()},
        problems=tuple(shelf.problems),
    )


def _with_aftermaths(found: EvidenceFiles, bundle: Path) -> EvidenceFiles:
    """Return the evidence with what later looks said, where they lie beside a bundle."""
    if not found.is_bundle:
        return found
    name = bundle.resolve().name
    shelf = _Shelf()
    for path in sorted(bundle.resolve().parent.iterdir()):
        number = aftermath_number(name, path.name)
        if number is None or not path.is_file():
            continue
        try:
            with tarfile.open(path, "r:*") as archive:
                for member in archive:
                    if member.isfile() and member.name.endswith(f"/{AFTERMATH_FILE}"):
                        stream = archive.extractfile(member)
                        assert stream is not None
                        shelf.put(f"aftermath/{number}/{AFTERMATH_FILE}", stream)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            shelf.problems.append(f"{path.name} is damaged ({_brief(error)}) and was not read")
    return replace(
        found,
        files={**found.files, **shelf.files},
        sizes={**found.sizes, **shelf.sizes},
        problems=(*found.problems, *shelf.problems),
    )


def _single(paths: tuple[Path, ...]) -> EvidenceFiles:
    shelf = _Shelf()
    logs: list[Path] = []
    for path in paths:
        if path.is_dir():
            raise NotABundleError(f"{path} is a folder: give it alone, or only files")
        kind = place(path.name).kind
        if kind in (Kind.LOG, Kind.OTHER) and not _begins_as_rescue(path):
            logs.append(path)
            shelf.sizes[path.name] = path.stat().st_size
            continue
        with path.open("rb") as stream:
            shelf.put(path.name, stream)
    return EvidenceFiles(
        origin=", ".join(path.name for path in paths[:3]) + (" …" if len(paths) > 3 else ""),
        files=shelf.files,
        sizes=shelf.sizes,
        logs=tuple(logs),
        problems=tuple(shelf.problems),
        rescues=shelf.rescues,
    )


def _begins_as_rescue(path: Path) -> bool:
    with path.open("rb") as stream:
        return is_rescue(stream.read(RESCUE_HEAD))


def _is_archive(path: Path) -> bool:
    if path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")):
        return True
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _brief(error: Exception) -> str:
    """Return an error in one line; ``tarfile`` says on several what it is not."""
    first, *more = str(error).splitlines() or [""]
    return "no tar archive" if more else first


def _inside(name: str) -> str | None:
    """Return the clean relative path, or ``None`` for one that leads out."""
    pure = PurePosixPath(name)
    parts = [part for part in pure.parts if part != "."]
    if pure.is_absolute() or ".." in parts or not parts:
        return None
    return "/".join(parts)


def _without_top(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Drop the one folder that everything lies in, if there is one."""
    tops = {name.split("/", 1)[0] for name in files if "/" in name}
    if len(tops) == 1 and f"{min(tops)}/{MANIFEST}" in files:
        return {name.split("/", 1)[1]: data for name, data in files.items() if "/" in name}
    return dict(files)


def _known(name: str) -> bool:
    return place(name).kind not in (Kind.OTHER, Kind.REPLAY, Kind.EXPECTATION, Kind.REPORT)
