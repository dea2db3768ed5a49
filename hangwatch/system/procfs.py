"""Reads ``/proc``, the harmless files first.

Three classes of files, by what they can cost the reader:

- ``stat``, ``status``, ``comm``, ``wchan``, ``schedstat``, ``syscall``, ``stack``, ``io``,
  ``net/tcp``, ``net/unix``, ``/proc/locks`` and the links in ``fd`` never wait for the target:
  ``read_row``, ``read_threads``, ``thread_counts``, ``thread_switches``, ``read_call``,
  ``read_stack``, ``read_bytes``, ``listeners``, ``tcp``, ``Unsent`` and ``locks`` use no others, so
  any process of ours may call them;
- ``cmdline``, ``environ`` and ``maps`` take the lock of the target's memory map and can block for
  as long as the target does. So can ``fdinfo``, which asks the driver of a device, and of an epoll
  descriptor takes the lock under which the target polls its files; and ``mountinfo``, which asks
  each file system for its options. ``look_closer``, ``read_environment``, ``read_descriptor``,
  ``mappings`` and ``mounts`` belong into an expendable process;
- files of the target's own file system can block for ever: so can ``read_inside``.

Nothing here signals, attaches to, or writes to another process. A process that ends while it is
read raises ``ProcessLookupError`` or ``FileNotFoundError``; what may not be read raises
``PermissionError``, except where a docstring says that the field stays empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from hangwatch.errors import TargetNotFoundError
from hangwatch.model.identity import ProcessId
from hangwatch.model.process import Listener, ProcessRow, ThreadRow

PROC: Final = "/proc"

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")

MAX_TITLE: Final = 4096

MAX_THREADS: Final = 512
"""Threads of one process that are counted; engines have about fifty."""

MAX_LINKS: Final = 4096
"""Descriptors of one process that are looked at; engines have a few hundred."""

PERMISSION_HINT: Final = (
    "run as root or as the user of the process, with SYS_PTRACE "
    "(Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
)
"""What to do where a process may not be read."""

_KERNEL_THREAD: Final = 0x00200000  # PF_KTHREAD, include/linux/sched.h
_SIGSTOP: Final = 1 << (signal.SIGSTOP - 1)
_STATUS: Final = re.compile(
    rb"^(State|TracerPid|SigPnd|ShdPnd|Uid|VmRSS|voluntary_ctxt_switches|nonvoluntary_ctxt_switches):\s*(\S.*)$",
    re.MULTILINE,
)
# ::ffff:0:0 as ``net/tcp6`` writes it: 32-bit words in the machine's own byte order.
_MAPPED: Final = "".join(f"{word:08X}" for word in struct.unpack("=3I", bytes(10) + b"\xff\xff"))
_TCP_ESTABLISHED: Final = "01"
_TCP_LISTEN: Final = "0A"
_GPU: Final = re.compile(r"/dev/nvidia(\d+)$")
_NOT_LOGS: Final = ("/dev/", "/proc/", "/sys/", "/memfd:")


def _read(*parts: object) -> bytes:
    # Hundreds of files every few seconds: a file object costs more than the kernel's answer.
    fd = os.open("/".join((PROC, *map(str, parts))), os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = []
        while block := os.read(fd, 1 << 16):
            blocks.append(block)
        return b"".join(blocks)
    finally:
        os.close(fd)


def _text(*parts: object) -> str:
    """Return a file as text, ``""`` where it may not be read."""
    try:
        return _read(*parts).decode("utf-8", "replace").strip()
    except PermissionError:
        return ""


@dataclass(frozen=True, slots=True)
class _Stat:
    comm: str
    fields: tuple[str, ...]  # from the state on: field N of proc(5) is fields[N - 3]

    @property
    def state(self) -> str:
        return self.fields[0]

    @property
    def ppid(self) -> int:
        return int(self.fields[1])

    @property
    def kernel(self) -> bool:
        return bool(int(self.fields[6]) & _KERNEL_THREAD)

    @property
    def cpu_seconds(self) -> float:
        return (int(self.fields[11]) + int(self.fields[12])) / TICKS_PER_SECOND

    @property
    def threads(self) -> int:
        return int(self.fields[17])

    @property
    def start_ticks(self) -> int:
        return int(self.fields[19])

    @property
    def exit_signal(self) -> int:
        return int(self.fields[49]) & 0x7F if self.state == "Z" else 0


def _stat(*parts: object) -> _Stat:
    # The name may hold blanks and parentheses; the last one closes it.
    head, _, tail = _read(*parts, "stat").decode("utf-8", "replace").rpartition(")")
    return _Stat(comm=head.partition("(")[2], fields=tuple(tail.split()))


def _status(*parts: object) -> dict[bytes, bytes]:
    """Return what we use of ``status``."""
    return dict(_STATUS.findall(_read(*parts, "status")))


def _optional(*parts: object) -> str:
    """Return a file that not every kernel has, ``""`` where there is none or it is not for us."""
    try:
        return _text(*parts)
    except FileNotFoundError:
        return ""


def _wchan(*parts: object) -> str:
    name = _optional(*parts, "wchan")
    return "" if name == "0" else name


def pids() -> tuple[int, ...]:
    """Return the numbers of all processes that we can see."""
    return tuple(int(name) for name in os.listdir(PROC) if name.isdigit())


def start_ticks(pid: int) -> int | None:
    """Return when *pid* started (clock ticks after boot), or ``None`` if there is none."""
    try:
        return _stat(pid).start_ticks
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_same(process: ProcessId) -> bool:
    """Say whether *process* is still there; a later one with its number is not it."""
    ticks = start_ticks(process.pid)
    return ticks is not None and process.start_ticks in (0, ticks)


def identify(pid: int) -> ProcessId:
    """Return the identity of a process that can be watched.

    Raises:
        TargetNotFoundError: There is no process *pid*, or it is a thread of the kernel, or it
            has ended and only waits to be reaped.
    """
    try:
        seen = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise TargetNotFoundError(
            f"there is no process {pid}: look it up with `pgrep -af python`; in a container, "
            "processes of other containers are visible only with a shared process namespace"
        ) from None
    if seen.kernel:
        raise TargetNotFoundError(
            f"process {pid} ({seen.comm}) is a thread of the kernel: give the pid of a program"
        )
    if seen.state in ("Z", "X"):
        raise TargetNotFoundError(
            f"process {pid} ({seen.comm}) has ended and only waits for its parent {seen.ppid}: "
            "give the pid of a process that runs"
        )
    return ProcessId(pid, seen.start_ticks)


def read_row(pid: int) -> ProcessRow:
    """Return the part of a process's row that never waits for the process."""
    seen = _stat(pid)
    row = ProcessRow(
        process=ProcessId(pid, seen.start_ticks),
        ppid=seen.ppid,
        comm=seen.comm,
        state=seen.state,
        kernel=seen.kernel,
        threads=seen.threads,
        cpu_seconds=seen.cpu_seconds,
        exit_signal=seen.exit_signal,
    )
    if seen.kernel:
        return row
    status = _status(pid)
    return replace(
        row,
        tracer_pid=int(status.get(b"TracerPid", 0)),
        uid=int(status[b"Uid"].split()[1]),
        rss_mib=round(int(status.get(b"VmRSS", b"0 kB").split()[0]) / 1024, 1),
        vol_ctxt=int(status[b"voluntary_ctxt_switches"]),
        wchan=_wchan(pid),
    )


