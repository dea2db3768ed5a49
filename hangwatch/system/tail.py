"""Follows growing files by name, through all that happens to logs.

Theory of operation
-------------------

*Looking, not being told.* Every ``poll`` expands the patterns anew and compares what the names mean
now with what is open. Kernel notifications are not used: they are silent on network filesystems
and on the lower layer of an overlay, their queues overflow, their instances run out (128 a user),
and whoever relies on them has to look as well. ``read`` only looks at what is open; it costs a
microsecond a file, so that it can be called many times a second.

*A source is a name, a file is an inode.* The file is kept open, so its inode cannot be reused
while we follow it. When a name leads to another inode, the old file is read to its end before the
new one is touched, and goes on being read for ``LINGER`` seconds, because a writer may take its
time to reopen; while the new file is empty the writer has not come over, and the old one is kept.
The unfinished line at the end of the old file goes on at the beginning of the new one. An inode
that is followed under one name is not followed under a second one; a file named like a rotation of
a source (``log.1``, ``log-20260101``) is not a source of its own beside it, unless it is spelled
out: what lies in it has been read, and a copy of it would look like news. What was read from a file
that was then left is remembered as long as the file can be seen.

*A log is only ever appended to, or it is another log.* Each read begins ``ANCHOR`` bytes before
our place and expects to find there what was there before. If it does not, the file was truncated,
or overwritten, and is read from its beginning, whatever its size says. If a new inode has the same
bytes at the same place, it is the same log (an overlay's copy-up, an editor that saved it), and is
read on from there.

*Fresh or not.* What lies in a file when it is first opened was written at some time before we
listened: at most the last ``BACKLOG`` bytes of it are read (from the saved position on, if that
lies further back, ``MAX_BACKLOG`` at most), and marked ``fresh=False``. A file that was not there
when its directory was listed before is fresh from its first byte, unless it was last written
before we began.

*Other names.* When a directory's link is turned to another directory, files behind it lose their
names: they are read to their end and retired at once, but kept in sight, and if one of them grows
again it is found again. A file whose name is vacant is followed on; its writer has it open, too.
It is left once it has been quiet for ``VACANT_LIMIT`` seconds, so a deleted file keeps its disk
space that long at most after its last line.

*Trouble.* What cannot be read is said once (``SourceUnreadable``), tried again with growing pauses,
and said when it is over. A directory that cannot be listed is not an empty one: nothing in it is
taken for gone. A filesystem that stalls blocks this process, and this process only: there is one
for each mount, and whoever started it notices that it is silent.

What can be lost
----------------

Lines written to a file between our last look and a truncation of it (``copytruncate``, ``>``): no
reader can get them back. A file that was created and rotated away again between two looks. The
line that was unfinished at a truncation. A truncated file that is
written over with the very same bytes at our place is not told from one that only grew. Lines
written to an old file more than ``LINGER`` seconds after the new one began, if the old was quiet so
long. When a copied rotation is read instead of its original (the original appears later), its lines
are not fresh. What lies more than ``BACKLOG`` bytes before the end when we start. A part of a line
beyond ``framing.MAX_LINE`` bytes. Nothing is read twice as fresh, with one exception: a file that
is moved into a followed directory, and was written since we began, is new to us.
"""

# Plain calls, because it matters here which of them touches the filesystem, and how often.

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from hangwatch.core.framing import Scanner
from hangwatch.model.following import FollowEvent, FollowRequest, Foreign, LinkRefused, Position
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import (
    SourceFound,
    SourceGrew,
    SourceReadable,
    SourceRetired,
    SourceUnreadable,
)
from hangwatch.model.time import Clock, Instant
from hangwatch.system.paths import (
    Elsewhere,
    Expander,
    Found,
    MountTable,
    Refused,
    Step,
    Trouble,
    descriptor_of,
    open_regular,
)

BLOCK: Final = 64 << 10
"""Bytes a read; fits into the processor's cache beside its copies."""

BUDGET: Final = 4 << 20
"""Bytes of one file in one ``read``, so that a flood in one log delays no other."""

WHOLE_BUDGET: Final = 64 << 20
"""Bytes of all files in one ``read``, so that it returns within a second."""

BACKLOG: Final = 256 << 10
MAX_BACKLOG: Final = 8 << 20
ANCHOR: Final = 256
"""Bytes: a whole heartbeat, stamp and all, so that two logs of like lines differ in it."""

