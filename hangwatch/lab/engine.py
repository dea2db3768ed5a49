"""The engine: schedules batches, and runs a model that is a sleep.

The tasks of its event loop, their names and what they await are those of LMDeploy's PyTorch engine
(pytorch/engine/engine_loop.py, request.py, model_agent/agent.py), so that what is read from
outside has the same shape:

========================== =====================================================
EngineMainLoop             waits for the tasks below; logs the one that fails
SenderWaitLoop             waits for senders of requests
MainLoopPreprocessMessage  takes requests in
MainLoopMain               schedules, dispatches, takes outputs
MainLoopSendResponse       sends outputs
MainLoopWaitExecutor       waits for the two below
ModelAgentPreprocess       prepares batches
ModelAgentLoop             runs them
========================== =====================================================

A fault strikes in ModelAgentLoop, or in MainLoopMain between two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from typing import Any

if __package__:
    from hangwatch.lab.faults import FORWARD, IN_ENGINE, LOOP, Scene
    from hangwatch.lab.faults._process import die_with_parent, set_title
else:  # a part of a program that is run by path
    from faults import (  # type: ignore[import-not-found,no-redef]
        FORWARD,
        IN_ENGINE,
        LOOP,
        Scene,
    )
    from faults._process import (  # type: ignore[import-not-found,no-redef]
        die_with_parent,
        set_title,
    )

BATCH = 6
"""Requests that run at once; the others wait in the engine."""

BLOCKS = 64
BLOCKS_EACH = 8
"""Of the KV cache, for each running sequence."""

STEPS_PER_INTERVAL = 8
TOKENS_PER_STEP = 10


class Sequence:
    """One request in the engine: how many tokens it brings and how many steps it takes."""

    def __init__(self, request: int, prompt: int, steps: int) -> None:
        self.request = request
        self.prompt = prompt
        self.steps = steps


class Scheduler:
    """Who runs, who waits, and how much of the KV cache is free.

    Attributes:
        scheduler_tick: Batches handed out; upstream's health monitor looks at it.
    """

    def __init__(self) -> None:
        self.scheduler_tick = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.free_blocks = BLOCKS

    def schedule(self) -> list[Sequence]:
        """Admit who waits, as far as there is room; return who runs."""
        while self.waiting and len(self.running) < BATCH and self.free_blocks >= BLOCKS_EACH:
            self.free_blocks -= BLOCKS_EACH
            self.running.append(self.waiting.popleft())
        return list(self.running)

    def finish(self) -> None:
        """Let go of those who are done."""
        before = len(self.running)
        self.running = [sequence for sequence in self.running if sequence.steps > 0]
        self.free_blocks += BLOCKS_EACH * (before - len(self.running))

    def preempt_all(self, *, blocks_returned: bool) -> None:
        """Send everybody back to wait."""
        if blocks_returned:
            self.free_blocks += BLOCKS_EACH * len(self.running)
        else:
            self.free_blocks = 0
        self.waiting.extendleft(reversed(self.running))
        self.running = []


class Sampler:
    """Decides how many tokens a step brings."""

    def tokens(self, batch: list[Sequence]) -> int:
        """Return how many tokens each sequence gets in this step."""
        del batch
        return TOKENS_PER_STEP


class BaseModelAgent:
    """Runs batches one after another, in a task of its own."""

    def __init__(self, step: float, scene: Scene) -> None:
        self.step = step
        self.tasks: list[asyncio.Task[Any]] = []
        self._scene = scene
        self._pre_in_que: asyncio.Queue[list[Sequence]] = asyncio.Queue()
        self._in_que: asyncio.Queue[list[Sequence]] = asyncio.Queue()
        self._out_que: asyncio.Queue[list[Sequence]] = asyncio.Queue()

    def start(self) -> None:
        """Start its tasks."""
        self.tasks = [
            asyncio.create_task(self._async_loop_inputs_preprocess(), name="ModelAgentPreprocess"),
            asyncio.create_task(self._async_loop_background(), name="ModelAgentLoop"),
        ]

    async def wait_tasks(self) -> None:
        """Wait until one of its tasks fails."""
        await wait_for_async_tasks(self.tasks)

    async def _async_loop_inputs_preprocess(self) -> None:
        while True:
            await self._in_que.put(await self._pre_in_que.get())

    async def _async_loop_background(self) -> None:
        while True:
            await self._async_step(await self._in_que.get())

    async def _async_step(self, batch: list[Sequence]) -> None:
        await self._async_model_forward(batch)
        await self._out_que.put(batch)

    async def _async_model_forward(self, batch: list[Sequence]) -> None:
        """Run one batch; here that is a sleep, cut short where a fault is to begin."""
        del batch
        await asyncio.sleep(min(self.step, self._scene.left()))
        if self._scene.due(FORWARD):
            assert self._scene.fault is not None
            await self._scene.fault.strike(self._scene)

    def set_forward_inputs(self, batch: list[Sequence]) -> None:
        """Hand a batch over."""
        self._pre_in_que.put_nowait(batch)

    async def get_output_async(self) -> list[Sequence]:
        """Return the outputs of the batch that is done next."""
        return await self._out_que.get()


class UniExecutor:
    """The model agent of this very process; there are others upstream."""

    def __init__(self, model_agent: BaseModelAgent) -> None:
        self.model_agent = model_agent

    async def forward_async(self, batch: list[Sequence]) -> None:
        """Hand a batch over."""
        self.model_agent.set_forward_inputs(batch)

    async def get_output_async(self) -> list[Sequence]:
        """Return the outputs of the batch that is done next."""
        return await self.model_agent.get_output_async()

    async def wait_tasks(self) -> None:
        """Wait until a task of the model agent fails."""
        await self.model_agent.wait_tasks()


class RequestManager:
    """Takes requests in."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Sequence] = asyncio.Queue()
        self.senders = asyncio.Event()

    async def sender_wait_loop(self) -> None:
        """Wait for senders; they are few here, and never wait."""
        while True:
            self.senders.clear()
            await self.senders.wait()

    async def get_all_requests(self) -> list[Sequence]:
        """Return what has arrived, once something has."""
        found = [await self.requests.get()]
        while not self.requests.empty():
            found.append(self.requests.get_nowait())
        return found