def names() -> Iterator[tuple[ProcessId, str]]:
    """Yield identity and name of each process; one that ends meanwhile is left out."""
    for pid in pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            seen = _stat(pid)
            yield ProcessId(pid, seen.start_ticks), seen.comm


def read_table() -> Iterator[ProcessRow]:
    """Yield a row for each process, as ``read_row`` does; one that ends meanwhile is left out."""
    for pid in pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield read_row(pid)


def thread_ids(pid: int) -> tuple[int, ...]:
    """Return the thread ids of a process."""
    return tuple(int(name) for name in os.listdir(f"{PROC}/{pid}/task"))


def thread_states(pid: int) -> dict[int, str]:
    """Return the state letter of each thread."""
    states = {}
    for tid in thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states[tid] = _stat(pid, "task", tid).state
    return states


def may_block(pid: int) -> bool:
    """Say whether a thread of a process is in state D: it could hold the lock of the memory map."""
    return "D" in thread_states(pid).values()


def tracer(pid: int) -> int:
    """Return who traces any thread of a process, 0 for nobody."""
    for tid in thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if found := int(_status(pid, "task", tid).get(b"TracerPid", 0)):
                return found
    return 0


def is_traced(pid: int) -> bool:
    """Say whether any thread of a process has a tracer."""
    return tracer(pid) != 0


