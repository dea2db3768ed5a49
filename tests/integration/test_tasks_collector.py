"""Rung 4: the tasks of real processes, read by the capture's workers."""

import itertools
import json
import os
import signal
import subprocess
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from captures import capture, pool, read, run_steps, step_for
from processes import eventually, python

from hangwatch import remote
from hangwatch.capture.rooms import StepRoom
from hangwatch.capture.schemas import schemas
from hangwatch.collectors import tasks
from hangwatch.core import awaiting
from hangwatch.lab import launch
from hangwatch.model.capture import CollectorError, FailureKind, Phase
from hangwatch.system import procfs

pytestmark = pytest.mark.needs_ptrace

NUMBERS = itertools.count()

STUCK = """
import asyncio
class Agent:
    async def forward(self):
        await self.done()
    async def done(self):
        await asyncio.Event().wait()  # the line
async def main():
    kept = [asyncio.create_task(Agent().forward(), name=f"agent-{i}") for i in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ready()
    await asyncio.gather(*kept)
"""


@contextmanager
def stuck(folder):
    """Run the program from a file, so that its frames have lines that a test can look up."""
    engine = folder / "engine.py"
    engine.write_text(STUCK)
    body = f"exec(compile(open({str(engine)!r}).read(), {str(engine)!r}, 'exec'))"
    with python(body, rest="asyncio.run(main())") as it:
        yield it


def the_line():
    return next(i for i, line in enumerate(STUCK.splitlines(), start=1) if "# the line" in line)


LOCKED = """
import threading
lock = threading.Lock()
def holder():
    with lock:
        threading.Event().wait()
def waiter():
    with lock:
        pass
threading.Thread(target=holder, name="holder", daemon=True).start()
while not lock.locked(): pass
threading.Thread(target=waiter, name="waiter", daemon=True).start()
"""


def test_every_thread_is_there_with_its_stack_and_the_owner_of_its_lock(tmp_path):
    with python(LOCKED) as it:
        eventually(
            lambda: any(
                "waiter" in {frame.function for frame in thread.frames} and thread.waits
                for thread in remote.attach(it.pid).threads()
            )
        )
        outcome, _ = capture(it.pid, output=tmp_path)
        found = json.loads(read(outcome, f"processes/api_server-{it.pid}", "stacks2.json"))

    jsonschema.validate(found, schemas()["loose-evidence.stacks.1"])
    threads = {thread["name"]: thread for thread in found["threads"]}
    stacks = {
        name: [found["frames"][place]["function"] for place in thread["frames"]]
        for name, thread in threads.items()
    }
    assert "waiter" == stacks["waiter"][0]
    assert "holder" in stacks["holder"]
    assert threads["holder"]["thread_ident"] == threads["waiter"]["waits"]["owner_ident"]


def test_both_samples_have_every_task_with_the_line_of_its_await(tmp_path):
    with stuck(tmp_path) as it:
        outcome, evidence = capture(it.pid, output=tmp_path)
        folder = f"processes/api_server-{it.pid}"
        documents = [json.loads(read(outcome, folder, n)) for n in ("tasks.json", "tasks2.json")]

    schema = json.loads((resources.files("hangwatch") / "schemas/tasks-1.json").read_text())
    for document in documents:
        jsonschema.validate(document, schema)
        jsonschema.validate(document, schemas()["loose-evidence.tasks.1"])
        agents = [task for task in document["tasks"] if task["name"].startswith("agent-")]
        frames = {(f["function"], f["file"], f["line"]) for task in agents for f in task["chain"]}
        assert 3 == len(agents)
        assert any(
            function.endswith("done") and Path(file).name == "engine.py" and line == the_line()
            for function, file, line in frames
        )
        assert {"event"} == {task["awaits"]["kind"] for task in agents}
    assert {None} == {evidence[f"tasks/{it.pid}/{sample}"].failure for sample in (1, 2)}


def test_tasks_are_read_before_stacks(tmp_path):
    with stuck(tmp_path) as it:
        outcome, _ = capture(it.pid, output=tmp_path)

    order = [step.id for step in outcome.plan.steps]
    assert order.index(f"tasks/{it.pid}/1") < order.index(f"stacks/{it.pid}/1")


def test_each_task_stands_on_a_line_of_its_own(tmp_path):
    with stuck(tmp_path) as it:
        outcome, _ = capture(it.pid, output=tmp_path)
        text = read(outcome, f"processes/api_server-{it.pid}", "tasks.json")

    names = [json.loads(line.rstrip(","))["name"] for line in text.splitlines() if "chain" in line]
    assert ["Task-1", "agent-0", "agent-1", "agent-2"] == sorted(names)


