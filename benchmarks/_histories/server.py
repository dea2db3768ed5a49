"""One server of LMDeploy or vLLM: its API server, its engine, and what can be seen of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random

from benchmarks._histories.world import Log, World
from hangwatch.core import endpoints
from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.identity import InstanceKey, Role
from hangwatch.model.observation import CountersSeen, GpusSeen, HealthSeen, ProcessesSeen
from hangwatch.model.profile import HealthMeaning, Signal
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, GpuVital, Health, Outcome, ProcessVital
from hangwatch.profiles import lmdeploy, vllm

INTERVAL = 10.0
MONITOR_EVERY = 12.0
PROBE_TIMEOUT = 10.0
UNHEALTHY_AFTER = 90.0
HTTP_TIMEOUT = 15.0
ASK_EVERY = 10.0
MAX_ASK_PAUSE = 300.0
LOOK_EVERY = 5.0
CALM_LOOKS = 12
"""Of so many looks of which each would say the same, one is delivered."""

ANSWERS_EVERY = 5.0
"""Of the access lines that tell of answers within so many seconds, the first is delivered: the next
ones tell nothing new."""

TOKENISE = 1.5e-6
"""Seconds of the API server's loop for a token of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What one kind of server is like.

    Attributes:
        vllm: Whether it is vLLM's: its beats ask nobody, a last line of zeros is printed when
            tokens cease, gauges follow the engine's steps, health has no words.
        slots: Requests in a batch.
        context: Longest prompt, tokens.
        prefill: Prompt tokens a second.
        decode: Tokens a second of one request.
        monitor: Whether ``/health`` has words (since 0.14).
        access_log: Whether uvicorn logs requests.
        ray: Whether the model runs in a worker of its own.
        spins: Whether the engine waits for the GPU on CPU.
        rests_at_full: Whether an idle GPU shows full utilisation (tensor parallel ranks that spin).
        tells_context: Whether the command line names the context length.
    """

    vllm: bool = False
    slots: int = 64
    context: int = 262_144
    prefill: float = 20_000.0
    decode: float = 40.0
    monitor: bool = True
    access_log: bool = True
    ray: bool = False
    spins: bool = False
    rests_at_full: bool = False
    tells_context: bool = True


def traits(rng: Random) -> Traits:
    """Draw a kind of server."""
    kind = _lmdeploy(rng)
    if kind.rests_at_full:
        return replace(kind, ray=True)  # several ranks are workers of Ray
    if rng.random() < 0.25:
        return replace(kind, vllm=True, monitor=False, ray=False, spins=True)
    return kind


def _lmdeploy(rng: Random) -> Traits:
    return Traits(
        slots=rng.choice((16, 32, 64, 128)),
        context=rng.choice((32_768, 131_072, 262_144, 262_144)),
        prefill=math.exp(rng.uniform(math.log(1_500), math.log(60_000))),
        decode=rng.uniform(15, 90),
        monitor=rng.random() < 0.7,
        access_log=rng.random() < 0.6,
        ray=rng.random() < 0.5,
        spins=rng.random() < 0.4,
        rests_at_full=rng.random() < 0.1,
        tells_context=rng.random() < 0.7,
    )


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        prompt: Tokens to be read.
        output: Tokens to be written.
        done: Called when it is answered.
    """

    prompt: int
    output: int
    done: Callable[[], None] | None = None


