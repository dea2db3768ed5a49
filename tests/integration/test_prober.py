"""The prober tells what servers say and how their processes fare."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hangwatch.core.codec import from_plain, to_plain
from hangwatch.daemon.prober import Server, of_instance
from hangwatch.lab import launch
from hangwatch.lab.launch import Fleet
from hangwatch.model.capture import Target
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.observation import CountersSeen, HealthSeen, ProcessesSeen
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, Outcome
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.system.spawn import Child

LIMIT = 60.0

Seen = HealthSeen | CountersSeen | ProcessesSeen


class Talk:
    """A prober that we are the daemon of."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.observations: list[Seen] = []
        self.found: list[dict[str, Any]] = []
        self.alive = 0

    def watch(self, *servers: tuple[InstanceKey, int], interval: float = 1.0) -> None:
        self.child.channel.send(
            {
                "kind": "watch",
                "profiles": to_plain((PROFILE,)),
                "interval": interval,
                "instances": [
                    {"instance": to_plain(key), "pid": pid, "profile": PROFILE.name}
                    for key, pid in servers
                ],
            }
        )  # fmt: skip

    def hear(self) -> None:
        for message in self.child.channel.wait(1.0):
            match message["kind"]:
                case "observations":
                    self.observations += [from_plain(Seen, item) for item in message["items"]]
                case "found":
                    self.found.append(message)
                case "alive":
                    self.alive += 1
                case _:
                    raise AssertionError(message)

    def until(self, wanted: Callable[[Seen], bool]) -> Seen:
        """Return the first observation from now on that is wanted."""
        deadline = time.monotonic() + LIMIT
        self.observations.clear()
        while True:
            for observation in self.observations:
                if wanted(observation):
                    return observation
            assert time.monotonic() < deadline, self.observations[-3:]
            self.hear()

    def health(self, key: InstanceKey, meaning: HealthMeaning) -> HealthSeen:
        seen = self.until(
            lambda o: (
                isinstance(o, HealthSeen) and o.instance == key and o.health.meaning is meaning
            )
        )
        assert isinstance(seen, HealthSeen)
        return seen

    def counters(self, key: InstanceKey) -> Counters:
        seen = self.until(lambda o: isinstance(o, CountersSeen) and o.instance == key)
        assert isinstance(seen, CountersSeen)
        return seen.counters

    def states(self, key: InstanceKey, wanted: Callable[[dict[Role, str]], bool]) -> ProcessesSeen:
        def states(o: Seen) -> dict[Role, str]:
            return {p.role: p.state for p in o.processes} if isinstance(o, ProcessesSeen) else {}

        seen = self.until(lambda o: o.instance == key and wanted(states(o)))
        assert isinstance(seen, ProcessesSeen)
        return seen


@pytest.fixture
def talk() -> Iterator[Talk]:
    with Child("hangwatch.daemon.prober", name="prober") as child:
        yield Talk(child)


def test_a_server_that_never_answers_is_asked_more_and_more_seldom():
    server = Server(pid=1, keys=(), profile=PROFILE, interval=10.0)
    pauses = []
    now = 0.0
    while now < 4 * 3600:
        server.came("health", timed_out=True, now=now + 15.0)
        pauses.append(server.ask_at["health"] - (now + 15.0))
        now = server.ask_at["health"]
    server.came("health", timed_out=False, now=now)
    server.came("health", timed_out=True, now=now)

    assert [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0] == pauses[:7]
    assert len(pauses) < 60
    assert now + 10.0 == server.ask_at["health"]


def key_of(server: launch.Server) -> InstanceKey:
    return InstanceKey(pid=server.pid, tag="DP0")


def test_a_healthy_server_is_found_asked_and_looked_at(tmp_path, talk):
    title = "/usr/bin/python3 /opt/bin/lmdeploy serve api_server internlm/x"
    with launch.Server(tmp_path, "--title", title, interval=0.5) as server:
        key = key_of(server)
        talk.watch((key, server.pid))

        healthy = talk.health(key, HealthMeaning.HEALTHY)
        first = talk.counters(key)
        later = talk.until(
            lambda o: isinstance(o, CountersSeen) and (o.counters.tokens or 0) > first.tokens
        )
        looked = talk.states(key, lambda s: set(s) == {Role.API_SERVER, Role.ENGINE})

        assert "Engine is healthy." == healthy.health.message
        assert later.counters.running is not None
        assert {server.pid, server.engine_pid} == {p.pid for p in looked.processes}
        assert all(p.needed and p.tracer_pid == 0 for p in looked.processes)
        assert server.url == talk.found[-1]["address"]
        assert sorted([server.pid, server.engine_pid]) == talk.found[-1]["pids"]


