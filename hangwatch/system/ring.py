"""The black box's file: a ring of looks at scheduling counters, ten minutes long.

Theory of operation
===================

One process writes it, others read it meanwhile, and either may be killed at any moment. So every
part has a checksum of its own, and what does not match it is as good as not there.

```
head    one page: JSON that says how the rest is laid out, and of which boot it is
table   one entry a slot: which thread's counters stand there, and from which look on
rows    one a look: number, instant, and two counters for each slot; look N in row N mod ROWS
```

Four looks are written at a time, once a second. Rows and entries have fixed sizes, and all of the
file is allocated when it is made: a disk that fills up later cannot stop the recording. Counters
are kept as the kernel counts them, modulo 2^32; a slot that nobody looked at holds ``ABSENT``.
Where threads are more than slots, a ring with twice as many takes its place, under the same name.
A slot is given away again once all looks at its thread have been overwritten.
"""

from __future__ import annotations

import json
import math
import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from zlib import crc32

from hangwatch.model.identity import ProcessId
from hangwatch.model.recording import UNSEEN, Recording, Track
from hangwatch.model.time import Instant

SCHEMA: Final = "hangwatch.ring/1"

PERIOD: Final = 0.25
"""Seconds between two looks."""

ROWS: Final = 2400
"""Looks that are kept: ten minutes."""

GAP: Final = 3.0
"""Periods between two looks from which on nobody is said to have looked in between."""

BATCH: Final = 4
"""Looks that are written at a time; divides ``ROWS``."""

SLOTS: Final = 128
"""Threads at first: those of forty processes; doubles up to ``MAX_SLOTS``."""

MAX_SLOTS: Final = 2048
"""Threads of 256 processes, and of as many that have ended; a file of 39 MB."""

ABSENT: Final = 0xFFFF_FFFF

_HEAD: Final = 4096
_ENTRY: Final = struct.Struct("<III4xQQd16s")  # checksum, pid, tid, ticks, first look, end, name
_ROW: Final = struct.Struct("<IIQd")  # checksum, slots in use, look, instant
_CHECKED: Final = 4  # bytes of a checksum, which goes over all that follows it


