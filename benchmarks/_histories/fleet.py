"""Who sends work to a fleet, and what befalls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks._histories.server import LOOK_EVERY, Request, Server, Traits, traits
from benchmarks._histories.world import Log, Script, World, deafen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.lease import Lease
from hangwatch.model.observation import LeaseReturned, LeaseTaken
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant

HOUR = 3600.0
DAY = 24 * HOUR

HANGS = (
    "kernel",
    "await",
    "store",
    "disk",
    "stopped",
    "killed",
    "task-dead",
    "pipe-full",
    "lost-request",
)
"""What may stop a server for good, or until somebody comes."""

ALIKE = ("beat-dead", "path-dead", "client-stalled", "stall-97")
"""What looks like a hang from some side, and is none, or ends by itself."""

REGIMES = ("serving", "colocated", "disaggregated", "agentic", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a history shall hold.

    Attributes:
        seed: Everything follows from it.
        servers: Servers of the fleet.
        days: Its length.
        regime: Who sends work; drawn where ``""``.
        plant: What is planted, of ``HANGS`` or ``ALIKE``; ``""`` for an honest history.
        together: Whether it befalls all servers at one instant.
        layout: ``files``, ``driver`` or ``both``; drawn where ``""``.
        settled: Whether what is planted waits for a beat that tells of work. Without it, a hang may
            come in the first seconds of a batch, when the last beat is of the idle time before.
    """

    seed: int
    servers: int = 4
    days: float = 1.0
    regime: str = ""
    plant: str = ""
    together: bool = False
    layout: str = ""
    settled: bool = False

    @property
    def until(self) -> float:
        """The instant of its end at the latest: what is planted late is given time to be found."""
        return self.days * DAY + (HOUR if self.plant else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What was planted, and when.

    Attributes:
        kind: Of ``HANGS`` or ``ALIKE``.
        at: The instant at which it began.
        keys: Whom it befell.
    """

    kind: str
    at: float
    keys: frozenset[InstanceKey]


class Fleet:
    """Servers that live together."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.rng: Random = world.rng
        self.plan = plan
        self.kind: Traits = traits(self.rng)
        self.regime = plan.regime or self.rng.choice(REGIMES)
        self.layout = plan.layout or self.rng.choice(("files", "files", "both", "driver"))
        self.block = self.layout == "files" and self.rng.random() < 0.05
        self.leases = self.rng.random() < 0.3
        self.session = 0
        self.pids = 1000
        self.driver: Log | None = None
        self.servers: list[Server] = []
        self.planted: Planted | None = None
        self.restarts: list[float] = []  # when our daemon is restarted
        self.busy = 0  # requests or trajectories that the driver waits for
        self.mean_prompt = math.exp(self.rng.uniform(math.log(500), math.log(8_000)))
        self.mean_output = math.exp(self.rng.uniform(math.log(400), math.log(6_000)))
        self.long_share = self.rng.choice((0.0, 0.002, 0.02))

    # --- its life ---

    def begin(self) -> None:
        world, rng = self.world, self.rng
        self._open_session()
        for number in range(self.plan.servers):
            self._launch(number, rng.uniform(60, 400))
        world.after(1.0, self._look)
        scripts: dict[str, Callable[[], Script]] = {
            "serving": self._serving,
            "colocated": self._colocated,
            "disaggregated": self._disaggregated,
            "agentic": self._agentic,
            "batch": self._batch,
        }
        world.spawn(scripts[self.regime](), 500.0)
        world.spawn(self._weather())
        world.spawn(self._disks())
        world.spawn(self._ourselves())
        world.spawn(self._restarts())
        if self.regime in ("serving", "batch"):
            world.spawn(self._upgrades())
        if self.plan.plant:
            world.spawn(self._plant())

    def _open_session(self) -> None:
        self.session += 1
        if self.layout != "files":
            self.driver = Log(
                self.world, f"/logs/training_{self.session}.txt", pid=None, merges=True
            )

    def _launch(self, number: int, loads: float) -> None:
        """Start a server, which takes *loads* seconds until it listens."""
        self.pids += 10
        pid = self.pids
        logs = []
        if self.layout != "driver":
            name = f"/ray/session_{self.session}/logs/worker-{number}-{pid}.out"
            logs.append(Log(self.world, name, pid=pid))
            logs[0].block = self.block
        if self.driver is not None:
            logs.append(self.driver)
        server = Server(self.world, number, pid, self.kind, logs)
        if number < len(self.servers):
            self.servers[number] = server
        else:
            self.servers.append(server)
        if self.layout != "driver":
            self.world.after(loads * 0.1, server.say, Signal.STARTING, "Loading weights from safe")
        self.world.after(loads, self._serve, server)

    def _serve(self, server: Server) -> None:
        if not server.alive:
            return
        server.serve()
        self._compile(server, self.rng.uniform(20, 300))
        self._compile(server, self.rng.uniform(20, 4000))

    def _compile(self, server: Server, after: float) -> None:
        """Let the engine compile a kernel for a shape that it meets for the first time."""

        def begin() -> None:
            if server.working and not server.held:
                # A model worker of its own compiles in its own loop: the engine's goes on turning.
                loop = "forward" if self.kind.ray else "loop"
                server.hold(loop, "jit", math.exp(self.rng.uniform(0, math.log(45))))
            elif server.alive:
                self.world.after(10.0, begin)

        self.world.after(after, begin)

    def _look(self) -> None:
        self.world.after(LOOK_EVERY, self._look)
        for server in self.servers:
            server.look()

    def _end(self, server: Server, *, orderly: bool, hosts: bool = False) -> None:
        """End a server's processes; its log is let go of later."""
        if orderly and self.kind.access_log:
            server.say(Signal.STOPPED, "INFO:     Shutting down")
        server.kill(whole=True, hosts=hosts)
        for _ in range(3):
            server.looks = 0
        own = [log for log in server.logs if log is not self.driver]
        for log in own:
            self.world.after(self.rng.uniform(1, 60), log.retire, "it is gone")
        for after in (1.0, 6.0, 12.0):
            self.world.after(after, self._last_look, server)

    def _last_look(self, server: Server) -> None:
        server.looks = 0
        server.look()

    # --- requests ---

    def _request(self, done: Callable[[], None] | None = None) -> Request:
        rng, kind = self.rng, self.kind
        if rng.random() < self.long_share:
            prompt = rng.uniform(0.4, 1.0) * kind.context
        else:
            prompt = min(rng.lognormvariate(math.log(self.mean_prompt), 1.0), 0.9 * kind.context)
        output = min(rng.lognormvariate(math.log(self.mean_output), 0.8), 32_000)
        return Request(prompt=max(1, int(prompt)), output=max(1, int(output)), done=done)

    def _serving(self) -> Script:
        """People, by day more than by night, alone or in bursts."""
        peak = self.rng.uniform(0.02, 0.3)
        night = self.rng.choice((0.0, 0.02, 0.2))
        while True:
            hour = (10 + self.world.now / HOUR) % 24
            share = max(night, math.sin(math.pi * (hour - 7) / 15)) if 7 <= hour < 22 else night
            rate = peak * share * len(self.servers)
            if rate < 1e-6:
                yield 300.0
                continue
            yield self.rng.expovariate(rate)
            for _ in range(self.rng.randint(5, 60) if self.rng.random() < 0.003 else 1):
                self.rng.choice(self.servers).submit(self._request())

    def _batch(self) -> Script:
        """A batch now and then, and nothing in between."""
        while True:
            yield from self._rollout(self.rng.randint(50, 300))
            yield self.rng.uniform(0.5, 6) * HOUR

    def _rollout(self, each: int) -> Script:
        """Hand out *each* requests a server and wait until the last is answered."""
        self.busy = 0
        for server in self.servers:
            for _ in range(each):
                self._count_in(server)
        while self.busy > 0:
            yield 2.0

    def _count_in(self, server: Server) -> None:
        def done() -> None:
            self.busy -= 1

        if server.submit(self._request(done)):
            self.busy += 1

    def _colocated(self) -> Script:
        """Reinforcement learning on the GPUs of the engines: they sleep while it trains."""
        rng, world = self.rng, self.world
        each = rng.randint(30, 200)
        partial = rng.random() < 0.5
        trains = rng.uniform(120, 1800)
        updates, wakes = rng.uniform(3, 60), rng.uniform(0.3, 20)
        while True:
            if partial:
                yield from self._partial(each)
            else:
                yield from self._rollout(each)
            for server in self.servers:
                server.abort()
            yield rng.uniform(0.2, 3)
            if self.leases:
                self._lease(trains * 1.5 + 300)
            for server in self.servers:
                server.sleep()
            yield trains * rng.uniform(0.8, 1.4)
            for server in self.servers:
                server.wake(wakes * rng.uniform(0.7, 1.3))
            yield wakes * 1.3 + 1
            for server in self.servers:
                server.update(updates * rng.uniform(0.8, 1.2))
            yield updates * 1.3 + 2
            if self.leases:
                world.see(LeaseReturned(id="train", at=Instant(world.now)))
            if rng.random() < 0.02:
                yield from self._new_job()

    def _partial(self, each: int) -> Script:
        """A rollout that ends when most are answered; what is left is given up."""
        rollout = self._rollout(each)
        total = each * len(self.servers)
        for pause in rollout:
            if self.busy < 0.2 * total:
                return
            yield pause

    def _disaggregated(self) -> Script:
        """Reinforcement learning on other GPUs: engines idle for a whole training step."""
        rng = self.rng
        each, trains, updates = rng.randint(30, 200), rng.uniform(120, 2400), rng.uniform(3, 60)
        while True:
            yield from self._rollout(each)
            yield trains * rng.uniform(0.7, 1.5)
            for server in self.servers:
                server.update(updates * rng.uniform(0.8, 1.2))
            yield updates * 1.3 + 2
            if rng.random() < 0.02:
                yield from self._new_job()

    def _agentic(self) -> Script:
        """Trajectories that call tools between turns, a few a server."""
        rng = self.rng
        each = rng.randint(2, 12)
        tools = rng.uniform(5, 120)
        while True:
            self.busy = 0
            for server in self.servers:
                for _ in range(each):
                    self.busy += 1
                    self.world.after(
                        rng.uniform(0, 30), self._turn, server, rng.randint(3, 30), tools
                    )
            while self.busy > 0:
                yield 2.0
            yield rng.uniform(60, 900)

    def _turn(self, server: Server, left: int, tools: float) -> None:
        def done() -> None:
            self.world.after(
                self.rng.expovariate(1 / tools) + 0.1, self._turn, server, left - 1, tools
            )

        if left == 0 or not server.submit(self._request(done)):
            self.busy -= 1

    def _lease(self, seconds: float) -> None:
        now = self.world.now
        self.world.see(
            LeaseTaken(
                lease=Lease(
                    id="train",
                    at=Instant(now),
                    until=Instant(now + min(seconds, 7200)),
                    reason="training step",
                    holder="pid 10",
                )
            )
        )

    # --- what befalls honest fleets ---

    def _new_job(self) -> Script:
        """The driver ends, its Ray with it; the next job begins minutes later."""
        old, driver = list(self.servers), self.driver
        for server in old:
            self._end(server, orderly=False, hosts=True)
        yield self.rng.uniform(60, 900)
        if driver is not None:
            driver.retire("the link moved on")
        self._open_session()
        for number in range(self.plan.servers):
            self._launch(number, self.rng.uniform(60, 400))
        yield 420.0

    def _upgrades(self) -> Script:
        """One server after the other is drained and replaced, every few days."""
        while True:
            yield self.rng.expovariate(1 / (1.5 * DAY))
            for number in range(len(self.servers)):
                server = self.servers[number]
                for _ in range(600):
                    if not server.in_flight:
                        break
                    yield 1.0
                else:
                    continue
                self._end(server, orderly=True)
                yield self.rng.uniform(1, 30)
                self._launch(number, self.rng.uniform(60, 300))
                yield 420.0

    def _weather(self) -> Script:
        """Clocks step; servers print lines that say nothing."""
        rng, world = self.rng, self.world
        chatty = rng.random() < 0.5
        while True:
            yield rng.expovariate(1 / 300.0)
            if rng.random() < 0.003:
                world.clock_offset += rng.choice((-3600.0, 3600.0, rng.uniform(-40, 40)))
            if chatty:
                server = rng.choice(self.servers)
                if server.alive:
                    server.logs[0].grow()

    def _disks(self) -> Script:
        """A shared disk is slow for a while: lines arrive in clumps."""
        rng = self.rng
        if rng.random() < 0.6:
            return
        while True:
            yield rng.expovariate(1 / (8 * HOUR))
            clump = rng.choice((3.0, 15.0, 30.0, 60.0))
            logs = [server.logs[0] for server in self.servers]
            for log in logs:
                log.clump = clump
            yield rng.uniform(600, 2 * HOUR)
            for log in logs:
                log.clump = 0.0

    def _ourselves(self) -> Script:
        """Our own loop stands still, or a child of ours does."""
        rng, world = self.rng, self.world
        while True:
            yield rng.expovariate(1 / (6 * HOUR))
            if rng.random() < 0.5:
                world.pause_us(math.exp(rng.uniform(math.log(4), math.log(1800))))
            else:
                logs = list(dict.fromkeys(log for s in self.servers for log in s.logs))
                yield from deafen(world, logs, math.exp(rng.uniform(0, math.log(600))))

    def _restarts(self) -> Script:
        """Our daemon is restarted now and then, and in the middle of a hang more often."""
        while True:
            yield self.rng.expovariate(1 / (2 * DAY))
            self.restarts.append(self.world.now)

    # --- what is planted ---

    def _plant(self) -> Script:
        """Wait for a moment with work, then let it happen."""
        kind, rng = self.plan.plant, self.rng
        yield rng.uniform(0.2, 0.8) * self.plan.days * DAY
        while not (servers := self._victims()):
            yield 1.0
            if self.world.now > self.plan.days * DAY:
                return self.world.end()
            if self._victims():
                # Not all in the first second of a batch, which is when a wait for work ends.
                yield rng.expovariate(1 / 120.0)
        now = self.world.now
        self.planted = Planted(kind=kind, at=now, keys=frozenset(s.key for s in servers))
        for server in servers:
            self._strike(server, kind)
        if rng.random() < 0.3:
            yield rng.uniform(60, 1200)
            self.restarts.append(self.world.now)
        yield 45 * 60.0
        self.world.end()

    def _victims(self) -> list[Server]:
        """Return whom it shall befall: one that works, or all that do, if any does."""
        ripe = [server for server in self.servers if self._is_ripe(server)]
        return ripe if self.plan.together or not ripe else [self.rng.choice(ripe)]

    def _is_ripe(self, server: Server) -> bool:
        works = server.alive and server.ready and not server.held and server.decoding > 0
        return works and (not self.plan.settled or (server.gauges[0] > 0 and server.fresh))

    def _strike(self, server: Server, kind: str) -> None:  # noqa: C901  # one case a kind
        server.hang = kind
        match kind:
            case "kernel" | "await":
                server.hold("forward", kind)
            case "store" | "disk" | "stopped":
                server.hold("loop", kind)
            case "killed":
                server.kill(whole=False)
            case "task-dead":
                server.hold("forward", "task")
                if self.rng.random() < 0.7:
                    server.say(Signal.ENGINE_DEAD, "Task <EngineMainLoop> failed")
            case "pipe-full":
                server.hold("api", "pipe")
                server.hold("forward", "unread")
            case "lost-request":
                server.settle()
                server.lost = server.in_flight
                server.queue.clear()
                server.events.clear()
                server.reading, server.decoding = None, 0
                server.kind = self.kind
                self._cut_off(server)
            case "beat-dead":
                server.beat_dead = True
            case "path-dead":
                for log in server.logs:
                    log.dead = True
            case "client-stalled":
                server.hang = ""
                server.settle()
                server.lost, server.unread = server.lost + 1, 1
            case "stall-97":
                server.hang = ""
                server.hold("forward", "await", 97.0)
            case _:
                raise ValueError(kind)

    def _cut_off(self, server: Server) -> None:
        """Let no request come any more: those that are lost hold every handle."""
        server.asleep = False
        server.ready = False