def test_each_endpoint_is_asked_once_a_period_at_most_and_only_with_get(tmp_path, talk):
    with launch.Server(tmp_path, interval=0.5) as server:
        talk.watch((key_of(server), server.pid), interval=1.0)
        began = time.monotonic()
        for _ in range(4):
            talk.counters(key_of(server))
        elapsed = time.monotonic() - began
        asked = [
            line
            for line in server.log.read_text().splitlines()
            if line.startswith("INFO:     127.0.0.1") and "completions" not in line
        ]

    paths = [re.search(r'"(\S+ \S+) HTTP', line)[1] for line in asked]
    assert {"GET /health", "GET /metrics"} == set(paths)
    for path in set(paths):
        assert paths.count(path) <= elapsed + 3


def test_a_server_that_speaks_first_is_not_taken_for_the_owner_of_all(tmp_path, talk):
    with Fleet(tmp_path, servers=3) as fleet:
        fleet.wait_ready()
        keys = [InstanceKey(pid=server["pid"]) for server in fleet.servers]
        own = {s["pid"]: {s["pid"], s["engine_pid"]} for s in fleet.servers}
        for count in (1, 2, 3):
            talk.watch(*((key, key.pid) for key in keys[:count]))
            for key in keys[:count]:
                seen = talk.states(key, lambda s: Role.ENGINE in s)

                assert own[key.pid] == {process.pid for process in seen.processes}


def test_a_process_that_is_somebody_elses_is_released_and_not_gone():
    def target(pid: int, ppid: int, role: Role, instance: str) -> Target:
        return Target(process=ProcessId(pid), ppid=ppid, role=role, instance=instance)

    ours, other = os.getpid(), os.getppid()
    server = Server(pid=ours, keys=(InstanceKey(pid=ours),), profile=PROFILE, interval=10.0)
    name = str(ours)
    server.learn((target(ours, 1, Role.API_SERVER, name), target(other, 1, Role.ENGINE, name)))
    before = server.look(Instant(1.0))
    server.learn((target(ours, 1, Role.API_SERVER, name),))
    released, after = server.look(Instant(2.0)), server.look(Instant(3.0))

    assert {ours: True, other: True} == {p.pid: p.needed for p in before}
    assert {ours: True, other: False} == {p.pid: p.needed for p in released}
    assert [ours] == [p.pid for p in after]


@pytest.mark.slow
def test_a_server_that_hangs_delays_nobody_and_is_asked_once(tmp_path, talk):
    with (
        launch.Server(tmp_path, "--fault", "sigstop-self", name="stuck") as stuck,
        launch.Server(tmp_path, name="well") as well,
    ):
        talk.watch((key_of(stuck), stuck.pid), (key_of(well), well.pid))
        talk.health(key_of(stuck), HealthMeaning.HEALTHY)
        talk.health(key_of(well), HealthMeaning.HEALTHY)
        stuck.start_fault()
        stuck.truth()
        talk.states(key_of(stuck), lambda s: s.get(Role.ENGINE) == "T")
        answers = 0
        timed_out = None
        while timed_out is None:
            seen = talk.until(lambda o: isinstance(o, HealthSeen))
            if seen.instance == key_of(well):
                answers += 1
            elif seen.health.meaning is None:
                timed_out = seen
        threads = len(list(Path(f"/proc/{talk.child.pid}/task").iterdir()))

        assert Outcome.TIMED_OUT is timed_out.health.outcome
        assert answers >= 5
        # Its own, the search, and each server's questions with the threads that end them.
        assert threads <= 2 + 4 * 2
        assert ("T", "T") == (state(stuck.pid), state(stuck.engine_pid))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_blocked_engine_is_told_by_its_health_and_frozen_gauges(tmp_path, talk):
    with launch.Server(tmp_path, "--fault", "blocked-call") as server:
        key = key_of(server)
        talk.watch((key, server.pid))
        talk.health(key, HealthMeaning.HEALTHY)
        talk.until(lambda o: isinstance(o, CountersSeen) and bool(o.counters.running))
        server.start_fault()
        server.truth()

        blocked = talk.health(key, HealthMeaning.LOOP_BLOCKED)
        first, second = talk.counters(key), talk.counters(key)

        assert 503 == blocked.health.http
        assert first.tokens == second.tokens
        assert first.running == second.running
        assert (first.running or 0) > 0


