"""Tasks that move as fast as they can beside tasks that never do.

    busy.py RESTING OUTPUT

Writes the truth about the resting ones, and every chain in which a moving one was ever seen from
inside, by the first letter of its name. Runs under any Python from 3.10 on.
"""

import asyncio
import json
import os
import sys

import truth

RESTING, OUTPUT = int(sys.argv[1]), sys.argv[2]
SAMPLES = 2000
legal = {}


async def take(queue, quick):
    if quick:
        await asyncio.sleep(0)
    else:
        await queue.get()


async def lend(queue, lock):
    await take(queue, False)
    async with lock:
        await take(queue, True)


async def child(queue):
    await take(queue, True)


async def mover(queue, lock):
    while True:
        await lend(queue, lock)
        await asyncio.create_task(child(queue), name="child")


async def several(queue):
    while True:
        await asyncio.gather(child(queue), child(queue))
        async for _ in stream(queue):
            pass


async def stream(queue):
    for _ in range(3):
        await take(queue, True)
        yield 1


async def feeder(queue):
    while True:
        queue.put_nowait(1)
        await asyncio.sleep(0)


async def rest(event, depth):
    if depth:
        await rest(event, depth - 1)
    else:
        await event.wait()


async def sample(tasks):
    """Look at every moving task from inside, between two steps of the loop."""
    for _ in range(SAMPLES):
        for task in asyncio.all_tasks():
            name = task.get_name()
            if name[0] in "mscf" and task is not asyncio.current_task():
                frames, _ = truth.follow(task.get_coro())
                legal.setdefault(name[0], set()).add(json.dumps(frames))
        await asyncio.sleep(0)
    del tasks


async def main():
    event, queue, lock = asyncio.Event(), asyncio.Queue(), asyncio.Lock()
    resting = [asyncio.create_task(rest(event, i % 7), name=f"rest-{i}") for i in range(RESTING)]
    moving = [asyncio.create_task(mover(queue, lock), name=f"m{i}") for i in range(60)]
    moving += [asyncio.create_task(several(queue), name=f"s{i}") for i in range(20)]
    moving += [asyncio.create_task(feeder(queue), name=f"f{i}") for i in range(3)]
    asyncio.current_task().set_name("watcher")
    await sample(moving)
    found = {
        "tasks": {str(id(task)): truth.of(task) for task in resting},
        "legal": {letter: sorted(chains) for letter, chains in legal.items()},
    }
    with open(OUTPUT + ".part", "w") as file:
        json.dump(found, file)
    os.rename(OUTPUT + ".part", OUTPUT)
    await asyncio.sleep(1e6)


asyncio.run(main())
