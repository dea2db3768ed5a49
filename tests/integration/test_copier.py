"""A server in front of us never notices us, whatever happens to us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE, eventually
from running import runs

from hangwatch.daemon import copier

# Stands for the daemon: starts the copier, tells where the copy is, and does nothing more.
DAEMON = """
import signal, sys, threading
from hangwatch.daemon import copier
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
stream = copier.start()["-"]
open(sys.argv[1], "w").write(stream + chr(10))
threading.Event().wait()
"""


class Pipeline:
    """``server | daemon``: we are the server, and the reader of what is passed through."""

    def __init__(self, folder: Path, before: str = "") -> None:
        their_input, self.server = os.pipe()
        self.output, their_output = os.pipe()
        note = folder / "stream"
        self.daemon = subprocess.Popen(
            [sys.executable, "-c", before + DAEMON, str(note)],
            stdin=their_input,
            stdout=their_output,
            start_new_session=True,
        )
        os.close(their_input)
        os.close(their_output)
        eventually(lambda: note.exists() and note.read_text().endswith("\n"))
        self.stream = note.read_text().strip()
        self.copier = 0 if before else eventually(self.find_copier)

    def find_copier(self) -> int | None:
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if copier.__file__.encode() in words and parent == self.daemon.pid:
                return int(entry.name)
        return None

    def ready(self) -> None:
        """Return when the copier copies, so that its signals are ignored."""
        self.passes(b"ready\n")

    def passes(self, data: bytes) -> None:
        os.write(self.server, data)

        assert data == self.read(len(data))

    def read(self, size: int) -> bytes:
        os.set_blocking(self.output, False)
        found = b""
        deadline = time.monotonic() + PATIENCE
        while len(found) < size and time.monotonic() < deadline:
            try:
                block = os.read(self.output, size - len(found))
            except BlockingIOError:
                time.sleep(0.01)
                continue
            if not block:
                break
            found += block
        return found

    def close(self) -> None:
        for fd in (self.server, self.output):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.daemon.kill()
        self.daemon.wait(PATIENCE)
        eventually(lambda: not self.copier or not runs(self.copier))


@pytest.fixture
def pipeline(tmp_path):
    made = Pipeline(tmp_path)
    yield made
    made.close()


def test_every_byte_passes_and_the_daemon_gets_its_copy(pipeline):
    data = bytes(range(256)) * 40 + b"\n"
    pipeline.passes(data)
    stream = os.open(pipeline.stream, os.O_RDONLY | os.O_NONBLOCK)
    copied = b""

    def whole() -> bool:
        nonlocal copied
        try:
            copied += os.read(stream, 1 << 20)
        except BlockingIOError:
            return False
        return len(copied) >= len(data)

    eventually(whole)
    os.close(stream)

    assert data == copied


def test_the_stream_goes_on_when_the_daemon_is_killed(pipeline):
    pipeline.ready()
    pipeline.daemon.kill()
    pipeline.daemon.wait(PATIENCE)
    for number in range(100):
        pipeline.passes(b"line %d\n" % number * 100)

    assert runs(pipeline.copier)


def test_a_daemon_that_never_reads_holds_nothing_up(pipeline):
    pipeline.ready()
    block = b"x" * 1023 + b"\n"
    for _ in range(4000):  # four times what the pipe to the daemon holds
        pipeline.passes(block)


def test_no_signal_ends_the_stream(pipeline):
    pipeline.ready()
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        os.kill(pipeline.copier, getattr(signal, name))
        pipeline.passes(b"after " + name.encode() + b"\n")


def test_the_stream_goes_on_when_the_daemon_ends_in_order(pipeline):
    pipeline.ready()
    pipeline.daemon.terminate()

    assert 0 == pipeline.daemon.wait(PATIENCE)
    pipeline.passes(b"still here\n")


def test_a_killed_copier_is_replaced_before_the_server_notices(pipeline):
    pipeline.ready()
    first = pipeline.copier
    os.kill(first, signal.SIGKILL)
    pipeline.copier = eventually(
        lambda: (found := pipeline.find_copier()) and found != first and found
    )
    pipeline.passes(b"here I am again\n")


def test_where_no_copier_can_be_had_the_daemon_copies_itself(tmp_path):
    alone = Pipeline(tmp_path, before='import sys; sys.executable = "/bin/false"\n')
    try:
        for _ in range(8):  # more than the pipes hold
            alone.passes(b"x" * (32 << 10))
    finally:
        alone.close()


def test_a_misspelt_option_does_not_cut_the_stream_off():
    daemon = subprocess.Popen(
        [sys.executable, "-m", "hangwatch", "watch", "--log", "-", "--stal-after", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    assert daemon.stderr is not None
    try:
        code = daemon.wait(PATIENCE)
        said = daemon.stderr.read()
        daemon.stdin.write(b"the server goes on\n" * 10_000)
        daemon.stdin.close()
        passed = daemon.stdout.read()
    finally:
        daemon.kill()
        daemon.stdout.close()
        daemon.stderr.close()

    assert 2 == code
    assert b"--stall-after" in said
    assert b"the server goes on\n" * 10_000 == passed


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["watch", "--log", "-"], True),
        (["watch", "--log=-", "--json"], True),
        (["watch", "--log", "a.log", "--log", "-"], True),
        (["watch", "--log", "a.log"], False),
        (["replay", "-"], False),
        ([], False),
    ],
)
def test_whether_standard_input_is_to_be_passed_through(arguments, wanted):
    assert wanted == copier.wanted(arguments)


def test_a_reader_that_goes_away_does_not_take_the_server_with_it(pipeline):
    pipeline.ready()
    os.close(pipeline.output)
    for _ in range(200):
        os.write(pipeline.server, b"x" * 4096)  # would raise, or wait for ever

    assert runs(pipeline.copier)


def test_the_copier_ends_with_its_input_and_so_does_the_copy(pipeline):
    pipeline.ready()
    stream = os.open(pipeline.stream, os.O_RDONLY)
    os.close(pipeline.server)
    eventually(lambda: not runs(pipeline.copier))

    assert b"ready\n" == os.read(stream, 100)
    assert b"" == os.read(stream, 100)
    os.close(stream)


def test_after_a_gap_the_copy_begins_with_a_whole_line():
    read_fd, write_fd = os.pipe()
    copy = copier.Copy(write_fd)
    copy.write(b"x" * (1 << 20))
    while len(os.read(read_fd, 1 << 20)) == 1 << 20:
        pass
    copy.write(b"rest of a lost line")
    copy.write(b"and its end\nwhole\n")
    found = os.read(read_fd, 1 << 20)
    os.close(read_fd)
    copy.write(b"nobody reads\n")
    copy.write(b"still nobody\n")
    os.close(write_fd)

    assert b"\nwhole\n" == found
