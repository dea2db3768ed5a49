"""The safety contract: what a collector, or a tool that it calls, may use up and may break.

The collectors here are evil, and run in real workers beside an honest one.
"""

import sys
from dataclasses import replace

import pytest
from captures import pool, program, step_for
from processes import PATIENCE, python
from test_contract_kills import adopting

from hangwatch.capture.rooms import QUOTA
from hangwatch.model.capture import FailureKind, Phase

MEMORY = 512 << 20
HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
from hangwatch.model.capture import Collector, Scope, Stage
hoard = []
def collect(step, room):
    room.write("head", b"written early")
{body}
COLLECTOR = Collector(
    name={name!r}, title="", scope=Scope.PROCESS, rung=5, stage=Stage.A, timeout=1, collect=collect)
"""
FINDABLE = "import hangwatch.collectors; hangwatch.collectors.__path__.append({folder!r})"

EVIL = {
    "eats_memory": (
        "while True: hoard.append(bytearray(1 << 20)); room.write(str(len(hoard)), b'x')",
        FailureKind.TOO_LARGE,
    ),
    "writes_without_end": (
        "with room.create('tail') as out:\n  while True: out.write(bytes(1 << 20))",
        FailureKind.TOO_LARGE,
    ),
    "writes_past_its_room": (
        "with Path({outside!r}).open('wb') as out:\n  while True: out.write(bytes(1 << 20))",
        FailureKind.TOO_LARGE,
    ),
    "hangs": ("time.sleep(3600)", FailureKind.TIMED_OUT),
    "cannot_be_asked_to_end": (
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(3600)",
        FailureKind.TIMED_OUT,
    ),
    "spins": ("while True: pass", FailureKind.TIMED_OUT),
    "dies_of_a_signal": ("os.kill(os.getpid(), signal.SIGSEGV)", FailureKind.WORKER_DIED),
    "ends_its_process": ("os._exit(0)", FailureKind.WORKER_DIED),
    "raises": ("raise RuntimeError('a bug')", FailureKind.CRASHED),
    "ends_its_thread": ("sys.exit(0)", FailureKind.WORKER_DIED),
    "talks_nonsense": (
        "for n in range(3, 20):\n  try: os.write(n, b'nonsense' * 99)\n  except OSError: pass",
        FailureKind.WORKER_DIED,
    ),
    "leaves_a_child": ("if os.fork() == 0: time.sleep(3600)", None),
    "leaves_a_group": ("if os.fork() == 0: os.setsid(); time.sleep(3600)", None),
    "leaves_a_thread": (
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
        None,
    ),
}


@pytest.fixture
def target():
    with python("") as process:
        yield process.pid


@pytest.fixture
def evil(tmp_path, monkeypatch, target):
    """Return a function that gives a step of an evil collector."""
    folder = tmp_path / "collectors"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FINDABLE.format(folder=str(folder)))
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def make(name):
        body = EVIL[name][0].format(outside=str(tmp_path / "outside"))
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        (folder / f"{name}.py").write_text(HEAD.format(name=name, body=lines))
        honest = step_for(target, collector="kernel", name=name)
        timeout = 2.0 if EVIL[name][1] is FailureKind.TIMED_OUT else PATIENCE
        return replace(honest, collector=name, memory=MEMORY, timeout=timeout)

    return make


@pytest.mark.parametrize("name", EVIL)
def test_an_evil_collector_costs_its_own_step_and_leaves_no_process(
    tmp_path, evil, target, name, monkeypatch
):
    monkeypatch.setattr("hangwatch.capture.pool.width", lambda: 1)
    expected = EVIL[name][1]
    with adopting() as wait_for_orphans:
        with pool(tmp_path / "output") as (workers, _):
            steps = [evil(name), step_for(target, collector="kernel", name="honest")]
            workers.submit(steps, phase=Phase.ONSET)
            found, honest = workers.wait(steps)
            sizes = {each.path.name: each.size for each in found.artifacts}
        wait_for_orphans()

    assert expected == (found.failure and found.failure.kind), found.failure
    assert honest.failure is None
    assert 13 == sizes["head"]
    assert sum(sizes.values()) <= QUOTA
    if name == "eats_memory":
        assert 1 << 20 < len(sizes) << 20 < MEMORY
    if name == "writes_past_its_room":
        assert (tmp_path / "outside").stat().st_size == 2 * QUOTA
    assert [] == list(tmp_path.rglob("core*"))


GREEDY = """exec {python} -c '
hoard = []
try:
    while True: hoard.append(bytearray(1 << 20))
except MemoryError: pass
had = len(hoard); hoard.clear()
import sys; sys.exit(f"Error: had {{had}} MiB")'"""


def test_a_tool_has_no_more_memory_than_its_step(tmp_path, target):
    tool = program(tmp_path / "py-spy", GREEDY.format(python=sys.executable))
    step = replace(step_for(target, py_spy=tool), memory=MEMORY)
    with pool(tmp_path / "output") as (workers, _):
        workers.submit([step], phase=Phase.ONSET)
        (found,) = workers.wait([step])

    assert FailureKind.TOOL_FAILED == found.failure.kind
    had = int(found.failure.message.split("had ")[1].split()[0])
    assert 0 < had < MEMORY >> 20
