"""The memory of another process, read without disturbing it.

``process_vm_readv`` copies pages out of another address space. The kernel checks the caller's
right once (the same right that ptrace needs) and copies; the target is not stopped, signalled,
traced or written to, and cannot notice. It works on a process that runs, sleeps, is stopped or
hangs in the kernel.

Three things make it fast enough for pure Python:

- Everything is read in whole pages, which are kept: objects of one program lie close together,
  so most fields come out of a dictionary look-up instead of a system call.
- ``prefetch`` collects the pages of many objects and reads them with one call per 1,024 ranges.
- A structure is read once as bytes and its fields unpacked from there.

The price of keeping pages is that they age. A ``Memory`` is therefore one *look* at the target;
``again()`` begins a new look, and whoever needs to know whether something moved compares both.

Bounds: a read outside user space, longer than 64 MiB, or beyond the budget of the look fails
with ``UnreadableError``. Garbage in the target can so waste a bounded amount of time and memory.
A target that ends, or forbids itself, in the middle of a look ends the look in the same way as an
empty budget does: what was read by then stands.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from hangwatch.remote.errors import (
    ExhaustedError,
    NotPermittedError,
    ProcessGoneError,
    RemoteError,
    UnreadableError,
)

PAGE: Final = 4096
LOWEST: Final = 65536
"""``vm.mmap_min_addr``: nothing is mapped below; small integers taken for pointers end here."""
HIGHEST: Final = 1 << 47
LONGEST_READ: Final = 64 << 20
RANGES_A_CALL: Final = 1024
"""``UIO_MAXIOV`` of Linux."""
BYTES_A_CALL: Final = 4 << 20
KEPT_PAGES: Final = 16_384
"""64 MiB; beyond it the pages of this look are dropped and read anew when asked for."""
USUAL_PAGES: Final = 4096
"""16 MiB: 1,000 tasks and 100 threads touch a quarter of it."""

_WORD: Final = struct.Struct("<Q")
_TYPE: Final = struct.Struct("<8xQ")

Range = tuple[int, int]
"""Address of the first page, and bytes, a multiple of the page size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one result may cost.

    Attributes:
        seconds: Wall time for one call of ``tasks()``, ``threads()`` or ``waits()``.
        bytes: Bytes copied from the target in that time.
        tasks: Tasks read; the rest is counted and said.
        depth: Frames of one await chain or stack.
    """

    seconds: float = 10.0
    bytes: int = 1 << 30
    tasks: int = 50_000
    depth: int = 256


@dataclass(slots=True)
class Cost:
    """What has been spent, over all looks at one target."""

    calls: int = 0
    bytes: int = 0
    faults: int = 0


class Source(Protocol):
    """Where pages come from: a live process, or a recorded image of one."""

    def read(self, ranges: Sequence[Range], cost: Cost) -> list[bytes | None]:
        """Return the bytes of each range, ``None`` where one cannot be read.

        Raises:
            ProcessGoneError: The process has ended.
            NotPermittedError: It may not be read (any more).
        """


class ProcessSource:
    """A live process.

    Attributes:
        tid: Any of its threads: a zombie leader has no memory, the others share theirs.
        lost: Why nothing more can be read, once that has happened.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.lost: RemoteError | None = None
        libc = ctypes.CDLL(None, use_errno=True)
        self._readv = libc.process_vm_readv
        self._readv.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
        self._readv.restype = ctypes.c_ssize_t

    def read(self, ranges: Sequence[Range], cost: Cost) -> list[bytes | None]:
        """Return the bytes of each range, ``None`` where one cannot be read."""
        found: list[bytes | None] = []
        while len(found) < len(ranges):
            batch: list[Range] = []
            total = 0
            for item in ranges[len(found) : len(found) + RANGES_A_CALL]:
                if batch and total + item[1] > BYTES_A_CALL:
                    break
                batch.append(item)
                total += item[1]
            found += self._batch(batch, total, cost)
        return found

    def _batch(self, batch: Sequence[Range], total: int, cost: Cost) -> list[bytes | None]:
        buffer = bytearray(total)
        held = (ctypes.c_char * total).from_buffer(buffer)
        ours = array("Q", (ctypes.addressof(held), total))
        theirs = array("Q", [word for item in batch for word in item])
        got = self._readv(
            self.tid, ours.buffer_info()[0], 1, theirs.buffer_info()[0], len(batch), 0
        )
        cost.calls += 1
        if got < 0:
            self._raise_if_final(ctypes.get_errno())
            got = 0
        cost.bytes += got
        found: list[bytes | None] = []
        start = 0
        with memoryview(buffer) as view:
            for _, size in batch:
                if start + size > got:
                    # The kernel stops at the first range that it cannot read. Skip that one;
                    # the caller comes back for the rest.
                    cost.faults += 1
                    found.append(None)
                    break
                found.append(bytes(view[start : start + size]))
                start += size
        return found

    def _raise_if_final(self, code: int) -> None:
        if code == errno.ESRCH:
            self.lost = ProcessGoneError(f"process {self.tid} has ended")
        elif code in (errno.EPERM, errno.EACCES):
            self.lost = NotPermittedError(
                f"reading the memory of process {self.tid} is not permitted"
            )
        elif code == errno.ENOSYS:
            self.lost = NotPermittedError(
                "this kernel, or a seccomp filter, has no process_vm_readv"
            )
        if self.lost is not None:
            raise self.lost


