"""The reader against garbage: a recorded image of a real process, corrupted at random."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

import pytest
from remote_targets import Interpreter, interpreters, running

from hangwatch.remote import procfs, runtime
from hangwatch.remote.errors import RemoteError
from hangwatch.remote.memory import (
    PAGE,
    Cost,
    ImageSource,
    Limits,
    Memory,
    ProcessSource,
    Recorder,
)
from hangwatch.remote.process import RemotePython
from hangwatch.remote.runtime import Runtime

pytestmark = pytest.mark.needs_ptrace

TRIALS = int(os.environ.get("HANGWATCH_PROOF_TRIALS", "40"))
LIMITS = Limits(seconds=3.0, bytes=256 << 20, tasks=2000)

FOUND = {each.minor: each for each in interpreters()}


class Recording:
    """The pages that one complete reading of a process touched."""

    def __init__(self, interpreter: Interpreter, folder: Path) -> None:
        with running(interpreter, "graph", 3, 120, folder=folder) as (process, _):
            recorder = Recorder(ProcessSource(process.pid))
            self.found: Runtime = runtime.find(Memory(recorder, LIMITS), process.pid)
            target = RemotePython(process.pid, recorder, LIMITS, self.found, 0)
            self.tasks = len(target.tasks().tasks)
            target.threads()
            self.pages = dict(recorder.pages)

    def attach(self, pages: dict[int, bytes]) -> RemotePython:
        return RemotePython(1, ImageSource(pages), LIMITS, self.found, 0)


@pytest.fixture(scope="module", params=sorted(FOUND), ids=lambda minor: f"3.{minor}")
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    interpreter = FOUND[request.param]
    return Recording(interpreter, tmp_path_factory.mktemp("recording"))


def test_a_recorded_image_reads_like_the_process(recording: Recording):
    snapshot = recording.attach(recording.pages).tasks()

    assert recording.tasks == len(snapshot.tasks)
    assert () == snapshot.problems


def corrupt(pages: dict[int, bytes], amount: int) -> dict[int, bytes]:
    """Overwrite words with other words of the image, small numbers, or noise; drop pages."""
    spoiled = dict(pages)
    places = list(pages)
    for _ in range(amount):
        page = random.choice(places)
        if page not in spoiled:
            continue
        if random.random() < 0.02:
            del spoiled[page]
            continue
        data = bytearray(spoiled[page])
        at = 8 * random.randrange(PAGE // 8)
        other = pages[random.choice(places)]
        words = (
            other[(start := 8 * random.randrange(PAGE // 8)) : start + 8],
            struct.pack("<Q", random.randrange(64)),
            struct.pack("<Q", random.choice(places) + 8 * random.randrange(PAGE // 8)),
            struct.pack("<Q", page + at),
            struct.pack("<q", -random.randrange(1 << 40)),
            random.randbytes(8),
        )
        data[at : at + 8] = random.choice(words)
        spoiled[page] = bytes(data)
    return spoiled


@pytest.mark.parametrize("amount", [1, 30, 1000, 20_000])
def test_garbage_costs_bounded_time_and_never_an_exception(recording: Recording, amount: int):
    random.seed(amount)
    slowest = 0.0
    for _ in range(TRIALS // 4):
        spoiled = corrupt(recording.pages, amount)
        started = time.monotonic()
        try:
            target = recording.attach(spoiled)
            target.tasks()
            target.threads()
        except RemoteError:
            # The whole process is refused: its layout can no longer be proved.
            pass
        slowest = max(slowest, time.monotonic() - started)

    assert slowest < 3 * LIMITS.seconds + 1


def test_garbage_after_the_proof_still_gives_a_result(recording: Recording):
    random.seed(5)
    for _ in range(TRIALS // 2):
        pages = dict(recording.pages)
        target = RemotePython(1, ImageSource(pages), LIMITS, recording.found, 0)
        pages.update(corrupt(recording.pages, 3000))

        snapshot = target.tasks()

        assert snapshot.python
        assert len(snapshot.tasks) <= LIMITS.tasks


def test_a_target_without_limits_in_its_memory_is_cut_at_ours(recording: Recording):
    tight = Limits(seconds=3.0, bytes=400 * PAGE, tasks=20)
    target = RemotePython(1, ImageSource(recording.pages), tight, recording.found, 0)
    snapshot = target.tasks()

    assert len(snapshot.tasks) <= 40
    assert "truncated" in {problem.kind for problem in snapshot.problems}


def test_unmapped_memory_is_a_hole_and_not_an_end():
    own = Memory(ProcessSource(os.getpid()))
    start = next(each.start for each in procfs.mappings(os.getpid()) if "r" in each.permissions)
    source, cost = ProcessSource(os.getpid()), Cost()

    hole, page, other = source.read([(1 << 46, PAGE), (start, PAGE), (1 << 45, PAGE)], cost)

    assert (None, None) == (hole, other)
    assert page is not None
    assert own.read(start, 16) == page[:16]
    assert 2 == cost.faults
