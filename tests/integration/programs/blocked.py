"""A program whose event loop is blocked by a call that is no await; and some odd tasks.

    blocked.py OUTPUT

Writes the line of the call. Runs under any Python from 3.10 on.
"""

import asyncio
import json
import os
import sys
import threading
import time

OUTPUT = sys.argv[1]
kept = []
placed = threading.Event()


async def waiter(event):
    await event.wait()


def deep(seconds):
    time.sleep(seconds)  # the culprit


async def inner():
    placed.set()
    deep(1e6)


async def outer():
    await inner()


async def late():
    await asyncio.sleep(0.05)


def ended_loop():
    """A loop that ran in a thread that has ended, its tasks still pending."""
    loop = asyncio.new_event_loop()

    async def leave():
        for i in range(3):
            kept.append(asyncio.create_task(waiter(asyncio.Event()), name=f"left-{i}"))
        await asyncio.sleep(0.05)

    loop.run_until_complete(leave())
    kept.append(loop)


async def main():
    event = asyncio.Event()
    asyncio.current_task().set_name("main")
    kept.append(asyncio.create_task(waiter(event), name="waiter"))
    kept.append(asyncio.create_task(late(), name="late"))
    kept.append(
        asyncio.tasks._PyTask(waiter(event), loop=asyncio.get_running_loop(), name="python-task")
    )
    kept.append(asyncio.create_task(waiter(event), name="escape \x1b[31m\n"))
    await asyncio.sleep(0.01)
    kept.append(asyncio.create_task(outer(), name="culprit"))
    kept.append(asyncio.create_task(waiter(event), name="not-started"))
    await asyncio.sleep(0.02)
    await event.wait()


def announce():
    placed.wait()
    time.sleep(0.5)
    with open(__file__) as file:
        line = next(i for i, text in enumerate(file, 1) if text.endswith("# the culprit\n"))
    with open(OUTPUT + ".part", "w") as file:
        json.dump({"line": line, "thread": threading.main_thread().native_id}, file)
    os.rename(OUTPUT + ".part", OUTPUT)


thread = threading.Thread(target=ended_loop)
thread.start()
thread.join()
threading.Thread(target=announce, name="announcer").start()
asyncio.run(main())
