"""Asynchronous Ray actors that hang in different ways.

    ray_actors.py OUTPUT

Writes their pids, their actor ids, and the id of the object that one of them waits for.
"""

import asyncio
import json
import os
import sys
import tempfile
import time

import ray

OUTPUT = sys.argv[-1]


@ray.remote
def never():
    time.sleep(1e6)


@ray.remote(max_concurrency=10)
class Engine:
    def __init__(self):
        self.event = asyncio.Event()

    async def pid(self):
        return os.getpid()

    async def deeper(self, depth):
        if depth:
            await self.deeper(depth - 1)
        else:
            await self.event.wait()

    async def generate(self):
        await self.deeper(3)

    async def stream(self):
        yield 1
        await self.deeper(1)

    async def needs(self, references):
        return await references[0]


@ray.remote(max_concurrency=10)
class Caller:
    def __init__(self, engine):
        self.engine = engine

    async def pid(self):
        return os.getpid()

    async def ask(self):
        return await self.engine.generate.remote()


@ray.remote(max_concurrency=10)
class Blocked:
    async def pid(self):
        return os.getpid()

    async def other(self):
        await asyncio.sleep(1e6)

    async def block(self):
        time.sleep(1e6)


with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
    ray.init(num_cpus=5, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    engine = Engine.remote()
    caller, blocked = Caller.remote(engine), Blocked.remote()
    actors = {"engine": engine, "caller": caller, "blocked": blocked}
    found = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
    reference = never.remote()
    kept = [
        engine.generate.remote(),
        engine.needs.remote([reference]),
        engine.stream.options(num_returns="streaming").remote(),
        caller.ask.remote(),
        blocked.other.remote(),
    ]
    time.sleep(1)
    kept.append(blocked.block.remote())
    time.sleep(1)
    truth = {
        "pids": found,
        "ids": {name: actor._actor_id.hex() for name, actor in actors.items()},
        "engine": engine._actor_id.hex(),
        "reference": reference.hex(),
    }
    with open(OUTPUT + ".part", "w") as file:
        json.dump(truth, file)
    os.rename(OUTPUT + ".part", OUTPUT)
    sys.stdin.read()
    ray.shutdown()
