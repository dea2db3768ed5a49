"""The safety contract: how long a target stands still, measured inside it."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from captures import capture
from processes import eventually, python

from benchmarks._pause import Meter, NoCompilerError

CROWD = """
def deep(n):
    if n: return deep(n - 1)
    wait()
for _ in range(40): threading.Thread(target=deep, args=(50,), daemon=True).start()
"""
ROUNDS = 3
"""Whatever else holds a thread up for a moment seldom does so in each of several rounds."""


@contextlib.contextmanager
def measured(folder):
    """Give a process with forty threads, and the meter that runs in it."""
    try:
        meter = Meter(folder)
    except NoCompilerError as error:
        pytest.skip(f"the meter is written in C: {error}")
    with meter, python(CROWD + meter.code) as it:
        eventually(lambda: meter.stamps)
        yield it.pid, meter


def longest(meter, action):
    """Return the longest pause, in milliseconds, during *action*."""
    meter.reset()
    action()
    return meter.longest_ms


@pytest.mark.needs_ptrace
def test_no_thread_stands_still_for_a_capture_as_it_does_for_a_tool_that_attaches(tmp_path):
    attaching = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid"]
    with measured(tmp_path) as (pid, meter):
        ours = [longest(meter, lambda: capture(pid, output=tmp_path)) for _ in range(ROUNDS)]
        theirs = [
            longest(
                meter,
                lambda: subprocess.run(
                    [*attaching, str(pid)], check=True, stdout=subprocess.DEVNULL
                ),
            )
            for _ in range(ROUNDS)
        ]

    print(f"longest pauses, ms: hangwatch {ours}, py-spy dump {theirs}")
    assert min(ours) < max(theirs) / 4
