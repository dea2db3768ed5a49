"""A lock held over a fork: the child inherits it locked, and nobody who would release it.

A thread writes a log line while the main thread forks. In the parent the thread goes on and
releases the lock; in the child there is no such thread.
"""

from __future__ import annotations

import os
import threading

from . import LOOP, Fault, Scene
from ._process import die_with_parent

LOCK = threading.Lock()


def write_line(held: threading.Event, forked: threading.Event) -> None:
    """Write a line, slowly, under the lock."""
    with LOCK:
        held.set()
        forked.wait()


def child_main(answer: int) -> None:
    """Say hello; the log's lock comes first."""
    with LOCK:
        os.write(answer, b"hello")


def wait_for_child(answer: int) -> bytes:
    """Wait until the child says hello."""
    return os.read(answer, 16)


def strike(scene: Scene) -> None:
    """Fork while the other thread writes."""
    held, forked = threading.Event(), threading.Event()
    writer = threading.Thread(target=write_line, args=(held, forked), name="log-writer")
    writer.start()
    held.wait()
    ours, theirs = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        child_main(theirs)
        os._exit(0)
    scene.begin(child)
    forked.set()
    writer.join()
    os.close(theirs)
    wait_for_child(ours)


FAULT = Fault(
    title="a process forks while a thread holds a lock; the child waits for it for ever",
    shows="the child has one thread, in futex, for a lock that nobody holds; the parent reads "
    "from a pipe of the child's",
    place=LOOP,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("fork-held-lock", "event-loop-blocked"),
    culprits=("child_main", "wait_for_child"),
)
