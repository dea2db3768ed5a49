"""The prober tells what servers say and how their processes fare."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from played import HEALTHY, METRICS, MUTE, WORDLESS, Asked, played

from hangwatch.core.codec import from_plain, to_plain
from hangwatch.daemon.servers import Found, Server, of_instance
from hangwatch.lab import launch
from hangwatch.lab.launch import Fleet
from hangwatch.model.capture import Target
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.observation import CountersSeen, HealthSeen, ProcessesSeen
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile, HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, Outcome, ProcessVital
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.system import procfs
from hangwatch.system.spawn import Child

LIMIT = 60.0

Seen = HealthSeen | CountersSeen | ProcessesSeen


class Talk:
    """A prober that we are the daemon of."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.observations: list[Seen] = []
        self.found: list[dict[str, Any]] = []
        self.company: set[int] = set()
        self.complaints: list[dict[str, Any]] = []
        self.alive = 0

    def watch(
        self,
        *servers: tuple[InstanceKey, int],
        period: float = 1.0,
        profile: EngineProfile = PROFILE,
        key_file: Path | str = "",
    ) -> None:
        self.child.channel.send(
            {
                "kind": "watch",
                "profiles": to_plain((profile,)),
                "interval": 1.0,
                "period": period,
                "key_file": str(key_file),
                "instances": [
                    {"instance": to_plain(key), "pid": pid, "profile": profile.name}
                    for key, pid in servers
                ],
            }
        )  # fmt: skip

    def look_closer(self, *keys: InstanceKey) -> None:
        self.child.channel.send({"kind": "closer", "instances": to_plain(keys)})

    def hear(self) -> None:
        for message in self.child.channel.wait(1.0):
            match message["kind"]:
                case "observations":
                    self.observations += [from_plain(Seen, item) for item in message["items"]]
                case "found":
                    self.found.append(message)
                case "company":
                    self.company = {pid for pid, _ in message["processes"]}
                case "alive":
                    self.alive += 1
                case "refused" | "keys_unreadable":
                    self.complaints.append(message)
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

    def vital(self, key: InstanceKey, wanted: Callable[[ProcessVital], bool]) -> ProcessVital:
        """Return the first look at the server itself from now on that is wanted."""
        seen = self.until(
            lambda o: (
                isinstance(o, ProcessesSeen)
                and o.instance == key
                and any(p.pid == key.pid and wanted(p) for p in o.processes)
            )
        )
        assert isinstance(seen, ProcessesSeen)
        return next(p for p in seen.processes if p.pid == key.pid)

    def complaint(self) -> dict[str, Any]:
        """Return the first complaint that was not returned yet."""
        deadline = time.monotonic() + LIMIT
        while not self.complaints:
            assert time.monotonic() < deadline
            self.hear()
        return self.complaints.pop(0)

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
        server.came("health", answered=False, now=now + 15.0)
        pauses.append(server.ask_at["health"] - (now + 15.0))
        now = server.ask_at["health"]
    server.came("health", answered=True, now=now)
    server.came("health", answered=False, now=now)

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
        assert {server.pid, server.engine_pid} == talk.company


def test_each_endpoint_is_asked_once_a_period_at_most_and_only_with_get(tmp_path, talk):
    with launch.Server(tmp_path, interval=0.5) as server:
        talk.watch((key_of(server), server.pid), period=1.0)
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
    own = target(ours, 1, Role.API_SERVER, name)
    server.learn(Found(targets=(own, target(other, 1, Role.ENGINE, name))), 1.0)
    before = server.look(Instant(1.0), procfs.Unsent())
    server.learn(Found(targets=(own,)), 2.0)
    released, after = (server.look(Instant(at), procfs.Unsent()) for at in (2.0, 3.0))

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
        assert threads <= 2  # its own and the search
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


def test_a_pid_that_was_never_there_is_gone_and_not_missed(talk):
    key = InstanceKey(pid=2**22 + 1)
    talk.watch((key, 2**22 + 1))

    gone = talk.states(key, lambda s: set(s.values()) == {""})

    assert [(2**22 + 1, False)] == [(p.pid, p.needed) for p in gone.processes]


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


# --- looking closer


