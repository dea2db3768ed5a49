"""A random graph of tasks that comes to rest and then writes the truth about itself.

    graph.py SEED TASKS [uvloop] OUTPUT

Runs under any Python from 3.10 on, two event loops in two threads. The truth comes from Python's
own introspection (``cr_await`` and its like), and from the leaves, which say what they are about
to await.
"""

import asyncio
import concurrent.futures
import functools
import json
import os
import random
import socket
import sys
import threading
import time
import types
import weakref

import truth

SEED, TASKS, OUTPUT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[-1]
UVLOOP = "uvloop" in sys.argv
NEVER = threading.Event()
random.seed(SEED)


# ---------------------------------------------------------------------- ways to await


class Delegating:
    def __init__(self, inner):
        self.inner = inner

    def __await__(self):
        return (yield from plain(self.inner).__await__())


class ByHand:
    """Yields its future itself, as a library without asyncio's help would."""

    def __init__(self, future):
        self.future = future

    def __await__(self):
        self.future._asyncio_future_blocking = True
        yield self.future
        return self.future.result()


class Room:
    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        return None


@types.coroutine
def old_style(inner):
    return (yield from plain(inner))


async def numbers(inner):
    try:
        yield 1
        yield await inner
    finally:
        pass


async def numbers_of_numbers(inner):
    async for number in numbers(inner):
        yield number


async def plain(inner):
    return await inner


async def nested(depth, inner):
    if depth:
        return await nested(depth - 1, inner)
    return await inner


async def in_a_room(inner):
    async with Room() as room:
        try:
            return await inner
        finally:
            del room


async def on_many_lines(
    inner,
    after=2,
):
    return [
        1,
        await inner,
        after,
    ]


async def in_a_comprehension(inner):
    return [await each for each in [inner]]


async def in_an_async_comprehension(inner):
    return [number async for number in numbers_of_numbers(inner)]


async def in_a_for(inner):
    async for _ in numbers_of_numbers(inner):
        pass


async def by_anext(inner):
    generator = numbers(inner)
    await anext(generator)
    await anext(generator, None)


async def by_asend(inner):
    generator = numbers(inner)
    await generator.asend(None)
    await generator.asend(None)


def decorated(function):
    @functools.wraps(function)
    async def wrapper(*arguments):
        return await function(*arguments)

    return wrapper


@decorated
async def through_a_decorator(inner):
    return await inner


async def through_a_lambda(inner):
    return await (lambda value: value)(inner)


async def in_an_except(inner):
    try:
        raise ValueError
    except ValueError:
        return await inner


WAYS = [
    plain,
    in_a_room,
    on_many_lines,
    in_a_comprehension,
    in_an_async_comprehension,
    in_a_for,
    by_anext,
    by_asend,
    through_a_decorator,
    through_a_lambda,
    in_an_except,
    lambda inner: nested(random.randint(1, 12), inner),
    Delegating,
    old_style,
]


# ---------------------------------------------------------------------- things to wait for

EXPECTED = weakref.WeakKeyDictionary()


def expect(kind, target=0, tasks=()):
    """Say what the current task is about to await."""
    EXPECTED[asyncio.current_task()] = [kind, id(target) if target else 0, [id(t) for t in tasks]]


