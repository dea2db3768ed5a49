"""A server that looks like LMDeploy from outside, and hangs on demand.

Run it by path, under any Python from 3.10 on::

    python hangwatch/lab/server.py serve api_server demo --interval 1 --fault blocked-call --after 5

It has LMDeploy's two processes, each with an event loop of its own, so that one answers while the
other hangs:

- the *API server* (the parent, this file) talks HTTP, counts tokens, prints the heartbeat, watches
  the engine's health, and has clients inside it that keep requests in flight;
- the *engine* (a child, ``ZMQMPEngine`` by name, ``engine.py``) schedules batches and runs the
  model. A socket pair carries the calls between them, without a time-out, as upstream.

Heartbeats, health messages and metric names are those of LMDeploy 0.12.3 and later; the health
monitor's times are upstream's, scaled by ``--interval`` over 10 seconds. A fault (``faults/``)
begins ``--after`` seconds after the server is ready, or upon SIGUSR2; the instant goes to
``--truth``.

It imports nothing but the standard library and listens on loopback unless told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

if __package__:
    from hangwatch.lab import faults
    from hangwatch.lab.engine import STEPS_PER_INTERVAL, engine_main, idle_threads
    from hangwatch.lab.faults._process import die_with_parent, set_title
else:  # run by path
    import faults  # type: ignore[import-not-found,no-redef]
    from engine import (  # type: ignore[import-not-found,no-redef]
        STEPS_PER_INTERVAL,
        engine_main,
        idle_threads,
    )
    from faults._process import (  # type: ignore[import-not-found,no-redef]
        die_with_parent,
        set_title,
    )

IN_SERVER = (faults.SERVER, faults.CLIENTS, faults.LOG)

CLIENTS = 8
"""Requests in flight."""


class EngineClient:
    """Calls into the engine process; none has a time-out."""

    def __init__(
        self, process: multiprocessing.process.BaseProcess, connection: socket.socket
    ) -> None:
        self._process = process
        self._connection = connection
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.outputs: dict[int, asyncio.Queue[tuple[int, int, int, bool]]] = {}

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid

    @property
    def connected(self) -> bool:
        """Whether calls can be made."""
        return self._writer is not None

    def alive(self) -> bool:
        """Whether the engine process lives."""
        return self._process.is_alive()

    async def listen(self) -> None:
        """Hand answers and outputs to those who wait for them, until the engine is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        while True:
            line = b""
            with contextlib.suppress(ConnectionError):
                line = await reader.readline()
            if not line:
                return
            message = json.loads(line)
            if "id" in message:
                self._calls.pop(message["id"]).set_result(message["result"])
            for output in message.get("outputs", ()):
                self.outputs[output[0]].put_nowait(output)

    def tell(self, method: str, *arguments: object, **more: object) -> None:
        """Call without waiting for an answer."""
        assert self._writer is not None
        call = {"method": method, "arguments": arguments, **more}
        self._writer.write(json.dumps(call).encode() + b"\n")

    async def call(self, method: str, *arguments: object) -> Any:
        """Call and wait for the answer."""
        number = next(self._ids)
        self._calls[number] = asyncio.get_running_loop().create_future()
        self.tell(method, *arguments, id=number)
        return await self._calls[number]