def is_stopping(pid: int) -> bool:
    """Say whether a SIGSTOP is on its way: a thread must run for a moment to be stopped by it."""
    for tid in thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = _status(pid, "task", tid)
            pending = int(status.get(b"SigPnd", b"0"), 16) | int(status.get(b"ShdPnd", b"0"), 16)
            if pending & _SIGSTOP:
                return True
    return False


def read_thread(pid: int, tid: int) -> ThreadRow:
    """Return what the kernel says of one thread; what may not be read stays empty."""
    at = (pid, "task", tid)
    seen = _stat(*at)
    status = _status(*at)
    run_ns, wait_ns, slices = (*_optional(*at, "schedstat").split(), "", "", "")[:3]
    return ThreadRow(
        tid=tid,
        comm=seen.comm,
        state=seen.state,
        cpu_seconds=seen.cpu_seconds,
        run_ns=int(run_ns) if run_ns else None,
        wait_ns=int(wait_ns) if wait_ns else None,
        slices=int(slices) if slices else None,
        vol_ctxt=int(status[b"voluntary_ctxt_switches"]),
        invol_ctxt=int(status[b"nonvoluntary_ctxt_switches"]),
        wchan=_wchan(*at),
        syscall=_optional(*at, "syscall"),
    )


def read_threads(pid: int) -> Iterator[ThreadRow]:
    """Yield a row for each thread; those that end meanwhile are left out."""
    for tid in thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield read_thread(pid, tid)


def read_call(pid: int, tid: int) -> str:
    """Return the system call that a thread is in, as the kernel writes it.

    Raises:
        PermissionError: Neither root with SYS_PTRACE nor the user of the process may read it.
    """
    return _read(pid, "task", tid, "syscall").decode("ascii", "replace").strip()


def read_name(pid: int, tid: int) -> str:
    """Return the name of a thread."""
    return _text(pid, "task", tid, "comm")


def read_stack(pid: int, tid: int) -> str:
    """Return the functions of the kernel that a thread is in, innermost first.

    Raises:
        PermissionError: It takes SYS_ADMIN besides the right to trace the process.
    """
    return _read(pid, "task", tid, "stack").decode("ascii", "replace").rstrip()


def thread_switches(pid: int) -> dict[int, tuple[str, int]]:
    """Return state and voluntary context switches of each thread, as cheaply as can be."""
    found = {}
    for tid in thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = _status(pid, "task", tid)
            state = status[b"State"][:1].decode("ascii", "replace")
            found[tid] = state, int(status[b"voluntary_ctxt_switches"])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadCount:
    """What one thread has done since it began: CPU time and voluntary context switches."""

    cpu_seconds: float
    vol_ctxt: int


