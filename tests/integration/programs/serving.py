"""LMDeploy's own API server and engine process on a CPU, and a client; made to go wrong.

usage: serving.py WHEEL serve api_server MODEL --faults DIR [options]
       serving.py client URL --faults DIR [options]

The server is the published wheel's: ``serve`` with its routes, middlewares, lifespan, heartbeat and
health monitor, ``AsyncEngine.generate``, sessions and handles, metrics and loggers, and the calls
over ZMQ into an engine process of its own. Stood in for are the tokenizer and what that process
runs: ``Engine`` here, which schedules sequences into forwards, and waits for those as one polls a
GPU. Times are upstream's, scaled by ``--interval`` over 10 seconds.

A fault begins when the file DIR/NAME appears and ends when it goes; whoever enters it writes
DIR/NAME.began. ``FAULTS`` has the names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types
import urllib.parse

import stubs

FAULTS = {
    "kernel": "the engine's forward never completes; its loop lives and polls for it (H1)",
    "await": "the engine's forward is awaited and never completes; its loop lives (H1)",
    "lock": "the engine's loop waits for a lock that nobody releases (H2)",
    "lose": "the engine forgets its sequences; their streams wait for ever",
    "slow": "the engine takes ten times as long for each token",
    "api-spin": "the API server's loop computes and gets back to nothing else",
    "api-lock": "the API server's loop waits for a lock that nobody releases",
    "beat-dies": "the task that prints heartbeats dies of an error that nobody logs",
    "rest": "the client asks for nothing any more",
}

HEAVY = ("PIL", "mmengine", "openai", "pybase64", "shortuuid", "torch", "transformers")
"""What the wheel imports and nothing here needs."""

CHUNK = 1024
"""Tokens of a prompt that one forward takes in."""

PREFILL = 2048
"""Tokens of a prompt in a second."""

STEP = 0.05
"""Seconds that a forward takes for one token of each sequence."""

BATCH = 8

PR_SET_NAME, PR_SET_PDEATHSIG = 15, 1


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Faults:
    """The faults that are asked for."""

    def __init__(self, folder):
        self.folder = folder

    def on(self, name):
        assert name in FAULTS
        return os.path.exists(f"{self.folder}/{name}")

    def begin(self, name):
        """Say that the next thing to happen is the fault."""
        with open(f"{self.folder}/{name}.began", "w"):
            pass


def arguments(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="+")
    parser.add_argument("--faults", required=True)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between beats")
    parser.add_argument("--server-name", default="127.0.0.1")
    parser.add_argument("--load", type=float, default=0.0, help="seconds that loading takes")
    parser.add_argument("--first", type=float, default=0.0, help="more seconds for the first one")
    parser.add_argument("--update", type=float, default=0.0, help="seconds of a weight update")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds of a wake-up")
    parser.add_argument("--width", type=int, default=2, help="bytes of a token's text")
    parser.add_argument("--key", help="that requests need, or carry")
    parser.add_argument("--redirect", help="where /health and /metrics redirect to")
    parser.add_argument("--max-concurrent-requests", type=int)
    parser.add_argument("--streams", type=int, default=4, help="requests at a time")
    parser.add_argument("--whole", action="store_true", help="ask for answers in one piece")
    parser.add_argument("--requests", type=int, help="requests of each stream; no limit without")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--tokens", type=int, default=24, help="that a request asks for")
    return parser.parse_args(words)


# --- the engine process -------------------------------------------------------------------------


class Sequence:
    """One request in the engine."""

    def __init__(self, prompt, tokens):
        self.prompt, self.left, self.outputs = prompt, tokens, asyncio.Queue()


class Engine:
    """What ``lmdeploy.pytorch.engine.Engine`` is to its process: a loop that computes."""

    def __init__(self, engine_config, options):
        self.engine_config, self.options = engine_config, options
        self.faults, self.lock = Faults(options.faults), threading.Lock()
        self.running, self.waiting, self.sessions = [], [], {}
        self.scheduler_tick, self.asleep = 0, False
        self.has_runable_event = self._loop_main = None

    @classmethod
    def from_pretrained(cls, model_path, engine_config=None, **rest):
        options = arguments(sys.argv[2:])
        Faults(options.faults).begin("engine")
        time.sleep(options.load)
        return cls(engine_config, options)

    def start_loop(self):
        self.has_runable_event = asyncio.Event()
        self._loop_main = asyncio.create_task(self.async_loop(), name="EngineMainLoop")

    async def async_loop(self):
        await asyncio.sleep(0)
        while True:
            if self.asleep or not (self.running or self.waiting):
                self.has_runable_event.clear()
                await self.has_runable_event.wait()
                continue
            while self.waiting and len(self.running) < BATCH:
                self.running.append(self.waiting.pop(0))
            self.scheduler_tick += 1
            if self.scheduler_tick == 1:
                time.sleep(self.options.first)  # compiled for the first one, on the loop
            await self.async_step()

    async def async_step(self):
        """Run one forward: a chunk of a prompt, or a token for each sequence."""
        prefill = next((sequence for sequence in self.running if sequence.prompt), None)
        chunk = min(CHUNK, prefill.prompt) if prefill else 0
        await self.forward_async(chunk / PREFILL if prefill else STEP)
        if prefill:
            prefill.prompt -= chunk
        if self.faults.on("lose"):
            self.running, self.waiting = [], []
            self.faults.begin("lose")
        for sequence in [each for each in self.running if not each.prompt]:
            sequence.left -= 1
            sequence.outputs.put_nowait("FINISH" if sequence.left <= 0 else "SUCCESS")
            if sequence.left <= 0:
                self.running.remove(sequence)

    async def forward_async(self, seconds):
        if self.faults.on("lock"):
            self.acquire_shared_lock()
        if self.faults.on("await"):
            self.faults.begin("await")
            await asyncio.get_running_loop().create_future()
        await self.get_output_async(seconds * (10 if self.faults.on("slow") else 1))

    async def get_output_async(self, seconds):
        """Poll for the end, as upstream does for an event of the device."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.001)
            if self.faults.on("kernel"):
                self.faults.begin("kernel")
                end = float("inf")

    def acquire_shared_lock(self):
        self.lock.acquire()
        self.faults.begin("lock")
        self.lock.acquire()

    def create_instance(self):
        return EngineInstance(self)

    def get_engine_config(self):
        return self.engine_config

    def get_schedule_metrics(self):
        from lmdeploy.messages import ScheduleMetrics

        return ScheduleMetrics(
            active_seqs=len(self.running),
            waiting_seqs=len(self.waiting),
            cache_usage=0.05 + 0.1 * len(self.running),
            scheduler_tick=self.scheduler_tick,
        )

    def get_local_health_status(self):
        return {"alive": True, "message": "", "schedule_metrics": self.get_schedule_metrics()}

    def end_session(self, session_id):
        return True

    async def sleep(self, level):
        self.asleep = True
        await asyncio.sleep(0.05)

    def wakeup(self, tags):
        if tags is None or "kv_cache" in tags:
            time.sleep(self.options.warm_up)
            self.asleep = False
            self.has_runable_event.set()

    def update_params(self, request):
        time.sleep(self.options.update)

    def close(self):
        self._loop_main.cancel()

    async def wait_tasks(self):
        await asyncio.wait([self._loop_main])


