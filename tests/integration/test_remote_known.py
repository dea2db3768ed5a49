"""What is known of a process from an earlier reading: faster, and never believed."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import eventually

from hangwatch import remote
from hangwatch.remote import known, procfs

pytestmark = pytest.mark.needs_ptrace

WAITS = """
import asyncio, os, sys, threading

def deep(levels):
    if levels:
        deep(levels - 1)
    else:
        threading.Event().wait()

async def leaf():
    await asyncio.Event().wait()

async def main():
    kept = [asyncio.create_task(leaf(), name=f"leaf-{n}") for n in range(20)]
    threading.Thread(target=deep, args=(20,), name="deep", daemon=True).start()
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    os.execv(sys.executable, [sys.executable, "-c", os.environ["THEN"]])

asyncio.run(main())
"""

GENERATES = """
import asyncio, gc, sys

SOURCE = "async def work_%04d():\\n    await event.wait()\\n"

async def main():
    place = {"event": asyncio.Event()}
    for number in range(1000):
        name = f"work_{number:04d}"
        exec(compile(SOURCE % number, "generated", "exec"), place)
        task = asyncio.create_task(place.pop(name)())
        await asyncio.sleep(0.01)
        print(name, id(task.get_coro().cr_code), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()

asyncio.run(main())
"""


RENAMES = """
import asyncio, ctypes, sys

async def before():
    await asyncio.Event().wait()

async def main():
    task = asyncio.create_task(before())
    await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    # The same addresses, another content: as when all of it was freed and made anew.
    for text in (before.__code__.co_name, before.__code__.co_qualname):
        ctypes.memmove(id(text) + sys.getsizeof("") - 1, b"beyond", 6)
    print("ready", flush=True)
    await task

asyncio.run(main())
"""


@contextmanager
def program(code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def seen(reader: remote.RemotePython) -> tuple[object, ...]:
    snapshot = reader.tasks(threads=True)
    return (
        [(task.id, task.name, task.state, task.chain, task.awaits.kind) for task in snapshot.tasks],
        [(thread.ident, thread.name, thread.frames) for thread in snapshot.threads or ()],
        snapshot.problems,
    )


def at_rest(pid: int) -> tuple[object, ...]:
    """Return what is seen of a process once it no longer changes."""

    def once() -> tuple[object, ...]:
        first, second = seen(remote.attach(pid)), seen(remote.attach(pid))
        return first if first == second and not first[2] else ()

    return eventually(once)


def test_a_known_process_is_read_the_same_with_a_tenth_of_the_system_calls():
    with program(WAITS) as process:
        assert ["ready"] == said(process)
        expected = at_rest(process.pid)
        stranger = remote.attach(process.pid)
        stranger.tasks(threads=True)
        learned = remote.attach(process.pid).learn()
        friend = remote.attach(process.pid, known=learned)

        assert expected == seen(friend)
        assert friend._memory.cost.calls < stranger._memory.cost.calls / 10


def test_code_that_took_the_place_of_other_code_has_its_own_name():
    replaced = 0
    with program(GENERATES) as process:
        name, address = said(process)
        for _ in range(30):
            learned = remote.attach(process.pid).learn()
            go_on(process)
            earlier = address
            name, address = said(process)
            replaced += address == earlier
            snapshot = remote.attach(process.pid, known=learned).tasks()
            functions = {frame.function for task in snapshot.tasks for frame in task.chain}

            assert {name} == {each for each in functions if each.startswith("work_")}
    assert replaced, "this Python never gave an address away again: the test has shown nothing"


def test_a_name_counts_only_as_long_as_it_stands_there():
    with program(RENAMES) as process:
        assert ["ready"] == said(process)
        learned = remote.attach(process.pid).learn()
        go_on(process)
        assert ["ready"] == said(process)
        snapshot = remote.attach(process.pid, known=learned).tasks()

    assert "beyond" in {task.chain[0].function for task in snapshot.tasks}


def test_a_process_that_runs_another_program_now_is_a_stranger():
    then = (
        "import asyncio\n"
        "async def other():\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(other())\n"
    )
    with program(WAITS, THEN=then) as process:
        assert ["ready"] == said(process)
        learned = remote.attach(process.pid).learn()
        go_on(process)
        assert ["ready"] == said(process)

        tasks = eventually(lambda: remote.attach(process.pid, known=learned).tasks().tasks)

    assert ["other"] == [task.chain[0].function for task in tasks]


def test_what_is_known_of_another_process_is_of_no_use_and_of_no_harm():
    with program(WAITS) as one, program(WAITS.replace("leaf", "twig")) as other:
        assert ["ready"] == said(one) == said(other)
        expected = at_rest(other.pid)
        learned = remote.attach(one.pid).learn()
        found = known.unpack(learned)
        assert found is not None
        # As if the number had been used again, by a program at the same place.
        reused = dataclasses.replace(
            found, start_ticks=procfs.start_ticks(other.pid), program=procfs.program(other.pid)
        )

        assert expected == seen(remote.attach(other.pid, known=learned))
        assert expected == seen(remote.attach(other.pid, known=known.pack(reused)))


def test_what_is_known_and_damaged_counts_as_not_known():
    with program(WAITS) as process:
        assert ["ready"] == said(process)
        expected = at_rest(process.pid)
        learned = remote.attach(process.pid).learn()
        chance = random.Random(5)
        for _ in range(200):
            damaged = bytearray(learned)
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            assert known.unpack(bytes(damaged)) is None
            assert known.unpack(learned[: chance.randrange(len(learned))]) is None

        assert expected == seen(remote.attach(process.pid, known=b"something else"))
