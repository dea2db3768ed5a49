"""The asyncio anatomy of LMDeploy's PyTorch engine, stuck at a chosen point.

    engine.py FAULT OUTPUT

Task names, functions and what they wait for follow lmdeploy/pytorch/engine/engine_loop.py,
request.py, mp_engine/zmq_rpc.py, executor/ray_executor.py and model_agent/agent.py. Nothing of it
computes anything. Runs under any Python from 3.10 on.
"""

import asyncio
import json
import os
import sys
import threading
import time

FAULT, OUTPUT = sys.argv[1], sys.argv[2]
NEVER = threading.Event()


class GpuEvent:
    def __init__(self, done):
        self.done = done

    def query(self):
        return self.done


class Executor:
    """Of the ray kind: both calls await futures that another process resolves."""

    def __init__(self):
        self.previous = None

    async def forward_async(self):
        if FAULT == "forward_never_acknowledged":
            await asyncio.get_running_loop().create_future()
        if FAULT == "guided_decoding":
            await asyncio.to_thread(apply_bitmask)
        if FAULT == "other_ranks_missing":
            await gather_ranks()
        if FAULT == "store_call_blocks":
            store_put()

    async def get_output_async(self):
        event = GpuEvent(FAULT != "kernel_never_ends")
        while not event.query():
            await asyncio.sleep(0.001)


def apply_bitmask():
    NEVER.wait()


def store_put():
    time.sleep(1e6)


async def gather_ranks():
    arrived = False
    while not arrived:
        await asyncio.sleep(0.001)


class EngineLoop:
    def __init__(self):
        self.requests = asyncio.Queue()
        self.resp_queue = asyncio.Queue()
        self.runnable = asyncio.Event()
        self.drained = asyncio.Event()
        self.executor = Executor()
        self.asleep = FAULT == "sleep_never_drains"

    async def preprocess_loop(self):
        while True:
            await self.requests.get()
            self.runnable.set()

    async def send_response_loop(self):
        while True:
            await self.resp_queue.get()

    async def main_loop(self):
        while True:
            await self.wait_runnable()
            if FAULT == "nothing_can_be_scheduled":
                await self.no_running_warning()
            await self.executor.forward_async()
            if self.asleep:
                await self.executor.forward_async()
                await asyncio.get_running_loop().create_future()
            await self.executor.get_output_async()
            self.runnable.clear()
            self.resp_queue.put_nowait(1)

    async def wait_runnable(self):
        await self.runnable.wait()

    async def no_running_warning(self):
        while True:
            await asyncio.sleep(0.1)

    async def drain_for_sleep(self):
        await self.drained.wait()

    async def wait_tasks(self, tasks):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)

    async def async_loop(self):
        loops = {
            "MainLoopPreprocessMessage": self.preprocess_loop,
            "MainLoopSendResponse": self.send_response_loop,
            "MainLoopMain": self.main_loop,
        }
        tasks = [asyncio.create_task(loop(), name=name) for name, loop in loops.items()]
        await self.wait_tasks(tasks)


class RequestManager:
    def __init__(self):
        self.condition = asyncio.Condition()

    async def sender_wait_loop(self):
        while True:
            async with self.condition:
                self.condition.notify_all()
            await asyncio.sleep(0.05)

    async def prepare_send(self):
        async with self.condition:
            await self.condition.wait()


class RpcClient:
    async def async_call(self):
        # The reply never comes, and nobody has set a deadline.
        await asyncio.get_running_loop().create_future()


class Api:
    def __init__(self, engine, manager):
        self.engine, self.manager, self.rpc = engine, manager, RpcClient()
        self.pool = asyncio.Queue()
        if FAULT != "handles_leaked":
            self.pool.put_nowait("handle")

    async def generate(self):
        handle = await self.pool.get()
        if FAULT == "sender_loop_dead":
            await self.manager.prepare_send()
        if FAULT == "reply_lost":
            await self.rpc.async_call()
        self.engine.requests.put_nowait(1)
        await asyncio.Event().wait()
        self.pool.put_nowait(handle)


async def health():
    while True:
        await asyncio.sleep(0.05)


async def main():
    engine, manager = EngineLoop(), RequestManager()
    api = Api(engine, manager)
    kept = [asyncio.create_task(engine.async_loop(), name="EngineMainLoop")]
    if FAULT != "sender_loop_dead":
        kept.append(asyncio.create_task(manager.sender_wait_loop(), name="SenderWaitLoop"))
    kept.append(asyncio.create_task(health(), name="EngineHealthMonitor"))
    kept.append(asyncio.create_task(api.generate(), name="request"))
    if FAULT == "sleep_never_drains":
        kept.append(asyncio.create_task(engine.drain_for_sleep(), name="sleep"))
    await asyncio.sleep(1e6)


def announce():
    time.sleep(0.4)
    with open(OUTPUT + ".part", "w") as file:
        json.dump({}, file)
    os.rename(OUTPUT + ".part", OUTPUT)


threading.Thread(target=announce, name="announcer").start()
asyncio.run(main())
