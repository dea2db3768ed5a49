"""Tasks that lock and await each other at random until most of them are stuck.

    deadlock.py SEED OUTPUT

Writes who holds what and who waits for what, kept by the tasks themselves. Runs under any Python
from 3.10 on.
"""

import asyncio
import json
import os
import random
import sys

SEED, OUTPUT = int(sys.argv[1]), sys.argv[2]
random.seed(SEED)
LOCKS, TASKS = 12, 24
owner, wants, awaits = {}, {}, {}


async def main():
    locks = [asyncio.Lock() for _ in range(LOCKS)]
    # ``async with condition`` is an acquire of its lock.
    conditions = [asyncio.Condition(lock) for lock in locks[:3]]
    tasks = []

    async def work(order):
        me = id(asyncio.current_task())

        async def enter(k):
            if k == len(order):
                return await rest()
            lock = locks[order[k]]
            door = conditions[order[k]] if order[k] < 3 and random.random() < 0.5 else lock
            wants[me] = id(lock)
            async with door:
                del wants[me]
                owner[id(lock)] = me
                await asyncio.sleep(random.random() * 0.03)
                await enter(k + 1)

        async def rest():
            others = random.sample(tasks, random.randint(1, 3))
            kind = random.randrange(4)
            awaits[me] = [id(other) for other in others]
            if kind == 0:
                await asyncio.gather(*others)
            elif kind == 1:
                await asyncio.wait(others)
            elif kind == 2:
                awaits[me] = [id(others[0])]
                await asyncio.shield(others[0])
            else:
                del awaits[me]
                await asyncio.sleep(1e6)

        await enter(0)

    for i in range(TASKS):
        order = random.sample(range(LOCKS), random.randint(0, 4))
        tasks.append(asyncio.create_task(work(order), name=f"worker-{i}"))
    for _ in range(50):  # rounds of the loop, not only time: the machine may stall
        await asyncio.sleep(0.02)
    with open(OUTPUT + ".part", "w") as file:
        json.dump({"owner": owner, "wants": wants, "awaits": awaits}, file)
    os.rename(OUTPUT + ".part", OUTPUT)
    await asyncio.sleep(1e6)


asyncio.run(main())
