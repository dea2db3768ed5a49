"""Reads old logs for a replay: files, folders, case folders with file operations.

A file is read in blocks and searched for candidates; the rest of it is only looked at for stamps
and line ends. Rotations of one log (``x.out.1``, ``x.out``) are one stream, so that a line which a
rotation cut is whole again. Folders may hold ``arrival.txt`` (the second at which each line
arrived) and ``replay.json`` (what befell the files, in order): then the real follower watches a
copy while the operations are carried out, and only what it read is replayed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from hangwatch.core import parsing, stamps
from hangwatch.core.framing import Scanner, peel
from hangwatch.core.layout import Kind, place
from hangwatch.core.material import HeldLog, Record, Stream, lay_out
from hangwatch.errors import UsageError
from hangwatch.model.following import FollowRequest
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import SourceFound, SourceRetired
from hangwatch.model.profile import EngineProfile
from hangwatch.model.replay import LogMaterial
from hangwatch.model.time import Instant
from hangwatch.system.tail import Tailer

BLOCK: Final = 1 << 20
TAIL: Final = 64 << 10
"""Bytes before a place in which the nearest stamp is looked for."""

_ROTATED: Final = re.compile(r"(?P<base>.+)\.(?P<number>\d{1,4})$")
_WORKER: Final = re.compile(r"worker-[0-9a-zA-Z]+-[0-9a-fA-F]+-(?P<pid>\d+)\.(?:out|err)$")
_ACTOR: Final = re.compile(rb"^:(?:actor_name|task_name):(?P<actor>[^\r\n]{1,200})", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sought:
    """What is looked for.

    Attributes:
        profiles: Engines.
        near: A moment not far from the logs, for stamps without a year.
    """

    profiles: tuple[EngineProfile, ...]
    near: datetime


def read(
    paths: Iterable[Path],
    *,
    profiles: Iterable[EngineProfile],
    zone: tzinfo,
    until: datetime | None = None,
    held: Mapping[str, HeldLog] | None = None,
) -> LogMaterial:
    """Return what stands in *paths*, in virtual time.

    Args:
        paths: Logs, folders of logs, case folders.
        profiles: Engines to look for.
        zone: Zone of naive stamps.
        until: When the evaluation will end.
        held: Further logs that are already in memory, by path.

    Raises:
        UsageError: A path is not there, or holds no log.
    """
    engines = tuple(profiles)
    sought = _Sought(profiles=engines, near=until or datetime.now(zone))
    streams = _held(held or {}, sought)
    problems: list[str] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist: check the path")
        if path.is_dir() and (path / "replay.json").is_file():
            streams += _operated(path, sought)
        elif path.is_dir():
            streams += _folder(path, sought, problems)
        elif place(path.name).kind in (Kind.LOG, Kind.OTHER):
            streams += _family([path], path.name, sought, problems, path.parent / "arrival.txt")
    if not streams:
        names = ", ".join(str(path) for path in paths) or "nothing"
        reason = f" ({problems[0]})" if problems else ""
        raise UsageError(f"no log was found in {names}{reason}: name a log, or a folder with logs")
    return lay_out(streams, profiles=engines, zone=zone, until=until, problems=tuple(problems))


def of(
    files: Mapping[str, bytes],
    *,
    profiles: Iterable[EngineProfile],
    zone: tzinfo,
    until: datetime | None = None,
) -> LogMaterial:
    """Return the same for logs that are already in memory: those of a packed bundle.

    Args:
        files: Contents by path; what is no log is left out.
        profiles: Engines to look for.
        zone: Zone of naive stamps.
        until: When the evaluation will end.
    """
    engines = tuple(profiles)
    held = {name: HeldLog(data=data) for name, data in files.items()}
    sought = _Sought(profiles=engines, near=until or datetime.now(zone))
    return lay_out(_held(held, sought), profiles=engines, zone=zone, until=until)


def _held(files: Mapping[str, HeldLog], sought: _Sought) -> list[Stream]:
    families = _families(name for name in files if place(name).kind is Kind.LOG)
    streams = []
    for name, parts in families.items():
        newest = files[parts[-1]]
        data = [io.BytesIO(files[part].data) for part in parts]
        stream = _scan(data, name, replace(sought, near=newest.written or sought.near))
        pid = stream.pid if stream.pid is not None else newest.pid
        streams.append(replace(stream, pid=pid, written=newest.written))
    return streams


def _families(names: Iterable[str]) -> dict[str, list[str]]:
    """Return logs with their rotations, oldest part first."""
    known = set(names)
    families: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(known):
        match = _ROTATED.match(name)
        base, number = (match["base"], int(match["number"])) if match else (name, 0)
        families.setdefault(base, []).append((-number, name))
    return {base: [name for _, name in sorted(parts)] for base, parts in families.items()}


def _folder(root: Path, sought: _Sought, problems: list[str]) -> Iterator[Stream]:
    names = [
        path.relative_to(root).as_posix()
        for path in sorted(root.rglob("*"))
        if not path.is_symlink() and path.is_file()
    ]
    families = _families(name for name in names if place(name).kind is Kind.LOG)
    for name, parts in families.items():
        paths = [root / part for part in parts]
        alone = [base for base in families if PurePosixPath(base).parent == _parent(name)]
        arrivals = paths[-1].parent / "arrival.txt" if len(alone) == 1 else None
        yield from _family(paths, name, sought, problems, arrivals)


def _parent(name: str) -> PurePosixPath:
    return PurePosixPath(name).parent


def _family(
    paths: Sequence[Path],
    name: str,
    sought: _Sought,
    problems: list[str],
    arrivals: Path | None,
) -> Iterator[Stream]:
    with ExitStack() as stack:
        try:
            parts: list[IO[bytes]] = [stack.enter_context(path.open("rb")) for path in paths]
            stream = _scan(parts, name, sought)
            if arrivals is not None and arrivals.is_file():
                seconds = _arrivals(arrivals)
                stream = replace(
                    _with_arrivals(stream, seconds), ended=_last_arrival(parts[-1], seconds)
                )
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
            return
    yield stream


def _arrivals(path: Path) -> list[float]:
    try:
        return [float(line) for line in path.read_text("ascii").split()]
    except ValueError as error:
        raise UsageError(
            f"{path} holds something that is no number of seconds: one number for each line"
        ) from error


def _last_arrival(file: IO[bytes], seconds: Sequence[float]) -> float | None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
    lines = file.read(TAIL).removesuffix(b"\n").split(b"\n")
    for line, second in zip(reversed(lines), reversed(seconds), strict=False):
        if line.strip() and b'"GET /' not in line:
            return second
    return None


def _with_arrivals(stream: Stream, seconds: Sequence[float]) -> Stream:
    return replace(
        stream,
        records=tuple(
            replace(record, arrival=seconds[record.number - 1])
            if record.number is not None and record.number <= len(seconds)
            else record
            for record in stream.records
        ),
    )


def _scan(parts: Sequence[IO[bytes]], name: str, sought: _Sought) -> Stream:
    """Search the parts of one log, oldest first."""
    scanner = Scanner(parsing.needles(sought.profiles), dialects=parsing.dialects(sought.profiles))
    records: list[Record] = []
    oddities = {"rotation"} if len(parts) > 1 else set()
    lines = 0
    first: datetime | None = None
    last: datetime | None = None
    actor = ""
    size = 0
    for index, part in enumerate(parts):
        if index:
            scanner.continue_in_next_file()
        mark = _Mark(part, near=last or sought.near)
        while block := part.read(BLOCK):
            if b"\x00" in block:
                oddities.add("format")
            for offset, text in scanner.feed(block):
                here = part.tell()
                above = mark.move(offset)
                records.append(
                    Record(text=text, offset=offset, number=lines + mark.lines + 1, above=above)
                )
                part.seek(here)
            size += len(block)
        if index == len(parts) - 1:
            above = mark.move(scanner.line_offset)
            records += [
                Record(text=text, offset=offset, number=lines + mark.lines + 1, above=above)
                for offset, text in scanner.finish()
            ]
        mark.move(part.seek(0, os.SEEK_END))
        lines += mark.lines
        last = _last_stamp(part, size=part.tell(), near=mark.near) or last
        first = first or _first_stamp(part, near=mark.near)
        actor = actor or _actor(part)
    if _kinds(records, sought.profiles) > 1:
        oddities.add("format")
    worker = _WORKER.search(name)
    return Stream(
        name=name,
        records=tuple(records),
        pid=int(worker["pid"]) if worker else None,
        actor=actor,
        first=first,
        last=last,
        near=sought.near,
        empty=size == 0,
        oddities=frozenset(oddities),
    )


def _kinds(records: Sequence[Record], profiles: Sequence[EngineProfile]) -> int:
    """Return how many formats of heartbeats the log mixes."""
    needles = {needle for profile in profiles for needle in profile.needles}
    first = {next((n for n in sorted(needles) if n in r.text), None) for r in records}
    return len(first - {None})


@dataclass(slots=True)
class _Mark:
    """A place in a file that moves on, and what was passed."""

    file: IO[bytes]
    near: datetime
    at: int = 0
    lines: int = 0

    def move(self, offset: int) -> datetime | None:
        """Move on to *offset*; return the latest stamp that was passed, near the end only."""
        found: datetime | None = None
        self.file.seek(self.at)
        while self.at < offset:
            block = self.file.read(min(BLOCK, offset - self.at))
            if not block:
                break
            self.lines += block.count(b"\n")
            self.at += len(block)
            if self.at >= offset:
                # The first line of what was passed is the candidate before.
                found = _newest(block[-TAIL:].split(b"\n")[1:], self.near)
        self.near = found or self.near
        return found


def _newest(lines: Sequence[bytes], near: datetime) -> datetime | None:
    for line in reversed(lines):
        if line and (stamp := _stamp(line, near)) is not None:
            return stamp
    return None


def _stamp(line: bytes, near: datetime) -> datetime | None:
    peeled = peel(line[:TAIL])
    return peeled.stamp or stamps.find(peeled.body, near=near)


def _last_stamp(file: IO[bytes], *, size: int, near: datetime) -> datetime | None:
    file.seek(max(0, size - TAIL))
    return _newest(file.read(TAIL).split(b"\n"), near)


def _first_stamp(file: IO[bytes], *, near: datetime) -> datetime | None:
    file.seek(0)
    return _newest(file.read(TAIL).split(b"\n")[::-1], near)


def _actor(file: IO[bytes]) -> str:
    file.seek(0)
    match = _ACTOR.search(file.read(4096))
    return match["actor"].decode("utf-8", "replace") if match else ""


# --- file operations -----------------------------------------------------------------------------


class _OperationClock:
    """Moves on between operations, far enough for the follower to give up on old files."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> Instant:
        """Return the present instant."""
        return Instant(self._now)

    def wall(self) -> datetime:
        """Not used by followers."""
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self._now += seconds