LINGER: Final = 10.0
VACANT_LIMIT: Final = 600.0

REOPEN_AFTER: Final = 3.0
"""Seconds of quiet after which a file is opened anew: a network filesystem shows new attributes
to a new opener only, and an overlay's lower file never grows once it was copied up."""

FIRST_LINE: Final = 1024
HEADER: Final = 4096
MAX_PAUSE: Final = 30.0
MAX_OLD: Final = 16
"""Files behind one name that are open at once, for a rotator that runs without a writer."""

CLOCK_SLACK: Final = 2.0
"""Seconds: a file's times have the grain of a kernel tick, a file server's clock is not ours."""

# ray/_private/node.py: `worker-<worker id>-<job id>-<pid>.out`, job `ffffffff` before it has one.
_WORKER: Final = re.compile(r"worker-[0-9a-zA-Z]+-[0-9a-fA-F]+-(?P<pid>\d+)\.(?:out|err)$")
_HEADER: Final = re.compile(rb"^:(?:actor_name|task_name):(?P<actor>[^\r\n]{1,200})$", re.MULTILINE)
_HEADER_NEEDLES: Final = (b":actor_name:", b":task_name:")

# What logrotate, the kubelet, Ray and Python's handlers append: a number, or a date.
_ROTATED: Final = re.compile(
    r"(?P<base>.+?)(?:\.\d{1,4}|[.-]\d{8,10}(?:[-_T]?\d{4,6})?|[.-]\d{4}-\d\d-\d\d(?:[_T][\d:-]+)?)"
    r"(?:\.(?:gz|bz2|xz|zst|lz4))?"
)
_COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst", ".lz4")

Key = tuple[int, int]
"""Device and inode."""


