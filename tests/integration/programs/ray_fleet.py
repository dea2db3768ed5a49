"""A rollout fleet on a Ray of its own, in XTuner's shape, whose shared store blocks on demand.

    ray_fleet.py FOLDER [SERVERS]

Starts Ray with FOLDER as its directory of sessions, and for each server

- a task ``run_lmdeploy_server_wrapper``: prints heartbeats every second, answers HTTP, and has
  requests of its own in flight;
- an actor ``RayEngineWorker``: the engine's loop, which puts each output into the shared store with
  a blocking ``ray.get``, as LMDeploy does;
- an actor ``RayWorkerWrapper``: runs the forward.

One actor ``SharedStore`` serves them all. Once FOLDER/fault exists it answers nothing any more. The
driver writes FOLDER/fleet.json when all servers print, and ends when its standard input does.
"""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path

import ray

FOLDER = Path(sys.argv[1])
SERVERS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
FAULT = FOLDER / "fault"
INTERVAL = 1.0
BEAT = (
    "[{stamp} DP0] Avg thr (in/out): {tokens:.1f} / {tokens:.1f} tokens/s, "
    "Server (succeeded/failed/routed/waiting): {done} / 0 / 6 / 0, "
    "Engine (running/waiting): {running} / {waiting}, KV cache: 42.0%, "
)


@ray.remote(num_cpus=0)
class SharedStore:
    def __init__(self, fault):
        self.fault = fault
        self.outputs = {}

    def pid(self):
        return os.getpid()

    def put(self, key, value):
        if self.fault.exists():
            self.wait_for_space()
        self.outputs[key] = value

    def wait_for_space(self):
        threading.Event().wait()


@ray.remote(num_cpus=0)
class RayWorkerWrapper:
    async def pid(self):
        return os.getpid()

    async def forward(self):
        await asyncio.sleep(INTERVAL / 8)


@ray.remote(num_cpus=0, max_concurrency=100)
class RayEngineWorker:
    def __init__(self, name, worker, store):
        self.name, self.worker, self.store = name, worker, store
        self.tokens = 0

    async def pid(self):
        self.task = asyncio.create_task(self.main_loop(), name="EngineMainLoop")
        return os.getpid()

    async def main_loop(self):
        while True:
            await self.worker.forward.remote()
            self.tokens += 60
            self._get_extra_outputs()

    def _get_extra_outputs(self):
        ray.get(self.store.put.remote(self.name, self.tokens))

    async def get_schedule_metrics(self):
        return {"running": 6, "waiting": 2, "tokens": self.tokens}


class Server:
    def __init__(self, engine):
        self.engine = engine
        self.metrics = {"running": 6, "waiting": 2, "tokens": 0}
        self.answered = time.monotonic()

    async def probe(self):
        while True:
            self.metrics = await self.engine.get_schedule_metrics.remote()
            self.answered = time.monotonic()
            await asyncio.sleep(INTERVAL / 4)

    async def force_log(self):
        told = 0
        for done in range(10**9):
            await asyncio.sleep(INTERVAL)
            now = await self.engine.get_schedule_metrics.remote()
            tokens, told = now["tokens"] - told, now["tokens"]
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            print(BEAT.format(stamp=stamp, done=done, **{**now, "tokens": tokens}), flush=True)

    async def answer(self, reader, writer):
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        status, body = "404 Not Found", ""
        if path == b"/health":
            silent = time.monotonic() - self.answered
            well = silent < 2.2 * INTERVAL
            status = "200 OK" if well else "503 Service Unavailable"
            word, text = ("healthy", "Engine is healthy") if well else ("unhealthy", "")
            text = text or f"health probe timed out after {INTERVAL:.1f}s"
            body = json.dumps({"status": word, "message": text})
        elif path == b"/metrics":
            status = "200 OK"
            body = (
                f'lmdeploy:generation_tokens_total{{engine="0"}} {self.metrics["tokens"]}\n'
                f'lmdeploy:num_requests_running{{engine="0"}} {self.metrics["running"]}\n'
                f'lmdeploy:num_requests_waiting{{engine="0"}} {self.metrics["waiting"]}\n'
            )
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()

    async def run(self):
        await asyncio.start_server(self.answer, "127.0.0.1", 0)
        await asyncio.gather(self.probe(), self.force_log())


@ray.remote(num_cpus=0)
def run_lmdeploy_server_wrapper(engine, started):
    started.with_name(f"{started.name}.{os.getpid()}").touch()
    asyncio.run(Server(engine).run())


def main():
    ray.init(
        num_cpus=1, include_dashboard=False, _temp_dir=str(FOLDER / "ray"), log_to_driver=False
    )
    store = SharedStore.remote(FAULT)
    workers = [RayWorkerWrapper.remote() for _ in range(SERVERS)]
    engines = [RayEngineWorker.remote(f"engine-{i}", w, store) for i, w in enumerate(workers)]
    fleet = {
        "driver": os.getpid(),
        "store": ray.get(store.pid.remote()),
        "workers": ray.get([worker.pid.remote() for worker in workers]),
        "engines": ray.get([engine.pid.remote() for engine in engines]),
    }
    started = FOLDER / f"server.{os.getpid()}"
    kept = [run_lmdeploy_server_wrapper.remote(engine, started) for engine in engines]
    while len(files := list(FOLDER.glob(f"{started.name}.*"))) < SERVERS:
        time.sleep(0.1)
    fleet["servers"] = [int(file.suffix[1:]) for file in files]
    partial = FOLDER / "fleet.json.part"
    partial.write_text(json.dumps(fleet))
    partial.rename(FOLDER / "fleet.json")
    sys.stdin.read()
    ray.shutdown()
    return kept


if __name__ == "__main__":
    main()