class AsyncEngine:
    """Requests on their way through the server, and the engine's progress as seen from here."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.total = self.succeeded = self.routed = 0
        self.sleeping = False
        self.updates: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._ids = itertools.count()
        self._last_tick: int | None = None
        self._last_tick_at = time.monotonic()
        self._dispatched_at: float | None = None

    async def generate(self, prompt: int, steps: int) -> None:
        """Run one request to its end."""
        request = next(self._ids)
        outputs: asyncio.Queue[tuple[int, int, int, bool]] = asyncio.Queue()
        self.client.outputs[request] = outputs
        self.total += 1
        self.routed += 1
        self.client.tell("add_request", request, prompt, steps)
        finished = False
        while not finished:
            _, fresh, tokens, finished = await outputs.get()
            self.updates.put_nowait((fresh, tokens))
        del self.client.outputs[request]
        self.routed -= 1
        self.succeeded += 1

    async def get_schedule_metrics(self) -> Any:
        """Ask the engine's scheduler; waits for as long as the engine's loop is blocked."""
        return await self.client.call("get_schedule_metrics")

    async def health_probe(self, unhealthy_after: float) -> tuple[str, str]:
        """Say how the engine fares, in upstream's words."""
        if self.sleeping:
            return "sleeping", "Engine is sleeping."
        if not self.client.alive():
            return "unhealthy", "PyTorch ZMQ engine process is not alive."
        metrics = await self.get_schedule_metrics()
        if metrics["stopped"]:
            return "unhealthy", f"PyTorch engine loop task has stopped: {metrics['stopped']}."
        now = time.monotonic()
        if metrics["scheduler_tick"] != self._last_tick:
            self._last_tick, self._last_tick_at = metrics["scheduler_tick"], now
        if self.routed == 0:
            self._dispatched_at = None
            return "healthy", "Engine is healthy."
        self._dispatched_at = self._dispatched_at or now
        still = now - max(self._last_tick_at, self._dispatched_at)
        if still > unhealthy_after:
            return "unhealthy", f"Backend scheduler_tick has not advanced for {still:.1f}s."
        return "healthy", "Engine is healthy."


class Clients:
    """Ask for completions, one after another, as rollout workers do.

    Prompts are short: a heartbeat far below the median would say that the engine stopped before it.

    Attributes:
        asking: Whether they do.
    """

    def __init__(self, engine: AsyncEngine, step: float) -> None:
        self.asking = asyncio.Event()
        self.asking.set()
        self._engine = engine
        self._step = step
        self._random = random.Random(os.getpid())

    async def run(self, number: int, answered: Callable[[int], None]) -> None:
        """Be one of them; *answered* is called with *number* after each answer."""
        await asyncio.sleep(self._step * number)
        while True:
            await self.asking.wait()
            await self._engine.generate(self._random.randint(8, 32), self._random.randint(16, 48))
            answered(number)


class EngineHealthMonitor:
    """Probes the engine now and then; ``/health`` answers with the last result."""

    def __init__(self, engine: AsyncEngine, scale: float) -> None:
        # 12, 10 and 90 s: serve/core/health.py of LMDeploy 0.14 and later.
        self._poll_interval = 12.0 * scale
        self._probe_timeout = 10.0 * scale
        self._unhealthy_after = 90.0 * scale
        self._engine = engine
        self._lock = asyncio.Lock()
        self._probe: asyncio.Task[tuple[str, str]] | None = None
        self.status, self.message = "initializing", "Engine health monitor is starting."

    async def run(self) -> None:
        """Probe for ever."""
        while True:
            await self.probe_once()
            await asyncio.sleep(self._poll_interval)

    async def probe_once(self) -> None:
        """Probe, unless the probe before still waits for its answer."""
        async with self._lock:
            if self._probe is not None and not self._probe.done() and self._engine.client.alive():
                return
            if self._probe is None or not self._engine.client.alive():
                self._probe = asyncio.create_task(
                    self._engine.health_probe(self._unhealthy_after), name="EngineHealthProbe"
                )
            try:
                self.status, self.message = await asyncio.wait_for(
                    asyncio.shield(self._probe), self._probe_timeout
                )
            except asyncio.TimeoutError:  # noqa: UP041  # not the built-in one before 3.11
                self.status = "unhealthy"
                self.message = f"Backend health probe timed out after {self._probe_timeout:.1f}s."
            else:
                self._probe = None


