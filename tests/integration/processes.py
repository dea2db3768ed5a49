"""Real processes for tests: started, ready, and ended for certain."""

import contextlib
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from hangwatch.system import procfs

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


def is_as_before(pid):
    """Say whether a process sleeps, and nobody traces it; it may run a moment before it does."""
    row = procfs.read_row(pid)
    return (row.state, row.tracer_pid) == ("S", 0) and not procfs.is_traced(pid)


def titled(word):
    """Return the processes whose title holds *word*."""
    found = []
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            found += [pid] if word in procfs.read_title(pid) else []
    return found


def skip_unless_it_works(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    tried = subprocess.run(command, check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"{command[0]} does not work here: {tried.stderr.strip()}")


def furnish(container):
    """Make an installation of its own for a target; return the variables that it needs."""
    (container / "bin").mkdir(parents=True)
    (container / "lib").mkdir()
    shutil.copy(Path(sys.executable).resolve(), container / "bin/python")
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        library = Path(*sysconfig.get_config_vars("LIBDIR", "INSTSONAME"))
        shutil.copy(library, container / "lib")
    for tool in ("py-spy", "git", "gdb", "nvidia-smi"):
        (container / "bin" / tool).symlink_to("/bin/true")
    return {
        "PATH": f"{container / 'bin'}:{os.environ['PATH']}",
        "PYTHONHOME": sys.base_prefix,
        "LD_LIBRARY_PATH": str(container / "lib"),
    }