@dataclass(slots=True)
class Slot:
    """Whose counters stand in one place of every row.

    Attributes:
        process: The process.
        tid: The thread.
        name: Its name by the kernel.
        first: The first look at it.
        ended_at: When it was found gone; NaN while it is there.
        left: The look from which on nobody looked at it any more, or ``None``.
    """

    process: ProcessId
    tid: int
    name: bytes
    first: int
    ended_at: float = math.nan
    left: int | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a file is laid out."""

    boot: str
    slots: int
    rows: int = ROWS
    period: float = PERIOD

    @property
    def stride(self) -> int:
        return _ROW.size + 8 * self.slots

    @property
    def table(self) -> int:
        return self.slots * _ENTRY.size

    @property
    def size(self) -> int:
        return _HEAD + self.table + self.rows * self.stride

    def place(self, look: int) -> int:
        return _HEAD + self.table + look % self.rows * self.stride

    def head(self) -> bytes:
        told = {
            "schema": SCHEMA,
            "boot": self.boot,
            "slots": self.slots,
            "rows": self.rows,
            "period": self.period,
        }
        return json.dumps(told).encode().ljust(_HEAD, b"\n")


def _shape(head: bytes) -> _Shape | None:
    """Return how a file that begins so is laid out, ``None`` if it is none of ours."""
    try:
        told = json.loads(head)
        shape = _Shape(
            str(told["boot"]), int(told["slots"]), int(told["rows"]), float(told["period"])
        )
    except (ValueError, KeyError, TypeError):
        return None
    sane = 0 < shape.slots <= MAX_SLOTS and 0 < shape.rows <= ROWS and shape.period > 0
    return shape if sane and told.get("schema") == SCHEMA else None


class Ring:
    """The file, for the one who writes it.

    Attributes:
        slots: Whose each slot is; ``None`` for one that is free.
        look: Number of the next look.
    """

    def __init__(self, path: Path, boot: str) -> None:
        """Go on with what is there of this boot, or begin anew.

        Raises:
            OSError: It cannot be written there.
        """
        self._path = path
        self.slots: list[Slot | None] = []
        self.look = 0
        self._unwritten: list[bytes] = []
        found = self._open()
        if found is None or found.boot != boot or (found.rows, found.period) != (ROWS, PERIOD):
            found = _Shape(boot, SLOTS)
            self._close()
            self._fd = self._make(found)
            self._fd = self._rename(self._fd)
        self._shape = found
        self._take_up()

    def seat(self, process: ProcessId, tid: int, name: bytes) -> int | None:
        """Return the slot of a thread, its old one if it has any; ``None`` if all are in use.

        Raises:
            OSError: The ring cannot grow.
        """
        free = None
        for number, slot in enumerate(self.slots):
            if slot is None:
                free = number if free is None else free
            elif (slot.process, slot.tid) == (process, tid) and math.isnan(slot.ended_at):
                slot.left = None
                return number
            elif slot.left is not None and slot.left <= self.look - self._shape.rows:
                free = number if free is None else free
        if free is None and len(self.slots) == self._shape.slots:
            if 2 * self._shape.slots > MAX_SLOTS:
                return None
            self._grow()
        if free is None:
            free = len(self.slots)
            self.slots.append(None)
        self.slots[free] = Slot(process, tid, name[:16], self.look)
        self._enter(free)
        return free

    def leave(self, number: int, ended_at: float = math.nan) -> None:
        """Take down that nobody looks at a slot's thread any more, and when it was found gone."""
        slot = self.slots[number]
        assert slot is not None
        slot.left = self.look
        if not math.isnan(ended_at):
            slot.ended_at = ended_at
            self._enter(number)

    def write(self, at: float, counters: Iterable[int]) -> None:
        """Write one look: two counters for each slot, in their order.

        Raises:
            OSError: The file is gone bad.
        """
        used = len(self.slots)
        body = struct.pack(f"<IQd{2 * used}I", used, self.look, at, *counters)
        self._unwritten.append(crc32(body).to_bytes(_CHECKED, "little") + body)
        self.look += 1
        if self.look % BATCH == 0:
            self.flush()

    def flush(self) -> None:
        """Write what waits; whoever reads sees it from now on.

        Raises:
            OSError: The file is gone bad.
        """
        rows, self._unwritten = self._unwritten, []
        if rows:
            data = b"".join(row.ljust(self._shape.stride, b"\0") for row in rows)
            os.pwrite(self._fd, data, self._shape.place(self.look - len(rows)))

    def close(self) -> None:
        """Write no more.

        Raises:
            OSError: The file is gone bad.
        """
        try:
            self.flush()
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> _Shape | None:
        self._fd = -1
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        return _whole(self._fd)

    def _make(self, shape: _Shape) -> int:
        """Make an empty ring beside the present one."""
        beside = self._path.with_name(f".{self._path.name}.new")
        beside.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(beside, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, shape.size)
            os.pwrite(fd, shape.head(), 0)
        except OSError:
            os.close(fd)
            beside.unlink(missing_ok=True)
            raise
        return fd

    def _rename(self, fd: int) -> int:
        self._path.with_name(f".{self._path.name}.new").replace(self._path)
        return fd

    def _grow(self) -> None:
        """Let a ring with twice as many slots take the place of this one."""
        self.flush()
        wide = _Shape(self._shape.boot, 2 * self._shape.slots)
        fd = self._make(wide)
        for number, entry in enumerate(_entries(self._fd, self._shape)):
            os.pwrite(fd, entry, _HEAD + number * _ENTRY.size)
        for look, _, row in _rows(self._fd, self._shape):
            os.pwrite(fd, row, wide.place(look))
        self._rename(fd)
        os.close(self._fd)
        self._fd, self._shape = fd, wide

    def _take_up(self) -> None:
        """Learn what the file holds."""
        for look, _, _ in _rows(self._fd, self._shape):
            self.look = max(self.look, look + 1)
        for entry in _entries(self._fd, self._shape):
            slot = _slot(entry)
            if slot is not None:
                slot.left = self.look
            self.slots.append(slot)
        while self.slots and self.slots[-1] is None:
            self.slots.pop()

    def _enter(self, number: int) -> None:
        slot = self.slots[number]
        assert slot is not None
        entry = _ENTRY.pack(
            0,
            slot.process.pid,
            slot.tid,
            slot.process.start_ticks,
            slot.first,
            slot.ended_at,
            slot.name,
        )[_CHECKED:]
        entry = crc32(entry).to_bytes(_CHECKED, "little") + entry
        os.pwrite(self._fd, entry, _HEAD + number * _ENTRY.size)