class EngineInstance:
    """A handle for one request at a time."""

    def __init__(self, engine):
        self.engine = engine

    async def async_stream_infer(
        self, session_id, input_ids, gen_config, notify_add_msg_func, **rest
    ):
        from lmdeploy.messages import EngineOutput, RequestMetrics, ResponseType

        sequence = Sequence(len(input_ids), gen_config.max_new_tokens)
        self.engine.sessions[session_id] = sequence
        self.engine.waiting.append(sequence)
        self.engine.has_runable_event.set()
        notify_add_msg_func()
        status = None
        while status not in ("FINISH", "CANCEL"):
            status = await sequence.outputs.get()
            yield EngineOutput(
                ResponseType[status],
                [] if status == "CANCEL" else [7],
                req_metrics=RequestMetrics(token_timestamp=time.time()),
            )
        self.engine.sessions.pop(session_id, None)

    async def async_cancel(self, session_id):
        from lmdeploy.messages import ResponseType

        sequence = self.engine.sessions.get(session_id)
        if sequence is not None:
            for queue in (self.engine.running, self.engine.waiting):
                if sequence in queue:
                    queue.remove(sequence)
            sequence.outputs.put_nowait("CANCEL")
        return ResponseType.SUCCESS

    async def async_end(self, session_id):
        return await self.async_cancel(session_id)


# --- the API server -----------------------------------------------------------------------------


def prepare(wheel):
    """Make the wheel importable, in the server and in its engine process."""
    stubs.stand_in_for(*HEAVY)
    package = types.ModuleType("lmdeploy")
    package.__path__ = [wheel + "/lmdeploy"]  # its __init__ would import all of it
    sys.modules["lmdeploy"] = package


@contextlib.contextmanager
def patient_manager(faults):
    """A manager that lives until the engine process needs it no more.

    Upstream ends it as soon as the port is known, and with it, now and then, the engine process,
    which waits for an answer to its release of the lock.
    """
    with multiprocessing.Manager() as manager:
        yield manager
        while not os.path.exists(f"{faults.folder}/engine.began"):
            assert multiprocessing.active_children()
            time.sleep(0.01)