class RunableEventAsync:
    """Says that there is something to run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.event = asyncio.Event()

    async def wait(self) -> None:
        """Wait until there is."""
        await self.event.wait()

    def set(self) -> None:
        """Look whether there is."""
        if self.scheduler.running or self.scheduler.waiting:
            self.event.set()
        else:
            self.event.clear()


class EngineLoop:
    """The tasks around the scheduler."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.executor = engine.executor
        self.req_manager = engine.req_manager
        self.scene = engine.scene
        self.has_runable_event = RunableEventAsync(engine.scheduler)
        self.resp_queue: asyncio.Queue[list[tuple[int, int, int, bool]]] = asyncio.Queue()
        self.tasks: list[asyncio.Task[Any]] = []
        self.warned = False

    def start(self) -> None:
        """Start its tasks."""
        named: dict[str, Coroutine[Any, Any, None]] = {
            "SenderWaitLoop": self.req_manager.sender_wait_loop(),
            "MainLoopWaitExecutor": self.executor.wait_tasks(),
            "MainLoopPreprocessMessage": self.preprocess_loop(),
            "MainLoopSendResponse": self.send_response_loop(),
            "MainLoopMain": self.main_loop(),
        }
        self.tasks = [asyncio.create_task(run, name=name) for name, run in named.items()]

    async def wait_tasks(self) -> None:
        """Wait until one of its tasks fails."""
        await wait_for_async_tasks(self.tasks)

    async def preprocess_loop(self) -> None:
        """Queue requests for the scheduler."""
        while True:
            self.scheduler.waiting.extend(await self.req_manager.get_all_requests())
            self.has_runable_event.set()

    async def send_response_loop(self) -> None:
        """Send the outputs of each step."""
        while True:
            self.engine.send({"outputs": await self.resp_queue.get()})

    async def main_loop(self) -> None:
        """Run one batch after another while there are requests."""
        while True:
            self.has_runable_event.set()
            await self.has_runable_event.wait()
            batch = self.scheduler.schedule()
            if not batch:
                await self.no_running_warning()
                continue
            await self._send_next_inputs(batch)
            await self._main_loop_get_outputs()

    async def no_running_warning(self) -> None:
        """Say that nobody can be admitted, and have patience."""
        if not self.warned:
            self.warned = True
            log(
                "WARNING",
                "engine_loop.py:475",
                "no next prefill running request, Maybe cache is full",
            )
        await asyncio.sleep(0.1)

    async def _send_next_inputs(self, batch: list[Sequence]) -> None:
        self.scheduler.scheduler_tick += 1
        await self.executor.forward_async(batch)

    async def _main_loop_get_outputs(self) -> None:
        self._update_running(await self.executor.get_output_async())

    def _update_running(self, batch: list[Sequence]) -> None:
        tokens = self.engine.sampler.tokens(batch)
        if tokens:
            outputs = []
            for sequence in batch:
                sequence.steps -= 1
                outputs.append((sequence.request, sequence.prompt, tokens, sequence.steps <= 0))
                sequence.prompt = 0
            self.resp_queue.put_nowait(outputs)
        self._get_extra_outputs()
        self.scheduler.finish()

    def _get_extra_outputs(self) -> None:
        """Do what remains between two steps; faults strike here."""
        if self.scene.due(LOOP):
            assert self.scene.fault is not None
            self.scene.fault.strike(self.scene)


