"""Pipes and sockets of all processes, with the process at the other end and who waits for it.

Nothing is opened and nothing asked of the processes: the links of ``/proc/PID/fd``, the socket
tables of the kernel, and the system calls that threads are in. Ends that no process of the capture
holds are looked for among all processes that we may read, as far as time allows.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hangwatch.core import connections, descriptors
from hangwatch.core.connections import Connection, End, Holder, Waiting
from hangwatch.core.objects import page
from hangwatch.core.planning import file_name
from hangwatch.model.capture import (
    CaptureKind,
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.system import netdiag, procfs
from hangwatch.system.calls import calls

MAX_SEARCH: Final = 1.5
"""Seconds for the search among processes that are not of the capture."""


def _collect(step: Step, room: Room) -> None:
    seen = _Seen(tuple(t.process.pid for t in step.targets if procfs.is_same(t.process)))
    found = list(seen.connections())
    whole = seen.search(found)
    if seen.others:
        found = list(seen.connections())  # with the ends that others hold
    by_inode = {end.inode: each for each in found for end in each.ends if end.inode}
    waits = [waiting for waiting in seen.waits() if waiting.inode in by_inode]
    waited, targets = frozenset(waiting.inode for waiting in waits), frozenset(seen.pids)
    found.sort(key=lambda each: connections.importance(each, waited, targets))
    kept = found[: connections.MAX_CONNECTIONS]
    head = {
        "schema": "hangwatch.connections/1",
        "sample": step.sample,
        "monotonic": time.monotonic(),
        "others": {str(pid): comm for pid, comm in seen.others.items()},
        "searched_all": whole,
        "left_out": len(found) - len(kept),
        "not_readable": seen.closed,
        "no_unix_peers": seen.elsewhere,
    }
    lists = {
        "waits": [connections.edge(waiting, by_inode[waiting.inode]) for waiting in waits],
        "connections": [
            connections.document(each, connections.fullness(each, waits)) for each in kept
        ],
    }
    room.write(file_name("connections", ".json", step.sample), page(head, lists))
    if seen.closed:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            f"the descriptors of {len(seen.closed)} processes may not be read",
            procfs.PERMISSION_HINT,
        )


@dataclass(slots=True)
class _Ends:
    """Who holds an inode, by what the descriptor may be used for."""

    by_mode: dict[str, list[Holder]] = field(default_factory=dict)

    def add(self, mode: str, holder: Holder) -> None:
        self.by_mode.setdefault(mode, []).append(holder)

    def holders(self, mode: str = "rw") -> tuple[Holder, ...]:
        return tuple(h for has, hs in self.by_mode.items() if set(mode) & set(has) for h in hs)


class _Seen:
    """The descriptors of all processes of the capture, and the kernel's tables of sockets."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self.pids = pids
        self.others: dict[int, str] = {}
        self.closed: list[int] = []
        self.elsewhere: list[int] = []
        self._pipes: dict[int, _Ends] = {}
        self._sockets: dict[int, _Ends] = {}
        self._links: dict[int, Mapping[int, str]] = {}
        self._tcp: dict[int, tuple[procfs.TcpSocket, int | None]] = {}  # with the peer's inode
        self._unix: dict[int, netdiag.UnixSocket] = {}
        with contextlib.suppress(OSError):
            self._unix = netdiag.unix_sockets()
        namespaces: dict[str, int] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                namespaces.setdefault(self._look(pid), pid)
        for pid in namespaces.values():
            self._read_tcp(pid)

    def _look(self, pid: int) -> str:
        """Note what a process holds; return its network namespace."""
        links = self._links[pid] = procfs.links(pid)
        if not links and procfs.has_hidden_links(pid):
            self.closed.append(pid)
            return ""
        self._note(pid, links)
        namespace = procfs.read_link(pid, "ns/net")
        if namespace != procfs.read_link(os.getpid(), "ns/net"):
            self.elsewhere.append(pid)
        return namespace

    def _note(self, pid: int, links: Mapping[int, str], wanted: Collection[int] = ()) -> bool:
        """Note the pipes and sockets among *links*; say whether there was one."""
        noted = False
        for fd, link in links.items():
            inode = descriptors.inode(link)
            if inode is None or (wanted and inode not in wanted):
                continue
            noted = True
            if link.startswith("socket"):
                self._sockets.setdefault(inode, _Ends()).add("rw", Holder(pid=pid, fd=fd))
            else:
                with contextlib.suppress(OSError):
                    mode = procfs.access(pid, fd)
                    self._pipes.setdefault(inode, _Ends()).add(mode, Holder(pid=pid, fd=fd))
        return noted

    def _read_tcp(self, pid: int) -> None:
        rows = tuple(procfs.tcp(pid))
        by_ends = {(row.near, row.far): row.inode for row in rows if row.state != "listen"}
        for row in rows:
            self._tcp[row.inode] = row, by_ends.get((row.far, row.near))

    # What they amount to

    def connections(self) -> Iterator[Connection]:
        for inode, ends in self._pipes.items():
            sides = (End(inode=inode, mode=mode, holders=ends.holders(mode)) for mode in "wr")
            yield Connection(kind="pipe", ends=tuple(sides))
        done: set[int] = set()
        for inode in tuple(self._sockets):
            if inode in done:
                continue
            connection = self._socket(inode)
            if connection is not None:
                done |= {end.inode for end in connection.ends}
                yield connection

    def _socket(self, inode: int) -> Connection | None:
        if inode in self._tcp:
            row, peer = self._tcp[inode]
            if row.state == "listen":
                return Connection(kind="tcp", ends=(self._end(inode),), state=row.state)
            far = self._end(peer) if peer is not None else End(inode=0, said={"address": row.far})
            return Connection(kind="tcp", ends=(self._end(inode), far), state=row.state)
        if inode in self._unix:
            mine = self._unix[inode]
            ends = [self._end(inode)]
            if mine.peer is not None:
                ends.append(self._end(mine.peer))
            return Connection(kind="unix", ends=tuple(ends), state="listen" if mine.listens else "")
        return None  # netlink, UDP, or of another namespace

    def _end(self, inode: int) -> End:
        holders = self._sockets[inode].holders() if inode in self._sockets else ()
        said: dict[str, Any] = {}
        if inode in self._tcp:
            row, _ = self._tcp[inode]
            said = {"address": row.near, **_queues(row.state == "listen", row.unread, row.unsent)}
            if row.retries:
                said["retries"] = row.retries
        elif inode in self._unix:
            one = self._unix[inode]
            said = {"address": one.name} if one.name else {}
            said |= _queues(one.listens, one.unread, one.unsent)
            if one.listens:
                said["most_callers"] = one.unsent
            elif one.room is not None:
                said["room"] = one.room
        return End(inode=inode, holders=holders, said=said)

    def search(self, found: Iterable[Connection]) -> bool:
        """Look for who holds the ends that nobody of ours does; say whether all were looked at."""
        lonely = {end.inode for each in found for end in each.ends if end.inode and not end.holders}
        if not lonely:
            return True
        until = time.monotonic() + MAX_SEARCH
        for pid in procfs.pids():
            if time.monotonic() > until:
                return False
            if pid in self._links:
                continue
            with contextlib.suppress(OSError):
                if self._note(pid, procfs.links(pid), lonely):
                    self.others[pid] = procfs.read_row(pid).comm
        return True

    def waits(self) -> Iterator[Waiting]:
        """Yield each thread that is in a call about a pipe or socket."""
        for pid, links in self._links.items():
            with contextlib.suppress(OSError):
                for tid, call in calls(pid):
                    if not call.fds or not (call.reads or call.writes):
                        continue
                    inode = descriptors.inode(links.get(call.fds[0], ""))
                    if inode is not None:
                        yield Waiting(pid=pid, tid=tid, call=call, fd=call.fds[0], inode=inode)


def _queues(listens: bool, unread: int, unsent: int) -> dict[str, int]:
    return {"callers": unread} if listens else {"unread": unread, "unsent": unsent}


COLLECTOR: Final = Collector(
    name="connections",
    title="Pipes and sockets with the process at their other end, and who waits for whom",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    samples=2,
    timeout=8.0,
    needs="the right to read the processes: same user, or SYS_PTRACE; the same net namespace",
    unhurried=True,
    kinds=frozenset({CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN}),
    collect=_collect,
)