def serve(options, wheel):
    prepare(wheel)
    from lmdeploy.logger import RequestLogger
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine.mp_engine import zmq_engine
    from lmdeploy.serve.core.async_engine import AsyncEngine
    from lmdeploy.serve.managers import SessionManager
    from lmdeploy.serve.openai import api_server

    faults, scale = Faults(options.faults), options.interval / 10.0
    zmq_engine.mp = types.SimpleNamespace(
        Manager=lambda: patient_manager(faults), get_context=multiprocessing.get_context
    )
    text = "x" * options.width

    class Server(AsyncEngine):
        """The real one, but for what its constructor loads of the model."""

        def __init__(self, model_path, model_name=None, backend="pytorch", **rest):
            config = rest["backend_config"]
            self.model_name, self.backend = model_path, backend
            self.hf_gen_cfg, self.session_len, self.num_spec_token = {}, 1 << 20, 0
            self.tokenizer = types.SimpleNamespace(
                eos_token_id=None, detokenize_incrementally=lambda ids, state, **_: (text, state)
            )
            self.chat_template, self.stop_words, self.speculative_config = stubs.Stub(), None, None
            self.request_logger = RequestLogger(None)
            self.engine = zmq_engine.ZMQMPEngine(model_path, engine_config=config)
            self.backend_config = self.engine.engine_config
            self.is_sleeping, self.sleeping_tags, self.epoch = False, set(), 0
            self.session_mgr = SessionManager()
            self.session_mgr.build_request_handle_pool(self.engine, config.max_batch_size)
            self._build_stat_loggers()
            self._last_scheduler_tick, self._last_scheduler_tick_time = None, time.monotonic()
            self._dispatched_start_time = self._idle_schedule_start_time = None

        def start_loop(self, loop, use_async_api=False):
            self.misbehaviour = loop.create_task(self.misbehave())
            return super().start_loop(loop, use_async_api)

        async def misbehave(self):
            while True:
                await asyncio.sleep(0.05)
                if faults.on("api-spin"):
                    self.tokenize_for_ever()
                if faults.on("api-lock"):
                    self.acquire_shared_lock()

        def tokenize_for_ever(self):
            faults.begin("api-spin")
            while faults.on("api-spin"):
                sum(number * number for number in range(10_000))

        def acquire_shared_lock(self):
            lock = threading.Lock()
            lock.acquire()
            faults.begin("api-lock")
            lock.acquire()

        async def do_log_stats(self):
            if faults.on("beat-dies"):
                faults.begin("beat-dies")
                raise OSError(28, "No space left on device")
            await super().do_log_stats()

    async def sleep(seconds):
        await asyncio.sleep(seconds * scale)

    api_server.asyncio = types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    api_server.get_task = lambda *args, **kwargs: ("llm", Server)
    api_server.resolve_default_gen_config = lambda *args: {}
    api_server.set_parsers = lambda *args: None
    if options.redirect:
        mount_metrics = api_server.mount_metrics

        def mount_redirects(app, config):
            mount_metrics(app, config)
            app.add_middleware(Redirecting, url=options.redirect)

        api_server.mount_metrics = mount_redirects
    for name, seconds in (("POLL_INTERVAL", 12), ("PROBE_TIMEOUT", 10), ("UNHEALTHY_AFTER", 90)):
        os.environ.setdefault(f"LMDEPLOY_HEALTH_{name}", str(seconds * scale))
    api_server.serve(
        options.words[-1],
        backend="pytorch",
        backend_config=PytorchEngineConfig(max_batch_size=64, enable_metrics=True),
        server_name=options.server_name,
        server_port=0,
        api_keys=options.key and [options.key],
        max_concurrent_requests=options.max_concurrent_requests,
    )


class Redirecting:
    """Sends whoever asks what hangwatch asks somewhere else."""

    def __init__(self, app, url):
        self.app, self.url = app, url

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in {"/health", "/metrics", "/is_sleeping"}:
            await self.app(scope, receive, send)
            return
        location = (self.url + scope["path"]).encode()
        start = {"type": "http.response.start", "status": 307, "headers": [(b"location", location)]}
        await send(start)
        await send({"type": "http.response.body", "body": b""})


# --- the client ---------------------------------------------------------------------------------


async def ask(options, faults):
    """Ask, and read what is streamed, again and again."""
    url = urllib.parse.urlsplit(options.words[1])
    body = json.dumps(
        {
            "input_ids": list(range(options.prompt)),
            "max_tokens": options.tokens,
            "stream": not options.whole,
            "ignore_eos": True,
        }
    ).encode()
    key = f"Authorization: Bearer {options.key}\r\n" if options.key else ""
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in itertools.repeat(None) if options.requests is None else range(options.requests):
        while faults.on("rest"):
            await asyncio.sleep(0.05)
        try:
            # A small window, so that a client that stops reading is felt by the server.
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (url.hostname, url.port))
            await loop.sock_sendall(connection, head + body)
            while await loop.sock_recv(connection, 1 << 16):
                pass
        except OSError:
            await asyncio.sleep(0.1)
        finally:
            connection.close()


async def clients(options):
    faults = Faults(options.faults)
    await asyncio.gather(*(ask(options, faults) for _ in range(options.streams)))


def main():
    die_with_parent()
    if sys.argv[1] == "client":
        asyncio.run(clients(arguments(sys.argv[1:])))
    else:
        serve(arguments(sys.argv[2:]), sys.argv[1])


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # Spawned by the server: the engine process.
    die_with_parent()
    prepare(sys.argv[1])
    import lmdeploy.pytorch.engine

    lmdeploy.pytorch.engine.Engine = Engine
