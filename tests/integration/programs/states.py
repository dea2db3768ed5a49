"""A program that brings itself into a state which is hard to read from outside.

    states.py STATE OUTPUT

An event loop in a thread of its own has a task that waits for ever and one that ticks; the main
thread does what STATE says. Writes the line of the ``await``. Runs under any Python from 3.10 on.
"""

import asyncio
import ctypes
import json
import os
import sys
import threading
import time

STATE, OUTPUT = sys.argv[1:]
CLONE_VM, CLONE_VFORK, SIGCHLD = 0x100, 0x4000, 17
PR_SET_DUMPABLE = 4
SYS_EXIT = 60
"""Of x86-64. Ends the calling thread alone, without unwinding its stack."""
libc = ctypes.CDLL(None)
ready = threading.Event()


async def leaf(event):
    await event.wait()  # the await


async def waiter(event):
    await leaf(event)


async def ticker():
    while True:
        await asyncio.sleep(0.005)


async def main():
    event = asyncio.Event()
    tasks = [
        asyncio.create_task(waiter(event), name="waiter"),
        asyncio.create_task(ticker(), name="ticker"),
    ]
    await asyncio.sleep(0.02)
    ready.set()
    await asyncio.gather(*tasks)


def announce():
    with open(__file__) as file:
        line = next(i for i, text in enumerate(file, 1) if text.endswith("# the await\n"))
    with open(OUTPUT + ".part", "w") as file:
        json.dump({"line": line}, file)
    os.rename(OUTPUT + ".part", OUTPUT)


def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def fork_and_wait():
    """Sleep in the kernel, not to be interrupted, until a child that shares our memory ends."""
    stack = ctypes.create_string_buffer(1 << 16)
    top = (ctypes.addressof(stack) + len(stack)) & ~15
    # The child runs ``sleep(600)`` of the C library and no Python.
    libc.clone(
        ctypes.cast(libc.sleep, ctypes.c_void_p),
        ctypes.c_void_p(top),
        CLONE_VM | CLONE_VFORK | SIGCHLD,
        ctypes.c_void_p(600),
    )


def in_another_interpreter():
    try:
        import _interpreters as other
    except ImportError:
        import _xxsubinterpreters as other
    code = (
        "import asyncio\n"
        "async def sub_leaf(event): await event.wait()\n"
        "async def main():\n"
        "    task = asyncio.create_task(sub_leaf(asyncio.Event()), name='sub-waiter')\n"
        "    await asyncio.sleep(0.02)\n"
        f"    open({OUTPUT + '.sub'!r}, 'w').close()\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    id_ = other.create()
    run = other.run_string if hasattr(other, "run_string") else other.exec
    run(id_, code)


def start(function):
    threading.Thread(target=function, daemon=True).start()


start(lambda: asyncio.run(main()))
ready.wait()
if STATE == "forking":
    start(fork_and_wait)
elif STATE == "undumpable":
    libc.prctl(PR_SET_DUMPABLE, 0)
elif STATE == "interpreters":
    start(in_another_interpreter)
    until(OUTPUT + ".sub")
announce()
if STATE == "leaderless":
    libc.syscall(SYS_EXIT, 0)
elif STATE == "executing":
    until(OUTPUT + ".go")
    os.execv(sys.executable, [sys.executable, "-B", __file__, "plain", OUTPUT + ".again"])
threading.Event().wait()
