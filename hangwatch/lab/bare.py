"""An engine in one bare process, without log and HTTP, for tools that are given a pid.

Run it by path, under any Python from 3.10 on::

    python hangwatch/lab/bare.py lock-order

On standard output stand two JSON lines: ``ready`` when it works, ``truth`` when the fault has
begun, a second later or upon SIGUSR2 (``--after never``). SIGTERM ends it. Without a fault it
works on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

if __package__:
    from hangwatch.lab import faults
    from hangwatch.lab.engine import STEPS_PER_INTERVAL, Engine, idle_threads
    from hangwatch.lab.faults._process import die_with_parent
    from hangwatch.lab.server import CLIENTS, AsyncEngine, Clients
else:  # run by path
    import faults  # type: ignore[import-not-found,no-redef]
    from engine import (  # type: ignore[import-not-found,no-redef]
        STEPS_PER_INTERVAL,
        Engine,
        idle_threads,
    )
    from faults._process import die_with_parent  # type: ignore[import-not-found,no-redef]
    from server import CLIENTS, AsyncEngine, Clients  # type: ignore[import-not-found,no-redef]

PLACES = (faults.LOOP, faults.FORWARD, faults.SERVER, faults.CLIENTS)


class OwnEngine:
    """The engine of this process, for a client of engines."""

    def __init__(self, interval: float, scene: faults.Scene) -> None:
        self.engine = Engine(interval, scene, self.hear)
        self.outputs: dict[int, asyncio.Queue[Any]] = {}

    def hear(self, message: Mapping[str, Any]) -> None:
        """Hand outputs to those who wait for them."""
        for output in message["outputs"]:
            self.outputs[output[0]].put_nowait(output)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the engine."""
        getattr(self.engine, "on_" + method)(*arguments)


async def work(interval: float, after: float | None, scene: faults.Scene) -> None:
    """Keep the engine busy until SIGTERM; let the fault strike *after* seconds, or when told."""
    step = interval / STEPS_PER_INTERVAL
    ours = OwnEngine(interval, scene)
    scene.clients = Clients(AsyncEngine(ours), step)
    loop = asyncio.get_running_loop()

    def arm(seconds: float) -> None:
        scene.arm(time.monotonic() + seconds)
        if scene.fault is not None and scene.fault.place not in faults.IN_ENGINE:
            loop.call_later(seconds, scene.fault.strike, scene)

    loop.add_signal_handler(signal.SIGUSR2, arm, step)
    ours.engine.start()
    tasks = [
        asyncio.create_task(scene.clients.run(number, lambda _: None)) for number in range(CLIENTS)
    ]
    say({"kind": "ready", "pid": os.getpid()})
    if after is not None:
        arm(after)
    await asyncio.gather(*tasks)


def say(message: Mapping[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps(message), flush=True)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options; a mistake ends the process with code 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    possible = [name for name, fault in faults.everything().items() if fault.bare]
    parser.add_argument("fault", nargs="?", choices=possible, help="what goes wrong")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds of eight steps")
    parser.add_argument("--threads", type=int, default=2, help="idle threads")
    parser.add_argument(
        "--after",
        type=lambda text: None if text == "never" else float(text),
        default=1.0,
        metavar="SECONDS",
        help="from ready to the fault; never: upon SIGUSR2",
    )
    parser.add_argument("--lasts", type=float, help="seconds until the fault ends by itself")
    parser.add_argument("--truth", metavar="FILE", help="where the instant is written as well")
    parser.add_argument("--die-with-parent", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    """Work, and hang."""
    options = parse_arguments(sys.argv[1:])
    if options.fault and (reason := faults.load(options.fault).unavailable()):
        print(f"{options.fault} cannot happen here: {reason}", file=sys.stderr)
        sys.exit(2)
    if options.die_with_parent:
        die_with_parent(os.getppid())
    scene = faults.Scene(
        options.fault,
        PLACES,
        options.truth,
        options.lasts,
        lambda note: say({"kind": "truth", **note}),
    )
    scene.prepare()
    idle_threads(options.threads)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(work(options.interval, options.after, scene))


if __name__ == "__main__":
    main()
