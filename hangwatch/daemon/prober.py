"""The child that asks: health and metrics of each server, and the state of its processes.

``python -m hangwatch.daemon.prober`` talks with the daemon:

- in ``{"kind": "watch", "profiles": [EngineProfile…], "interval": S | null, "period": S,
  "key_file": PATH, "instances": [{"instance": InstanceKey, "pid": N, "profile": NAME}…]}``: from
  now on these, and no others; each has one of the profiles, and ``interval`` between beats, where
  given, goes before what they say; the file, where one is named, holds API keys;
- in ``{"kind": "closer", "instances": [InstanceKey…]}``: the threads and connections of these, and
  no others, are looked at as well, because a beat is missing;
- out ``{"kind": "observations", "items": [HealthSeen | CountersSeen | ProcessesSeen…]}``;
- out ``{"kind": "found", "instance": InstanceKey, "address": URL, "pids": [N…]}`` whenever an
  address or the processes of an instance become known or change;
- out ``{"kind": "company", "processes": [[PID, START_TICKS]…]}`` whenever the processes change
  that belong to any server, or that they share;
- out ``{"kind": "refused", "instance": InstanceKey, "path": PATH, "status": N, "keys": N}`` once
  when an endpoint answers nobody without a key, or none of our keys; ``{"kind": "keys_unreadable",
  "problem": TEXT}`` once when the file cannot be read any more.

The main thread does only what never waits: it looks at files that cannot block, and its requests
are all on their way at once, so that a server that hangs delays nobody else. The search for
processes reads command lines, which may wait for a target, and has a thread of its own.

It asks with GET alone, the paths of the profile alone, each endpoint at most once a period however
often the engine beats, and only a socket that the server itself listens on. A server may listen on
several, of which one speaks HTTP: until one has answered as a health endpoint does, all are tried,
the one that the command line names first. Sockets of the engine process are never touched:
LMDeploy's takes pickles from anybody.

API keys go to those sockets alone, to ``/health`` only once it has refused to answer without one,
and never anywhere else: what a server echoes of them is masked before it is looked at.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from hangwatch.core import endpoints, kinship
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.daemon.servers import Address, Found, Server, of_instance
from hangwatch.errors import ConfigError
from hangwatch.model.capture import CapturedInstance, Target
from hangwatch.model.identity import InstanceKey, ProcessId
from hangwatch.model.observation import CountersSeen, HealthSeen, Observation, ProcessesSeen
from hangwatch.model.process import ProcessRow
from hangwatch.model.profile import EngineProfile, HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Health, Outcome
from hangwatch.system import http, procfs
from hangwatch.system.channel import Channel
from hangwatch.system.keys import KeyFile, masked
from hangwatch.system.spawn import message_kind, serve

TIMEOUT: Final = 15.0
"""Seconds; LMDeploy probes its engine for up to 10 s before an unhealthy answer."""

SLEEPING_TIMEOUT: Final = 3.0
"""Seconds; it is asked of a loop that has just answered, and what that said waits for it."""

MAX_WORDS: Final = 1 << 16
"""Bytes of what a health endpoint says; the metrics have ``http.MAX_BODY``."""

MAX_ON_THE_WAY: Final = 256
"""Requests at a time: two for each of a hundred mute servers, and a descriptor each."""

SEARCH_EVERY: Final = 30.0
"""Seconds between searches for processes once everything is known."""

ALIVE_EVERY: Final = 1.0

MAX_CONTEXT: Final = 10**9
"""Tokens; a larger number in a command line is no context length."""

_AT_EASE: Final = (None, HealthMeaning.HEALTHY, HealthMeaning.SLEEPING, HealthMeaning.STARTING)

Question: TypeAlias = Generator[http.Exchange, http.Response, None]
"""Yields what it asks, one at a time, and is sent how that ended."""


class Finder:
    """Searches for the processes of servers, in a thread that may block."""

    def __init__(self, done: Callable[[Callable[[], None]], None]) -> None:
        self._done = done
        self._key_file: KeyFile | None = None
        self._closer: dict[tuple[ProcessId, str], ProcessRow] = {}
        self._tied: frozenset[int] = frozenset()
        self.searching = False

    def use(self, key_file: str) -> None:
        """Read API keys from this file, unless it is ``""``."""
        self._key_file = KeyFile(key_file) if key_file else None

    def search(
        self,
        instances: Mapping[InstanceKey, int],
        profiles: tuple[EngineProfile, ...],
        then: Callable[[Found], None],
    ) -> None:
        """Search once; *then* is called in the main thread."""
        self.searching = True
        captured = tuple(CapturedInstance(instance=k, pid=pid) for k, pid in instances.items())

        def run() -> None:
            found: Found | None = None
            try:
                rows = self._table(frozenset(instances.values()))
                targets = kinship.related(rows, seeds=(), profiles=profiles, instances=captured)
                found = self._found(rows, targets, profiles)
            finally:
                self._done(lambda: self._finish(found, then))

        threading.Thread(target=run, name="search", daemon=True).start()

    def _found(
        self,
        rows: Iterable[ProcessRow],
        targets: tuple[Target, ...],
        profiles: tuple[EngineProfile, ...],
    ) -> Found:
        kin = {target.process.pid for target in targets}
        own = [row for row in rows if row.pid in kin]
        keys: tuple[str, ...] = ()
        problem = ""
        if self._key_file is not None:
            try:
                keys = self._key_file.read()
            except ConfigError as error:
                problem = str(error)
        return Found(
            targets=targets,
            piped=frozenset(row.pid for row in own if "".join(row.stdio[1:2])[:5] == "pipe:"),
            contexts=dict(_contexts(own, profiles)),
            keys=keys,
            problem=problem,
        )

    def _finish(self, found: Found | None, then: Callable[[Found], None]) -> None:
        self.searching = False
        if found is None:
            return  # the next search may do better
        self._tied = frozenset(t.process.pid for t in found.targets if t.instance)
        then(found)

    def _table(self, servers: frozenset[int]) -> tuple[ProcessRow, ...]:
        """Return every process; closely looked at are servers, and what is new or renamed.

        And processes of Ray, until their connections say whose they are.
        """
        sockets = procfs.Sockets()
        closer = {}
        for key in procfs.names():
            pid = key[0].pid
            known = self._closer.get(key)
            untied = known is not None and known.raylet and pid not in self._tied
            if known is None or untied or pid in servers:
                try:
                    closer[key] = procfs.look_closer(procfs.read_row(pid), sockets)
                except OSError:
                    continue
            else:
                closer[key] = known
        self._closer = closer
        return tuple(closer.values())


def _contexts(
    rows: Iterable[ProcessRow], profiles: Iterable[EngineProfile]
) -> Iterator[tuple[int, int]]:
    """Yield process and context length for each command line that names one."""
    for row in rows:
        for profile in profiles:
            named = profile.context.search(row.title) if profile.context is not None else None
            if named is not None and 0 < int(named["tokens"]) <= MAX_CONTEXT:
                yield row.pid, int(named["tokens"])
                break


class Questions:
    """All questions that are on their way; none is ever waited for."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Question, http.Exchange]] = {}

    @property
    def full(self) -> bool:
        """Whether no other can be asked now."""
        return len(self._asked) >= MAX_ON_THE_WAY

    @property
    def deadline(self) -> float:
        """When the first of them is cut."""
        return min((asked.deadline for _, asked in self._asked.values()), default=float("inf"))

    def register(self, poll: select.poll) -> None:
        """Let *poll* wait for them."""
        for fd, (_, exchange) in self._asked.items():
            poll.register(fd, exchange.events)

    def ask(self, question: Question) -> None:
        """Begin to ask *question*."""
        self._go_on(question, None)

    def advance(self, ready: Iterable[int], now: float) -> None:
        """Take in what has come, given the descriptors that are ready."""
        come = set(ready)
        for fd, (question, exchange) in tuple(self._asked.items()):
            if fd not in come and now < exchange.deadline:
                continue
            exchange.advance(ready=fd in come)
            if exchange.response is not None:
                del self._asked[fd]
                self._go_on(question, exchange.response)

    def _go_on(self, question: Question, response: http.Response | None) -> None:
        try:
            exchange = next(question) if response is None else question.send(response)
            while exchange.response is not None:  # it could not even be asked
                exchange = question.send(exchange.response)
        except StopIteration:
            return
        self._asked[exchange.fileno()] = (question, exchange)