@dataclass(slots=True)
class _File:
    """One open inode and how far it was read."""

    real: str
    key: Key
    fd: int  # -1 while it cannot be read
    scanner: Scanner
    opened_at: float
    quiet_since: float
    anchor: bytes = b""
    boundary: int = 0  # what lies before it is not fresh
    before: _File | None = None  # its predecessor, until its first byte
    joins: bool = False  # whether the unfinished line of its predecessor goes on in it

    def close(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
        self.fd = -1


@dataclass(slots=True)
class _Source:
    """One name: the file behind it now, and those that were."""

    name: str
    pattern: str = ""
    pid: int | None = None
    actor: str = ""
    file: _File | None = None
    old: list[_File] = field(default_factory=list)
    retired: bool = False
    vacant: bool = False
    unreadable: bool = False
    pause: float = 0.0
    retry_at: float = 0.0

    @property
    def files(self) -> list[_File]:
        """Every open file, the oldest first."""
        return [*self.old, *([] if self.file is None else [self.file])]


@dataclass(slots=True)
class _Stream:
    """One pipe, and the source that it is told as."""

    path: str
    source: _Source
    scanner: Scanner
    fd: int = -1


@dataclass(slots=True)
class _Left:
    """A file that was read to its end and closed."""

    name: str
    offset: int
    anchor: bytes


class Tailer:
    """Follows what a request asks for; every call returns at once with what has happened.

    Not thread-safe. See the module for what it does and for what can be lost.
    """

    def __init__(
        self, request: FollowRequest, *, clock: Clock, positions: Iterable[Position] = ()
    ) -> None:
        """Start to listen now.

        Args:
            request: What to follow.
            clock: Stamps the events.
            positions: How far the logs were read in an earlier life.
        """
        self._request = request
        self._clock = clock
        self._mounts = MountTable()
        self._expander = Expander(roots=request.roots, mount=request.mount, mounts=self._mounts)
        self._positions = {position.source: position for position in positions}
        self._sources: dict[str, _Source] = {}
        self._streams = [
            _Stream(path, _Source(name), Scanner(request.needles, dialects=request.dialects))
            for name, path in request.streams.items()
        ]
        self._left: dict[Key, _Left] = {}
        self._unmatched: dict[str, None] = {}
        self._listed: set[str] = set()  # patterns that were listed whole at least once
        self._troubled: set[str] = set()  # patterns that could not be listed whole
        self._borders: set[Step] = set()  # refused links and other filesystems of the last look
        # Files carry wall time of this machine, whatever clock the caller lives by.
        self._began = time.time() - CLOCK_SLACK
        self._events: list[FollowEvent] = []
        self._behind = False
        self._budget = BUDGET

    def follow(self, request: FollowRequest) -> None:
        """Follow what *request* asks for from now on.

        What both requests ask for goes on without a break. Logs that only the former asked for
        retire with the next ``poll``; its streams stay.
        """
        known = {stream.source.name for stream in self._streams} | set(self._request.streams)
        self._streams += [
            _Stream(path, _Source(name), Scanner(request.needles, dialects=request.dialects))
            for name, path in request.streams.items()
            if name not in known
        ]
        self._request = request
        self._expander = Expander(roots=request.roots, mount=request.mount, mounts=self._mounts)
        self._troubled &= set(request.patterns)

    @property
    def descriptors(self) -> dict[Key, int]:
        """The files that are open: device and inode to descriptor. Only to be watched."""
        files = [file for source in self._sources.values() for file in source.files]
        return {file.key: file.fd for file in files if file.fd >= 0}

    @property
    def pipes(self) -> list[int]:
        """The streams that are open, by descriptor. Only to be waited on."""
        return [stream.fd for stream in self._streams if stream.fd >= 0]

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The patterns that led to nothing at the last look, not even to an error."""
        return tuple(self._unmatched)

    @property
    def behind(self) -> bool:
        """Whether the last call stopped at its budget: there is more to read at once."""
        return self._behind

    def poll(self) -> tuple[FollowEvent, ...]:
        """Look at all names again, then read what was written."""
        self._look()
        return self.read()

    def read(self) -> tuple[FollowEvent, ...]:
        """Read what was written to the files that are open."""
        self._behind = False
        share = WHOLE_BUDGET // max(1, len(self._sources))
        self._budget = max(BLOCK, min(BUDGET, share))
        for source in self._sources.values():
            for file in source.files:
                self._read(source, file)
        for stream in list(self._streams):
            self._read_stream(stream)
        events, self._events = tuple(self._events), []
        return events

    def positions(self) -> tuple[Position, ...]:
        """Return how far each log was read."""
        kept = []
        for source in self._sources.values():
            file = source.file
            if file is None or file.fd < 0:
                continue
            with suppress(OSError):
                digest, size = _first_line(os.pread(file.fd, FIRST_LINE, 0))
                kept.append(
                    Position(
                        source=source.name,
                        device=file.key[0],
                        inode=file.key[1],
                        first_line=digest,
                        first_line_size=size,
                        offset=file.scanner.line_offset,
                    )
                )
        return tuple(kept)

    def close(self) -> None:
        """Close every file; nothing more can be read."""
        for source in self._sources.values():
            for file in source.files:
                file.close()
        for stream in self._streams:
            if stream.fd >= 0:
                os.close(stream.fd)
        self._sources.clear()
        self._streams.clear()

    # Looking at names.

    def _look(self) -> None:
        now = self._clock.now()
        self._mounts.refresh()
        found: dict[str, tuple[Found, str]] = {}
        newborn: set[str] = set()
        borders: set[Step] = set()
        self._unmatched = dict.fromkeys(self._request.patterns)
        for pattern in self._request.patterns:
            trouble = None
            for step in self._expander.expand(pattern):
                self._unmatched.pop(pattern, None)
                match step:
                    case Found(name=name):
                        if pattern in self._listed and step.status.st_mtime >= self._began:
                            newborn.add(name)
                        found.setdefault(name, (step, pattern))
                    case Trouble():
                        trouble = step
                    case Refused() | Elsewhere():
                        borders.add(step)
            self._tell_trouble(pattern, trouble, now)
            if trouble is None:
                self._listed.add(pattern)
        for step in borders - self._borders:
            self._tell_border(step, now)
        self._borders = borders
        self._drop_rotations(found)
        keys = {_key(entry.status) for entry, _ in found.values()}
        self._left = {key: left for key, left in self._left.items() if key in keys}
        for entry, pattern in found.values():
            self._meet(entry, pattern, newborn=entry.name in newborn, now=now)
        for source in list(self._sources.values()):
            if source.name not in found and source.pattern not in self._troubled:
                self._miss(source, now)
            self._leave_quiet(source, now)

    def _tell_border(self, step: Step, now: Instant) -> None:
        match step:
            case Refused(name=name, target=target):
                self._events.append(LinkRefused(path=name, target=target, at=now))
            case Elsewhere(pattern=pattern, mount=mount):
                self._events.append(Foreign(pattern=pattern, mount=mount, at=now))
            case Found() | Trouble():
                pass

    def _tell_trouble(self, pattern: str, trouble: Trouble | None, now: Instant) -> None:
        if trouble is None:
            if pattern in self._troubled:
                self._troubled.remove(pattern)
                self._events.append(SourceReadable(source=pattern, at=now))
        elif pattern not in self._troubled:
            self._troubled.add(pattern)
            reason = f"{trouble.name}: {_reason(trouble.error)}"
            self._events.append(SourceUnreadable(source=pattern, at=now, reason=reason))

    def _drop_rotations(self, found: dict[str, tuple[Found, str]]) -> None:
        for name, (entry, _) in list(found.items()):
            rotated = _ROTATED.fullmatch(name)
            base = rotated["base"] if rotated else ""
            if not entry.literal and (
                name.endswith(_COMPRESSED) or base in found or base in self._sources
            ):
                del found[name]

    def _meet(self, entry: Found, pattern: str, *, newborn: bool, now: Instant) -> None:
        """A name leads to a file: the one we follow, its successor, or one that is new."""
        key = _key(entry.status)
        source = self._sources.get(entry.name)
        if source is None:
            if self._is_followed(key) or self._was_left(key, entry):
                return
            source = self._new_source(entry, pattern, now)
            if source is None:
                return
        if source.file is not None and source.file.key == key:
            self._meet_again(source, source.file, entry, now)
        elif source.file is not None and (back := _of_key(source.old, key)) is not None:
            source.old.remove(back)
            source.old.append(source.file)
            source.file, back.before = back, None
        elif not stat.S_ISREG(entry.status.st_mode) and source.file is None:
            pass
        elif self._is_followed(key) or not stat.S_ISREG(entry.status.st_mode):
            self._miss(source, now)
        elif now >= source.retry_at:
            if source.file is not None:
                self._succeed(source, source.file, entry, now)
            else:
                self._open(source, entry, newborn=newborn and not source.unreadable, now=now)

    def _new_source(self, entry: Found, pattern: str, now: Instant) -> _Source | None:
        regular = stat.S_ISREG(entry.status.st_mode)
        if not regular and not entry.literal:
            return None
        source = _Source(entry.name, pattern, pid=_pid_of(entry))
        self._sources[entry.name] = source
        if not regular:
            self._fail(source, OSError(errno.EINVAL, "it is not a regular file"), now)
        return source

    def _meet_again(self, source: _Source, file: _File, entry: Found, now: Instant) -> None:
        file.real, source.vacant = entry.real, False
        if source.retired:
            self._tell_found(source, now)
        if file.fd < 0:
            if now >= source.retry_at:
                self._reopen(source, file, now)
        elif now - max(file.quiet_since, file.opened_at) >= REOPEN_AFTER:
            self._reopen(source, file, now)

    def _is_followed(self, key: Key) -> bool:
        """Whether this inode is open under whatever name."""
        return any(_of_key(source.files, key) is not None for source in self._sources.values())

    def _was_left(self, key: Key, entry: Found) -> bool:
        """Whether this file was read to its end and closed, and has not grown since."""
        left = self._left.get(key)
        if left is None or entry.status.st_size != left.offset:
            return False  # if it grew, or its inode was given to a new file, opening it tells
        if left.name != entry.name:
            with suppress(OSError):
                file = self._new_file(entry, Instant(0.0))
                same = _has_anchor(file.fd, left.offset, left.anchor)
                file.close()
                if not same:
                    return False
            left.name = entry.name
        return True

    def _miss(self, source: _Source, now: Instant) -> None:
        """No name of ours leads to this source's file any more."""
        file = source.file
        if source.vacant or (file is not None and self._read(source, file)):
            return
        source.vacant = True
        if file is None:
            return
        closed = descriptor_of(file.real) is not None
        if closed or _is_still_there(file):
            self._tell(source, file.scanner.finish(), now)
            reason = "its process closed it, or ended" if closed else "its name leads elsewhere now"
            self._retire(source, now, reason)

    def _leave_quiet(self, source: _Source, now: Instant) -> None:
        """Close what has been left behind and says nothing any more."""
        files = source.files
        for i, file in enumerate(list(source.old)):
            followed = any(later.scanner.offset > 0 for later in files[i + 1 :])
            limit = LINGER if followed else VACANT_LIMIT
            if now - file.quiet_since > limit or len(source.old) > MAX_OLD:
                source.old.remove(file)
                self._leave(source, file, now)
        file_now = source.file
        if source.vacant and file_now is not None and now - file_now.quiet_since > VACANT_LIMIT:
            source.file = None
            self._leave(source, file_now, now)
        if source.vacant and not source.files:
            if not source.retired:
                self._retire(source, now, "it was deleted or renamed, and is quiet")
            del self._sources[source.name]

    def _leave(self, source: _Source, file: _File, now: Instant) -> None:
        self._left[file.key] = _Left(source.name, file.scanner.offset, file.anchor)
        self._tell(source, file.scanner.finish(), now)
        file.close()

    # Opening.

    def _new_file(self, entry: Found, now: Instant) -> _File:
        """Open a file; make sure that it is the one that was looked at.

        Raises:
            OSError: It cannot be opened, or is another one now.
        """
        fd = open_regular(entry.real)
        if not _leads_to(fd, entry.real):
            os.close(fd)
            raise OSError(errno.ESTALE, "it changed while it was opened")
        key = _key(entry.status)
        return _File(entry.real, key, fd, Scanner(()), opened_at=now, quiet_since=now)

    def _open(self, source: _Source, entry: Found, *, newborn: bool, now: Instant) -> None:
        try:
            file = self._new_file(entry, now)
            size = os.fstat(file.fd).st_size
            header = os.pread(file.fd, HEADER, 0)
        except OSError as error:
            self._fail(source, error, now)
            return
        file.scanner = Scanner(self._needles(source), dialects=self._request.dialects)
        if not self._resume_left(file) and not newborn and size:
            start = self._start(source.name, file.key, header, size)
            if start:
                # One byte early: only that byte tells whether a line begins at the start.
                file.scanner.reset(start - 1)
                file.scanner.skip_line()
            file.boundary = size
        source.file, source.vacant = file, False
        if source.unreadable:
            self._recover(source, now)
        actors = _HEADER.findall(header)
        source.actor = actors[-1].decode("utf-8", "replace") if actors else source.actor
        self._tell_found(source, now)

    def _start(self, name: str, key: Key, header: bytes, size: int) -> int:
        """Return where to begin in a file that was there before us."""
        start = max(0, size - BACKLOG)
        saved = self._positions.pop(name, None)
        if saved is None or (saved.device, saved.inode) != key or saved.offset > size:
            return start
        line = header[: min(saved.first_line_size, FIRST_LINE)]
        if hashlib.sha256(line).hexdigest() != saved.first_line:
            return start
        return max(0, size - MAX_BACKLOG, min(start, saved.offset))

    def _resume_left(self, file: _File) -> bool:
        """Go on where this file was left, if it is the one that was."""
        left = self._left.pop(file.key, None)
        with suppress(OSError):
            if left is not None and _has_anchor(file.fd, left.offset, left.anchor):
                file.scanner.reset(left.offset)
                file.anchor = left.anchor
                return True
        return False

    def _needles(self, source: _Source) -> tuple[bytes, ...]:
        if _WORKER.search(source.name) is None:
            return self._request.needles
        return (*self._request.needles, *_HEADER_NEEDLES)

    def _reopen(self, source: _Source, file: _File, now: Instant) -> None:
        """Swap the descriptor of a quiet or broken file for a new one of the same inode."""
        file.opened_at = now
        try:
            fd = open_regular(file.real)
        except OSError as error:
            if file.fd < 0:
                self._fail(source, error, now)
            return
        if not _leads_to(fd, file.real) or not _is_same(fd, file):
            os.close(fd)  # the next look sees who has the name now
            return
        file.close()
        file.fd = fd
        if source.unreadable:
            self._recover(source, now)

    def _succeed(self, source: _Source, old: _File, entry: Found, now: Instant) -> None:
        """Another inode has the name: read it once the writer has come over to it."""
        try:
            new = self._new_file(entry, now)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._fail(source, error, now)
            return
        new.scanner = Scanner(self._needles(source), dialects=self._request.dialects)
        new.before = None if self._resume_left(new) else old
        new.joins = not _is_deleted(old.fd) and not _is_still_there(old)
        source.old.append(old)
        source.file, source.vacant = new, False
        if source.unreadable:
            self._recover(source, now)
        if source.retired:
            self._tell_found(source, now)

    def _take_over(self, source: _Source, new: _File, old: _File, now: Instant) -> bool:
        """Go over to *new*, which has its first bytes; say whether *old* was at its end."""
        if self._read(source, old):
            return False
        if old.before is not None and not self._take_over(source, old, old.before, now):
            return False  # it never had a line itself, but hands on what went before
        new.before = None
        if _is_copy(new, old):
            new.scanner, new.anchor = old.scanner, old.anchor
            source.old.remove(old)
            old.close()
            return True
        new.scanner, old.scanner = old.scanner, new.scanner
        old.scanner.reset(new.scanner.offset)
        if new.joins:
            new.scanner.continue_in_next_file()
        else:
            self._tell(source, new.scanner.finish(), now)
            new.scanner.reset(0)
        old.quiet_since = now
        return True

    # Reading.

    def _read(self, source: _Source, file: _File) -> bool:
        """Read what was written to *file*; say whether there is more at once."""
        if file.fd < 0:
            return False
        now = self._clock.now()
        count, said = 0, False
        while count < self._budget:
            try:
                block = _next_block(file)
            except OSError as error:
                file.close()
                self._fail(source, error, now)
                return False
            if block is None:
                if file is source.file:
                    _restart(file)
                    continue
                source.old.remove(file)  # what a rotator copies over an old log is no news
                file.close()
                return False
            if not block:
                break
            if file.before is not None:
                if not self._take_over(source, file, file.before, now):
                    break
                continue
            fresh = file.scanner.offset >= file.boundary
            count += len(block)
            file.anchor = (file.anchor + block[-ANCHOR:])[-ANCHOR:]
            if fresh and not said and self._is_growth(block):
                said = True
                if source.retired:
                    self._tell_found(source, now)
                size = file.scanner.offset + len(block)
                self._events.append(SourceGrew(source=source.name, at=now, size=size))
            self._tell(source, file.scanner.feed(block), now, fresh=fresh)
        if count:
            file.quiet_since = now
        more = count >= self._budget
        self._behind = self._behind or more
        return more

    def _is_growth(self, block: bytes) -> bool:
        echoes = self._request.echoes
        if not echoes or len(block) > HEADER:
            return True
        lines = [line for line in block.splitlines() if line.strip()]
        return not all(any(echo in line for echo in echoes) for line in lines)

    def _read_stream(self, stream: _Stream) -> None:
        now = self._clock.now()
        if stream.fd < 0 and not self._open_stream(stream, now):
            return
        source, count = stream.source, 0
        while count < self._budget:
            try:
                block = os.read(stream.fd, BLOCK)
            except BlockingIOError:
                break
            except OSError as error:
                os.close(stream.fd)
                stream.fd = -1
                self._fail(source, error, now)
                return
            if not block:
                self._tell(source, stream.scanner.finish(), now, stream=True)
                self._retire(source, now, "the stream ended")
                os.close(stream.fd)
                self._streams.remove(stream)
                return
            if not count:
                self._events.append(SourceGrew(source=source.name, at=now))
            count += len(block)
            self._tell(source, stream.scanner.feed(block), now, stream=True)
        self._behind = self._behind or count >= self._budget

    def _open_stream(self, stream: _Stream, now: Instant) -> bool:
        source = stream.source
        if now < source.retry_at:
            return False
        try:
            # A pipe without a writer must not hold us up.
            stream.fd = os.open(stream.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._fail(source, error, now)
            return False
        if source.unreadable:
            self._recover(source, now)
        self._tell_found(source, now)
        return True

    # Telling.

    def _tell(
        self,
        source: _Source,
        candidates: Iterable[tuple[int, bytes]],
        now: Instant,
        *,
        fresh: bool = True,
        stream: bool = False,
    ) -> None:
        for offset, text in candidates:
            if text.startswith(_HEADER_NEEDLES):
                header = _HEADER.match(text)
                actor = header["actor"].decode("utf-8", "replace") if header else source.actor
                if actor != source.actor:
                    source.actor = actor
                    self._tell_found(source, now)
                continue
            self._events.append(
                Line(
                    source=source.name,
                    text=text,
                    at=now,
                    offset=None if stream else offset,
                    fresh=fresh,
                )
            )

    def _tell_found(self, source: _Source, now: Instant) -> None:
        source.retired = False
        self._events.append(
            SourceFound(source=source.name, at=now, pid=source.pid, actor=source.actor)
        )

    def _retire(self, source: _Source, now: Instant, reason: str) -> None:
        source.retired = True
        self._events.append(SourceRetired(source=source.name, at=now, reason=reason))

    def _fail(self, source: _Source, error: OSError, now: Instant) -> None:
        if not source.unreadable:
            source.unreadable = True
            self._events.append(SourceUnreadable(source=source.name, at=now, reason=_reason(error)))
        source.pause = min(MAX_PAUSE, max(1.0, source.pause * 2))
        source.retry_at = now + source.pause

    def _recover(self, source: _Source, now: Instant) -> None:
        source.unreadable, source.pause, source.retry_at = False, 0.0, 0.0
        self._events.append(SourceReadable(source=source.name, at=now))


def _next_block(file: _File) -> bytes | None:
    """Return the next bytes, ``b""`` at the end, ``None`` if this is not the log that we knew.

    Raises:
        OSError: The file cannot be read now.
    """
    offset, anchor = file.scanner.offset, file.anchor
    size = BLOCK if offset >= file.boundary else min(BLOCK, file.boundary - offset)
    block = os.pread(file.fd, size + len(anchor), offset - len(anchor))
    if not block.startswith(anchor):
        return None
    block = block[len(anchor) :]
    if not block and not anchor and os.fstat(file.fd).st_size < offset:
        return None
    if block.startswith(b"\x00") and not block.strip(b"\x00"):
        # Nothing but a hole: on to where it ends, instead of reading gigabytes of it.
        _go_to_data(file, offset)
        block = os.pread(file.fd, len(block), file.scanner.offset)
    return block


def _restart(file: _File) -> None:
    """Go to the beginning of what replaced the log."""
    _go_to_data(file, 0)
    file.boundary = 0


def _go_to_data(file: _File, offset: int) -> None:
    """Forget the unfinished line, go to *offset* or, if a hole is there, to its end."""
    with suppress(OSError, AttributeError):
        offset = os.lseek(file.fd, offset, os.SEEK_DATA)
    file.scanner.reset(offset)
    file.anchor = b""


def _key(status: os.stat_result) -> Key:
    return status.st_dev, status.st_ino


def _of_key(files: Iterable[_File], key: Key) -> _File | None:
    return next((file for file in files if file.key == key), None)


def _is_same(fd: int, file: _File) -> bool:
    """Whether *fd* is of the inode that *file* has, by its name's status or by its descriptor's."""
    key = _key(os.fstat(fd))
    try:
        return key in {file.key, _key(os.fstat(file.fd))}
    except OSError:
        return key == file.key


def _is_deleted(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return True


def _is_still_there(file: _File) -> bool:
    """Whether the file is where it was, so that only the way to it has changed."""
    try:
        return _key(os.lstat(file.real)) == file.key
    except OSError:
        return False


def _is_copy(new: _File, old: _File) -> bool:
    """Whether *new* holds the same log as *old* up to our place."""
    offset = old.scanner.offset
    size = min(offset, HEADER)
    try:
        return offset > 0 and all(
            os.pread(new.fd, size, start) == os.pread(old.fd, size, start)
            for start in (0, offset - size)
        )
    except OSError:
        return False


def _has_anchor(fd: int, offset: int, anchor: bytes) -> bool:
    return os.pread(fd, len(anchor), offset - len(anchor)) == anchor


def _leads_to(fd: int, real: str) -> bool:
    """Whether the descriptor is of the file at *real*, and no link got in between."""
    if real.startswith("/proc/"):
        return True
    try:
        opened = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return True  # no /proc: nothing to check against
    return opened.removesuffix(" (deleted)") == real


def _pid_of(entry: Found) -> int | None:
    descriptor = descriptor_of(entry.real)
    if descriptor is not None:
        return descriptor[0]
    worker = _WORKER.search(entry.name)
    return int(worker["pid"]) if worker else None


def _first_line(head: bytes) -> tuple[str, int]:
    """Return the hash of the first line, or of as much of it as there is, and that length."""
    line = head[: head.find(b"\n") + 1] or head
    return hashlib.sha256(line).hexdigest(), len(line)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