class World:
    def __init__(self, loop):
        self.loop = loop
        self.tasks = []
        self.kept = []
        self.events = [asyncio.Event() for _ in range(5)]
        self.locks = [asyncio.Lock() for _ in range(5)]
        self.queues = [asyncio.Queue() for _ in range(4)]
        self.queues += [asyncio.PriorityQueue(), asyncio.LifoQueue()]
        self.full = asyncio.Queue(1)
        self.full.put_nowait(1)
        self.semaphores = [asyncio.Semaphore(1) for _ in range(3)]
        self.bounded = asyncio.BoundedSemaphore(2)
        self.conditions = [asyncio.Condition() for _ in range(3)]
        self.futures = []
        self.leaves = [getattr(self, name) for name in dir(type(self)) if name.startswith("leaf_")]

    def future(self):
        future = self.loop.create_future()
        self.futures.append(future)
        return future

    def branch(self, depth):
        """Return a coroutine for a new task."""
        leaf = random.choice(self.leaves)() if depth < 3 else self.leaf_future()
        for _ in range(random.randint(0, 3)):
            leaf = random.choice(WAYS)(leaf)
        return plain(leaf) if not asyncio.iscoroutine(leaf) else leaf

    def branches(self, low, high):
        return [asyncio.ensure_future(self.branch(2)) for _ in range(random.randint(low, high))]

    async def leaf_event(self):
        event = random.choice(self.events)
        expect("event", event)
        await event.wait()

    async def leaf_lock(self):
        lock = random.choice(self.locks)
        expect("lock", lock)
        async with lock:
            expect("sleep")
            await asyncio.sleep(1e6)

    async def leaf_queue_get(self):
        queue = random.choice(self.queues)
        expect("queue", queue)
        await queue.get()

    async def leaf_queue_put(self):
        expect("queue", self.full)
        await self.full.put(2)

    async def leaf_queue_join(self):
        queue = asyncio.Queue()
        queue.put_nowait(1)
        self.kept.append(queue)
        expect("queue", queue)
        await queue.join()

    async def leaf_semaphore(self):
        semaphore = random.choice([*self.semaphores, self.bounded])
        expect("semaphore", semaphore)
        async with semaphore:
            expect("sleep")
            await asyncio.sleep(1e5)

    async def leaf_condition(self):
        condition = random.choice(self.conditions)
        expect("lock", condition._lock)
        async with condition:
            expect("condition", condition)
            await condition.wait()

    async def leaf_condition_wait_for(self):
        condition = random.choice(self.conditions)
        expect("lock", condition._lock)
        async with condition:
            expect("condition", condition)
            await condition.wait_for(lambda: False)

    async def leaf_barrier(self):
        if sys.version_info < (3, 11):
            return await self.leaf_event()
        barrier = asyncio.Barrier(3)
        self.kept.append(barrier)
        expect("barrier", barrier)
        await barrier.wait()

    async def leaf_sleep(self):
        expect("sleep")
        await asyncio.sleep(random.choice([1e5, 1e6]))

    async def leaf_future(self):
        future = self.future()
        expect("future", future)
        await future

    async def leaf_python_future(self):
        future = asyncio.futures._PyFuture(loop=self.loop)
        self.kept.append(future)
        expect("future", future)
        await future

    async def leaf_by_hand(self):
        future = self.future()
        expect("future", future)
        await ByHand(future)

    async def leaf_gather(self):
        branches = self.branches(1, 4)
        expect("gather", 0, branches)
        await asyncio.gather(*branches)

    async def leaf_wait(self):
        branches = self.branches(1, 3)
        expect("wait", 0, branches)
        when = random.choice([asyncio.ALL_COMPLETED, asyncio.FIRST_COMPLETED])
        await asyncio.wait(branches, return_when=when)

    async def leaf_wait_for(self):
        await asyncio.wait_for(self.branch(2), random.choice([None, 1e6]))

    async def leaf_wait_for_queue(self):
        await asyncio.wait_for(random.choice(self.queues).get(), 1e6)

    async def leaf_shield(self):
        inner = asyncio.ensure_future(self.branch(2))
        self.kept.append(inner)
        expect("shield", inner, [inner])
        await asyncio.shield(inner)

    async def leaf_task(self):
        if not self.tasks:
            return await self.leaf_future()
        task = random.choice(self.tasks)
        expect("task", task, [task])
        await task

    async def leaf_executor(self):
        if random.random() > 0.2:
            return await self.leaf_future()
        expect("executor")
        await self.loop.run_in_executor(None, NEVER.wait)

    async def leaf_other_thread(self):
        future = concurrent.futures.Future()
        self.kept.append(future)
        expect("executor", future)
        await asyncio.wrap_future(future)

    async def leaf_as_completed(self):
        for each in asyncio.as_completed([self.branch(2) for _ in range(2)]):
            await each

    async def leaf_task_group(self):
        if sys.version_info < (3, 11):
            return await self.leaf_gather()
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(self.branch(2)) for _ in range(random.randint(1, 3))]
            expect("task_group", group, members)

    async def leaf_timeout(self):
        if sys.version_info < (3, 11):
            return await self.leaf_event()
        async with asyncio.timeout(1e6):
            await self.leaf_event()

    async def leaf_after_cancel(self):
        try:
            await self.leaf_future()
        except asyncio.CancelledError:
            await self.leaf_future()

    async def leaf_stream(self):
        ours, theirs = socket.socketpair()
        self.kept.append(theirs)
        if random.random() > 0.3:
            return await self.leaf_queue_get()
        reader, writer = await asyncio.open_connection(sock=ours)
        self.kept.append(writer)
        expect("stream")
        await reader.read(10)

    async def leaf_over(self):
        """A task that ends, and is kept."""
        await asyncio.sleep(0)


def make(world, number):
    coroutine = world.branch(0)
    name = f"task-{number}-\N{GREEK SMALL LETTER ALPHA}" if random.random() < 0.8 else None
    if random.random() < 0.1:
        return asyncio.tasks._PyTask(coroutine, loop=world.loop, name=name)
    if sys.version_info >= (3, 12) and random.random() < 0.1:
        return asyncio.Task(coroutine, loop=world.loop, name=name, eager_start=True)
    return asyncio.create_task(coroutine, name=name)


# ---------------------------------------------------------------------- the truth


def truth_of(task):
    found = truth.of(task)
    # A coroutine inside ``wait_for`` runs in a task of its own up to 3.11.
    told = not task.done() and "wait_for" not in str(found["chain"])
    return {**found, "expected": EXPECTED.get(task) if told else None}


async def live(share, results):
    loop = asyncio.get_running_loop()
    world = World(loop)
    while len(asyncio.all_tasks()) < share:
        world.tasks.append(make(world, len(world.tasks)))
        if random.random() < 0.1:
            await asyncio.sleep(0)
    for _ in range(50):  # rounds of the loop, not only time: the machine may stall
        await asyncio.sleep(0.004)
    for task in random.sample(world.tasks, max(1, len(world.tasks) // 20)):
        try:
            task.cancel()
        except RecursionError:
            pass
    for future in world.futures[::17]:
        if not future.done():
            future.set_result(None)
    for _ in range(100):
        await asyncio.sleep(0.004)
    me = asyncio.current_task()
    everyone = {*asyncio.all_tasks(), *world.tasks} - {me}
    results.append({str(id(task)): truth_of(task) for task in everyone})
    world.kept.append(everyone)
    del everyone
    await asyncio.sleep(1e6)


def run(share, results):
    if UVLOOP:
        import uvloop

        loop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    loop.run_until_complete(live(share, results))


results = []
for share in (TASKS // 2, TASKS - TASKS // 2):
    threading.Thread(target=run, args=(share, results), daemon=True).start()
while len(results) < 2:
    time.sleep(0.02)
time.sleep(0.1)
with open(OUTPUT + ".part", "w") as file:
    json.dump({"tasks": {**results[0], **results[1]}}, file)
os.rename(OUTPUT + ".part", OUTPUT)
NEVER.wait()