def thread_counts(pid: int, limit: int = MAX_THREADS) -> dict[int, ThreadCount]:
    """Return the counts of the first *limit* threads of a process; ``{}`` if it is gone."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for tid in thread_ids(pid)[:limit]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[tid] = ThreadCount(
                    cpu_seconds=_stat(pid, "task", tid).cpu_seconds,
                    vol_ctxt=int(_status(pid, "task", tid)[b"voluntary_ctxt_switches"]),
                )
    return found


def read_bytes(pid: int) -> int | None:
    """Return the bytes that a process had fetched from storage so far, or ``None`` if not told."""
    with contextlib.suppress(OSError):
        for line in _read(pid, "io").splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line.split()[1])
    return None


def read_file(pid: int, name: str) -> bytes:
    """Return a file of ``/proc/PID`` as it is: ``limits``, ``cgroup``, ``status``."""
    return _read(pid, name)


def read_link(pid: int, name: str) -> str:
    """Return what a link of ``/proc/PID`` leads to: ``exe``, ``cwd``, ``ns/net``."""
    return os.readlink(f"{PROC}/{pid}/{name}")


def children(pid: int) -> tuple[int, ...]:
    """Return the direct children of a process; ``()`` if it is gone."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for tid in thread_ids(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, _text(pid, "task", tid, "children").split())
    return tuple(found)


def links(pid: int) -> dict[int, str]:
    """Return what the descriptors of a process lead to; empty where that may not be read."""
    found = {}
    folder = f"{PROC}/{pid}/fd"
    with contextlib.suppress(PermissionError):
        for name in os.listdir(folder)[:MAX_LINKS]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[int(name)] = os.readlink(f"{folder}/{name}")
    return found


def descriptors(pid: int) -> tuple[int, ...]:
    """Return the numbers of the descriptors of a process; what they lead to may still be closed.

    Raises:
        PermissionError: It may not be read.
    """
    return tuple(sorted(map(int, os.listdir(f"{PROC}/{pid}/fd"))))


def locks() -> str:
    """Return the file locks of this machine, as far as their takers are in our pid namespace."""
    return _text("locks")


def read_descriptor(pid: int, fd: int) -> str:
    """Return what the kernel says of a descriptor: position, flags, locks; can block, see above."""
    return _read(pid, "fdinfo", fd).decode("utf-8", "replace")


def mappings(pid: int) -> str:
    """Return the memory map of a process; can block for as long as the process does."""
    return _read(pid, "maps").decode("utf-8", "replace")


def mounts(pid: int) -> str:
    """Return the mounts that a process sees, as ``mountinfo`` has them; can block, see above."""
    return _read(pid, "mountinfo").decode("utf-8", "replace")


def access(pid: int, fd: int) -> str:
    """Return what a descriptor may be used for: ``r``, ``w``, ``rw``.

    Raises:
        OSError: It was closed, or may not be looked at.
    """
    mode = os.lstat(f"{PROC}/{pid}/fd/{fd}").st_mode  # of the link: what it leads to is not asked
    return "r" * bool(mode & stat.S_IRUSR) + "w" * bool(mode & stat.S_IWUSR)


_descriptors: dict[tuple[int, int], int] = {}
"""Where a socket of a process was found last; a hint that is looked at before it is believed."""


def holds(pid: int, inode: int) -> bool:
    """Say whether a process holds this socket.

    Raises:
        OSError: Its descriptors may not be read, or it is gone.
    """
    folder, wanted = f"{PROC}/{pid}/fd", f"socket:[{inode}]"
    known = _descriptors.get((pid, inode))
    if known is not None:
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{known}") == wanted:
                return True
        del _descriptors[pid, inode]
    for name in os.listdir(folder)[:MAX_LINKS]:
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{name}") == wanted:
                if len(_descriptors) >= MAX_LINKS:
                    _descriptors.clear()
                _descriptors[pid, inode] = int(name)
                return True
    return False


