"""Await chains through coroutines that Cython compiled, and back into Python.

    cython_chains.py FOLDER [uvloop] OUTPUT

FOLDER holds the compiled module. Writes the chain expected of each task, by name: functions, and
for Cython's the await point. Runs under any Python from 3.10 on.
"""

import asyncio
import json
import os
import sys

sys.path.insert(0, sys.argv[1])
import compiled

OUTPUT = sys.argv[-1]
UVLOOP = "uvloop" in sys.argv
expected = {}
kept = []


async def leaf(event):
    await event.wait()


async def native(inner):
    return await inner


def start(name, coroutine, *chain):
    expected[name] = [*chain, ["leaf", ""], ["Event.wait", ""]]
    kept.append(asyncio.create_task(coroutine, name=name))


async def main():
    event = asyncio.Event()
    inner = lambda: leaf(event)  # noqa: E731
    first, second = "await point 1", "await point 2"
    start("relay", compiled.relay(inner()), ["relay", first])
    start("second", compiled.second(inner()), ["second", second])
    start("consume", compiled.consume(inner()), ["consume", first], ["stream", second])
    start("room", compiled.in_a_room(inner()), ["in_a_room", second])
    start("method", compiled.Box().method(inner()), ["Box.method", first])
    start(
        "closure",
        compiled.closure(inner()),
        ["closure.<locals>.nested", first],
        ["relay", first],
    )
    start(
        "sandwich",
        native(compiled.relay(native(compiled.second(inner())))),
        ["native", ""],
        ["relay", first],
        ["native", ""],
        ["second", second],
    )
    for i in range(40):
        coroutine, chain = inner(), []
        for j in range(i % 7):
            if (i + j) % 2:
                coroutine, chain = compiled.relay(coroutine), [["relay", first], *chain]
            else:
                coroutine, chain = native(coroutine), [["native", ""], *chain]
        start(f"mixed-{i}", coroutine, *chain)
    expected["not-started"] = [["relay", ""]]
    asyncio.get_running_loop().call_later(0.2, finish, event)
    await asyncio.sleep(1e6)


def finish(event):
    kept.append(asyncio.create_task(compiled.relay(leaf(event)), name="not-started"))
    with open(OUTPUT + ".part", "w") as file:
        json.dump(expected, file)
    os.rename(OUTPUT + ".part", OUTPUT)
    compiled_block()


def compiled_block():
    import time

    time.sleep(1e6)


if UVLOOP:
    import uvloop

    uvloop.install()
asyncio.run(main())