class Server:
    """The truth of one server, from the start of its process to its end."""

    def __init__(self, world: World, number: int, pid: int, kind: Traits, logs: list[Log]) -> None:
        self.world = world
        self.rng = world.rng
        self.number = number
        self.pid = pid
        self.kind = kind
        self.logs = logs
        self.profile = vllm.PROFILE if kind.vllm else lmdeploy.PROFILE
        self.key = InstanceKey(pid=pid, tag="Engine 000" if kind.vllm else "DP0")
        self.flowed = False  # whether the last beat had tokens
        self.alive = True
        self.ready = False
        self.asleep = False
        self.known = False
        self.hang = ""  # what makes it hang, or ""
        self.ended: dict[Role, float] = {}
        self.host_ended_at: float | None = None
        # what keeps a loop from turning, by the loop: "forward", "loop", "api"
        self.holds: dict[str, list[str]] = {"forward": [], "loop": [], "api": []}
        # the engine: its own time, in which nothing is held
        self.time = 0.0
        self.settled_at = world.now
        self.queue: deque[Request] = deque()
        self.reading: Request | None = None
        self.decoding = 0
        self.lost = 0  # requests that are handed out and that nobody works on
        self.unread = 0  # those of them whose answer a client does not read
        self.events: list[tuple[float, int, Request, bool]] = []
        self.serial = 0
        self.armed = 0
        self.generated = self.prompted = 0.0
        self.finished = 0
        self.answered_at = -ANSWERS_EVERY
        self.ticked_at = world.now
        # the task that prints
        self.told_in = self.told_out = 0.0
        self.printed_at = world.now
        self.gauges = (0, 0, 0)
        self.beat_waits = self.beat_dead = False
        self.lag = 0.0
        self.last_flow_at = world.now
        # the monitor
        self.status, self.message = "initializing", "Engine health monitor is starting."
        self.tick_seen = self.tick_since = world.now
        self.probe_waits = False
        self.pauses: dict[str, float] = {}
        self.looks = self.number
        self.since: dict[int, tuple[str, float]] = {}
        self.since_calm: dict[str, int] = {}

    # --- the engine ---

    @property
    def working(self) -> bool:
        return bool(self.decoding or self.reading)

    @property
    def held(self) -> bool:
        return bool(self.holds["forward"] or self.holds["loop"]) or self.asleep

    @property
    def in_flight(self) -> int:
        return self.decoding + (self.reading is not None) + len(self.queue) + self.lost

    @property
    def fresh(self) -> bool:
        """Whether a beat tells of the present work."""
        return self.world.now - self.printed_at < INTERVAL and self.told_out > 0

    def settle(self) -> None:
        now = self.world.now
        if not self.held:
            elapsed = now - self.settled_at
            self.time += elapsed
            if self.decoding:
                self.generated += self.decoding * self.kind.decode * elapsed
                if elapsed > 0:
                    self.last_flow_at = now
            if self.working and elapsed > 0:
                self.ticked_at = now
        self.settled_at = now

    def arm(self) -> None:
        self.armed += 1
        if self.events and not self.held and self.alive:
            self.world.after(max(0.0, self.events[0][0] - self.time), self._step, self.armed)

    def _step(self, armed: int) -> None:
        if armed != self.armed:
            return
        self.settle()
        while self.events and self.events[0][0] <= self.time + 1e-6:
            _, _, request, answered = heappop(self.events)
            if not answered:
                self.reading = None
                self.prompted += request.prompt
                self.decoding += 1
                self.last_flow_at = self.world.now
                self._push(request.output / self.kind.decode, request, answered=True)
            else:
                self.decoding -= 1
                self.finished += 1
                self.generated += 1  # the last token comes with the answer, not before it
                if self.kind.access_log and self.world.now >= self.answered_at + ANSWERS_EVERY:
                    self.answered_at = self.world.now
                    self.say(Signal.COMPLETED, '"POST /v1/chat/completions HTTP/1.1" 200 OK')
                if request.done is not None:
                    request.done()
        self._admit()
        self.arm()

    def _push(self, seconds: float, request: Request, *, answered: bool) -> None:
        self.serial += 1
        heappush(self.events, (self.time + seconds, self.serial, request, answered))

    def _admit(self) -> None:
        if self.reading is None and self.queue and self.decoding < self.kind.slots:
            self.reading = self.queue.popleft()
            self._push(self.reading.prompt / self.kind.prefill, self.reading, answered=False)

    def submit(self, request: Request) -> bool:
        """Take a request, if anybody is there to take it."""
        if not self.alive or not self.ready or self.asleep:
            return False
        self.lag = min(self.lag + request.prompt * TOKENISE, 8.0)
        self.settle()
        self.queue.append(request)
        self._admit()
        self.arm()
        return True

    def abort(self) -> None:
        self.settle()
        self.queue.clear()
        self.events.clear()
        self.reading, self.decoding, self.lost, self.unread = None, 0, 0, 0
        self._count()
        self.arm()
        if self.kind.access_log:
            self.say(Signal.ABORTED, '"POST /abort_request HTTP/1.1" 200 OK')

    # --- what holds it ---

    def hold(self, loop: str, cause: str, seconds: float = math.inf) -> None:
        """Keep *loop* from turning."""
        self.settle()
        self._count()
        self.holds[loop].append(cause)
        self.arm()
        if seconds < math.inf:
            self.world.after(seconds, self._release, loop, cause)

    def _release(self, loop: str, cause: str) -> None:
        if cause not in self.holds[loop] or not self.alive:
            return
        self.settle()
        self.holds[loop].remove(cause)
        self.arm()
        if not self.holds["loop"]:
            self.probe_waits = False
        if self.beat_waits and not self.holds["loop"] and not self.holds["api"]:
            self.beat_waits = False
            self.world.after(0.02, self._print)

    # --- its life ---

    def serve(self) -> None:
        """Begin to listen: the model is loaded."""
        self.ready = True
        self.say(Signal.READY, "HINT:    Please open http://0.0.0.0:23333 in a browser")
        self.world.after(INTERVAL, self._wake)
        if self.kind.monitor:
            self.world.after(self.rng.uniform(0.1, MONITOR_EVERY), self._poll)
        self.world.after(self.rng.uniform(1, ASK_EVERY), self._ask, "health")
        self.world.after(self.rng.uniform(1, ASK_EVERY), self._ask, "metrics")

    def sleep(self) -> None:
        self.settle()
        self.asleep = True
        self.arm()
        self.status, self.message = "sleeping", "Engine is sleeping."
        if self.kind.access_log:
            self.say(Signal.SLEEP, '"POST /sleep?level=2 HTTP/1.1" 200 OK')

    def wake(self, seconds: float) -> None:
        """Wake up, which blocks both loops for *seconds*."""
        self.hold("api", "wakeup", seconds)
        self.hold("loop", "wakeup", seconds)
        self.world.after(seconds, self._awake)

    def _awake(self) -> None:
        self.settle()
        self.asleep = False
        self.arm()
        if self.kind.access_log:
            self.say(Signal.WAKE, '"POST /wakeup HTTP/1.1" 200 OK')

    def update(self, seconds: float) -> None:
        """Take new weights, which blocks the engine's loop for *seconds*."""
        self.hold("loop", "update", seconds)
        if self.kind.access_log:
            words = '"POST /update_weights HTTP/1.1" 200 OK'
            self.world.after(seconds, self.say, Signal.UPDATED, words)

    def kill(self, *, whole: bool, hosts: bool = False) -> None:
        """End processes: all, or the engine alone; with them the Ray that they belong to."""
        self.settle()
        now = self.world.now
        roles = [role for role, _ in self._roles()] if whole else [Role.ENGINE]
        self.ended.update(dict.fromkeys(roles, now))
        if hosts:
            self.host_ended_at = now + 1.5
        if whole:
            self.alive = False
        else:
            self.hold("loop", "ended")

    # --- what it prints ---

    def say(self, signal: Signal, text: str) -> None:
        if not self.alive:
            return
        self.known = self.known or signal is Signal.READY
        for log in self.logs[:1]:
            log.signal(
                SignalSeen(
                    instance=InstanceKey(pid=self.pid),
                    signal=signal,
                    at=Instant(self.world.now),
                    text=text,
                    profile=self.profile.name,
                )
            )

    def _wake(self) -> None:
        if not self.alive or self.beat_dead:
            return
        if self.holds["api"] or (self.holds["loop"] and not self.kind.vllm):
            self.beat_waits = True
        else:
            self._print()

    def _print(self) -> None:
        if not self.alive or self.beat_dead:
            return
        self.settle()
        now = self.world.now
        running = self.decoding + (self.reading is not None)
        self._count()
        if not self.kind.vllm:
            self.gauges = (running, len(self.queue), self.in_flight)
        running, waiting, routed = self.gauges
        elapsed = now - self.printed_at
        new_in, new_out = self.prompted - self.told_in, self.generated - self.told_out
        flows = new_in + new_out >= 1
        if elapsed > 0 and (flows or (self.kind.vllm and self.flowed)):
            self.flowed = flows
            self.told_in, self.told_out = self.prompted, self.generated
            self.known = True
            beat = Heartbeat(
                instance=self.key,
                at=Instant(now),
                printed=self.world.printed(),
                source=self.logs[0].name,
                in_tps=round(new_in / elapsed, 1),
                out_tps=round(new_out / elapsed, 1),
                running=running,
                waiting=waiting,
                routed=None if self.kind.vllm else routed,
                api_waiting=None if self.kind.vllm else 0,
                finished=None if self.kind.vllm else self.finished,
                profile=self.profile.name,
            )
            for log in self.logs:
                log.beat(beat)
        self.printed_at = now
        lag, self.lag = self.lag, 0.0
        self.world.after(INTERVAL + self.rng.uniform(0.002, 0.05) + lag, self._wake)

    # --- its monitor ---

    def _poll(self) -> None:
        if not self.alive:
            return
        self.world.after(MONITOR_EVERY, self._poll)
        if self.probe_waits or self.holds["api"] or self.asleep:
            return
        if self.holds["loop"] and Role.ENGINE not in self.ended:
            self.probe_waits = True
            self.world.after(PROBE_TIMEOUT, self._probe_timed_out)
        else:
            self._examine()

    def _probe_timed_out(self) -> None:
        if self.probe_waits:
            self.status = "unhealthy"
            self.message = "Backend health probe timed out after 10.0s."

    def _examine(self) -> None:
        self.settle()
        now = self.world.now
        if Role.ENGINE in self.ended:
            self.status, self.message = "unhealthy", "PyTorch ZMQ engine process is not alive."
            return
        if "task" in self.holds["forward"]:
            self.status = "unhealthy"
            self.message = "PyTorch engine loop task has stopped: ['EngineMainLoop']."
            return
        if self.in_flight == 0 or self.ticked_at > self.tick_seen:
            self.tick_since, self.tick_seen = now, self.ticked_at
        stood = now - self.tick_since
        self.status, self.message = "healthy", "Engine is healthy."
        if stood >= UNHEALTHY_AFTER:
            self.status = "unhealthy"
            self.message = f"Backend scheduler_tick has not advanced for {stood:.1f}s."
            if self.lost == self.in_flight:
                self.message = (
                    "Backend has dispatched request handle(s), but schedule metrics report no "
                    "active or waiting sequences."
                )

    # --- what is asked of it ---

    def _ask(self, what: str) -> None:
        if not self.alive:
            return
        if what == "metrics" and not self._calm():
            self.settle()
        if self.holds["api"]:
            self.world.after(HTTP_TIMEOUT, self._no_answer, what)
            return
        self.pauses.pop(what, None)
        self.world.after(ASK_EVERY, self._ask, what)
        if self._skips(what):
            return
        if what == "metrics":
            self._tell_counters()
        elif self.kind.monitor and self.status == "unhealthy" and self.holds["loop"]:
            self.world.after(PROBE_TIMEOUT, self._tell_health, PROBE_TIMEOUT)
        else:
            if self.kind.monitor and self.status == "unhealthy":
                self._examine()
            self._tell_health(0.003)

    def _no_answer(self, what: str) -> None:
        if not self.alive:
            return
        pause = min(MAX_ASK_PAUSE, 2 * self.pauses.get(what, ASK_EVERY / 2))
        self.pauses[what] = pause
        self.world.after(pause, self._ask, what)
        if what == "health":
            error = "timeout after 15 s"
            at = Instant(self.world.now)
            if not self.holds["api"]:
                self._tell_health(HTTP_TIMEOUT)
                return
            health = endpoints.health_of_error(error, at=at, elapsed=HTTP_TIMEOUT)
            self.world.see(HealthSeen(instance=self._name(), health=health))

    def _tell_health(self, elapsed: float) -> None:
        if not self.alive or self.holds["api"]:
            return
        if self.kind.monitor and self.asleep:
            self.status, self.message = "sleeping", "Engine is sleeping."
        elif self.kind.monitor and self.status == "unhealthy" and not self.holds["loop"]:
            self._examine()
        at = Instant(self.world.now)
        if self.kind.monitor:
            http = 503 if self.status in ("unhealthy", "initializing") else 200
            health = endpoints.health_of_words(
                self.profile,
                at=at,
                http=http,
                status=self.status,
                message=self.message,
                elapsed=elapsed,
            )
        elif self.asleep:
            health = Health(
                at=at,
                outcome=Outcome.ANSWERED,
                http=200,
                status="sleeping",
                message="/is_sleeping says so",
                meaning=HealthMeaning.SLEEPING,
            )
        else:
            http = 503 if self.kind.vllm and self._is_dead() else 200
            health = endpoints.health_of_answer(http, b"", self.profile, at=at, elapsed=elapsed)
        self.world.see(HealthSeen(instance=self._name(), health=health))

    def _count(self) -> None:
        """Let vLLM's gauges follow: they come with what its engine does, whoever prints."""
        if self.kind.vllm and not self.held:
            self.gauges = (self.decoding + (self.reading is not None), len(self.queue), 0)

    def _is_dead(self) -> bool:
        return Role.ENGINE in self.ended or "task" in self.holds["forward"]

    def _tell_counters(self) -> None:
        at = Instant(self.world.now)
        self.settle()
        self._count()
        running, waiting, routed = self.gauges
        counters = Counters(
            at=at,
            since=at,
            tokens=float(int(self.prompted) + int(self.generated)),
            running=running,
            waiting=waiting,
            routed=None if self.kind.vllm else routed,
        )
        self.world.see(CountersSeen(instance=self._name(), counters=counters))

    def _name(self) -> InstanceKey:
        return self.key if self.pid in self.world.heard_of else InstanceKey(pid=self.pid)

    def _calm(self) -> bool:
        """Say whether a look would say what the look before said."""
        now = self.world.now
        if self.hang or self.holds["loop"] or self.holds["api"] or self.ended:
            return False
        if self.in_flight:
            return self.decoding > 0 and now - self.printed_at < 12
        return now - self.last_flow_at > 180

    def _skips(self, what: str) -> bool:
        count = self.since_calm.get(what, 0) if self._calm() else 0
        self.since_calm[what] = (count + 1) % (CALM_LOOKS // 2)
        return count > 0

    # --- how it looks from outside ---

    def look(self) -> None:
        """Be looked at, as the prober does every five seconds."""
        self.looks += 1
        if not self.known or (self._calm() and self.looks % CALM_LOOKS):
            return
        if self.ended and not self.alive and self.looks > 10**6:
            return
        now = self.world.now
        at = Instant(now)
        ended_at = min(self.ended.values(), default=None)
        hosts_known = self.host_ended_at is not None and now >= self.host_ended_at
        if ended_at is not None and self.kind.ray and not hosts_known and now - ended_at < 3.0:
            return
        vitals = tuple(self._process(role, offset, at) for role, offset in self._roles())
        if hosts_known:
            vitals += (self._ended_host(at),)
        self.world.see(ProcessesSeen(instance=self._name(), processes=vitals, at=at))
        if self.alive and self.looks % 2 == 0:
            self.world.see(GpusSeen(instance=self._name(), gpus=(self._gpu(at),), at=at))

    def _roles(self) -> list[tuple[Role, int]]:
        roles = [(Role.API_SERVER, 0), (Role.ENGINE, 1)]
        return [*roles, (Role.ENGINE_WORKER, 2)] if self.kind.ray else roles

    def _ended_host(self, at: Instant) -> ProcessVital:
        return ProcessVital(
            pid=10,
            role=Role.RAY_SYSTEM,
            state="",
            since=Instant(self.host_ended_at or at),
            at=at,
            needed=False,
        )

    def _process(self, role: Role, offset: int, at: Instant) -> ProcessVital:
        pid = self.pid + offset
        if role in self.ended:
            return ProcessVital(
                pid=pid, role=role, state="", since=Instant(self.ended[role]), at=at
            )
        state, cpu, switches, wchan = self._rates(role)
        was, since = self.since.get(pid, ("", 0.0))
        if was != state:
            since = at
            self.since[pid] = (state, at)
        jitter = self.rng.uniform(0.9, 1.1)
        near = self.world.now - self.printed_at > 15 or not self.decoding
        return ProcessVital(
            pid=pid,
            role=role,
            state=state,
            since=Instant(since),
            at=at,
            wchan=wchan,
            cpu_pct=round(min(100.0, cpu * jitter), 1),
            vol_ctxt_per_s=round(switches * jitter, 1),
            read_bytes_per_s=0.0,
            switches_per_s=round((switches + 25) * jitter, 1) if near else None,
            busiest_cpu_pct=round(min(100.0, cpu * jitter), 1) if near else None,
            stdout_pipe="pipe" in self.holds["api"],
            unsent_bytes=(400_000 * self.unread if role is Role.API_SERVER else 0)
            if near
            else None,
            context=self.kind.context if self.kind.tells_context else None,
        )

    def _rates(self, role: Role) -> tuple[str, float, float, str]:
        """Return state, percent of a core, voluntary switches a second, and wait channel."""
        if role is Role.API_SERVER:
            return self._rates_of_api()
        kind, loop, forward = self.kind, self.holds["loop"], self.holds["forward"]
        if "stopped" in loop:
            return ("T", 0.0, 0.0, "do_signal_stop") if role is Role.ENGINE else _IDLE
        if "disk" in loop:
            disk = ("D", 0.0, 0.0, "nfs_wait_bit_killable")
            return disk if role is Role.ENGINE else _IDLE
        computes = role is Role.ENGINE_WORKER or not kind.ray
        if "jit" in loop + forward or "update" in loop or "wakeup" in loop:
            return ("R", 98.0, 6.0, "") if computes else _IDLE
        if "store" in loop:
            return ("S", 0.1, 1.0, "futex_wait_queue") if role is Role.ENGINE else _IDLE
        if "kernel" in forward:
            spins = ("R", 99.0, 5.0, "") if kind.spins else ("S", 6.7, 880.0, "do_epoll_wait")
            return spins if computes else _IDLE
        if forward or not self.working or self.asleep:
            return ("S", 3.8, 100.0, "do_epoll_wait")
        if not computes:
            return ("S", 15.0, 150.0, "do_epoll_wait")
        return ("R", 98.0, 10.0, "") if kind.spins else ("S", 25.0, 700.0, "do_epoll_wait")

    def _rates_of_api(self) -> tuple[str, float, float, str]:
        if "pipe" in self.holds["api"]:
            return "S", 0.0, 0.0, "pipe_write"
        if "wakeup" in self.holds["api"]:
            return "S", 0.5, 100.0, "do_epoll_wait"
        if self.decoding and not self.held:
            return "S", 20.0, 178.0, "do_epoll_wait"
        return "S", 0.6, 13.0, "do_epoll_wait"

    def _gpu(self, at: Instant) -> GpuVital:
        rng = self.rng
        used, memory, power = 0.0, 0.0, rng.uniform(115, 123)
        if "kernel" in self.holds["forward"]:
            used, memory, power = 100.0, rng.choice((0.0, 0.0, 1.0)), rng.uniform(119, 250)
        elif self.working and not self.held:
            used, memory, power = rng.uniform(40, 100), rng.uniform(10, 60), rng.uniform(250, 680)
        elif self.kind.rests_at_full and not self.asleep:
            used, memory, power = 100.0, 0.0, rng.uniform(120, 160)
        return GpuVital(
            index=self.number % 8,
            at=at,
            utilization_pct=round(used),
            memory_activity_pct=round(memory),
            power_w=round(power, 1),
            power_limit_w=700.0,
        )


_IDLE = ("S", 3.8, 100.0, "do_epoll_wait")
