"""Two tasks of two event loops that wait for each other.

crossing.py OUTPUT
"""

import asyncio
import os
import sys
import threading
import time

OUTPUT = sys.argv[-1]
loops, here = [], []
placed = threading.Event()


def run():
    loop = asyncio.new_event_loop()
    loops.append(loop)
    loop.run_forever()


async def back():
    """Runs on the other loop, and waits for a task of the first one."""
    asyncio.current_task().set_name("there")
    again = asyncio.run_coroutine_threadsafe(wait_for_here(), here[0])
    await asyncio.wrap_future(again)


async def wait_for_here():
    asyncio.current_task().set_name("messenger")
    placed.set()
    await here[1]


async def main():
    here.extend([asyncio.get_running_loop(), asyncio.current_task()])
    here[1].set_name("here")
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(back(), loops[0]))


def announce():
    placed.wait()
    time.sleep(0.4)
    with open(OUTPUT + ".part", "w") as file:
        file.write("{}")
    os.rename(OUTPUT + ".part", OUTPUT)


threading.Thread(target=run, daemon=True).start()
while not loops:
    time.sleep(0.01)
threading.Thread(target=announce).start()
asyncio.run(main())
