"""The child that keeps the black box, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import kill, wait_for

from hangwatch.daemon.recorder import Recorder, loops
from hangwatch.model.recording import UNSEEN, Recording, Track
from hangwatch.system import ring
from hangwatch.system.channel import Channel
from hangwatch.system.clock import boot_id
from hangwatch.system.spawn import Child

LOOPING = textwrap.dedent("""
    import asyncio, subprocess, sys, threading, time

    async def beat():
        while True:
            await asyncio.sleep(0.02)

    threading.Thread(target=lambda: asyncio.run(beat()), daemon=True).start()
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    if len(sys.argv) > 1:
        kid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    print("ready", flush=True)
    time.sleep(1e6)
""")


class Looping:
    """A process whose main thread sleeps and whose loop runs fifty times a second."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOPING, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert "ready\n" == self.process.stdout.readline()
        self.pid = self.process.pid

    def children(self) -> list[int]:
        return list(
            map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        )

    def end(self) -> None:
        for pid in (*self.children(), self.pid) if self.process.poll() is None else ():
            kill(pid)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def looping() -> Iterator[Looping]:
    running = Looping("with a child")
    yield running
    running.end()


@pytest.fixture
def recorder() -> Iterator[Child]:
    with Child("hangwatch.daemon.recorder", name="recorder") as child:
        yield child


def watch(child: Child, path: Path, *pids: int) -> None:
    processes = [[pid, 0] for pid in pids]
    child.channel.send({"kind": "watch", "ring": str(path), "processes": processes})


def recorded(path: Path) -> Recording:
    try:
        return ring.read(path, boot_id()) or Recording(period=0.25)
    except (OSError, ValueError):
        return Recording(period=0.25)


def track_of(path: Path, pid: int, *, main: bool) -> Track | None:
    found = (t for t in recorded(path).tracks if t.process.pid == pid and (t.tid == pid) is main)
    return next(found, None)


def looks(track: Track | None) -> int:
    return 0 if track is None else sum(count != UNSEEN for count in track.slices)


def test_the_loop_is_found_among_threads_that_bear_no_name(looping, recorder, tmp_path):
    path = tmp_path / "ring"
    watch(recorder, path, looping.pid)
    wait_for(lambda: looks(track_of(path, looping.pid, main=False)) > 8, "its loop")

    (loop,) = (
        t
        for t in recorded(path).tracks
        if (t.process.pid, t.tid) != (looping.pid,) * 2 and t.process.pid == looping.pid
    )
    counts = [count for count in loop.slices if count != UNSEEN]
    assert sum(counts) > len(counts)
    assert 0o600 == path.stat().st_mode & 0o777


def test_what_a_watched_process_has_spawned_is_recorded_too(looping, recorder, tmp_path):
    (kid,) = looping.children()
    watch(recorder, tmp_path / "ring", looping.pid)

    assert wait_for(lambda: track_of(tmp_path / "ring", kid, main=True), "its child")


def test_what_was_spawned_by_what_was_spawned_stays_when_more_processes_are_named(
    looping, tmp_path
):
    shell = subprocess.Popen(["sh", "-c", "sh -c 'sleep 1e6; :'; :"])
    try:
        below = wait_for(lambda: len(found := descendants(shell.pid)) == 2 and found)
        recorder = Recorder(Channel(*os.pipe()))
        order = {"ring": tmp_path / "ring", "processes": [[shell.pid, 0]]}
        recorder._watch(order)
        recorder._take_in(below, time.monotonic())
        recorder._watch(order | {"processes": [[shell.pid, 0], [looping.pid, 0]]})

        assert {shell.pid, *below, looping.pid} == recorder._watched.keys()
    finally:
        for pid in (*descendants(shell.pid), shell.pid):
            kill(pid)
        shell.wait(60)


def descendants(pid: int) -> list[int]:
    found = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return found + [each for kid in found for each in descendants(kid)]


def test_a_process_that_ended_keeps_its_row_and_says_when(recorder, tmp_path):
    path, brief = tmp_path / "ring", Looping()
    watch(recorder, path, brief.pid)
    wait_for(lambda: looks(track_of(path, brief.pid, main=True)) > 4, "some looks")
    brief.end()

    ended = wait_for(
        lambda: (t := track_of(path, brief.pid, main=True)) and t.ended_at and t, "its end"
    )
    assert looks(ended) > 4


def test_a_recorder_that_stood_still_has_not_looked(looping, recorder, tmp_path):
    path = tmp_path / "ring"
    watch(recorder, path, looping.pid)
    wait_for(lambda: looks(track_of(path, looping.pid, main=True)) > 4, "some looks")
    os.kill(recorder.pid, signal.SIGSTOP)
    before = recorded(path).at[-1]
    wait_for(lambda: time.monotonic() - before > 2.0, "two seconds")
    os.kill(recorder.pid, signal.SIGCONT)
    wait_for(lambda: recorded(path).at[-1] > before + 2.5, "more looks")

    found = recorded(path)
    late = max(range(1, len(found.at)), key=lambda i: found.at[i] - found.at[i - 1])
    assert found.at[late] - found.at[late - 1] > 1.0
    assert {UNSEEN} == {track.slices[late] for track in found.tracks}


def test_a_recorder_after_one_that_was_killed_goes_on_in_the_same_ring(looping, tmp_path):
    path = tmp_path / "ring"
    for looked in (4, 12):
        with Child("hangwatch.daemon.recorder", name="recorder") as child:
            watch(child, path, looping.pid)
            wait_for(lambda n=looked: looks(track_of(path, looping.pid, main=True)) > n, "looks")
            kill(child.pid)

    assert 1 == sum(t.tid == looping.pid for t in recorded(path).tracks)


def test_a_ring_that_cannot_be_written_is_told_and_is_no_reason_to_end(looping, recorder, tmp_path):
    watch(recorder, tmp_path / "nowhere" / "ring", looping.pid)
    said: list[dict[str, object]] = []

    def told() -> bool:
        said.extend(recorder.channel.wait(0.1))
        return {"problem", "alive"} <= {str(message["kind"]) for message in said}

    assert wait_for(told, "the problem")
    assert recorder.alive


def test_loops_are_chosen_by_name_then_by_how_often_they_run_and_helpers_never():
    rates = {1: 500.0, 2: 90.0, 3: 70.0, 4: 50.0, 5: 40.0, 6: 300.0}
    names = {
        1: b"ray::Engine",
        2: b"python3",
        3: b"ray::IDLE",
        4: b"AsyncIO Thread:",
        5: b"ray::Engine",
        6: b"worker.io",
    }

    assert (4, 2) == loops(rates, names, main=b"ray::Engine", pid=1, seated=())
    assert (4, 5) == loops(rates, names, main=b"ray::Engine", pid=1, seated=(5,))