class Metrics:
    """Token counters, gauges, and the heartbeat that is printed from them."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.file: IO[str] | None = None
        self.prompt_tokens = self.generation_tokens = 0
        self._interval_prompt = self._interval_generation = 0
        self._last_log_at = time.monotonic()
        self._schedule: Mapping[str, float] = {"running": 0, "waiting": 0, "gpu_cache_usage": 0.0}
        self._requests = (0, 0, 0)
        self.asked_with = ""

    async def run_metrics_handler(self, updates: asyncio.Queue[tuple[int, int]]) -> None:
        """Count the tokens of each step."""
        while True:
            prompt, tokens = await updates.get()
            self.prompt_tokens += prompt
            self.generation_tokens += tokens
            self._interval_prompt += prompt
            self._interval_generation += tokens

    def update_schedule_stats(self, schedule: Mapping[str, float], engine: AsyncEngine) -> None:
        """Set the gauges; nothing else does."""
        self._schedule = schedule
        self._requests = (
            engine.succeeded,
            engine.routed,
            engine.total - engine.succeeded - engine.routed,
        )

    def log(self) -> None:
        """Print the heartbeat, unless no token was processed since the last time."""
        now = time.monotonic()
        elapsed, self._last_log_at = now - self._last_log_at, now
        prompt, self._interval_prompt = self._interval_prompt, 0
        generation, self._interval_generation = self._interval_generation, 0
        if prompt == 0 and generation == 0:
            return
        succeeded, routed, waiting = self._requests
        stamp = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
        print(
            f"[{stamp} DP0] Avg thr (in/out): "
            f"{prompt / elapsed:.1f} / {generation / elapsed:.1f} tokens/s, "
            f"Server (succeeded/failed/routed/waiting): {succeeded} / 0 / {routed} / {waiting}, "
            f"Engine (running/waiting): "
            f"{self._schedule['running']} / {self._schedule['waiting']}, "
            f"KV cache: {self._schedule['gpu_cache_usage'] * 100:.1f}%, ",
            file=self.file,
            flush=True,
        )

    def text(self) -> str:
        """Return everything in Prometheus' text format."""
        succeeded, routed, waiting = self._requests
        gauges: dict[str, tuple[str, float]] = {
            "num_requests_succeeded": ("Number of current succeeded requests.", succeeded),
            "num_requests_failed": ("Number of current failed requests.", 0),
            "num_api_requests_routed": ("Number of requests routed to request handles.", routed),
            "num_api_requests_waiting": (
                "Number of requests waiting for free request handles.",
                waiting,
            ),
            "num_requests_running": (
                "Number of requests in model execution batches.",
                self._schedule["running"],
            ),
            "num_requests_waiting": (
                "Number of requests waiting to be processed.",
                self._schedule["waiting"],
            ),
            "gpu_cache_usage_perc": (
                "GPU KV-cache usage. 1 means 100 percent usage.",
                self._schedule["gpu_cache_usage"],
            ),
            "prefix_cache_hit_rate": (
                "Prefix-cache hit rate. 1 means 100 percent of queried prefix tokens hit.",
                0.0,
            ),
        }
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens_total": ("Number of prefill tokens processed.", self.prompt_tokens),
            "generation_tokens_total": (
                "Number of generation tokens processed.",
                self.generation_tokens,
            ),
            "cached_tokens_total": ("Total prefix-cached input tokens served.", 0),
        }
        model = f'model_name="{self._model}"'
        lines = []
        for kind, family in (("gauge", gauges), ("counter", counters)):
            for name, (words, value) in family.items():
                lines += [
                    f"# HELP lmdeploy:{name} {words}",
                    f"# TYPE lmdeploy:{name} {kind}",
                    f'lmdeploy:{name}{{engine="0",{model}}} {float(value)}',
                ]
        success = f'engine="0",finished_reason="stop",{model}'
        lines += [
            "# HELP lmdeploy:request_success_total Count of successfully processed requests.",
            "# TYPE lmdeploy:request_success_total counter",
            f"lmdeploy:request_success_total{{{success}}} {float(succeeded)}",
        ]
        if self.asked_with:
            lines.append(f"# asked with {self.asked_with}")
        return "\n".join(lines) + "\n"