class Prober:
    """Everything that is watched, and what is on its way."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._finished: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._finder = Finder(self._later)
        self._questions = Questions()
        self._servers: dict[int, Server] = {}
        self._profiles: tuple[EngineProfile, ...] = ()
        self._closer: frozenset[InstanceKey] = frozenset()
        self._keys: tuple[str, ...] = ()
        self._problem = ""
        self._company: tuple[tuple[int, int], ...] = ()
        self._search_at = 0.0
        self._search_pause = 1.0
        self._alive_at = 0.0

    def run(self) -> None:
        """Serve until the channel closes."""
        while True:
            ready = self._wait()
            for message in self._channel.receive():
                match message_kind(message):
                    case "watch":
                        self._watch(message)
                    case "closer":
                        self._closer = frozenset(
                            from_plain(InstanceKey, key) for key in message["instances"]
                        )
                    case _:
                        pass
            self._take_finished()
            now = time.monotonic()
            self._questions.advance(ready, now)
            if self._servers:
                self._search(now)
                self._look(now)
                self._ask(now)
            if now >= self._alive_at:
                self._alive_at = now + ALIVE_EVERY
                self._channel.send({"kind": "alive"})

    def _wait(self) -> list[int]:
        """Wait until something comes or is due; return the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        self._questions.register(poll)
        dues = [self._alive_at, self._questions.deadline]
        if not self._finder.searching:
            dues.append(self._search_at)
        for server in self._servers.values():
            dues.append(server.look_at)
            if not self._questions.full:
                dues += [at for what, at in server.ask_at.items() if what not in server.asking]
        patience = min(1.0, max(0.05, min(dues) - time.monotonic()))
        return [fd for fd, _ in poll.poll(patience * 1000)]

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
        self._finder.use(str(message.get("key_file") or ""))
        by_name = {profile.name: profile for profile in self._profiles}
        # Whose engine nobody knows may talk anything but HTTP: its sockets are left alone.
        unknown = replace(self._profiles[0], endpoints={})
        keys: dict[int, list[InstanceKey]] = {}
        profiles: dict[int, EngineProfile] = {}
        for entry in message["instances"]:
            pid = int(entry["pid"])
            keys.setdefault(pid, []).append(from_plain(InstanceKey, entry["instance"]))
            profiles[pid] = by_name[entry["profile"]] if entry["profile"] else unknown
        servers = {}
        for pid, own in keys.items():
            profile = profiles[pid]
            server = self._servers.get(pid)
            if server is None or (server.keys, server.profile) != (tuple(own), profile):
                server = Server(
                    pid=pid,
                    keys=tuple(own),
                    profile=profile,
                    interval=float(message["interval"] or profile.interval),
                    period=float(message["period"]),
                )
                self._search_at, self._search_pause = 0.0, 1.0
            servers[pid] = server
        self._servers = servers

    # Finding

    def _search(self, now: float) -> None:
        if now < self._search_at or self._finder.searching:
            return
        known = all(server.address is not None for server in self._servers.values())
        self._search_pause = SEARCH_EVERY if known else min(SEARCH_EVERY, 2.0 * self._search_pause)
        self._search_at = now + self._search_pause
        instances = {key: s.pid for s in self._servers.values() for key in s.keys}
        self._finder.search(instances, self._profiles, self._learn)

    def _learn(self, found: Found) -> None:
        now = time.monotonic()
        if found.problem and found.problem != self._problem:
            self._channel.send({"kind": "keys_unreadable", "problem": found.problem})
        self._problem = found.problem
        company = tuple((t.process.pid, t.process.start_ticks) for t in found.targets)
        if company != self._company:
            self._company = company
            self._channel.send({"kind": "company", "processes": company})
        if not found.problem and found.keys != self._keys:
            self._keys = found.keys
            for server in self._servers.values():
                server.try_again(now)
        for number, server in enumerate(self._servers.values()):
            kin = server.kin.keys()
            server.learn(found, now)
            if kin != server.kin.keys():
                server.look_at = now
            # Spread over the period, so that our requests are no burst in the engines' logs.
            server.ask_at.setdefault("health", now + server.period * number / len(self._servers))
            self._tell_found(server)

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

    # Looking

    def _look(self, now: float) -> None:
        at = Instant(now)
        unsent = procfs.Unsent()
        seen: list[Observation] = []
        for server in self._servers.values():
            server.look_closer(at, wanted=not self._closer.isdisjoint(server.keys))
            if server.kin and now >= server.look_at and (vitals := server.look(at, unsent)):
                seen += [ProcessesSeen(instance=k, processes=vitals, at=at) for k in server.keys]
        self._send(seen)

    # Asking

    def _ask(self, now: float) -> None:
        due = sorted(
            (at, server.pid, purpose)
            for server in self._servers.values()
            for purpose, at in server.ask_at.items()
            if now >= at and purpose not in server.asking
        )
        for _, pid, purpose in due:
            if self._questions.full:
                return
            server = self._servers[pid]
            server.ask_at[purpose] = now + server.period
            if purpose in server.profile.endpoints and server.addresses:
                server.asking.add(purpose)
                question = {"health": self._health_of, "metrics": self._metrics_of}[purpose]
                self._questions.ask(question(server))

    def _asked(
        self, server: Server, address: Address, purpose: str, timeout: float = TIMEOUT
    ) -> Generator[http.Exchange, http.Response, http.Response]:
        """Ask one endpoint; say once if it answers nobody without a key, or none of ours."""
        path = server.profile.endpoints[purpose]
        key = server.key_for(purpose, self._keys)
        limit = http.MAX_BODY if purpose == "metrics" else MAX_WORDS
        exchange = http.Exchange(
            address.owner, address.listener, path, timeout=timeout, limit=limit, key=key
        )
        response = yield exchange
        if response.status in (401, 403):
            # The search also looks whether the keys are others now.
            self._search_at = min(self._search_at, time.monotonic() + server.period)
            if server.refused(purpose, key=key, of=len(self._keys)):
                self._tell_refused(server, path, response.status)
        elif response.status is not None:
            server.welcomed(purpose)
        return replace(
            response,
            body=masked(response.body, self._keys),
            error=masked(response.error.encode(), self._keys).decode(),
        )

    def _health_of(self, server: Server) -> Question:
        """Ask until an address answers as a health endpoint does."""
        health: Health | None = None
        answered: Address | None = None
        mute = False
        addresses = server.addresses
        for address in addresses:
            response = yield from self._asked(server, address, "health")
            answer = _health(response, server.profile)
            mute = mute or _is_mute(response)
            if answer.outcome is Outcome.ANSWERED:
                health, answered = answer, address
                break
            # What a socket says that may not be the server's HTTP port says nothing.
            if len(addresses) == 1:
                health = answer
        if health is not None and answered is not None and _may_sleep(server, health):
            response = yield from self._asked(server, answered, "sleeping", SLEEPING_TIMEOUT)
            if response.status == 200 and endpoints.says_sleeping(response.body):
                path = server.profile.endpoints["sleeping"]
                health = replace(
                    health,
                    meaning=HealthMeaning.SLEEPING,
                    status="sleeping",
                    message=f"{path} is true",
                )
        now = time.monotonic()
        server.came("health", answered=not mute or answered is not None, now=now)
        if self._servers.get(server.pid) is not server:
            return
        if answered is not None and server.address is None:
            server.address = answered
            server.ask_at.setdefault("metrics", now)
            self._tell_found(server)
        if health is not None:
            server.accused = health.meaning not in _AT_EASE
            if health.outcome is Outcome.REFUSED:
                self._search_at = min(self._search_at, now + server.period)
            self._send([HealthSeen(instance=key, health=health) for key in server.keys])

    def _metrics_of(self, server: Server) -> Question:
        """Ask for the counters; no answer tells nothing that health does not tell."""
        response = yield from self._asked(server, server.addresses[0], "metrics")
        now = time.monotonic()
        refused = response.status in (401, 403)
        server.came("metrics", answered=not (refused or _is_mute(response)), now=now)
        if response.status != 200 or self._servers.get(server.pid) is not server:
            return
        text = response.body.decode("utf-8", "replace")
        found = endpoints.counters_of_text(text, server.profile, at=Instant(now))
        alone = len(server.keys) == 1
        self._send(
            [
                CountersSeen(instance=key, counters=counters)
                for key in server.keys
                if (counters := of_instance(key, found, alone=alone)) is not None
            ]
        )

    def _tell_refused(self, server: Server, path: str, status: int) -> None:
        for key in server.keys:
            self._channel.send(
                {
                    "kind": "refused",
                    "instance": to_plain(key),
                    "path": path,
                    "status": status,
                    "keys": len(self._keys),
                }
            )

    def _send(self, observations: Iterable[Observation]) -> None:
        items = [to_plain(observation) for observation in observations]
        if items:
            self._channel.send({"kind": "observations", "items": items})


def _health(response: http.Response, profile: EngineProfile) -> Health:
    at = Instant(time.monotonic())
    if response.status is None:
        return endpoints.health_of_error(response.error, at=at, elapsed=response.elapsed)
    return endpoints.health_of_answer(
        response.status, response.body, profile, at=at, elapsed=response.elapsed
    )


def _is_mute(response: http.Response) -> bool:
    """Say whether a request was left waiting until we cut it."""
    late = endpoints.outcome_of_error(response.error) is Outcome.TIMED_OUT
    return late or response.error.startswith(http.NOT_ACCEPTED)


def _may_sleep(server: Server, health: Health) -> bool:
    """Say whether the engine is to be asked if it sleeps.

    An engine without a health monitor answers 200 for as long as HTTP lives; and the answer of a
    monitor is as old as its last look, 12 s for LMDeploy's, which matters while a beat is missing.
    """
    if "sleeping" not in server.profile.endpoints or health.meaning is HealthMeaning.SLEEPING:
        return False
    return not health.status or server.closer or health.meaning not in _AT_EASE


def body(channel: Channel) -> None:
    """Probe what the daemon names until it closes the channel."""
    Prober(channel).run()


if __name__ == "__main__":
    serve(body)
