"""The child that asks: health and metrics of each server, and the state of its processes.

``python -m hangwatch.daemon.prober`` talks with the daemon:

- in ``{"kind": "watch", "profiles": [EngineProfile…], "interval": S | null, "instances":
  [{"instance": InstanceKey, "pid": N, "profile": NAME}…]}``: from now on these, and no others;
  each has one of the profiles, and ``interval``, where given, goes before what they say;
- out ``{"kind": "observations", "items": [HealthSeen | CountersSeen | ProcessesSeen…]}``;
- out ``{"kind": "found", "instance": InstanceKey, "address": URL, "pids": [N…]}`` whenever an
  address or the processes of an instance become known or change.

Whatever may block does so in a thread of its own: each request (one at a time for an endpoint,
none doubled), and the search for processes, which reads command lines. The main thread reads only
what never waits for a target, so that a server that hangs, or a process whose memory map is
locked, delays nobody else.

It asks with GET alone, the paths of the profile alone, and only a socket that the server itself
listens on. A server may listen on several, of which one speaks HTTP: until one has answered as a
health endpoint does, all are tried, the one that the command line names first. Sockets of the
engine process are never touched: LMDeploy's takes pickles from anybody.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final

from hangwatch.core import endpoints, kinship
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.model.capture import CapturedInstance, Target
from hangwatch.model.identity import NEEDED, InstanceKey, ProcessId, Role
from hangwatch.model.observation import CountersSeen, HealthSeen, Observation, ProcessesSeen
from hangwatch.model.process import Listener, ProcessRow
from hangwatch.model.profile import EngineProfile, HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, Health, Outcome, ProcessVital
from hangwatch.system import http, procfs
from hangwatch.system.channel import Channel
from hangwatch.system.spawn import message_kind, serve

TIMEOUT: Final = 15.0
"""Seconds; LMDeploy probes its engine for up to 10 s before an unhealthy answer."""

MAX_PAUSE: Final = 300.0
"""Seconds between requests to a server that answers none.