BUSY = """
import signal, sys, threading, time

def spin():
    while True: pass

def switch():
    while True: time.sleep(0.001)

for body in (spin, switch, switch):
    threading.Thread(target=body, daemon=True).start()
signal.pause()
"""


def test_threads_are_counted_only_while_a_beat_is_missing(talk):
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        key = InstanceKey(pid=process.pid)
        talk.watch((key, process.pid))
        # Its main thread waits, once it has started the others; these switch.
        before = talk.vital(key, lambda p: p.cpu_pct is not None and p.vol_ctxt_per_s == 0)
        talk.look_closer(key)
        closer = talk.vital(key, lambda p: p.switches_per_s is not None)
        talk.look_closer()
        after = talk.vital(key, lambda p: p.switches_per_s is None)
        process.kill()

    assert before.busiest_cpu_pct is None
    assert closer.switches_per_s > 20
    assert 5 < closer.busiest_cpu_pct <= 110
    assert after.busiest_cpu_pct is None
    assert after.read_bytes_per_s is not None


@pytest.mark.parametrize(
    ("stdout", "piped"), [(subprocess.PIPE, True), (subprocess.DEVNULL, False)]
)
def test_a_standard_output_that_is_a_pipe_is_known(talk, stdout, piped):
    with subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], stdout=stdout
    ) as process:
        key = InstanceKey(pid=process.pid)
        talk.watch((key, process.pid))
        seen = talk.vital(key, lambda p: bool(p.state))
        process.kill()

    assert piped == seen.stdout_pipe


@pytest.mark.parametrize("words", [["--session-len", "262144"], ["--session-len=262144"]])
def test_the_context_length_of_the_command_line_is_known(talk, words):
    profile = replace(PROFILE, context=re.compile(r"--session-len[= ](?P<tokens>\d+)"))
    with subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()", *words]
    ) as process:
        key = InstanceKey(pid=process.pid)
        talk.watch((key, process.pid), profile=profile)
        seen = talk.vital(key, lambda p: bool(p.state))
        process.kill()

    assert 262_144 == seen.context


STALLED = """
import signal, socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
peer.setblocking(False)
try:
    while True: peer.send(b"token " * 4096)
except BlockingIOError:
    print("full", flush=True)
signal.pause()
"""


