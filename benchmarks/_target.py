"""What the benchmarks look at: a process with deep threads, two event loops and suspended tasks.

::

    python benchmarks/_target.py --threads 48 --tasks 206 [--torch] [--run CODE]

It prints ``ready`` once everything waits where it should. A third of the tasks wait in
``queue.get``, a third for a lock that somebody holds, a third in ``sleep``; each thread is sixty
frames deep. With ``--torch`` it imports torch first, where that is installed: a process with some
five hundred mappings, as engines are. ``--run`` executes Python of the caller's, a meter say.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading

DEPTH = 60


def deep(levels: int) -> None:
    """Wait for ever, *levels* frames down."""
    if levels:
        deep(levels - 1)
    else:
        threading.Event().wait()


async def down(levels: int, leaf: asyncio.Queue[int] | asyncio.Lock | None) -> None:
    """Wait for *leaf*, *levels* awaits down."""
    if levels:
        await down(levels - 1, leaf)
    elif isinstance(leaf, asyncio.Queue):
        await leaf.get()
    elif isinstance(leaf, asyncio.Lock):
        async with leaf:
            pass
    else:
        await asyncio.sleep(1e6)


async def tasks(count: int, ready: threading.Event) -> None:
    """Have *count* tasks wait."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    lock = asyncio.Lock()
    async with lock:
        leaves = (queue, lock, None)
        waiting = [asyncio.create_task(down(3, leaves[n % 3])) for n in range(count)]
        await asyncio.sleep(0.2)
        ready.set()
        await asyncio.gather(*waiting)


def main() -> None:
    """Build it and wait to be killed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--threads", type=int, default=48)
    parser.add_argument("--tasks", type=int, default=206)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--run", default="", metavar="CODE")
    options = parser.parse_args()
    if options.torch:
        with contextlib.suppress(ImportError):
            import torch  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    exec(options.run)
    loops = [threading.Event(), threading.Event()]
    for ready in loops:
        run = tasks(options.tasks // len(loops), ready)
        threading.Thread(target=asyncio.run, args=(run,), name="loop", daemon=True).start()
    for number in range(max(0, options.threads - len(loops) - 1)):
        threading.Thread(target=deep, args=(DEPTH,), name=f"pool_{number}", daemon=True).start()
    for ready in loops:
        ready.wait()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