class ImageSource:
    """A recorded image: page address to page. For tests, and for dumps taken elsewhere."""

    def __init__(self, pages: Mapping[int, bytes]) -> None:
        self.pages = pages

    def read(self, ranges: Sequence[Range], cost: Cost) -> list[bytes | None]:
        """Return the bytes of each range, ``None`` where a page was not recorded."""
        found: list[bytes | None] = []
        for address, size in ranges:
            parts = [self.pages.get(address + offset) for offset in range(0, size, PAGE)]
            whole = [part for part in parts if part is not None]
            found.append(b"".join(whole) if len(whole) == len(parts) else None)
            cost.bytes += size
        cost.calls += 1
        return found


class Recorder:
    """Passes reads on to another source and keeps every page that went through."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.pages: dict[int, bytes] = {}

    def read(self, ranges: Sequence[Range], cost: Cost) -> list[bytes | None]:
        """Return what the inner source returns."""
        found = self.source.read(ranges, cost)
        for (address, _), data in zip(ranges, found, strict=True):
            for offset in range(0, len(data or b""), PAGE):
                assert data is not None
                self.pages.setdefault(address + offset, data[offset : offset + PAGE])
        return found


class Memory:
    """One look at the target: pages read once, kept until ``forget`` or ``again``.

    Attributes:
        touched: Addresses of the pages that were needed so far.
        drops: How often pages were dropped, to be read anew when asked for.
    """

    def __init__(
        self,
        source: Source,
        limits: Limits | None = None,
        *,
        cost: Cost | None = None,
        deadline: float | None = None,
    ) -> None:
        self.source = source
        self.limits = limits or Limits()
        self.cost = cost or Cost()
        self.deadline = deadline if deadline is not None else time.monotonic() + self.limits.seconds
        self._spent_before = self.cost.bytes
        self.touched: set[int] = set()
        self.drops = 0
        self._pages: dict[int, bytes] = {}
        self._holes: set[int] = set()

    def again(self) -> Memory:
        """Return a new look at the same target, within the same limits."""
        fresh = Memory(self.source, self.limits, cost=self.cost, deadline=self.deadline)
        fresh._spent_before = self._spent_before  # the same budget
        return fresh

    def restart(self) -> None:
        """Begin a new budget, with new bytes: the next result starts here.

        The pages that the last result needed are read at once: the next one will need most of them.
        """
        self.forget()
        self.deadline = time.monotonic() + self.limits.seconds
        self._spent_before = self.cost.bytes
        if len(self.touched) > USUAL_PAGES:
            self.touched.clear()
        with suppress(ExhaustedError):  # whoever needs them finds out, and says so
            self.prefetch(self.touched, 1)
        self.touched -= self._holes

    def forget(self) -> None:
        """Drop the pages: what is read next is what the target holds then."""
        self.touched.update(self._pages)
        self._drop()
        self._holes.clear()

    def equals(self, earlier: Memory) -> bool:
        """Whether every page of this look is in an earlier one, and was the same there."""
        theirs = earlier._pages
        return not self._holes and self._pages.items() <= theirs.items()

    def needed(self) -> set[int]:
        """Return the addresses of all pages that were needed since the last result."""
        return self.touched | self._pages.keys()

    def _drop(self) -> None:
        self.drops += 1
        self._pages.clear()

    @property
    def exhausted(self) -> bool:
        """Whether the time or the bytes of this look are used up."""
        return (
            time.monotonic() > self.deadline
            or self.cost.bytes - self._spent_before > self.limits.bytes
        )

    def read(self, address: int, size: int) -> bytes:
        """Return *size* bytes.

        Raises:
            UnreadableError: Nothing is mapped there, or the request is absurd.
        """
        offset = address & 4095
        if offset + size <= PAGE and size >= 0:
            page = self._pages.get(address - offset)
            if page is None:
                page = self._page(address - offset)
            return page[offset : offset + size]
        return self._long(address, size)

    def word(self, address: int) -> int:
        """Return the pointer-sized word at *address*."""
        offset = address & 4095
        if offset <= PAGE - 8:
            page = self._pages.get(address - offset)
            if page is None:
                page = self._page(address - offset)
            value: int = _WORD.unpack_from(page, offset)[0]
        else:
            value = _WORD.unpack(self._long(address, 8))[0]
        return value

    def type_word(self, address: int) -> int:
        """Return the second word of an object: its type."""
        return self.word(address + 8)

    def text(self, address: int, limit: int = 256) -> str:
        """Return a NUL-terminated string, cut at *limit* bytes."""
        data = b""
        while len(data) < limit:
            step = min(PAGE - ((address + len(data)) & 4095), limit - len(data))
            part = self.read(address + len(data), step)
            end = part.find(b"\0")
            if end >= 0:
                data += part[:end]
                break
            data += part
        return data.decode("utf-8", "replace")

    def prefetch(self, addresses: Iterable[int], size: int) -> None:
        """Read the pages of many objects of up to *size* bytes in few system calls.

        What cannot be read is left out; a later ``read`` of it says so.
        """
        pages = self._pages
        starts = set(addresses)
        wanted = {at & -PAGE for at in starts} | {(at + size - 1) & -PAGE for at in starts}
        wanted -= pages.keys()
        wanted -= self._holes
        ranges = _runs([at for at in sorted(wanted) if LOWEST <= at < HIGHEST])
        if not ranges:
            return
        found = self._fetch(ranges)
        if len(pages) + len(wanted) > KEPT_PAGES:
            self._drop()
        for (address, length), data in zip(ranges, found, strict=True):
            if data is None:
                if length == PAGE:
                    self._holes.add(address)
                continue
            for offset in range(0, length, PAGE):
                pages[address + offset] = data[offset : offset + PAGE]

    def _page(self, address: int) -> bytes:
        if not LOWEST <= address < HIGHEST:
            raise UnreadableError(f"{address:#x} is no address")
        if address in self._holes:
            raise UnreadableError(f"{address:#x} is not mapped")
        data = self._fetch([(address, PAGE)])[0]
        if data is None:
            self._holes.add(address)
            raise UnreadableError(f"{address:#x} is not mapped")
        if len(self._pages) >= KEPT_PAGES:
            self._drop()
        self._pages[address] = data
        return data

    def _long(self, address: int, size: int) -> bytes:
        if not (LOWEST <= address < HIGHEST and 0 <= size <= LONGEST_READ):
            raise UnreadableError(f"{size} bytes at {address:#x} make no sense")
        first = address & ~4095
        length = ((address + size + 4095) & ~4095) - first
        if length <= 4 * PAGE:
            data = b"".join(
                self._pages.get(page) or self._page(page)
                for page in range(first, first + length, PAGE)
            )
        else:
            whole = self._fetch([(first, length)])[0]
            if whole is None:
                raise UnreadableError(f"{size} bytes at {address:#x} are not all mapped")
            data = whole
        return data[address - first : address - first + size]

    def _fetch(self, ranges: Sequence[Range]) -> list[bytes | None]:
        if self.exhausted:
            raise ExhaustedError("the limit on time or bytes was reached")
        try:
            return self.source.read(ranges, self.cost)
        except RemoteError as error:
            raise ExhaustedError(str(error)) from error


def _runs(pages: Sequence[int]) -> list[Range]:
    """Join neighbouring pages, up to eight: one bad page must not spoil many good ones."""
    runs: list[Range] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page and runs[-1][1] < 8 * PAGE:
            runs[-1] = (runs[-1][0], runs[-1][1] + PAGE)
        else:
            runs.append((page, PAGE))
    return runs
