"""The safety contract: whatever of hangwatch is killed, and whenever, the targets are as before.

Each round captures the same few processes once more and kills one of those that do it, or all: at
a moment of its own, or while the target is held by what attached to it. ``HANGWATCH_PROOF_KILLS``
says how many rounds; a round's seed is its number.
"""

import contextlib
import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import PATIENCE, eventually, python
from test_contract import in_d_state, traced

from hangwatch.core.layout import is_bundle_name
from hangwatch.system import procfs

pytestmark = [pytest.mark.slow, pytest.mark.needs_ptrace]

KILLS = int(os.environ.get("HANGWATCH_PROOF_KILLS", "30"))
BATCH = 10
"""Rounds that the same targets live through."""
PR_SET_CHILD_SUBREAPER = 36

TICKING = """
import asyncio, mmap
slots = mmap.mmap(os.open({file!r}, os.O_RDWR), mmap.PAGESIZE)
def tick(slot):
    while True:
        slots[slot] = (slots[slot] + 1) % 256
        time.sleep(0.01)
for slot in range({threads}): threading.Thread(target=tick, args=(slot,), daemon=True).start()
async def main():
    ready()
    await asyncio.Event().wait()
"""
THREADS = 6
ENGINE = ("mp_engine_proc",)
"""A word of its title, by which it is taken for an engine: stacks of C are read of these alone."""

CAPTURER = """
import sys
sys.path[:0] = [{tests!r}]
from captures import CLOCK, request_for
from hangwatch.capture.conductor import capture_and_bundle
request = request_for(*{pids!r}, output={output!r}, gap=0.05)
capture_and_bundle(request, clock=CLOCK, rejudge=lambda _: "hung")
"""


@dataclass
class Target:
    """A process that is captured, and how it was before the first capture."""

    pid: int
    page: mmap.mmap | None = None
    """Where each of its threads counts."""

    def __post_init__(self):
        self.threads = eventually(self.settled)
        self.descriptors = procfs.links(self.pid)

    def settled(self):
        """Return its state once two looks at it say the same."""
        return (seen := self.state()) == self.state() and seen

    def state(self):
        """Return state and tracer of each thread; one that runs is one that sleeps."""
        return {
            tid: (state.replace("R", "S"), tracer_of(self.pid, tid))
            for tid, state in procfs.thread_states(self.pid).items()
        }

    def check(self):
        """Say that it is as it was."""
        assert self.threads == self.state()
        assert self.descriptors == procfs.links(self.pid)
        stopped = {state for state, _ in self.threads.values()} & {"T", "t"}
        if self.page is not None and not stopped:
            before = self.page[:THREADS]
            eventually(lambda: all(map(int.__ne__, before, self.page[:THREADS])))


def tracer_of(pid, tid):
    for line in Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    raise AssertionError("no TracerPid")


@contextlib.contextmanager
def ticking(folder):
    """Give a process whose threads all count, and the page where they do."""
    file = folder / "ticks"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as opened:
        page = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
    body = TICKING.format(file=str(file), threads=THREADS)
    with page, python(body, rest="asyncio.run(main())", arguments=ENGINE) as it:
        eventually(lambda: all(page[:THREADS]))
        yield it.pid, page


@contextlib.contextmanager
def fleet(folder):
    """Give a process of each kind that a capture could leave in another state."""
    with contextlib.ExitStack() as stack:
        (folder / "stopped").mkdir()
        running, page = stack.enter_context(ticking(folder))
        stopped, _ = stack.enter_context(ticking(folder / "stopped"))
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: {"T"} == set(procfs.thread_states(stopped).values()))
        others = [
            Target(stopped),
            Target(stack.enter_context(traced(folder))),
            Target(stack.enter_context(in_d_state(folder))),
        ]
        yield [Target(running, page), *others]


