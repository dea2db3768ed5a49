"""Real processes for tests: started, ready, and ended for certain."""

import contextlib
import os
import select
import subprocess
import sys
import time

PATIENCE = 60.0
"""Seconds that anything may take on a noisy machine before a test fails."""

_PREFACE = """
import os, sys, threading, time
def wait(): threading.Event().wait()
def ready(): os.write(1, b"ready")
"""


def eventually(condition, patience=PATIENCE):
    """Return what *condition* gives, as soon as it is true."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def python(body, *, interpreter=sys.executable, arguments=(), rest="ready(); wait()", **options):
    """Run *body* in a fresh interpreter until it is ready; kill it afterwards."""
    process = subprocess.Popen(
        [interpreter, "-c", f"{_PREFACE}\n{body}\n{rest}", *arguments],
        stdout=subprocess.PIPE,
        **options,
    )
    try:
        said, _, _ = select.select([process.stdout], [], [], PATIENCE)
        assert said, "the process did not become ready"
        assert os.read(process.stdout.fileno(), 5) == b"ready"
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdout.close()
