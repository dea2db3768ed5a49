"""The safety contract: whatever of hangwatch is killed, and whenever, the targets are as before.

Each round captures the same few processes once more and kills one of those that do it: hangwatch
itself, a worker or a tool, at a moment of its own. ``HANGWATCH_PROOF_KILLS`` says how many rounds;
a round's seed is its number.
"""

import contextlib
import ctypes
import mmap
import os
import random
import select
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
    with page, python(body, rest="asyncio.run(main())") as it:
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


class Victims:
    """Those that make a capture; each is held by a descriptor, so that nobody else is hit."""

    def __init__(self, capturer, rng):
        self.capturer, self.rng = capturer, rng

    def hangwatch(self):
        return [self.capturer.pid]

    def worker(self):
        return procfs.children(self.capturer.pid)

    def tool(self):
        return [pid for worker in self.worker() for pid in procfs.children(worker)]

    def strike(self, kind, within):
        """Kill one of a kind at most *within* seconds after it is seen; say whether it was."""
        while self.capturer.poll() is None:
            seen = getattr(self, kind)()
            if not seen:
                continue
            pid = self.rng.choice(seen)
            with contextlib.suppress(ProcessLookupError), held(pid) as descriptor:
                if pid in getattr(self, kind)():
                    ended, _, _ = select.select([descriptor], [], [], self.rng.uniform(0.0, within))
                    if not ended:
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        return True
        return False


@contextlib.contextmanager
def held(pid):
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


KINDS = {"hangwatch": 1.5, "worker": 1.0, "tool": 0.05}
"""Who is killed, and how many seconds after it is first seen at the latest."""


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
            kind = [*KINDS][number % len(KINDS)]
            with capturer_of(targets, rng, output) as capturer:
                # So that each moment of a capture can be the one.
                time.sleep(rng.uniform(0.0, 0.5) if kind == "tool" else 0.0)
                hit = Victims(capturer, rng).strike(kind, KINDS[kind])
                said = capturer.communicate(timeout=PATIENCE)[1].decode()
            wait_for_orphans()
            struck[kind] += hit
            print(f"seed {number}: {kind} {'killed' if hit else 'had ended'}")
            for target in targets:
                target.check()
            expected = -signal.SIGKILL if hit and kind == "hangwatch" else 0
            assert expected == capturer.returncode, said
        with capturer_of(targets, random.Random(), output) as capturer:
            assert 0 == capturer.wait(PATIENCE)

    print(f"killed: {dict(struck)}")
    assert [] == [path for path in output.iterdir() if not is_bundle_name(path.name)]
    for path in output.iterdir():
        with tarfile.open(path) as bundle:
            assert bundle.getnames()
