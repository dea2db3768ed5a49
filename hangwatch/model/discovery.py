"""What was found out about whom to watch."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.capture import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """A running Ray node that we can see.

    Attributes:
        raylet: Process that runs it.
        folder: Its session directory, as the raylet names it.
        logs: What to follow: a pattern where the folder is mounted here too, else one path
            through ``/proc`` for each worker that is running now.
        reachable: Whether the folder is mounted here.
    """

    raylet: int
    folder: str
    logs: tuple[str, ...]
    reachable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOwner:
    """The process that writes a log.

    Attributes:
        log: Its path.
        pid: The process, or ``None`` if nobody who can be seen writes it.
    """

    log: str
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """What a process belongs to.

    Attributes:
        pid: The process that was asked about.
        targets: It and every related process, the most suspicious first.
        servers: Processes that print heartbeats, as far as roles tell.
        logs: What to follow, and which server prints it: paths where they are mounted here
            too, else paths through ``/proc/PID/fd``.
        profile: Name of the profile that knows the engine by its processes, or ``""``.
        guessed: Whether no role tells a server or an engine, and ``servers`` is a guess.
        closed: Whether the process may not be looked into: its descriptors, addresses and logs,
            its memory and what it runs are not to be had.
        problem: Why nothing can be said, one sentence with its remedy, or ``""``.
    """

    pid: int
    targets: tuple[Target, ...] = ()
    servers: tuple[int, ...] = ()
    logs: tuple[LogOwner, ...] = ()
    profile: str = ""
    guessed: bool = False
    closed: bool = False
    problem: str = ""