class Engine:
    """One engine, on the event loop that runs."""

    def __init__(
        self, interval: float, scene: Scene, send: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.scene = scene
        self.send = send
        self.sampler: Any = Sampler()
        self.scheduler = Scheduler()
        self.executor = UniExecutor(BaseModelAgent(interval / STEPS_PER_INTERVAL, scene))
        self.req_manager = RequestManager()
        self._engine_loop = EngineLoop(self)
        self._main: asyncio.Task[None] | None = None
        scene.engine = self

    def start(self) -> None:
        """Start all of its tasks."""
        self.executor.model_agent.start()
        self._engine_loop.start()
        self._main = asyncio.create_task(self.async_loop(), name="EngineMainLoop")

    async def async_loop(self) -> None:
        """Wait until something fails, and say what."""
        await self._engine_loop.wait_tasks()

    def stopped(self) -> list[str]:
        """Return the names of the tasks that have ended and should not have."""
        tasks = (*self.executor.model_agent.tasks, *self._engine_loop.tasks)
        return [task.get_name() for task in tasks if task.done()]

    def on_add_request(self, request: int, prompt: int, steps: int) -> None:
        """Take a request."""
        self.req_manager.requests.put_nowait(Sequence(request, prompt, steps))

    def on_get_schedule_metrics(self) -> dict[str, Any]:
        """Return what the scheduler knows."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "scheduler_tick": self.scheduler.scheduler_tick,
            "gpu_cache_usage": 1.0 - self.scheduler.free_blocks / BLOCKS,
            "stopped": self.stopped(),
        }

    def on_arm(self, at: float) -> None:
        """Let the fault strike at the instant *at*."""
        self.scene.arm(at)


async def wait_for_async_tasks(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until one fails, log it, and wait for the others."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                name = task.get_name()
                log(
                    "ERROR",
                    "request.py:33",
                    f"Task <{name}> failed\n{type(error).__name__}: {error}",
                )


def log(level: str, where: str, words: str) -> None:
    """Print a line as LMDeploy's logger does."""
    stamp = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S},000"
    print(f"{stamp} - lmdeploy - {level} - {where} - {words}", flush=True)


def idle_threads(count: int) -> None:
    """Start threads that wait for work which never comes, as executors' threads do."""
    jobs: queue.Queue[Any] = queue.Queue()

    def worker() -> None:
        while True:
            jobs.get(block=True)()

    for number in range(count):
        threading.Thread(target=worker, name=f"asyncio_{number}", daemon=True).start()


class AsyncRPCServer:
    """Takes the calls of the API server, one line each."""

    def __init__(
        self, connection: socket.socket, options: argparse.Namespace, scene: Scene
    ) -> None:
        self.engine = Engine(options.interval, scene, self.send)
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Serve until the API server is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self.engine.start()
        while line := await reader.readline():
            call = json.loads(line)
            result = getattr(self.engine, "on_" + call["method"])(*call["arguments"])
            if "id" in call:
                self.send({"id": call["id"], "result": result})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send an answer, or outputs."""
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")


def engine_main(options: argparse.Namespace, connection: socket.socket, parent: int) -> None:
    """Run the engine; the entry point of the second process."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    title = "ray::RayEngineWorker.get_schedule_metrics" if options.ray_logs else ""
    set_title(title, "ZMQMPEngine")
    scene = Scene(options.fault, IN_ENGINE, options.truth, options.lasts)
    scene.parent = parent
    scene.prepare()
    idle_threads(options.threads)

    async def run() -> None:
        await AsyncRPCServer(connection, options, scene).run()

    if not options.ray_logs:
        asyncio.run(run())
        return
    # Under Ray the code of an async actor runs in a thread of this name, never in MainThread.
    set_title("", "ray::RayEngineW")
    thread = threading.Thread(
        target=asyncio.run, args=(run(),), name="AsyncIO Thread: default", daemon=True
    )
    thread.start()
    thread.join()
    sys.exit(0)
