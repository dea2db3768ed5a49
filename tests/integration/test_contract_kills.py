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

DAEMON = """
import sys
sys.path[:0] = [{tests!r}]
from captures import request_for
from hangwatch.core.codec import to_plain
from hangwatch.system.spawn import Child
request = request_for(*{pids!r}, output={output!r}, gap=0.05)
kind = ""
with Child("hangwatch.capture.conductor", name="conductor") as child:
    child.channel.send({{"kind": "capture", "request": to_plain(request)}})
    while kind != "bundle":
        for message in child.channel.wait(1.0):
            kind = message["kind"]
            assert kind not in ("failed", "crash"), message
            if kind == "stage_a": child.channel.send({{"kind": "verdict", "word": "hung"}})
"""
"""What a daemon does in a capture: it has a conductor that does it, and says what became of it."""


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

    def __init__(self, process, target, rng):
        self.process, self.target, self.rng = process, target, rng

    def family(self):
        """Return what each of them is, by its number; those that began last come first."""
        found, pending = {self.process.pid: "hangwatch"}, [(self.process.pid, "hangwatch")]
        while pending:
            parent, what = pending.pop()
            for pid in procfs.children(parent):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    title = procfs.read_title(pid)
                    found[pid] = self._what(title, what)
                    pending.append((pid, found[pid]))
        return dict(reversed(found.items()))

    def _what(self, title, parent):
        if "hangwatch.capture.conductor" in title:
            return "conductor"
        if "hangwatch.capture.worker" in title:
            return "watcher" if parent == "worker" else "worker"
        # One that becomes another program at this moment has no title.
        return "tool" if parent in ("worker", "watcher", "tool") else ""

    def those(self, whom):
        return [pid for pid, what in self.family().items() if whom in (what, "all")]

    def runs(self):
        return self.process.poll() is None

    def until(self, moment):
        """Wait for a moment of the capture, at most until it ends."""
        if moment == WHILE_HELD:
            while self.runs() and not procfs.read_row(self.target).tracer_pid:
                time.sleep(0.001)
            time.sleep(self.rng.uniform(0.0, 0.02))
        else:
            deadline = time.monotonic() + self.rng.uniform(0.0, LONGEST)
            while self.runs() and time.monotonic() < deadline:
                time.sleep(0.001)

    def kill(self, whom):
        """Kill one of a kind, or all at once, as soon as there is one; say whether it was."""
        seen = []
        while self.runs() and not (seen := self.those(whom)):
            time.sleep(0.001)
        victims = seen if whom == "all" else [self.rng.choice(seen)] if seen else []
        hit = [
            self._send(pid, number)
            for number in (signal.SIGSTOP, signal.SIGKILL)  # so that none sees another end
            for pid in (self.those(whom) if whom == "all" and self.runs() else victims)
        ]
        return any(hit)

    def _send(self, pid, number):
        with contextlib.suppress(ProcessLookupError), held(pid) as descriptor:
            if pid in self.family():
                signal.pidfd_send_signal(descriptor, number)
                return True
        return False


@contextlib.contextmanager
def held(pid):
    """Give a descriptor of a process: who has its number later is not hit."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


LONGEST = 2.0
"""Seconds; most captures of a round are shorter."""
AT_ANY_MOMENT, WHILE_HELD = "at any moment", "while it holds the target"
MOMENTS = [
    *((whom, AT_ANY_MOMENT) for whom in ("hangwatch", "conductor", "worker", "tool", "all")),
    *((whom, WHILE_HELD) for whom in ("hangwatch", "conductor", "worker", "watcher", "tool")),
    ("all", WHILE_HELD),
    ("hangwatch attach", AT_ANY_MOMENT),
]


def command(whom, pids, output):
    """Return a command that captures processes."""
    if whom == "hangwatch attach":
        return [*HANGWATCH, "attach", "--now", "--pid", str(pids[0]), "--output", str(output)]
    script = DAEMON.format(tests=str(Path(__file__).parent), pids=pids, output=str(output))
    return [sys.executable, "-c", script]


HANGWATCH = (sys.executable, "-m", "hangwatch")
FOUND_A_HANG = 3
"""Exit code; a process that was stopped by somebody hangs."""


@pytest.mark.parametrize("first", range(0, KILLS, BATCH))
def test_killing_anything_of_a_capture_at_any_moment_leaves_every_target_as_it_was(tmp_path, first):
    output = tmp_path / "output"
    struck = Counter()
    environment = {
        **os.environ,
        "HANGWATCH_STATE": str(tmp_path / "state"),
        "HANGWATCH_SAMPLE_GAP": "0.05",
    }
    with fleet(tmp_path) as targets, adopting() as wait_for_orphans:

        def start(whom, rng):
            pids = [targets[0].pid, rng.choice(targets[1:]).pid]
            return subprocess.Popen(
                command(whom, pids, output), env=environment, stderr=subprocess.PIPE
            )

        for number in range(first, min(first + BATCH, KILLS)):
            rng = random.Random(number)
            whom, moment = MOMENTS[number % len(MOMENTS)]
            victim = whom.split()[0]
            with start(whom, rng) as process:
                capture = Capture(process, targets[0].pid, rng)
                capture.until(moment)
                hit = capture.kill(victim)
                said = process.communicate(timeout=PATIENCE)[1].decode()
            wait_for_orphans()
            struck[f"{whom} {moment}"] += hit
            print(f"seed {number}: {whom} {moment}: {'killed' if hit else 'had ended'}")
            for target in targets:
                target.check()
            if hit and victim in ("hangwatch", "all"):
                assert -signal.SIGKILL == process.returncode, said
            elif not hit or victim != "conductor":
                assert process.returncode in (0, FOUND_A_HANG), said
        with start("", random.Random()) as process:
            assert 0 == process.wait(PATIENCE)

    print(f"killed: {dict(struck)}")
    assert [] == [path for path in output.iterdir() if not is_bundle_name(path.name)]
    for path in output.iterdir():
        with tarfile.open(path) as bundle:
            assert bundle.getnames()