class ApiServer:
    """HTTP, heartbeat, clients: everything on the loop of the main thread."""

    def __init__(
        self, options: argparse.Namespace, client: EngineClient, scene: faults.Scene
    ) -> None:
        self.options = options
        self.scene = scene
        self.step = options.interval / STEPS_PER_INTERVAL
        self.engine = AsyncEngine(client)
        self.clients = Clients(self.engine, self.step)
        self.heartbeat: asyncio.Task[None] | None = None
        self.metrics = Metrics(options.words[2] if len(options.words) > 2 else "demo-model")
        self.monitor = EngineHealthMonitor(self.engine, options.interval / 10.0)
        self._shutdown = asyncio.Event()
        scene.server, scene.clients = self, self.clients

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._shutdown.set)
        # A step's delay lets the batch that runs now end on time, so that a fleet freezes at once.
        loop.add_signal_handler(signal.SIGUSR2, self.arm, self.step)
        print(f"INFO:     Started server process [{os.getpid()}]", file=sys.stderr, flush=True)
        tasks = [asyncio.create_task(self.engine.client.listen())]
        await self.engine_starts()
        server = await asyncio.start_server(
            self.handle, self.options.server_name, self.options.server_port
        )
        host, port = server.sockets[0].getsockname()[:2]
        url = f"http://{host}:{port}"
        for _ in range(3):
            print(
                f"HINT:    Please open \033[93m\033[1m{url}\033[0m in a browser for detailed api"
                " usage!!!",
                flush=True,
            )
        self.heartbeat = asyncio.create_task(self._force_log())
        tasks += [
            self.heartbeat,
            asyncio.create_task(self.monitor.run(), name="EngineHealthMonitor"),
            asyncio.create_task(self.metrics.run_metrics_handler(self.engine.updates)),
            *(
                asyncio.create_task(self.clients.run(number, self.answered))
                for number in range(CLIENTS)
            ),
        ]
        print("INFO:     Application startup complete.", file=sys.stderr, flush=True)
        print(
            f"INFO:     Uvicorn running on {url} (Press CTRL+C to quit)",
            file=sys.stderr,
            flush=True,
        )
        if self.options.ready:
            faults.write_whole(
                self.options.ready,
                {"pid": os.getpid(), "engine_pid": self.engine.client.pid, "url": url},
            )
        if self.options.after is not None:
            self.arm(self.options.after)
        await self._shutdown.wait()
        print("INFO:     Shutting down", file=sys.stderr, flush=True)
        for task in tasks:
            task.cancel()
        server.close()

    async def engine_starts(self) -> None:
        """Return once the engine answers, after the time that loading the model takes."""
        while not self.engine.client.connected:
            await asyncio.sleep(0.01)
        await self.engine.get_schedule_metrics()
        await asyncio.sleep(self.options.load)

    def arm(self, seconds: float) -> None:
        """Let the fault begin *seconds* from now, in whichever process it belongs to."""
        if self.scene.fault is not None:
            self.scene.arm(time.monotonic() + seconds)
            asyncio.get_running_loop().call_later(seconds, self.scene.fault.strike, self.scene)
        elif self.options.fault:
            self.engine.client.tell("arm", time.monotonic() + seconds)

    async def _force_log(self) -> None:
        while True:
            await asyncio.sleep(self.options.interval)
            schedule = await self.engine.get_schedule_metrics()
            self.metrics.update_schedule_stats(schedule, self.engine)
            self.metrics.log()

    def sleep(self, level: int) -> None:
        """Go to sleep, as if asked to by the trainer."""
        self.engine.sleeping = True
        self.access("127.0.0.1", 40_100, f"POST /sleep?level={level}", "200 OK")

    def answered(self, number: int) -> None:
        """Log that a client has got its answer."""
        self.access("127.0.0.1", 40_000 + number, "POST /v1/chat/completions", "200 OK")

    def access(self, host: str, port: int, request: str, status: str) -> None:
        """Print a line of uvicorn's access log."""
        print(f'INFO:     {host}:{port} - "{request} HTTP/1.1" {status}', flush=True)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError
        ):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
            path = target.split("?", 1)[0]
            status, kind, body = self.unlock(path, head) or await self.answer(method, path)
            peer = writer.get_extra_info("peername") or ("", 0)
            self.access(peer[0], peer[1], f"{method} {target}", status)
            data = body.encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n"
                f"content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode()
                + data
            )
            await writer.drain()
        writer.close()

    def unlock(self, path: str, head: bytes) -> tuple[str, str, str] | None:
        """Refuse who has no key, as LMDeploy does but for ``/health``; repeat keys carelessly."""
        if not self.options.api_key_file or path == "/health":
            return None
        given = re.search(rb"\r\n[Aa]uthorization: Bearer ([^\r]+)", head)
        key = given[1].decode("latin-1") if given else ""
        print(f"DEBUG:    asked for {path} with {key or 'no key'}", flush=True)
        if key in Path(self.options.api_key_file).read_text().split():
            self.metrics.asked_with = key
            return None
        return "401 Unauthorized", "application/json", json.dumps({"error": f"not known: {key}"})

    async def answer(self, method: str, path: str) -> tuple[str, str, str]:
        """Return status, content type and body."""
        json_type = "application/json"
        if method != "GET":
            return "405 Method Not Allowed", json_type, '{"detail":"Method Not Allowed"}'
        if path == "/health":
            if self.monitor.status == "unhealthy":
                await self.monitor.probe_once()
            well = self.monitor.status in ("healthy", "sleeping")
            body = json.dumps({"status": self.monitor.status, "message": self.monitor.message})
            return ("200 OK" if well else "503 Service Unavailable"), json_type, body
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", self.metrics.text()
        if path == "/is_sleeping":
            return (
                "200 OK",
                json_type,
                json.dumps({"is_sleeping": self.engine.sleeping}, separators=(",", ":")),
            )
        return "404 Not Found", json_type, '{"detail":"Not Found"}'


