"""What the prober knows of one server: its processes, its sockets, and when to ask it what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hangwatch.model.capture import Target
from hangwatch.model.identity import NEEDED, InstanceKey, ProcessId, Role
from hangwatch.model.process import Listener, ProcessRow
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, ProcessVital
from hangwatch.system import procfs
from hangwatch.system.procfs import ThreadCount

MAX_PAUSE: Final = 300.0
"""Seconds between requests to a server that answers none.

Each lies in the queue of its socket until the server takes it; were it asked every ten seconds, a
queue of 2,048 (uvicorn's) would be full of ours within hours, and real clients turned away.
"""

MAX_CANDIDATES: Final = 4

MIN_SPAN: Final = 0.5
"""Seconds between two looks below which they say nothing of rates: CPU time comes in 10 ms."""

HOLD: Final = 3.0
"""Seconds that the end of a process under Ray is kept back: the raylet or the driver may follow.

A Ray that is shut down ends its workers first, one after the other, itself last, 1 to 2 s later.
"""

FAREWELL: Final = 60.0
"""Seconds that the end of a driver explains the ends of its workers; jobs come and go."""

_PORT: Final = re.compile(r"--(?:server-)?port[= ](\d+)")
_DIGITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Address:
    """A socket and the process that must hold it."""

    owner: ProcessId
    listener: Listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search brought.

    Attributes:
        targets: Every process that belongs to a server.
        piped: Those whose standard output is a pipe.
        contexts: Context length in tokens by process, where its command line names one.
        keys: API keys of the servers, as the file has them now.
        problem: Why there are none, or ``""``.
    """

    targets: tuple[Target, ...] = ()
    piped: frozenset[int] = frozenset()
    contexts: Mapping[int, int] = field(default_factory=dict)
    keys: tuple[str, ...] = field(default=(), repr=False)
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What a process had done at one moment."""

    at: float
    row: ProcessRow
    threads: Mapping[int, ThreadCount]
    fetched: int | None


@dataclass(slots=True)
class Watched:
    """One process of a server, over time.

    One that was never seen alive is not missed: a log in another pid namespace names processes
    that are not ours.
    """

    process: ProcessId
    role: Role
    needed: bool
    piped: bool = False
    context: int | None = None
    state: str = ""
    since: Instant | None = None
    lived: bool = True
    counts: _Counts | None = None

    def look(self, now: Instant, *, closer: bool = False) -> ProcessVital:
        """Return what is to be seen of it now; *closer* at its threads, too."""
        before, after = self.counts, self._count(now, closer=closer)
        if before is not None and after is not None and now - before.at < MIN_SPAN:
            before, self.counts = None, before
        else:
            self.counts = after
        row = after.row if after is not None else None
        state = row.state if row is not None else ""
        if state != self.state or self.since is None:
            self.state, self.since = state, now
        self.lived = self.lived or bool(state)
        switches, busiest = _threads(before, after)
        return ProcessVital(
            pid=self.process.pid,
            role=self.role,
            state=state,
            since=self.since,
            at=now,
            needed=self.needed and self.lived,
            tracer_pid=row.tracer_pid if row is not None else None,
            wchan=row.wchan if row is not None else "",
            cpu_pct=_rate(before, after, lambda counts: counts.row.cpu_seconds, 100.0),
            vol_ctxt_per_s=_rate(before, after, lambda counts: counts.row.vol_ctxt),
            read_bytes_per_s=_rate(before, after, lambda counts: counts.fetched),
            switches_per_s=switches,
            busiest_cpu_pct=busiest,
            stdout_pipe=self.piped,
            context=self.context,
        )

    def begin_closely(self, now: Instant) -> None:
        """Take down what its threads have done, which the next look will compare with."""
        self.counts = self._count(now, closer=True)

    def _count(self, now: Instant, *, closer: bool) -> _Counts | None:
        """Return what it has done so far; ``None`` if it is gone."""
        pid = self.process.pid
        try:
            row = procfs.read_row(pid)
        except OSError:
            return None
        if self.process.start_ticks not in (0, row.process.start_ticks):
            return None
        return _Counts(
            at=now,
            row=row,
            threads=procfs.thread_counts(pid) if closer else {},
            fetched=procfs.read_bytes(pid),
        )


def _rate(
    before: _Counts | None,
    after: _Counts | None,
    count: Callable[[_Counts], float | None],
    scale: float = 1.0,
) -> float | None:
    if before is None or after is None:
        return None
    then, now = count(before), count(after)
    if then is None or now is None:
        return None
    return round((now - then) / (after.at - before.at) * scale, 2)


def _threads(before: _Counts | None, after: _Counts | None) -> tuple[float | None, float | None]:
    """Return the switches a second of all threads, and the CPU share of the busiest one."""
    if before is None or after is None or not (before.threads and after.threads):
        return None, None
    new = ThreadCount(cpu_seconds=0.0, vol_ctxt=0)
    switches, busiest = 0, 0.0
    for tid, now in after.threads.items():
        then = before.threads.get(tid, new)
        switches += max(0, now.vol_ctxt - then.vol_ctxt)
        busiest = max(busiest, now.cpu_seconds - then.cpu_seconds)
    elapsed = after.at - before.at
    return round(switches / elapsed, 2), round(busiest / elapsed * 100, 2)


@dataclass(slots=True)
class Server:
    """One process that prints heartbeats, with what is known around it.

    Attributes:
        pid: It.
        keys: The instances whose beats it prints.
        profile: The engine that it is.
        interval: Seconds between its beats.
        period: Seconds between two requests at one endpoint.
        closer: Whether it is looked at closely, because a beat is missing.
        accused: Whether its health endpoint said last that something is wrong.
        candidates: Sockets that may speak HTTP, likeliest first.
        address: The one that does.
        kin: Its processes by number, itself among them.
        hosts: Under Ray the raylet and the drivers by number, without which the server ends.
        released: Processes that turned out to belong to somebody else; told once more, as not
            needed, because what is merely left out counts as gone.
        told: What the daemon was told last.
        look_at: When its processes are looked at next.
        asking: Purposes for which a request is on its way.
        ask_at: When each purpose may be asked next.
        pauses: Seconds that the last request without an answer was followed by, by purpose.
        choice: Which of the keys it is asked with.
        refusals: How often in a row an answer was refused, by purpose that ever was.
    """

    pid: int
    keys: tuple[InstanceKey, ...]
    profile: EngineProfile
    interval: float
    period: float = 10.0
    closer: bool = False
    accused: bool = False
    candidates: tuple[Address, ...] = ()
    address: Address | None = None
    kin: dict[int, Watched] = field(default_factory=dict)
    hosts: dict[int, Watched] = field(default_factory=dict)
    released: list[Watched] = field(default_factory=list)
    told: tuple[str, tuple[int, ...]] = ("", ())
    look_at: float = 0.0
    asking: set[str] = field(default_factory=set)
    ask_at: dict[str, float] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)
    choice: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    # Asking

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where to ask."""
        return (self.address,) if self.address is not None else self.candidates

    def key_for(self, purpose: str, keys: Sequence[str]) -> str:
        """Return the API key to ask with, or ``""``; health is open until it refuses."""
        if not keys or (purpose == "health" and purpose not in self.refusals):
            return ""
        return keys[self.choice % len(keys)]

    def welcomed(self, purpose: str) -> None:
        """Note that an answer was not refused."""
        if self.refusals.get(purpose):
            self.refusals[purpose] = 0

    def refused(self, purpose: str, *, key: str, of: int) -> bool:
        """Note that an answer was refused; say whether that has just become certain.

        Args:
            purpose: What was asked.
            key: What it was asked with.
            of: How many keys there are.
        """
        if of and not key:
            self.refusals.setdefault(purpose, 0)
            return False
        self.choice += 1
        self.refusals[purpose] = self.refusals.get(purpose, 0) + 1
        return self.refusals[purpose] == max(1, of)

    def try_again(self, now: float) -> None:
        """Ask soon where an answer was refused: the keys are others now."""
        for purpose, count in self.refusals.items():
            if count:
                self.refusals[purpose] = 0
                self.pauses.pop(purpose, None)
                if purpose in self.ask_at:
                    self.ask_at[purpose] = min(self.ask_at[purpose], now)

    def came(self, purpose: str, *, answered: bool, now: float) -> None:
        """Note that a question has ended; one without an answer is asked more and more seldom."""
        self.asking.discard(purpose)
        if answered:
            self.pauses.pop(purpose, None)
            return
        pause = min(MAX_PAUSE, 2 * self.pauses.get(purpose, self.period / 2))
        self.pauses[purpose] = pause
        self.ask_at[purpose] = now + pause

    # Finding

    def learn(self, found: Found, now: float) -> None:
        """Take in what a search found."""
        own = self._own(found.targets)
        alive = {target.role for target in own}
        gone = {
            pid: watched
            for pid, watched in self.kin.items()
            if watched.role not in alive and not procfs.is_same(watched.process)
        }
        before = self.kin
        self.kin = {target.process.pid: self._watched(target) for target in own} | gone
        if self.pid not in self.kin:
            self.kin[self.pid] = Watched(
                ProcessId(self.pid), Role.API_SERVER, needed=True, lived=False
            )
        for pid, watched in self.kin.items():
            watched.piped = pid in found.piped
            watched.context = found.contexts.get(pid)
        for pid in before.keys() - self.kin.keys():
            before[pid].needed = False
            self.released.append(before[pid])
        self.hosts = self._hosts(found.targets, now)
        servers = [t for t in own if t.process.pid == self.pid or t.role is Role.API_SERVER]
        self.candidates = _candidates(servers)
        # Where nothing listens any more the old address stays, and is told to be refused.
        if self.candidates and self.address not in self.candidates:
            self.address = None

    def _own(self, targets: tuple[Target, ...]) -> list[Target]:
        names = {key.name for key in self.keys}
        own = [t for t in targets if t.process.pid == self.pid or t.instance in names]
        if all(t.role is not Role.API_SERVER or t.process.pid == self.pid for t in own):
            return own
        # Where nothing but the raylet ties engines to servers, all are taken for those of the only
        # instance that is known; while other servers have yet to speak, only descent is proof.
        parents = {target.process.pid: target.ppid for target in own}
        return [t for t in own if self.pid in _line(t.process.pid, parents)] + [
            t
            for t in own
            if t.process.pid != self.pid and t.process.pid in _line(self.pid, parents)
        ]

    def _hosts(self, targets: tuple[Target, ...], now: float) -> dict[int, Watched]:
        by_pid = {target.process.pid: target for target in targets}
        kept = {pid: host for pid, host in self.hosts.items() if _explains(host, now)}
        server = by_pid.get(self.pid)
        raylet = by_pid.get(server.ppid) if server is not None else None
        if raylet is None or raylet.role is not Role.RAY_SYSTEM:
            return kept
        drivers = [target for target in targets if target.role is Role.DRIVER]
        seen = {
            target.process.pid: Watched(target.process, target.role, needed=False)
            for target in (raylet, *drivers)
        }
        return seen | kept

    def _watched(self, target: Target) -> Watched:
        known = self.kin.get(target.process.pid)
        if known is not None and known.process == target.process:
            known.role = target.role
            return known
        needed = target.process.pid == self.pid or target.role in NEEDED
        return Watched(process=target.process, role=target.role, needed=needed)

    # Looking

    def look(self, at: Instant, unsent: procfs.Unsent) -> tuple[ProcessVital, ...]:
        """Return what is to be seen of its processes now; nothing while that is kept back.

        Besides its own, the drivers of its job are told, and the raylet once it has ended.
        """
        self.look_at = at + max(1.0, self.interval / 2)
        vitals = [
            watched.look(at, closer=self.closer) for watched in (*self.kin.values(), *self.released)
        ]
        hosts = [host.look(at) for host in self.hosts.values()]
        vitals += [vital for vital in hosts if vital.ended or vital.role is Role.DRIVER]
        ended = [vital.since for vital in vitals if vital.needed and vital.ended]
        hosts_live = bool(hosts) and not any(vital.ended for vital in hosts)
        if ended and hosts_live and at - min(ended) < HOLD:
            return ()
        whole = all(vital.ended for vital in vitals if vital.needed)
        if ended and whole and at == min(ended):
            return ()  # the next look tells since when
        self.released = []
        if self.closer or self.accused:
            waiting = unsent.of(self.pid, self._ports())
            vitals = [
                replace(vital, unsent_bytes=waiting) if vital.pid == self.pid else vital
                for vital in vitals
            ]
        return tuple(vitals)

    def look_closer(self, at: Instant, *, wanted: bool) -> None:
        """Look closely from now on, or no longer; the first close look is what later ones need."""
        if wanted and not self.closer:
            for watched in self.kin.values():
                watched.begin_closely(at)
            self.look_at = at + max(1.0, self.interval / 2)
        self.closer = wanted

    def _ports(self) -> frozenset[int]:
        return frozenset(
            address.listener.port for address in self.addresses if address.owner.pid == self.pid
        )


def _explains(host: Watched, now: float) -> bool:
    """Say whether a host lives, or ended so lately that others may end with it."""
    ended = host.since is not None and host.state in ("", "Z", "X")
    return not ended or now - (host.since or now) < FAREWELL


def _line(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """Return *pid* and its ancestors, as far as they are known."""
    line = [pid]
    while (parent := parents.get(line[-1])) is not None and parent not in line:
        line.append(parent)
    return tuple(line)


def _candidates(servers: Iterable[Target]) -> tuple[Address, ...]:
    found: list[tuple[bool, int, ProcessId, Listener]] = []
    for target in servers:
        if target.role in (Role.ENGINE, Role.ENGINE_WORKER):
            continue
        named = {int(port) for port in _PORT.findall(target.title)}
        found += [
            (listener.port not in named, listener.port, target.process, listener)
            for listener in target.listeners
        ]
    found.sort(key=lambda item: item[:2])
    return tuple(Address(owner, listener) for _, _, owner, listener in found[:MAX_CANDIDATES])


def of_instance(key: InstanceKey, found: Mapping[str, Counters], *, alone: bool) -> Counters | None:
    """Return the counters of one instance among those of its server, by label.

    ``DP0`` and ``Engine 000`` are engine ``0``. Where the server has one instance and one label
    they belong together, whatever they are called.
    """
    if alone and len(found) == 1:
        return next(iter(found.values()))
    number = _DIGITS.search(key.tag)
    return found.get(str(int(number[0]))) if number else None
