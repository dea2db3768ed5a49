"""The child that keeps the black box: how often each thread runs, four times a second.

``python -m hangwatch.daemon.recorder`` talks with the daemon:

- in ``{"kind": "watch", "ring": PATH, "processes": [[PID, START_TICKS]…]}``: from now on these;
- out ``{"kind": "problem", "problem": TEXT}`` where the ring cannot be written;
- out ``{"kind": "alive"}``.

Heartbeats come every ten seconds, so they cannot tell which of forty processes stopped first;
counters of the scheduler can. One read of a descriptor that stays open says how long a thread ran
and how often it was put on a CPU (``/proc/PID/task/TID/schedstat``); it never waits for the
process, needs no privilege, and says nothing of what the program is about. A descriptor belongs to
its thread for ever: when that is gone, it says so, and never speaks of a later one of that number.

Which threads: the main one, and the busiest two that may run an event loop. Those are threads that
Python names so (3.14 tells the kernel) or that bear the process's own name or Python's, as every
thread does that nobody named: libraries name their helpers (``pt_nccl_watchdg``, ``worker.io``,
``ZMQbg/IO/0``). They are counted when a process is found, four seconds later, and every five
minutes from then on; one that is watched stays until another one does four times as much.

Which processes: those that the daemon names, and what their main threads have spawned since.
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hangwatch.model.identity import ProcessId
from hangwatch.system.channel import Channel
from hangwatch.system.clock import boot_id
from hangwatch.system.ring import ABSENT, PERIOD, Ring
from hangwatch.system.spawn import message_kind, serve

MAX_PROCESSES: Final = 256

MAX_LOOPS: Final = 2
"""Threads of a process besides its main one."""

MAX_THREADS: Final = 512
"""Threads of a process that are counted."""

KIN_EVERY: Final = 15.0
"""Seconds between two looks for what the processes have spawned."""

COUNT_SOON: Final = 4.0
"""Seconds from finding a process to choosing among its threads."""

COUNT_EVERY: Final = 300.0

USURPS: Final = 4.0
"""How many times as often another thread must run to take the place of one that is watched."""

WORTH: Final = 1.0
"""Slices a second below which a thread is no loop at work."""

ALIVE_EVERY: Final = 5.0

_LOOPS: Final = (b"asyncio", b"AsyncIO")
_UNNAMED: Final = (b"python", b"ray::")


@dataclass(slots=True, eq=False)
class Seat:
    """One thread that is looked at.

    Attributes:
        tid: The thread.
        fd: Of its counters.
        slot: Where they stand in the ring.
        place: Of the first of them in a look.
        said: What they said last.
    """

    tid: int
    fd: int
    slot: int
    place: int
    said: bytes = b""


@dataclass(slots=True)
class Watched:
    """One process.

    Attributes:
        process: It.
        seats: Its threads that are looked at, the main one first.
        counts: Slices of each of its threads when they were counted last.
        counted_at: When that was.
        count_at: When they are counted next.
    """

    process: ProcessId
    seats: list[Seat] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    counted_at: float = 0.0
    count_at: float = 0.0


class Recorder:
    """Everything that is recorded."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ring: Ring | None = None
        self._named: dict[int, int] = {}
        self._watched: dict[int, Watched] = {}
        self._seats: list[Seat] = []
        self._full: set[int] = set()
        self._counters: list[int] = []
        self._queue: deque[int] = deque()
        self._kin_at = 0.0

    def run(self) -> None:
        """Serve until the channel closes."""
        _allow_descriptors()
        look_at = alive_at = time.monotonic()
        while True:
            for message in self._channel.wait(max(0.0, look_at - time.monotonic())):
                if message_kind(message) == "watch":
                    self._watch(message)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = max(look_at + PERIOD, now)
            if self._ring is not None:
                self._look(self._ring, now)
                self._tend(self._ring, now)
            if now >= alive_at:
                alive_at = now + ALIVE_EVERY
                self._channel.send({"kind": "alive"})

    # Who

    def _watch(self, message: Mapping[str, Any]) -> None:
        if self._ring is None:
            try:
                self._ring = Ring(Path(message["ring"]), boot_id())
            except OSError as error:
                self._problem(error)
                return
        self._named = dict(message["processes"])
        kept = set(self._named)
        while kin := {pid for pid in self._watched.keys() - kept if _parent(pid) in kept}:
            kept |= kin
        for pid in self._watched.keys() - kept:
            self._release(pid)
        now = time.monotonic()
        self._take_in(self._named, now)

    def _take_in(self, pids: Iterable[int], now: float) -> None:
        """Begin to look at processes."""
        assert self._ring is not None
        for pid in pids:
            if pid in self._watched or len(self._watched) >= MAX_PROCESSES:
                continue
            ticks = _start_ticks(pid)
            if ticks is None or self._named.get(pid, 0) not in (0, ticks):
                continue
            watched = Watched(ProcessId(pid, ticks), count_at=now)
            self._watched[pid] = watched
            self._sit(self._ring, watched, pid)
            if not watched.seats:
                del self._watched[pid]

    def _sit(self, ring: Ring, watched: Watched, tid: int) -> None:
        """Begin to look at a thread."""
        pid = watched.process.pid
        try:
            fd = os.open(f"/proc/{pid}/task/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # it has ended, or there are too many
        try:
            slot = ring.seat(watched.process, tid, _name(pid, tid))
        except OSError as error:
            self._problem(error)
            slot = None
        # It may have ended meanwhile, and another one begun under its number.
        if slot is None or _start_ticks(pid) != watched.process.start_ticks:
            os.close(fd)
            return
        self._counters += [ABSENT] * (2 * len(ring.slots) - len(self._counters))
        watched.seats.append(Seat(tid, fd, slot, 2 * slot))
        self._seats.append(watched.seats[-1])

    def _release(self, pid: int) -> None:
        watched = self._watched.pop(pid)
        for seat in watched.seats:
            self._rise(seat)

    def _rise(self, seat: Seat, ended_at: float = float("nan")) -> None:
        """Look at a thread no longer."""
        assert self._ring is not None
        os.close(seat.fd)
        self._seats.remove(seat)
        self._counters[seat.place : seat.place + 2] = (ABSENT, ABSENT)
        self._ring.leave(seat.slot, ended_at)

    # Looking

    def _look(self, ring: Ring, now: float) -> None:
        counters, read = self._counters, os.pread
        gone: list[Seat] = []
        for seat in self._seats:
            try:
                said = read(seat.fd, 64, 0)
            except OSError:
                gone.append(seat)
                continue
            if said != seat.said:
                seat.said = said
                run, _, slices = said.split()
                place = seat.place
                counters[place] = int(run) // 1000 & ABSENT
                counters[place + 1] = int(slices) & ABSENT
        for seat in gone:
            self._ended(seat, now)
        try:
            ring.write(now, counters)
        except OSError as error:
            self._problem(error)

    def _ended(self, seat: Seat, now: float) -> None:
        """Take down that a thread is gone, and with the main one the process."""
        for watched in tuple(self._watched.values()):
            if seat in watched.seats:
                watched.seats.remove(seat)
                self._rise(seat, now)
                if seat.tid == watched.process.pid:
                    self._release(seat.tid)

    # Choosing

    def _tend(self, ring: Ring, now: float) -> None:
        """Look for kin, and count the threads of one process whose time has come."""
        if now >= self._kin_at:
            self._kin_at = now + KIN_EVERY
            spawned = [kid for pid in self._watched for kid in _children(pid)]
            self._take_in(spawned, now)
        if not self._queue:
            self._queue.extend(pid for pid, each in self._watched.items() if now >= each.count_at)
        if self._queue and (watched := self._watched.get(self._queue.popleft())) is not None:
            self._choose(ring, watched, now)

    def _choose(self, ring: Ring, watched: Watched, now: float) -> None:
        """Count the threads of a process, and look at the busiest loops from now on."""
        before, since = watched.counts, now - watched.counted_at
        watched.counts = counts = _counts(watched.process.pid)
        watched.counted_at = now
        watched.count_at = now + (COUNT_EVERY if before else COUNT_SOON)
        if not before:
            return
        rates = {tid: (n - before.get(tid, 0)) / since for tid, n in counts.items()}
        names = {tid: _name(watched.process.pid, tid) for tid in rates if rates[tid] >= WORTH}
        main = _name(watched.process.pid, watched.process.pid)
        seated = {seat.tid: seat for seat in watched.seats[1:]}
        for tid in loops(rates, names, main=main, pid=watched.process.pid, seated=seated.keys()):
            if tid not in seated:
                if len(seated) >= MAX_LOOPS:
                    idlest = min(seated, key=lambda tid: rates.get(tid, 0.0))
                    watched.seats.remove(seated[idlest])
                    self._rise(seated.pop(idlest))
                self._sit(ring, watched, tid)
                seated = {seat.tid: seat for seat in watched.seats[1:]}

    def _problem(self, error: OSError) -> None:
        if error.errno not in self._full:
            self._full.add(error.errno or 0)
            self._channel.send({"kind": "problem", "problem": error.strerror or str(error)})


def loops(
    rates: Mapping[int, float],
    names: Mapping[int, bytes],
    *,
    main: bytes,
    pid: int,
    seated: Collection[int],
) -> tuple[int, ...]:
    """Return the threads besides the main one that are to be looked at, the likeliest loop first.

    Args:
        rates: Slices a second of each thread.
        names: Names of those that are at work.
        main: The process's own name.
        pid: The main thread.
        seated: Those that are looked at already.
    """

    def worth(tid: int) -> tuple[bool, float]:
        named = names.get(tid, b"").startswith(_LOOPS)
        return named, rates[tid] * (USURPS if tid in seated else 1.0)

    candidates = [
        tid
        for tid in rates
        if tid != pid
        and (tid in seated or names.get(tid, b"").startswith((*_LOOPS, *_UNNAMED, main or b"\0")))
    ]
    return tuple(sorted(candidates, key=worth, reverse=True)[:MAX_LOOPS])


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_PROCESSES * (1 + MAX_LOOPS) + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``stat`` from the state on; none if there is no such process."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def _start_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _name(pid: int, tid: int) -> bytes:
    try:
        return _read(f"/proc/{pid}/task/{tid}/comm").rstrip(b"\n")
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    """Return what the main thread of a process has spawned."""
    try:
        found = [int(kid) for kid in _read(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:
        return []
    return [kid for kid in found if kid != os.getpid() and kid != os.getppid()]


def _counts(pid: int) -> dict[int, int]:
    """Return how often each thread of a process was put on a CPU."""
    found: dict[int, int] = {}
    try:
        tids = os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]
    except OSError:
        return found
    for tid in tids:
        try:
            found[int(tid)] = int(_read(f"/proc/{pid}/task/{tid}/schedstat").split()[2])
        except (OSError, IndexError):
            continue
    return found


def body(channel: Channel) -> None:
    """Record what the daemon names until it closes the channel."""
    Recorder(channel).run()


if __name__ == "__main__":
    serve(body)
