"""Tasks of real Ray actors, whose methods run inside Cython's coroutines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch import remote
from hangwatch.remote import Task

pytestmark = [pytest.mark.needs_ptrace, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "integration" / "programs" / "ray_actors.py"


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    pytest.importorskip("ray")
    output = tmp_path_factory.mktemp("ray") / "actors.json"
    driver = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not output.exists():
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield json.loads(output.read_text())
    finally:
        driver.communicate(timeout=60)


def chain(task: Task) -> list[str]:
    """Return the functions, without the one that Ray wraps around every method of an actor."""
    return [frame.function for frame in task.chain if "_resume_span" not in frame.function]


def task_with(pid: int, function: str) -> Task:
    """Return the task with *function* in its chain, as soon as there is one."""
    deadline = time.monotonic() + 60
    while True:
        found = [task for task in remote.attach(pid).tasks().tasks if function in chain(task)]
        if found:
            return found[0]
        assert time.monotonic() < deadline, f"{function} is in no task"
        time.sleep(0.1)


def test_an_actor_method_is_followed_into_the_users_code(actors: dict[str, Any]):
    task = task_with(actors["pids"]["engine"], "Engine.generate")

    assert ["Engine.generate", *["Engine.deeper"] * 4, "Event.wait"] == chain(task)[-6:]
    assert "cython" == task.chain[0].kind
    assert "event" == task.awaits.kind
    assert "" == task.torn


def test_a_streaming_generator_is_followed(actors: dict[str, Any]):
    task = task_with(actors["pids"]["engine"], "Engine.stream")

    assert ["Engine.stream", "Engine.deeper", "Engine.deeper", "Event.wait"] == chain(task)[-4:]


def test_an_awaited_object_is_named(actors: dict[str, Any]):
    task = task_with(actors["pids"]["engine"], "Engine.needs")

    assert "ray" == task.awaits.kind
    assert actors["reference"] in task.awaits.detail
    assert "a call on actor" not in task.awaits.detail


def test_a_call_to_another_actor_names_that_actor(actors: dict[str, Any]):
    task = task_with(actors["pids"]["caller"], "Caller.ask")

    assert f"a call on actor {actors['engine']}" in task.awaits.detail


def test_a_blocked_actor_shows_the_line_that_blocks_its_loop(actors: dict[str, Any]):
    task = task_with(actors["pids"]["blocked"], "Blocked.block")

    assert "running" == task.state
    assert "Blocked.block" == chain(task)[-1]
    line = task.chain[-1].line
    assert line is not None
    assert "time.sleep(1e6)" == PROGRAM.read_text().splitlines()[line - 1].strip()


def test_a_process_names_the_actors_that_live_in_it(actors: dict[str, Any]):
    found = {name: remote.attach(pid).tasks().actors for name, pid in actors["pids"].items()}

    assert {name: (actors["ids"][name],) for name in found} == found