def test_a_process_that_ends_is_told_and_not_forgotten(tmp_path, talk):
    with launch.Server(tmp_path, "--fault", "engine-exit") as server:
        key = key_of(server)
        talk.watch((key, server.pid))
        talk.states(key, lambda s: s.get(Role.ENGINE) in {"S", "R"})
        server.start_fault()
        server.truth()

        talk.states(key, lambda s: s.get(Role.ENGINE) == "")
        talk.health(key, HealthMeaning.DEAD)
        server.process.kill()
        server.process.wait()
        talk.until(lambda o: isinstance(o, HealthSeen) and o.health.outcome is Outcome.REFUSED)
        talk.states(key, lambda s: s and set(s.values()) == {""})


def test_a_pid_that_is_not_there_is_gone(talk):
    key = InstanceKey(pid=2**22 + 1)
    talk.watch((key, 2**22 + 1))

    gone = talk.states(key, lambda s: set(s.values()) == {""})

    assert [2**22 + 1] == [p.pid for p in gone.processes]


def test_what_is_watched_no_longer_is_asked_no_longer(tmp_path, talk):
    with launch.Server(tmp_path, name="a") as one, launch.Server(tmp_path, name="b") as other:
        talk.watch((key_of(one), one.pid), (key_of(other), other.pid))
        talk.health(key_of(one), HealthMeaning.HEALTHY)
        talk.watch((key_of(other), other.pid))
        talk.health(key_of(other), HealthMeaning.HEALTHY)
        talk.observations.clear()
        for _ in range(3):
            talk.counters(key_of(other))

        assert [] == [o for o in talk.observations if o.instance == key_of(one)]


TWO_SOCKETS = """
import http.server, socket, sys, threading

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status": "healthy", "message": "Engine is healthy."}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

raw = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
for server in raw:
    def serve(server=server):
        while True:
            peer, _ = server.accept()
            peer.sendall(b"not the protocol you speak")
            peer.close()
    threading.Thread(target=serve, daemon=True).start()
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_sockets_that_do_not_speak_http_are_passed_over(talk):
    with subprocess.Popen(
        [sys.executable, "-c", TWO_SOCKETS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        key = InstanceKey(pid=process.pid)
        talk.watch((key, process.pid))
        talk.health(key, HealthMeaning.HEALTHY)
        process.kill()

    assert f"http://127.0.0.1:{port}" == talk.found[-1]["address"]


def test_it_says_that_it_lives_and_ends_with_its_channel(talk):
    deadline = time.monotonic() + LIMIT
    while talk.alive < 3:
        assert time.monotonic() < deadline
        talk.hear()

    assert talk.child.close(timeout=30.0)


def test_it_dies_without_harm_to_the_server(tmp_path, talk):
    with launch.Server(tmp_path) as server:
        talk.watch((key_of(server), server.pid))
        talk.health(key_of(server), HealthMeaning.HEALTHY)
        os.kill(talk.child.pid, signal.SIGKILL)
        talk.child.process.wait(LIMIT)

        assert None is server.process.poll()
        assert state(server.engine_pid) in "SR"


@pytest.mark.parametrize(
    ("tag", "labels", "alone", "expected"),
    [
        ("DP0", ["0"], True, "0"),
        ("", ["7"], True, "7"),
        ("DP1", ["0", "1"], False, "1"),
        ("Engine 000", ["0", "1"], False, "0"),
        ("DP2", ["0", "1"], False, None),
        ("", ["0", "1"], True, None),
    ],
)
def test_counters_go_to_the_instance_of_their_label(
    tag: str, labels: Sequence[str], alone: bool, expected: str | None
):
    at = Instant(1.0)
    found = {
        label: Counters(at=at, since=at, running=number) for number, label in enumerate(labels)
    }

    got = of_instance(InstanceKey(pid=1, tag=tag), found, alone=alone)

    assert (found[expected] if expected is not None else None) == got