Each lies in the queue of its socket until the server takes it; were it asked every ten seconds, a
queue of 2,048 (uvicorn's) would be full of ours within hours, and real clients turned away.
"""

MAX_CANDIDATES: Final = 4

SEARCH_EVERY: Final = 30.0
"""Seconds between searches for processes once everything is known."""

HOLD: Final = 3.0
"""Seconds that the end of a process under Ray is kept back: the raylet or the driver may follow.

A Ray that is shut down ends its workers first, one after the other, itself last, 1 to 2 s later.
"""

_PORT: Final = re.compile(r"--(?:server-)?port[= ](\d+)")
_DIGITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Address:
    """A socket and the process that must hold it."""

    owner: ProcessId
    listener: Listener


@dataclass(slots=True)
class Watched:
    """One process of a server, over time."""

    process: ProcessId
    role: Role
    needed: bool
    state: str = ""
    since: Instant | None = None
    row: ProcessRow | None = None
    looked_at: float = 0.0

    def look(self, now: Instant) -> ProcessVital:
        """Return what is to be seen of it now."""
        row: ProcessRow | None = None
        try:
            row = procfs.read_row(self.process.pid)
            if self.process.start_ticks not in (0, row.process.start_ticks):
                row = None
        except OSError:
            pass
        state = row.state if row is not None else ""
        if state != self.state or self.since is None:
            self.state, self.since = state, now
        before, elapsed = self.row, now - self.looked_at
        self.row, self.looked_at = row, now
        return ProcessVital(
            pid=self.process.pid,
            role=self.role,
            state=state,
            since=self.since,
            at=now,
            needed=self.needed,
            tracer_pid=row.tracer_pid if row is not None else None,
            wchan=row.wchan if row is not None else "",
            cpu_pct=_rate(row, before, elapsed, lambda r: r.cpu_seconds, 100.0),
            vol_ctxt_per_s=_rate(row, before, elapsed, lambda r: r.vol_ctxt, 1.0),
        )


def _rate(
    row: ProcessRow | None,
    before: ProcessRow | None,
    elapsed: float,
    count: Callable[[ProcessRow], float | None],
    scale: float,
) -> float | None:
    if row is None or before is None or elapsed <= 0.0:
        return None
    now, then = count(row), count(before)
    return None if now is None or then is None else round((now - then) / elapsed * scale, 2)


@dataclass(slots=True)
class Server:
    """One process that prints heartbeats, with what is known around it.

    Attributes:
        pid: It.
        keys: The instances whose beats it prints.
        profile: The engine that it is.
        interval: Seconds between its beats.
        candidates: Sockets that may speak HTTP, likeliest first.
        address: The one that does.
        kin: Its processes by number, itself among them.
        hosts: Under Ray the raylet and the drivers, without which the server ends as well.
        released: Processes that turned out to belong to somebody else; told once more, as not
            needed, because what is merely left out counts as gone.
        told: What the daemon was told last.
        asking: Purposes for which a request is on its way.
        ask_at: When each purpose may be asked next.
        pauses: Seconds that the last request without an answer was followed by, by purpose.
    """

    pid: int
    keys: tuple[InstanceKey, ...]
    profile: EngineProfile
    interval: float
    candidates: tuple[Address, ...] = ()
    address: Address | None = None
    kin: dict[int, Watched] = field(default_factory=dict)
    hosts: tuple[Watched, ...] = ()
    released: list[Watched] = field(default_factory=list)
    told: tuple[str, tuple[int, ...]] = ("", ())
    asking: set[str] = field(default_factory=set)
    ask_at: dict[str, float] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)

    @property
    def period(self) -> float:
        """Seconds between two requests at one endpoint."""
        return max(1.0, self.interval)

    def came(self, purpose: str, *, timed_out: bool, now: float) -> None:
        """Note that a question has ended; one that nobody answers is asked more and more seldom."""
        self.asking.discard(purpose)
        if timed_out:
            pause = min(MAX_PAUSE, 2 * self.pauses.get(purpose, self.period / 2))
            self.pauses[purpose] = pause
            self.ask_at[purpose] = now + pause
        else:
            self.pauses.pop(purpose, None)

    def learn(self, targets: tuple[Target, ...]) -> None:
        """Take in what a search found."""
        own = self._own(targets)
        alive = {target.role for target in own}
        gone = {
            pid: watched
            for pid, watched in self.kin.items()
            if watched.role not in alive and not procfs.is_same(watched.process)
        }
        before = self.kin
        self.kin = {target.process.pid: self._watched(target) for target in own} | gone
        if self.pid not in self.kin:
            self.kin[self.pid] = Watched(ProcessId(self.pid), Role.API_SERVER, needed=True)
        for pid in before.keys() - self.kin.keys():
            before[pid].needed = False
            self.released.append(before[pid])
        self.hosts = self.hosts or self._hosts(targets)
        servers = [t for t in own if t.process.pid == self.pid or t.role is Role.API_SERVER]
        self.candidates = _candidates(servers)
        if self.address is not None and self.address not in self.candidates:
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

    def _hosts(self, targets: tuple[Target, ...]) -> tuple[Watched, ...]:
        by_pid = {target.process.pid: target for target in targets}
        server = by_pid.get(self.pid)
        raylet = by_pid.get(server.ppid) if server is not None else None
        if raylet is None or raylet.role is not Role.RAY_SYSTEM:
            return ()
        drivers = [target for target in targets if target.role is Role.DRIVER]
        return tuple(Watched(t.process, t.role, needed=False) for t in (raylet, *drivers))

    def look(self, at: Instant) -> tuple[ProcessVital, ...]:
        """Return what is to be seen of its processes now; nothing while that is kept back."""
        vitals = tuple(watched.look(at) for watched in (*self.kin.values(), *self.released))
        ended = [vital.since for vital in vitals if vital.needed and vital.ended]
        if ended:
            hosts = tuple(watched.look(at) for watched in self.hosts)
            vitals += tuple(vital for vital in hosts if vital.ended)
            if hosts and not any(vital.ended for vital in hosts) and at - min(ended) < HOLD:
                return ()
        self.released = []
        return vitals

    def _watched(self, target: Target) -> Watched:
        known = self.kin.get(target.process.pid)
        if known is not None and known.process == target.process:
            known.role = target.role
            return known
        needed = target.process.pid == self.pid or target.role in NEEDED
        return Watched(process=target.process, role=target.role, needed=needed)


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


class Finder:
    """Searches for the processes of servers, in a thread that may block."""

    def __init__(self, done: Callable[[Callable[[], None]], None]) -> None:
        self._done = done
        self._closer: dict[tuple[ProcessId, str], ProcessRow] = {}
        self._tied: frozenset[int] = frozenset()
        self.searching = False

    def search(
        self,
        instances: Mapping[InstanceKey, int],
        profiles: tuple[EngineProfile, ...],
        found: Callable[[tuple[Target, ...]], None],
    ) -> None:
        """Search once; *found* is called in the main thread."""
        self.searching = True
        captured = tuple(CapturedInstance(instance=k, pid=pid) for k, pid in instances.items())

        def run() -> None:
            targets: tuple[Target, ...] = ()
            try:
                rows = self._table(frozenset(instances.values()))
                targets = kinship.related(rows, seeds=(), profiles=profiles, instances=captured)
            finally:
                self._done(lambda: self._finish(targets, found))

        threading.Thread(target=run, name="search", daemon=True).start()

    def _finish(
        self, targets: tuple[Target, ...], found: Callable[[tuple[Target, ...]], None]
    ) -> None:
        self.searching = False
        self._tied = frozenset(target.process.pid for target in targets if target.instance)
        found(targets)

    def _table(self, servers: frozenset[int]) -> tuple[ProcessRow, ...]:
        """Return every process; closely looked at are servers, and what is new or renamed.

        And processes of Ray, until their connections say whose they are.
        """
        sockets = procfs.Sockets()
        closer = {}
        for row in procfs.read_table():
            key = (row.process, row.comm)
            known = self._closer.get(key)
            untied = known is not None and known.raylet and row.pid not in self._tied
            if known is None or untied or row.pid in servers:
                try:
                    closer[key] = procfs.look_closer(row, sockets)
                except OSError:
                    continue
            else:
                closer[key] = known
        self._closer = closer
        return tuple(closer.values())


class Prober:
    """Everything that is watched, and what is on its way."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._finished: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._finder = Finder(self._later)
        self._servers: dict[int, Server] = {}
        self._profiles: tuple[EngineProfile, ...] = ()
        self._look_at = self._search_at = 0.0
        self._search_pause = 1.0

    def run(self) -> None:
        """Serve until the channel closes."""
        while True:
            select.select([self._channel.fileno(), self._wake], [], [], self._patience())
            for message in self._channel.receive():
                if message_kind(message) == "watch":
                    self._watch(message)
            self._take_finished()
            now = time.monotonic()
            if self._servers:
                self._search(now)
                self._look(now)
                self._ask(now)
            self._channel.send({"kind": "alive"})

    def _patience(self) -> float:
        if not self._servers:
            return 1.0
        dues = [self._look_at, self._search_at if not self._finder.searching else float("inf")]
        for server in self._servers.values():
            dues += [at for what, at in server.ask_at.items() if what not in server.asking]
        return min(1.0, max(0.05, min(dues) - time.monotonic()))

    def _later(self, then: Callable[[], None]) -> None:
        """Let the main thread call *then*; may be called in any thread."""
        self._finished.put(then)
        os.eventfd_write(self._wake, 1)

    def _take_finished(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while True:
            try:
                self._finished.get_nowait()()
            except Empty:
                return

    def _watch(self, message: Mapping[str, Any]) -> None:
        self._profiles = from_plain(tuple[EngineProfile, ...], message["profiles"])
        by_name = {profile.name: profile for profile in self._profiles}
        keys: dict[int, list[InstanceKey]] = {}
        profiles: dict[int, EngineProfile] = {}
        for entry in message["instances"]:
            pid = int(entry["pid"])
            keys.setdefault(pid, []).append(from_plain(InstanceKey, entry["instance"]))
            profiles[pid] = by_name[entry["profile"]]
        servers = {}
        for pid, own in keys.items():
            profile = profiles[pid]
            interval = float(message["interval"] or profile.interval)
            server = self._servers.get(pid)
            if server is None or (server.keys, server.profile) != (tuple(own), profile):
                server = Server(pid=pid, keys=tuple(own), profile=profile, interval=interval)
                self._search_at, self._search_pause = 0.0, 1.0
            servers[pid] = server
        self._servers = servers

    def _search(self, now: float) -> None:
        if now < self._search_at or self._finder.searching:
            return
        known = all(server.address is not None for server in self._servers.values())
        self._search_pause = SEARCH_EVERY if known else min(SEARCH_EVERY, 2.0 * self._search_pause)
        self._search_at = now + self._search_pause
        instances = {key: s.pid for s in self._servers.values() for key in s.keys}
        self._finder.search(instances, self._profiles, self._learn)

    def _learn(self, targets: tuple[Target, ...]) -> None:
        now = time.monotonic()
        for number, server in enumerate(self._servers.values()):
            server.learn(targets)
            # Spread over the period, so that our requests are no burst in the engines' logs.
            server.ask_at.setdefault("health", now + server.period * number / len(self._servers))
            self._tell_found(server)
        self._look_at = 0.0

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return
        shortest = min(server.interval for server in self._servers.values())
        self._look_at = now + max(1.0, shortest / 2)
        at = Instant(now)
        self._send(
            ProcessesSeen(instance=key, processes=vitals, at=at)
            for server in self._servers.values()
            if server.kin and (vitals := server.look(at))
            for key in server.keys
        )

    def _ask(self, now: float) -> None:
        for server in self._servers.values():
            for purpose, at in tuple(server.ask_at.items()):
                if now < at or purpose in server.asking:
                    continue
                server.ask_at[purpose] = now + server.period
                addresses = (server.address,) if server.address else server.candidates
                if purpose in server.profile.endpoints and addresses:
                    server.asking.add(purpose)
                    question = {"health": self._ask_health, "metrics": self._ask_metrics}[purpose]
                    threading.Thread(
                        target=question,
                        args=(server, addresses),
                        name=f"{purpose} of {server.pid}",
                        daemon=True,
                    ).start()

    def _ask_health(self, server: Server, addresses: tuple[Address, ...]) -> None:
        """Ask in a thread of its own until an address answers as a health endpoint does."""
        health: Health | None = None
        answered: Address | None = None
        mute = False
        for address in addresses:
            answer = _health(address, server.profile)
            mute = mute or answer.outcome is Outcome.TIMED_OUT
            if answer.outcome is Outcome.ANSWERED:
                health, answered = answer, address
                break
            # What a socket says that may not be the server's HTTP port says nothing.
            if len(addresses) == 1:
                health = answer
        mute = mute and answered is None
        self._later(lambda: self._health_came(server, health, answered, mute=mute))

    def _health_came(
        self, server: Server, health: Health | None, answered: Address | None, *, mute: bool
    ) -> None:
        server.came("health", timed_out=mute, now=time.monotonic())
        if self._servers.get(server.pid) is not server:
            return
        if answered is not None and server.address is None:
            server.address = answered
            server.ask_at.setdefault("metrics", time.monotonic())
            self._tell_found(server)
        if health is not None:
            if health.outcome is Outcome.REFUSED:
                self._search_at = min(self._search_at, time.monotonic() + server.period)
            self._send(HealthSeen(instance=key, health=health) for key in server.keys)

    def _ask_metrics(self, server: Server, addresses: tuple[Address, ...]) -> None:
        """Ask in a thread of its own; no answer tells nothing that health does not tell."""
        response = http.get(
            addresses[0].owner,
            addresses[0].listener,
            server.profile.endpoints["metrics"],
            timeout=TIMEOUT,
        )
        found: dict[str, Counters] = {}
        if response.status == 200:
            text = response.body.decode("utf-8", "replace")
            found = endpoints.counters(
                (sample for _, sample in endpoints.samples(text)),
                server.profile,
                at=Instant(time.monotonic()),
            )
        mute = endpoints.outcome_of_error(response.error) is Outcome.TIMED_OUT
        self._later(lambda: self._metrics_came(server, found, mute=mute))

    def _metrics_came(self, server: Server, found: Mapping[str, Counters], *, mute: bool) -> None:
        server.came("metrics", timed_out=mute, now=time.monotonic())
        if self._servers.get(server.pid) is server:
            self._send(
                CountersSeen(instance=key, counters=counters)
                for key in server.keys
                if (counters := of_instance(key, found, alone=len(server.keys) == 1)) is not None
            )

    def _tell_found(self, server: Server) -> None:
        address = server.address.listener.url if server.address is not None else ""
        told = (address, tuple(sorted(server.kin)))
        if told == server.told:
            return
        server.told = told
        for key in server.keys:
            self._channel.send(
                {
                    "kind": "found",
                    "instance": to_plain(key),
                    "address": address,
                    "pids": list(told[1]),
                }
            )

    def _send(self, observations: Iterable[Observation]) -> None:
        items = [to_plain(observation) for observation in observations]
        if items:
            self._channel.send({"kind": "observations", "items": items})


def of_instance(key: InstanceKey, found: Mapping[str, Counters], *, alone: bool) -> Counters | None:
    """Return the counters of one instance among those of its server, by label.

    ``DP0`` and ``Engine 000`` are engine ``0``. Where the server has one instance and one label
    they belong together, whatever they are called.
    """
    if alone and len(found) == 1:
        return next(iter(found.values()))
    number = _DIGITS.search(key.tag)
    return found.get(str(int(number[0]))) if number else None


def _health(address: Address, profile: EngineProfile) -> Health:
    response = http.get(
        address.owner, address.listener, profile.endpoints["health"], timeout=TIMEOUT
    )
    at = Instant(time.monotonic())
    if response.status is None:
        return endpoints.health_of_error(response.error, at=at, elapsed=response.elapsed)
    health = endpoints.health_of_answer(
        response.status, response.body, profile, at=at, elapsed=response.elapsed
    )
    if health.outcome is Outcome.ANSWERED and not health.status and "sleeping" in profile.endpoints:
        # An engine without a health monitor answers 200 for as long as HTTP lives.
        asleep = http.get(
            address.owner, address.listener, profile.endpoints["sleeping"], timeout=TIMEOUT
        )
        if asleep.status == 200 and endpoints.says_sleeping(asleep.body):
            return Health(
                at=at,
                outcome=Outcome.ANSWERED,
                http=health.http,
                message=health.message,
                meaning=HealthMeaning.SLEEPING,
                elapsed=health.elapsed,
            )
    return health


def body(channel: Channel) -> None:
    """Probe what the daemon names until it closes the channel."""
    Prober(channel).run()


if __name__ == "__main__":
    serve(body)