@contextlib.contextmanager
def adopting():
    """Become the parent of whatever outlives its own; give a function that waits for them."""
    prctl = ctypes.CDLL(None).prctl
    before = {*procfs.children(os.getpid())}

    def orphans():
        return {*procfs.children(os.getpid())} - before

    def reaped():
        for pid in orphans():
            os.waitpid(pid, os.WNOHANG)
        return not orphans()

    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield lambda: eventually(reaped)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Capture:
    """A capture that runs, and those that make it; whoever is killed is held by a descriptor."""

    def __init__(self, capturer, target, rng):
        self.capturer, self.target, self.rng = capturer, target, rng

    def hangwatch(self):
        return [self.capturer.pid]

    def worker(self):
        return procfs.children(self.capturer.pid)

    def watcher(self):
        return [pid for pid in self._below_workers() if self._is_ours(pid)]

    def tool(self):
        return [pid for pid in self._below_workers() if not self._is_ours(pid)]

    def all(self):
        return [*self._below_workers(), *self.worker(), *self.hangwatch()]

    def _below_workers(self):
        children = [pid for worker in self.worker() for pid in procfs.children(worker)]
        return [*(pid for child in children for pid in procfs.children(child)), *children]

    def _is_ours(self, pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return "python" in procfs.read_row(pid).comm
        return False

    def runs(self):
        return self.capturer.poll() is None

    def until(self, moment):
        """Wait for a moment of the capture, at most until it ends."""
        if moment == "while it holds the target":
            while self.runs() and not procfs.read_row(self.target).tracer_pid:
                time.sleep(0.001)
            time.sleep(self.rng.uniform(0.0, 0.02))
        else:
            deadline = time.monotonic() + self.rng.uniform(0.0, LONGEST)
            while self.runs() and time.monotonic() < deadline:
                time.sleep(0.001)

    def kill(self, whom):
        """Kill one of a kind, or all at once, as soon as there is one; say whether it was."""
        seen = ()
        while self.runs() and not (seen := getattr(self, whom)()):
            time.sleep(0.001)
        if whom != "all":
            seen = [self.rng.choice(seen)] if seen else []
        if not self.runs():
            return False
        with contextlib.ExitStack() as stack:
            victims = []
            for number in signal.SIGSTOP, signal.SIGKILL:  # so that none sees another end
                for pid in getattr(self, whom)() if whom == "all" else seen:
                    with contextlib.suppress(ProcessLookupError):
                        descriptor = os.pidfd_open(pid)
                        stack.callback(os.close, descriptor)
                        if pid in getattr(self, whom)():
                            signal.pidfd_send_signal(descriptor, number)
                            victims.append(number)
            return signal.SIGKILL in victims


LONGEST = 1.5
"""Seconds; most captures of a round are shorter."""
MOMENTS = [
    (whom, moment)
    for moment in ("at any moment", "while it holds the target")
    for whom in ("hangwatch", "worker", "tool", "watcher", "all")
    if (whom, moment) != ("watcher", "at any moment")
]


def capturer_of(targets, rng, output):
    """Start a capture of the first process and of one more."""
    pids = [targets[0].pid, rng.choice(targets[1:]).pid]
    script = CAPTURER.format(tests=str(Path(__file__).parent), pids=pids, output=str(output))
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)


@pytest.mark.parametrize("first", range(0, KILLS, BATCH))
def test_killing_anything_of_a_capture_at_any_moment_leaves_every_target_as_it_was(tmp_path, first):
    output = tmp_path / "output"
    struck = Counter()
    with fleet(tmp_path) as targets, adopting() as wait_for_orphans:
        for number in range(first, min(first + BATCH, KILLS)):
            rng = random.Random(number)
            whom, moment = MOMENTS[number % len(MOMENTS)]
            with capturer_of(targets, rng, output) as capturer:
                capture = Capture(capturer, targets[0].pid, rng)
                capture.until(moment)
                hit = capture.kill(whom)
                said = capturer.communicate(timeout=PATIENCE)[1].decode()
            wait_for_orphans()
            struck[f"{whom} {moment}"] += hit
            print(f"seed {number}: {whom} {moment}: {'killed' if hit else 'had ended'}")
            for target in targets:
                target.check()
            expected = -signal.SIGKILL if hit and whom in ("hangwatch", "all") else 0
            assert expected == capturer.returncode, said
        with capturer_of(targets, random.Random(), output) as capturer:
            assert 0 == capturer.wait(PATIENCE)

    print(f"killed: {dict(struck)}")
    assert [] == [path for path in output.iterdir() if not is_bundle_name(path.name)]
    for path in output.iterdir():
        with tarfile.open(path) as bundle:
            assert bundle.getnames()