def _written(pid: int, fd: int) -> bool:
    """Say whether a descriptor is open for writing."""
    with contextlib.suppress(OSError):
        for line in _read(pid, "fdinfo", fd).splitlines():
            if line.startswith(b"flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


@dataclass(frozen=True, slots=True)
class _Tcp:
    """The TCP sockets of one network namespace, by inode."""

    listening: Mapping[int, Listener]
    called: Mapping[int, str]  # the other end of a connection, where that is here, too


class Sockets:
    """TCP sockets by inode, one table for each network namespace met."""

    def __init__(self) -> None:
        self._tables: dict[str, _Tcp] = {}

    def of(self, pid: int, found: Mapping[int, str]) -> tuple[Listener, ...]:
        """Return what a process listens on, given what its descriptors lead to."""
        inodes = _sockets(found)
        if not inodes:
            return ()
        table = self._table(pid).listening
        return tuple(
            sorted(
                (table[inode] for inode in inodes & table.keys()),
                key=lambda listener: (listener.port, listener.host),
            )
        )

    def called(self, pid: int, found: Mapping[int, str]) -> tuple[str, ...]:
        """Return which addresses of its own namespace a process is connected to."""
        inodes = _sockets(found)
        if not inodes:
            return ()
        table = self._table(pid).called
        return tuple(sorted({table[inode] for inode in inodes & table.keys()}))

    def _table(self, pid: int) -> _Tcp:
        try:
            namespace = read_link(pid, "ns/net")
        except OSError:
            namespace = "unknown"
        if namespace not in self._tables:
            self._tables[namespace] = _tcp(pid)
        return self._tables[namespace]


def _sockets(found: Mapping[int, str]) -> set[int]:
    return {int(target[8:-1]) for target in found.values() if target.startswith("socket:[")}


def _tcp(pid: int) -> _Tcp:
    """Read the table of the namespace that a process lives in."""
    listening: dict[int, Listener] = {}
    ends: dict[tuple[str, str], int] = {}  # (local, remote) to inode
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for fields in _connections(pid, family, _TCP_LISTEN, _TCP_ESTABLISHED):
                if fields[3] == _TCP_LISTEN:
                    address, port = fields[1].split(":")
                    inode = int(fields[9])
                    listening[inode] = Listener(
                        host=_host(address), port=int(port, 16), inode=inode
                    )
                else:
                    # A socket for both families has IPv4 callers under such a name.
                    near, far = (end.removeprefix(_MAPPED) for end in fields[1:3])
                    ends[near, far] = int(fields[9])
    # Both ends stand in one table: then the remote one is a process of this namespace.
    called = {inode: _address(far) for (near, far), inode in ends.items() if (far, near) in ends}
    return _Tcp(listening=listening, called=called)


def _connections(pid: int, family: str, *states: str) -> Iterator[list[str]]:
    """Yield the fields of each socket in one of these states; most are in others, or nobody's."""
    for line in _read(pid, "net", family).decode("ascii", "replace").splitlines()[1:]:
        fields = line.split(None, 10)
        if len(fields) > 9 and fields[3] in states:
            yield fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """A TCP socket, as its network namespace lists it.

    Attributes:
        inode: It.
        near: Its own address, ``host:port``, ``[host]:port`` for IPv6.
        far: The other end's; of no meaning for a listener.
        state: The kernel's word for its state, in lower case.
        unread: Bytes that came and were not read yet; a listener's callers that wait.
        unsent: Bytes that the other end has not acknowledged.
        retries: Times in a row that the other end did not acknowledge anything.
    """

    inode: int
    near: str
    far: str
    state: str
    unread: int
    unsent: int
    retries: int = 0


_TCP_STATES: Final = (
    "", "established", "syn_sent", "syn_recv", "fin_wait1", "fin_wait2", "time_wait", "close",
    "close_wait", "last_ack", "listen", "closing",
)  # fmt: skip


def tcp(pid: int) -> Iterator[TcpSocket]:
    """Yield the TCP sockets of the network namespace of a process, those that somebody holds."""
    states = tuple(f"{number:02X}" for number in range(1, len(_TCP_STATES)))
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for fields in _connections(pid, family, *states):
                inode = int(fields[9])
                unsent, _, unread = fields[4].partition(":")
                near, far = (_bracketed(end.removeprefix(_MAPPED)) for end in fields[1:3])
                if inode:
                    yield TcpSocket(
                        inode=inode,
                        near=near,
                        far=far,
                        state=_TCP_STATES[int(fields[3], 16)],
                        unread=int(unread, 16),
                        unsent=int(unsent, 16),
                        retries=int(fields[6], 16),
                    )


class Unsent:
    """Bytes in connections that the other end does not take, one table a network namespace met."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[int, tuple[int, int]]] = {}

    def of(self, pid: int, ports: Collection[int]) -> int | None:
        """Return the bytes that wait in connections of a process on these ports of its own.

        ``None`` where its descriptors may not be read.
        """
        try:
            namespace = read_link(pid, "ns/net")
            if namespace not in self._tables:
                self._tables[namespace] = dict(_unsent(pid))
            table = self._tables[namespace]
            found = links(pid)
        except OSError:
            return None
        waiting = {inode: size for inode, (port, size) in table.items() if port in ports}
        held = _sockets(found) & waiting.keys()
        return sum(waiting[inode] for inode in held) if found else None


def _unsent(pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (inode, (local port, bytes)) for each connection with bytes that were not taken."""
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for fields in _connections(pid, family, _TCP_ESTABLISHED):
                size = int(fields[4].partition(":")[0], 16)
                if size:
                    port = int(fields[1].rpartition(":")[2], 16)
                    yield int(fields[9]), (port, size)


def _address(end: str) -> str:
    address, port = end.split(":")
    return f"{_host(address)}:{int(port, 16)}"


def _bracketed(end: str) -> str:
    """Return an end as a URL has it, so that no port is taken for a part of the address."""
    address, port = end.split(":")
    host = _host(address)
    return f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"


def _host(address: str) -> str:
    """Return an address of ``net/tcp``: 32-bit words in the machine's own byte order."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def listeners(pid: int) -> tuple[Listener, ...]:
    """Return the TCP addresses that a process listens on, in its own network namespace.

    Empty where its descriptors may not be read.
    """
    return Sockets().of(pid, links(pid))


def listening_on(pid: int, port: int) -> frozenset[int]:
    """Return the inodes of all sockets that listen on a port where a process lives, whoever's."""
    found = _tcp(pid).listening
    return frozenset(inode for inode, each in found.items() if each.port == port)


def users_of(pid: int) -> frozenset[int]:
    """Return the real, effective, saved and file system user of a process.

    Raises:
        OSError: It is gone.
    """
    return frozenset(map(int, _status(pid)[b"Uid"].split()))


def owns(process: ProcessId, listener: Listener) -> bool:
    """Say whether *process* is still the one that holds this listening socket."""
    return is_same(process) and listener in listeners(process.pid)


def look_closer(row: ProcessRow, sockets: Sockets) -> ProcessRow:
    """Return *row* with title, program, descriptors and raylet; can block, see the module.

    What may not be read stays empty.
    """
    if row.kernel or row.state in ("Z", "X"):
        return row
    found = links(row.pid)
    row = replace(
        row,
        stdio=tuple(found.get(fd, "") for fd in range(3)),
        gpus=tuple(sorted({int(m[1]) for t in found.values() if (m := _GPU.match(t))})),
        logs=tuple(
            sorted(
                {
                    target
                    for fd, target in found.items()
                    if target.startswith("/")
                    and not target.startswith(_NOT_LOGS)
                    and _written(row.pid, fd)
                }
            )
        ),
        listeners=sockets.of(row.pid, found),
        called=sockets.called(row.pid, found),
    )
    with contextlib.suppress(OSError):
        row = replace(row, exe=read_link(row.pid, "exe"))
    raylet = read_environment(row.pid).get("RAY_RAYLET_PID", "")
    return replace(row, title=read_title(row.pid), raylet=int(raylet) if raylet.isdigit() else None)


def read_title(pid: int) -> str:
    """Return the command line, or the title that replaced it, on one line; can block, see above.

    A program that sets its title leaves hundreds of empty arguments behind: they are dropped.
    """
    arguments = _text(pid, "cmdline").split("\0")
    return " ".join(word for argument in arguments for word in argument.split())[:MAX_TITLE]


def read_arguments(pid: int) -> tuple[str, ...]:
    """Return the command line, an argument each; can block, see the module.

    Empty where it may not be read.
    """
    return tuple(_text(pid, "cmdline").removesuffix("\0").split("\0"))


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment that a process started with; can block, see the module.

    Empty where it may not be read. What the program set later does not stand there.
    """
    entries = _text(pid, "environ").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_OPENAT2: Final = 437  # the same number on every architecture
_RESOLVE_IN_ROOT: Final = 0x10
_RESOLVE_NO_MAGICLINKS: Final = 0x02


@contextlib.contextmanager
def inside(pid: int, path: PurePosixPath | str, *, follow: bool = True) -> Iterator[int]:
    """Give a descriptor that names *path* in the target's root without opening it.

    Links cannot lead out of the root. Needs Linux 5.6 (``openat2``).

    Args:
        pid: The target.
        path: An absolute path in its root.
        follow: Whether the last part of the path may be a link.

    Raises:
        OSError: It is not there; ``ENOSYS`` or ``EPERM`` where the kernel or a filter does not let
            the call through.
    """
    root = os.open(f"{PROC}/{pid}/root", os.O_PATH | os.O_DIRECTORY)
    try:
        how = _OpenHow(
            flags=os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW),
            mode=0,
            resolve=_RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS,
        )
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        fd = libc.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(root),
            ctypes.c_char_p(os.fsencode(str(path))),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
    finally:
        os.close(root)
    try:
        yield fd
    finally:
        os.close(fd)


def read_inside(pid: int, path: PurePosixPath | str, limit: int) -> bytes:
    """Return the first *limit* bytes of a file of the target's root; see ``open_inside``.

    Raises:
        OSError: See ``open_inside``.
    """
    with os.fdopen(open_inside(pid, path), "rb") as file:
        return file.read(limit)


def size_inside(pid: int, path: PurePosixPath | str) -> int:
    """Return the size of a file of the target's root without opening it; see ``open_inside``.

    Raises:
        OSError: It is not there.
    """
    with inside(pid, path) as fd:
        return os.fstat(fd).st_size


def open_inside(pid: int, path: PurePosixPath | str, *, follow: bool = True) -> int:
    """Return a descriptor to read a file of the target's root by; links cannot lead out of it.

    Opens regular files only: no device is touched and no named pipe waited for. Can block for as
    long as the file system does.

    Args:
        pid: The target.
        path: An absolute path in its root.
        follow: Whether the last part of the path may be a link: where others than the target may
            write, it could lead to what only we may read.

    Raises:
        OSError: It is not there, not a regular file, or may not be read; see ``inside``.
    """
    with inside(pid, path, follow=follow) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def stat_inside(pid: int, path: PurePosixPath | str) -> os.stat_result:
    """Return the attributes of a file of the target's root; see ``inside``.

    Raises:
        OSError: See ``inside``.
    """
    with inside(pid, path) as fd:
        return os.fstat(fd)


def has_hidden_links(pid: int) -> bool:
    """Say whether a process has descriptors that may not be looked at.

    Raises:
        OSError: It is gone.
    """
    try:
        return bool(descriptors(pid)) and not links(pid)
    except PermissionError:
        return True


def list_inside(pid: int, path: PurePosixPath | str) -> tuple[str, ...]:
    """Return the names in a folder of the target's root; see ``inside``.

    Raises:
        OSError: See ``inside``.
    """
    with inside(pid, path) as fd:
        return tuple(sorted(os.listdir(f"/proc/self/fd/{fd}")))
