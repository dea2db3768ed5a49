"""What the kernel says of a process, its threads and its sockets."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.identity import ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A TCP address that a process listens on.

    Attributes:
        host: The address as the socket has it; ``0.0.0.0`` and ``::`` mean all.
        port: Port.
        inode: The socket; who holds it owns the address.
    """

    host: str
    port: int
    inode: int

    @property
    def url(self) -> str:
        """The base URL to ask it at, on this machine: never loopback unless it says so or all."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process at one look. Empty fields were not read, or nothing is there.

    Attributes:
        process: Identity.
        ppid: Parent.
        comm: Name of the main thread, at most 15 characters.
        state: Letter of ``/proc/PID/stat``.
        kernel: Whether it is a thread of the kernel: it can be neither read nor captured.
        threads: Threads it has.
        cpu_seconds: CPU time of all threads so far, user and system.
        exit_signal: Signal that ended a zombie, else 0.
        tracer_pid: Who traces it; 0 for nobody; ``None`` not read.
        uid: Effective user; ``None`` not read.
        rss_mib: Resident memory.
        vol_ctxt: Voluntary context switches of the main thread so far; ``None`` not read.
        wchan: Kernel function that its main thread sleeps in.
        title: Its title or command line, arguments joined by blanks.
        exe: Program file.
        stdio: What descriptors 0, 1 and 2 lead to: a path, ``pipe:[inode]``, ``socket:[inode]``.
        gpus: Numbers of the ``/dev/nvidiaN`` that it has open.
        logs: Regular files that it has open for writing.
        listeners: TCP addresses that it listens on.
        called: Addresses in its own network namespace that it holds TCP connections to, as
            ``host:port``.
        raylet: The raylet that it belongs to by ``RAY_RAYLET_PID``, or ``None``.
    """

    process: ProcessId
    ppid: int
    comm: str
    state: str
    kernel: bool = False
    threads: int = 0
    cpu_seconds: float = 0.0
    exit_signal: int = 0
    tracer_pid: int | None = None
    uid: int | None = None
    rss_mib: float | None = None
    vol_ctxt: int | None = None
    wchan: str = ""
    title: str = ""
    exe: str = ""
    stdio: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    logs: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] = ()
    called: tuple[str, ...] = ()
    raylet: int | None = None

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRow:
    """One thread at one look; counters count since it began.

    Attributes:
        tid: Its number.
        comm: Its name.
        state: Letter.
        cpu_seconds: User and system time.
        run_ns: Time on a core by the scheduler; ``None`` where the kernel does not say.
        wait_ns: Time in a run queue.
        slices: Times it was put on a core.
        vol_ctxt: Voluntary context switches.
        invol_ctxt: Involuntary ones.
        wchan: Kernel function it sleeps in; ``""`` if it runs or may not be read.
        syscall: Number and arguments as the kernel writes them, ``running``, or ``""``.
    """

    tid: int
    comm: str
    state: str
    cpu_seconds: float = 0.0
    run_ns: int | None = None
    wait_ns: int | None = None
    slices: int | None = None
    vol_ctxt: int | None = None
    invol_ctxt: int | None = None
    wchan: str = ""
    syscall: str = ""