def _operated(case: Path, sought: _Sought) -> list[Stream]:
    """Carry out the operations of *case* under the eyes of a follower."""
    try:
        operations = json.loads((case / "replay.json").read_text("utf-8"))
        operations = sorted(operations, key=lambda operation: operation["t"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{case / 'replay.json'} is no list of file operations, each with t, op and path"
        ) from error
    arrivals = _arrivals(case / "arrival.txt") if (case / "arrival.txt").is_file() else []
    with tempfile.TemporaryDirectory(prefix="hangwatch-replay-") as folder:
        root = Path(os.path.realpath(folder))
        clock = _OperationClock()
        tailer = Tailer(
            FollowRequest(
                patterns=tuple(f"{root}/{name}" for name in _followed(operations)),
                needles=parsing.needles(sought.profiles),
                dialects=parsing.dialects(sought.profiles),
                roots=(str(root),),
            ),
            clock=clock,
        )
        events: list[object] = list(tailer.poll())
        try:
            for operation in operations:
                _operate(case, root, operation)
                for _ in range(3):
                    clock.sleep(1.0)
                    events += tailer.poll()
            for _ in range(4):
                clock.sleep(10.0)
                events += tailer.poll()
        finally:
            tailer.close()
        streams = _streams(events, f"{root}/", arrivals)
        return [replace(stream, near=sought.near) for stream in streams]


def _streams(events: Sequence[object], prefix: str, arrivals: Sequence[float]) -> list[Stream]:
    streams: dict[str, Stream] = {}
    count = 0
    for event in events:
        match event:
            case SourceFound(source=source, pid=pid, actor=actor):
                name = source.removeprefix(prefix)
                before = streams.get(name) or Stream(name=name, records=())
                streams[name] = replace(before, pid=pid, actor=actor, retired=False)
            case SourceRetired(source=source):
                name = source.removeprefix(prefix)
                if name in streams:
                    streams[name] = replace(streams[name], retired=True)
            case Line(source=source, text=text, offset=offset):
                name = source.removeprefix(prefix)
                before = streams.get(name) or Stream(name=name, records=())
                arrival = arrivals[count] if count < len(arrivals) else None
                record = Record(text=text, offset=offset or 0, arrival=arrival)
                streams[name] = replace(before, records=(*before.records, record))
                count += 1
            case _:
                pass
    return [replace(stream, oddities=frozenset({"rotation"})) for stream in streams.values()]


def _followed(operations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return patterns for what the operations write: through a link where there is one."""
    links = {o["to"]: o["path"] for o in operations if o["op"] == "symlink"}
    moved = {o["to"] for o in operations if o["op"] in ("rename", "copy") and "to" in o}
    patterns: dict[str, None] = {}
    for operation in operations:
        path = operation["path"]
        if operation["op"] not in ("append", "write") or path in moved:
            continue
        for target, link in links.items():
            if path == target:
                path = link
            elif path.startswith(f"{target}/"):
                rest = path.removeprefix(f"{target}/")
                path = f"{link}/{PurePosixPath(rest).parent / '*'}"
        patterns.setdefault(path)
    return list(patterns)


def _operate(case: Path, root: Path, operation: Mapping[str, Any]) -> None:
    """Carry out one operation.

    Raises:
        UsageError: It is none that we know, or leads out of the folder.
    """
    path = _inside(root, operation["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    match operation["op"]:
        case "append" | "write" as how:
            text = operation.get("text")
            source = _inside(case, operation.get("from", operation["path"]))
            data = text.encode() if isinstance(text, str) else source.read_bytes()
            with path.open("ab" if how == "append" else "wb") as file:
                file.write(data)
        case "rename":
            path.rename(_inside(root, operation["to"]))
        case "copy":
            shutil.copyfile(path, _inside(root, operation["to"]))
        case "truncate":
            os.truncate(path, int(operation.get("size", 0)))
        case "symlink":
            fresh = path.with_name(path.name + ".new")
            fresh.symlink_to(operation["to"])
            fresh.rename(path)
        case "delete" | "remove" | "unlink":
            path.unlink()
        case other:
            raise UsageError(
                f"{case / 'replay.json'} has an operation {other!r}: append, write, rename, copy, "
                "truncate, symlink and delete are known"
            )


def _inside(root: Path, name: str) -> Path:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise UsageError(f"a file operation names {name!r}: it must stay in the folder")
    return root / name
