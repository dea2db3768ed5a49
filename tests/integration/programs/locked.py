"""Threads that wait for locks of every kind, two of them for each other.

    locked.py OUTPUT

Runs under any Python from 3.10 on.
"""

import concurrent.futures
import json
import os
import queue
import sys
import threading
import time

OUTPUT = sys.argv[-1]
first, second, again = threading.Lock(), threading.Lock(), threading.RLock()
event, condition, semaphore = threading.Event(), threading.Condition(), threading.Semaphore(0)
empty = queue.Queue()
pool = concurrent.futures.ThreadPoolExecutor(1)


both, held = threading.Barrier(2), threading.Event()


def hold_and_want(mine, theirs):
    with mine:
        both.wait()
        with theirs:
            pass


def hold_again():
    with again:
        held.set()
        time.sleep(1e6)


def want_again():
    held.wait()
    with again:
        pass


def wait_condition():
    with condition:
        condition.wait()


def wait_future():
    pool.submit(event.wait).result()


def start(name, function, *arguments):
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


start("first", hold_and_want, first, second)
start("second", hold_and_want, second, first)
start("holder", hold_again)
start("wants", want_again)
start("queue", empty.get)
start("event", event.wait)
start("condition", wait_condition)
start("semaphore", semaphore.acquire)
start("future", wait_future)
start("free", time.sleep, 1e6)
time.sleep(1)
with open(OUTPUT + ".part", "w") as file:
    json.dump({"first": id(first), "second": id(second), "again": id(again)}, file)
os.rename(OUTPUT + ".part", OUTPUT)
time.sleep(1e6)
