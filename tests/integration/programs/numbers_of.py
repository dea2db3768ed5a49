"""Holds numbers of every kind that state probes read, at rest or moving, and says what they are.

usage: numbers_of.py (rest | move) OUTPUT
"""

from __future__ import annotations

import asyncio
import collections
import enum
import json
import os
import sys
import threading
import time

SECRET = "the-prompt-of-somebody"


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    STOPPED = enum.auto()


class Code(enum.IntEnum):
    OK = 200


class Text(str, enum.Enum):  # noqa: UP042  # of 3.10, too
    FINE = SECRET


class OwnInt(int):
    pass


class Base:
    pass


class Slotted:
    __slots__ = ("count", "empty", "flag")

    def __init__(self):
        self.count, self.flag = 41, True


class Derived(Slotted):
    __slots__ = ("more",)

    def __init__(self):
        super().__init__()
        self.more = 2.5


class Item:
    def __init__(self, number):
        self.number = number
        self.state = Derived() if number % 2 else Base()
        self.begin, self.end = 10, 10 + 7 * number


class Queue(collections.deque):
    pass


class Engine:
    def __init__(self):
        self.zero, self.one, self.negative = 0, 1, -77
        self.large, self.huge = 2**62 + 5, 2**200
        self.vast = 2**400
        self.yes, self.no = True, False
        self.real, self.whole, self.nothing = 3.25, 17, None
        self.infinite, self.undefined = float("inf"), float("nan")
        self.own_int = OwnInt(5)
        self.text, self.data = SECRET, SECRET.encode()
        self.since = time.monotonic() - 100
        self.list, self.tuple, self.set = [1] * 5, (1,) * 6, set(range(1000))
        self.frozen = frozenset("ab")
        self.dict = {SECRET + str(i): i for i in range(50)}
        self.default = collections.defaultdict(int, {1: 1, 2: 2})
        self.ordered = collections.OrderedDict.fromkeys("abcd")
        self.deque, self.queue = collections.deque([1, 2, 3]), Queue([1, 2])
        for i in range(900):
            self.set.discard(i)
        self.status, self.code, self.choice = Status.RUNNING, Code.OK, Text.FINE
        self.by_status = collections.defaultdict(dict)
        self.by_status[Status.WAITING][SECRET] = 1
        self.by_status[Status.RUNNING].update({SECRET + "1": 1, SECRET + "2": 2})
        self.by_status[Status.STOPPED].clear()
        self.slotted = Derived()
        self.items = {SECRET + str(i): Item(i) for i in range(9)}
        self.item_list = list(self.items.values())
        self.many = {i: Item(i) for i in range(1000)}
        self.none_yet = {}
        self.later = None

    def step(self):
        """Never in a coroutine; a thread hangs in it."""
        count = 12
        GATE.wait()
        return count

    async def loop(self):
        await asyncio.Event().wait()


GATE = threading.Event()


def maker(engine):
    async def inside():
        level = 7
        await asyncio.Event().wait()
        return engine, level

    return inside


async def nested(number):
    width = number * 3
    await asyncio.Event().wait()
    return width


async def stream(engine):
    offset = 19
    await asyncio.Event().wait()
    yield engine, offset


async def consume(engine):
    async for _ in stream(engine):
        pass


class Moving:
    def __init__(self):
        self.count, self.low = 1000, 1000
        self.real = 1000.5
        self.grows, self.shuffled = {}, []
        self.label = Status.WAITING

    async def run(self):
        while True:
            for i in range(200):
                self.count += 1
                self.real += 1.0
                self.grows[self.count] = i
                if len(self.grows) > 3000:
                    self.grows = {}
                self.shuffled = [None] * (self.count % 7)
                self.label = Status.RUNNING if self.count % 2 else Status.WAITING
            await asyncio.sleep(0)


class Coming:
    """Comes and goes, with a new frame each time."""

    async def visit(self, number):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return number

    async def run(self):
        number = 5000
        while True:
            number += 1
            await self.visit(number)


async def main(mode, output):
    engine = Engine()
    tasks = [
        asyncio.ensure_future(each)
        for each in (
            engine.loop(),
            maker(engine)(),
            nested(1),
            nested(2),
            nested(3),
            consume(engine),
        )
    ]
    threading.Thread(target=engine.step, daemon=True).start()
    truth = {"since": engine.since, "items": [item.end - 10 for item in engine.items.values()]}
    if mode == "move":
        moving = Moving()
        tasks += [asyncio.ensure_future(moving.run()), asyncio.ensure_future(Coming().run())]
    await asyncio.sleep(0.2)
    with open(output + ".part", "w") as out:
        json.dump(truth, out)
    os.rename(output + ".part", output)
    await asyncio.gather(*tasks)


asyncio.run(main(*sys.argv[1:]))