def test_a_stopped_process_is_read_and_stays_stopped(tmp_path):
    with stuck(tmp_path) as it:
        it.send_signal(signal.SIGSTOP)
        eventually(lambda: procfs.read_row(it.pid).state == "T")
        (evidence,) = run_steps(tmp_path, step_for(it.pid, collector="tasks"))
        state = procfs.read_row(it.pid).state
        it.send_signal(signal.SIGCONT)

    assert (None, "T") == (evidence.failure, state)


def test_a_process_without_python_says_so(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as it:
        try:
            (evidence,) = run_steps(tmp_path, step_for(it.pid, collector="tasks"))
        finally:
            it.kill()

    assert FailureKind.NOT_PYTHON == evidence.failure.kind


def test_a_python_of_unknown_layout_is_refused_with_what_to_do(tmp_path, monkeypatch):
    def refuse(*_args, **_more):
        raise remote.UnknownLayoutError("this Python 3.99 has an unknown layout")

    monkeypatch.setattr(remote, "attach", refuse)

    with pytest.raises(CollectorError) as caught:
        tasks.COLLECTOR.collect(step_for(os.getpid()), StepRoom(tmp_path, tmp_path))

    assert FailureKind.UNKNOWN_LAYOUT == caught.value.failure.kind
    assert caught.value.failure.hint


def test_the_second_sample_is_taken_by_the_reader_of_the_first(tmp_path, monkeypatch):
    attached = []
    attach = remote.attach
    monkeypatch.setattr(remote, "attach", lambda *a, **m: attached.append(a) or attach(*a, **m))
    with stuck(tmp_path) as it:
        for sample in (1, 2):
            room = tmp_path / str(sample)
            room.mkdir()
            tasks.COLLECTOR.collect(step_for(it.pid, sample=sample), StepRoom(room, room))

    assert [(it.pid,)] == attached
    assert (tmp_path / "1" / "tasks.json").exists()
    assert (tmp_path / "2" / "tasks2.json").exists()


def test_a_second_sample_goes_to_the_worker_that_took_the_first(tmp_path):
    with python("") as one, python("") as two, pool(tmp_path) as (workers, _):
        workers.warm()
        first = [step_for(it.pid, collector="tasks") for it in (one, two)]
        workers.submit(first, phase=Phase.ONSET)
        workers.wait(first)
        # One at a time: every worker is free to be chosen.
        for it in (two, one, two):
            step = step_for(it.pid, collector="tasks", sample=2, name=f"{it.pid}/{next(NUMBERS)}")
            workers.submit((step,), phase=Phase.ONSET)
            workers.wait((step,))
        took = [
            [number for number, worker in enumerate(workers._workers) if it in worker.did]
            for it in (("tasks", step.target.process) for step in first)
        ]

    assert [1, 1] == [len(numbers) for numbers in took]


LOCKS = """
import asyncio
async def take(first, second):
    async with first:
        await asyncio.sleep(0)
        async with second:
            pass
async def main():
    a, b = asyncio.Lock(), asyncio.Lock()
    kept = [
        asyncio.create_task(take(a, b), name="ab"),
        asyncio.create_task(take(b, a), name="ba"),
    ]
    for _ in range(4): await asyncio.sleep(0)
    ready()
    await asyncio.gather(*kept)
"""


def test_a_deadlock_of_locks_is_in_both_samples_and_did_not_move(tmp_path):
    with python(LOCKS, rest="asyncio.run(main())") as it:
        outcome, _ = capture(it.pid, output=tmp_path)
        folder = f"processes/api_server-{it.pid}"
        texts = [read(outcome, folder, name).encode() for name in ("tasks.json", "tasks2.json")]

    parsed = [awaiting.parse(text, it.pid, sample) for sample, text in enumerate(texts, start=1)]
    found = awaiting.tasks(
        [record for records, _ in parsed for record in records], [r for _, r in parsed]
    )

    assert {"ab", "ba"} == {task.name for task in found if task.deadlocked}
    assert {False} == {task.moved for task in found}
    assert {"lock"} == {task.awaits.kind for task in found if task.deadlocked}


def test_the_numbers_that_the_profile_asks_for_are_in_both_samples(tmp_path):
    with launch.Server(tmp_path, "--fault", "blocked-call") as server:
        server.start_fault()
        server.truth()
        outcome, _ = capture(server.pid, output=tmp_path)
        folder = f"processes/engine-{server.engine_pid}"
        ticks = []
        for name in ("tasks.json", "tasks2.json"):
            tables = {
                table["name"]: table for table in json.loads(read(outcome, folder, name))["state"]
            }
            (row,) = tables["scheduler"]["rows"]
            ticks.append(row["values"]["tick"])

    assert ticks[0] == ticks[1] > 0
