"""What a follower is asked for, and what it saw besides the lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import (
    SourceFound,
    SourceGrew,
    SourceReadable,
    SourceRetired,
    SourceUnreadable,
)
from hangwatch.model.time import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What the lines of one engine contain.

    Attributes:
        beats: Literals, one of which each of its heartbeats contains.
        others: Literals of its other lines that matter.
    """

    beats: tuple[bytes, ...]
    others: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRequest:
    """Which logs to follow, and what to look for in them.

    Attributes:
        patterns: Paths, globs (``*``, ``?``, ``[…]`` in any component), directories (all files
            directly in them) and ``/proc/PID/fd/N``. What matches later is followed, too.
        needles: Literals; a line that contains one of them becomes a ``Line``.
        dialects: Engines that the needles are of: once a heartbeat of one was found in a log, the
            other lines of the others are not looked for in it any more.
        roots: Directories beneath which symbolic links may lead. Without any, a link may lead
            only beneath the directory that the first link of its path lies in.
        streams: Pipes to read instead of files, by source name: ``{"-": "/proc/42/fd/5"}``.
        mount: Only logs on this mount point are read, others are reported as ``Foreign``;
            ``""`` reads all.
        echoes: Literals of lines that our own requests cause; a block of nothing else is no growth.
    """

    patterns: tuple[str, ...]
    needles: tuple[bytes, ...]
    dialects: tuple[Dialect, ...] = ()
    roots: tuple[str, ...] = ()
    streams: Mapping[str, str] = field(default_factory=dict)
    mount: str = ""
    echoes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a log was read: kept over restarts.

    Attributes:
        source: Name of the log.
        device: Its filesystem.
        inode: Its number there.
        first_line: SHA-256 of the first ``first_line_size`` bytes, hexadecimal. Inode numbers are
            reused, and first lines are often equal; together they tell files apart.
        first_line_size: Bytes of the first line, at most 1024; less where it had not ended yet.
        offset: Everything before this byte was read.
    """

    source: str
    device: int
    inode: int
    first_line: str
    first_line_size: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A pattern leads to another filesystem: a follower of its own must read it.

    Attributes:
        pattern: What that follower should follow: links resolved up to the border.
        mount: Mount point of the other filesystem.
        at: When this was noticed.
    """

    pattern: str
    mount: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRefused:
    """A symbolic link leads out of the configured roots and is not followed.

    Attributes:
        path: The log by its name.
        target: Where it leads.
        at: When this was noticed.
    """

    path: str
    target: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingMatches:
    """The first look found nothing that a pattern matches; it is waited for.

    Attributes:
        pattern: The pattern.
        nearest: The deepest folder of it that exists.
        at: When we looked.
    """

    pattern: str
    nearest: str
    at: Instant


FollowEvent: TypeAlias = (
    Line
    | SourceFound
    | SourceGrew
    | SourceRetired
    | SourceUnreadable
    | SourceReadable
    | Foreign
    | LinkRefused
    | NothingMatches
)