def read(path: Path, boot: str) -> Recording | None:
    """Return what a ring holds, also while it is written; ``None`` if it is of another boot.

    Raises:
        OSError: There is none, or it may not be read.
        ValueError: It is damaged from its head on.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        shape = _whole(fd)
        if shape is None:
            raise ValueError(f"{path} is no black box of this version")
        if shape.boot != boot:
            return None
        slots = [_slot(entry) for entry in _entries(fd, shape)]
        rows = sorted((look, at, row) for look, at, row in _rows(fd, shape))
    finally:
        os.close(fd)
    # What was overwritten while it was read is newer than all else; a look that is older than a
    # whole ring was left behind by a ring that has been written over since.
    newest = rows[-1][0] if rows else 0
    rows = [row for row in rows if row[0] > newest - shape.rows]
    return Recording(
        period=shape.period,
        at=array("d", (at for _, at, _ in rows)),
        tracks=tuple(_tracks(slots, rows, shape)),
    )


def _whole(fd: int) -> _Shape | None:
    shape = _shape(os.pread(fd, _HEAD, 0))
    return shape if shape is not None and os.fstat(fd).st_size >= shape.size else None


def _entries(fd: int, shape: _Shape) -> Iterator[bytes]:
    table = os.pread(fd, shape.table, _HEAD)
    for at in range(0, len(table), _ENTRY.size):
        yield table[at : at + _ENTRY.size]


def _slot(entry: bytes) -> Slot | None:
    if crc32(entry[_CHECKED:]).to_bytes(_CHECKED, "little") != entry[:_CHECKED]:
        return None
    _, pid, tid, ticks, first, ended_at, name = _ENTRY.unpack(entry)
    return Slot(ProcessId(pid, ticks), tid, name.rstrip(b"\0"), first, ended_at)


def _rows(fd: int, shape: _Shape) -> Iterator[tuple[int, float, bytes]]:
    """Yield number, instant and bytes of each row that is whole."""
    for place in range(shape.rows):
        row = os.pread(fd, shape.stride, shape.place(place))
        checked, used, look, at = _ROW.unpack_from(row)
        if used > shape.slots or look % shape.rows != place:
            continue
        row = row[: _ROW.size + 8 * used]
        if crc32(row[_CHECKED:]) == checked:
            yield look, at, row


def _tracks(
    slots: list[Slot | None], rows: list[tuple[int, float, bytes]], shape: _Shape
) -> Iterator[Track]:
    counters = [
        struct.unpack_from(f"<{(len(row) - _ROW.size) // 4}I", row, _ROW.size) for *_, row in rows
    ]
    apart = GAP * shape.period
    near = [False] + [
        rows[i][0] == rows[i - 1][0] + 1 and rows[i][1] - rows[i - 1][1] < apart
        for i in range(1, len(rows))
    ]
    for number, slot in enumerate(slots):
        if slot is None:
            continue
        run, slices = array("q", [UNSEEN]) * len(rows), array("q", [UNSEEN]) * len(rows)
        before = None
        for i, row in enumerate(counters):
            now = row[2 * number : 2 * number + 2] if rows[i][0] >= slot.first else ()
            if not now or now == (ABSENT, ABSENT):
                before = None
                continue
            if before is not None and near[i]:
                run[i] = (now[0] - before[0]) & ABSENT
                slices[i] = (now[1] - before[1]) & ABSENT
            before = now
        if slices.count(UNSEEN) < len(slices):
            yield Track(
                process=slot.process,
                tid=slot.tid,
                name=slot.name.decode("utf-8", "replace"),
                slices=slices,
                run_us=run,
                ended_at=None if math.isnan(slot.ended_at) else Instant(slot.ended_at),
            )