def open_ray_logs(folder: str) -> None:
    """Send our output where a Ray worker's goes, under the names that Ray gives."""
    worker = "".join(random.Random(os.getpid()).choices("0123456789abcdef", k=56))
    for descriptor, suffix in ((1, "out"), (2, "err")):
        path = Path(folder, f"worker-{worker}-01000000-{os.getpid()}.{suffix}")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(log, b":job_id:01000000\n:task_name:run_lmdeploy_server_wrapper\n")
        os.dup2(log, descriptor)
        os.close(log)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options; a mistake ends the process with code 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("words", nargs="*", help="as of LMDeploy: serve api_server MODEL")
    parser.add_argument("--backend", default="pytorch", help="shown in the command line only")
    parser.add_argument("--server-name", default="127.0.0.1", metavar="ADDRESS")
    parser.add_argument("--server-port", type=int, default=0, help="0 for any that is free")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between heartbeats")
    parser.add_argument("--load", type=float, default=0.0, help="seconds before it serves")
    parser.add_argument("--threads", type=int, default=2, help="idle threads in each process")
    parser.add_argument("--fault", choices=faults.names(), help="what goes wrong")
    parser.add_argument("--after", type=float, help="seconds from ready to the fault")
    parser.add_argument("--lasts", type=float, help="seconds until the fault ends by itself")
    parser.add_argument("--truth", metavar="FILE", help="where the instant of the fault is written")
    parser.add_argument("--ready", metavar="FILE", help="where pids and URL are written")
    parser.add_argument(
        "--ray-logs", metavar="FOLDER", help="look like a Ray worker that logs here"
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="keys that all but /health ask for")
    parser.add_argument("--title", default="", help="what the command line shall look like")
    parser.add_argument("--die-with-parent", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    """Start the engine, then serve."""
    options = parse_arguments(sys.argv[1:])
    if options.fault and (reason := faults.load(options.fault).unavailable()):
        sys.exit(f"{options.fault} cannot happen here: {reason}")
    if options.die_with_parent:
        die_with_parent(os.getppid())
    if options.ray_logs:
        open_ray_logs(options.ray_logs)
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=engine_main, args=(options, theirs, os.getpid()), name="mp_engine_proc"
    )
    process.start()
    theirs.close()
    if options.ray_logs:
        title = options.title or "ray::run_lmdeploy_server_wrapper"
        set_title(title, title)
    elif options.title:
        set_title(options.title, Path("/proc/self/comm").read_text().strip())
    idle_threads(options.threads)

    scene = faults.Scene(options.fault, IN_SERVER, options.truth, options.lasts)
    scene.prepare()

    async def run() -> None:
        await ApiServer(options, EngineClient(process, ours), scene).run()

    try:
        asyncio.run(run())
    finally:
        process.kill()
        process.join(5.0)


if __name__ == "__main__":
    main()