def test_what_a_stalled_client_does_not_take_is_counted_while_a_beat_is_missing(talk):
    with subprocess.Popen([sys.executable, "-c", STALLED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as client:
            assert b"full\n" == process.stdout.readline()
            key = InstanceKey(pid=process.pid)
            talk.watch((key, process.pid))
            before = talk.vital(key, lambda p: bool(p.state))
            talk.look_closer(key)
            first, second = (talk.vital(key, lambda p: bool(p.unsent_bytes)) for _ in range(2))
            client.setblocking(False)

            def drain(vital: ProcessVital) -> bool:
                with suppress(BlockingIOError):
                    while client.recv(1 << 20):
                        pass
                return vital.unsent_bytes == 0

            talk.vital(key, drain)
        process.kill()

    assert before.unsent_bytes is None
    assert first.unsent_bytes == second.unsent_bytes


def test_drivers_are_told_while_they_live_and_hosts_that_ended_long_ago_explain_nothing():
    def target(pid: int, ppid: int, role: Role, ticks: int = 0) -> Target:
        return Target(process=ProcessId(pid, ticks), ppid=ppid, role=role, instance="")

    ours, raylet = os.getpid(), os.getppid()
    gone = 2**22 + 1
    server = Server(pid=ours, keys=(InstanceKey(pid=ours),), profile=PROFILE, interval=10.0)
    own, host = target(ours, raylet, Role.API_SERVER), target(raylet, 1, Role.RAY_SYSTEM)
    server.learn(Found(targets=(own, host, target(1, 0, Role.DRIVER))), 0.0)
    first = server.look(Instant(1.0), procfs.Unsent())
    server.learn(Found(targets=(own, host, target(gone, 1, Role.DRIVER))), 2.0)
    second = server.look(Instant(3.0), procfs.Unsent())
    server.learn(Found(targets=(own, host)), 100.0)
    third = server.look(Instant(101.0), procfs.Unsent())

    def drivers(vitals: Sequence[ProcessVital]) -> dict[int, tuple[bool, bool]]:
        return {p.pid: (p.ended, p.needed) for p in vitals if p.role is Role.DRIVER}

    assert {1: (False, False)} == drivers(first)
    assert {1: (False, False), gone: (True, False)} == drivers(second)
    assert {1: (False, False)} == drivers(third)
    assert raylet not in {p.pid for p in (*first, *second, *third)}


# --- sleep


ASLEEP = {"body": '{"is_sleeping": true}'}
AWAKE = {"body": '{"is_sleeping": false}'}
SAYS_ASLEEP = {"body": '{"status": "sleeping", "message": "Engine is sleeping."}'}
ACCUSED = {
    "status": 503,
    "body": '{"status": "unhealthy", "message": "Backend health probe timed out after 10.0s."}',
}


@pytest.mark.parametrize(
    ("health", "sleeping", "asks"),
    [(WORDLESS, ASLEEP, True), (SAYS_ASLEEP, MUTE, False), (ACCUSED, ASLEEP, True)],
    ids=["without words", "with words", "accused"],
)
def test_sleep_is_seen_whoever_says_so(tmp_path, talk, health, sleeping, asks):
    with played(tmp_path, {"/health": health, "/is_sleeping": sleeping}) as servers:
        (pid,) = servers.pids
        talk.watch((InstanceKey(pid=pid), pid))
        talk.health(InstanceKey(pid=pid), HealthMeaning.SLEEPING)

        assert asks == ("/is_sleeping" in {request.path for request in servers.asked(pid)})


def test_a_contented_monitor_is_asked_about_sleep_only_while_a_beat_is_missing(tmp_path, talk):
    with played(tmp_path, {"/health": HEALTHY, "/is_sleeping": ASLEEP}) as servers:
        (pid,) = servers.pids
        key = InstanceKey(pid=pid)
        talk.watch((key, pid))
        talk.health(key, HealthMeaning.HEALTHY)
        talk.health(key, HealthMeaning.HEALTHY)
        before = {request.path for request in servers.asked(pid)}
        talk.look_closer(key)
        talk.health(key, HealthMeaning.SLEEPING)

    assert "/is_sleeping" not in before


# --- what others do cannot hurt


@pytest.mark.slow
def test_mute_and_dripping_endpoints_delay_nobody_and_cost_no_thread(tmp_path, talk):
    mute = {"/health": WORDLESS, "/metrics": MUTE, "/is_sleeping": MUTE}
    dripping = {"/health": WORDLESS, "/metrics": {"drip": True}, "/is_sleeping": {"drip": True}}
    dead = {"/health": MUTE}
    well = {"/health": HEALTHY, "/metrics": METRICS}
    with played(tmp_path, *[mute] * 4, *[dripping] * 3, *[dead] * 3, *[well] * 10) as servers:
        keys = {
            pid: [InstanceKey(pid=pid, tag=f"DP{i}") for i in range(15)] for pid in servers.pids
        }
        talk.watch(*((key, pid) for pid, own in keys.items() for key in own), period=1.0)
        silent, healthy = keys[servers.pids[9]][14], [keys[pid][0] for pid in servers.pids[10:]]
        talk.until(
            lambda o: (
                isinstance(o, HealthSeen)
                and o.instance == silent
                and o.health.outcome is Outcome.TIMED_OUT
            )
        )
        answers = [o.instance for o in talk.observations if isinstance(o, HealthSeen)]
        counted = [o.instance for o in talk.observations if isinstance(o, CountersSeen)]
        folder = Path(f"/proc/{talk.child.pid}")
        threads, descriptors = (len(list((folder / what).iterdir())) for what in ("task", "fd"))
        asked = {pid: servers.asked(pid) for pid in servers.pids}

    # Fifteen seconds passed until the first was given up on; the others were asked every second.
    assert all(answers.count(key) >= 8 and counted.count(key) >= 8 for key in healthy)
    assert threads <= 2  # its own and the search
    assert descriptors < 64
    for requests in asked.values():
        for path in {request.path for request in requests}:
            times = [request.at for request in requests if request.path == path]
            pauses = [later - earlier for earlier, later in pairwise(times)]
            assert all(pause > 0.5 for pause in pauses), path
    waiting = [request.path for request in asked[servers.pids[9]]]
    assert ["/health"] == waiting  # one lies in its queue, and no second one


def test_however_often_an_engine_beats_an_endpoint_is_asked_every_ten_seconds_at_most(
    tmp_path, talk
):
    with played(tmp_path, {"/health": HEALTHY, "/metrics": METRICS}) as servers:
        (pid,) = servers.pids
        key = InstanceKey(pid=pid)
        talk.watch((key, pid), period=Policy().probe_interval)
        talk.health(key, HealthMeaning.HEALTHY)
        talk.health(key, HealthMeaning.HEALTHY)
        times = [request.at for request in servers.asked(pid) if request.path == "/health"]

    assert times[1] - times[0] > 9.0


# --- keys

LOCKED = {"body": METRICS["body"], "key": "sk-right", "echo": True}


def keys_of(requests: Sequence[Asked], path: str) -> list[str]:
    return [request.key for request in requests if request.path == path]


def test_an_endpoint_that_wants_a_key_is_told_once_with_the_number_of_ours(tmp_path, talk):
    with played(tmp_path, {"/health": HEALTHY, "/metrics": LOCKED}) as servers:
        (pid,) = servers.pids
        key = InstanceKey(pid=pid)
        talk.watch((key, pid))
        complaint = talk.complaint()
        for _ in range(4):
            talk.health(key, HealthMeaning.HEALTHY)

    assert ("/metrics", 401, 0) == (complaint["path"], complaint["status"], complaint["keys"])
    assert [] == talk.complaints


def test_a_key_goes_where_it_is_needed_and_nowhere_else(tmp_path, talk):
    keys = tmp_path / "keys"
    keys.write_text("sk-wrong\nsk-right\n")
    behaviour = {
        "/health": WORDLESS,
        "/metrics": LOCKED,
        "/is_sleeping": {**AWAKE, "key": "sk-right"},
    }
    with played(tmp_path, behaviour, {"/health": {**HEALTHY, "key": "sk-right"}}) as servers:
        one, other = (InstanceKey(pid=pid) for pid in servers.pids)
        talk.watch(*((key, key.pid) for key in (one, other)), key_file=keys)
        talk.health(other, HealthMeaning.HEALTHY)
        talk.counters(one)
        talk.counters(one)
        asked = {key: servers.asked(key.pid) for key in (one, other)}

    assert {""} == set(keys_of(asked[one], "/health"))
    assert "sk-right" == keys_of(asked[one], "/metrics")[-1]
    assert "sk-right" == keys_of(asked[one], "/is_sleeping")[-1]
    assert ["", "sk-wrong", "sk-right"] == keys_of(asked[other], "/health")[:3]
    assert [] == talk.complaints


@pytest.mark.slow
def test_a_key_that_is_replaced_is_used_without_a_restart(tmp_path, talk):
    keys = tmp_path / "keys"
    keys.write_text("sk-old\n")
    with played(tmp_path, {"/health": HEALTHY, "/metrics": LOCKED}) as servers:
        (pid,) = servers.pids
        talk.watch((InstanceKey(pid=pid), pid), key_file=keys)
        refused = talk.complaint()
        keys.write_text("")
        unreadable = talk.complaint()
        keys.write_text("sk-right\n")
        talk.counters(InstanceKey(pid=pid))

    assert ("refused", 1) == (refused["kind"], refused["keys"])
    assert f"there is no API key in {keys}" in unreadable["problem"]


def test_a_server_that_repeats_a_key_does_not_get_it_past_the_prober(tmp_path, talk):
    keys = tmp_path / "keys"
    keys.write_text('sk-"right\n')
    words = json.dumps({"status": "unhealthy", "message": 'known: sk-"right'})
    with played(tmp_path, {"/health": {"status": 503, "body": words}}) as servers:
        (pid,) = servers.pids
        talk.watch((InstanceKey(pid=pid), pid), key_file=keys)
        seen = talk.until(lambda o: isinstance(o, HealthSeen) and bool(o.health.message))

    assert isinstance(seen, HealthSeen)
    assert "known: [redacted]" == seen.health.message


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
