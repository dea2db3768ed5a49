"""Stacks of a process that stands still, and how it is left: with real tools and worse ones."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from captures import pool, program, run_steps, step_for
from processes import (
    PATIENCE,
    eventually,
    furnish,
    is_as_before,
    python,
    skip_unless_it_works,
    titled,
)
from running import runs

from hangwatch.capture.rooms import sweep
from hangwatch.model.capture import FailureKind, Gate, Phase, Settled
from hangwatch.system import procfs, pyspy
from hangwatch.system.attaching import Note, settle

pytestmark = pytest.mark.needs_ptrace

IN_C = """
def asleep_in_c(): ready(); time.sleep(1e6)
"""


@pytest.fixture
def target():
    with python("") as process:
        yield process.pid


def frames(output, evidence):
    """Return the names of all frames of a dump."""
    (work,) = output.glob("*.partial")
    found = json.loads((work / evidence.artifacts[0].path).read_text())
    return {frame["name"] for thread in found for frame in thread["frames"]}


def stopping(then):
    """Return a script that stops its target for good, as a tool that attaches may, and more."""
    return f'for pid in "$@"; do :; done\nkill -STOP $pid\n{then}'


def test_c_frames_stand_below_the_python_frames_that_called_them(tmp_path):
    with python(IN_C, rest="asleep_in_c()") as it:
        (evidence,) = run_steps(tmp_path, step_for(it.pid, collector="native", budget_ms="9999"))
        eventually(lambda: is_as_before(it.pid))

    names = frames(tmp_path, evidence)
    assert evidence.failure is None
    assert "asleep_in_c" in names
    assert [name for name in names if "sleep" in name and name != "asleep_in_c"]


def test_a_library_as_large_as_those_of_cuda_is_no_reason_to_fail(tmp_path):
    installation = tmp_path / "installation"
    environment = {**os.environ, **furnish(installation)}
    for path in (*(installation / "lib").iterdir(), installation / "bin/python"):
        os.truncate(path, 3 << 30)  # a hole
    interpreter = str(installation / "bin/python")
    with python(IN_C, rest="asleep_in_c()", interpreter=interpreter, env=environment) as it:
        (evidence,) = run_steps(
            tmp_path / "output", step_for(it.pid, collector="native", budget_ms="9999")
        )

    assert evidence.failure is None
    assert {"asleep_in_c", "time_sleep"} <= frames(tmp_path / "output", evidence)


def test_one_thread_of_the_dump_is_one_line(tmp_path, target):
    (evidence,) = run_steps(tmp_path, step_for(target, collector="native", budget_ms="9999"))
    (work,) = tmp_path.glob("*.partial")
    first, *threads, last = (work / evidence.artifacts[0].path).read_text().splitlines()

    assert ("[", "]") == (first, last)
    assert target == json.loads(threads[0].rstrip(","))["pid"]


UNWINDS_NOT = """case "$*" in *--native*)
echo 'Error: Failed to get stack traces' >&2
echo '0: UNW_EINVAL: unsupported operation or bad value' >&2
exit 1
esac
exec {py_spy} "$@"
"""


def test_where_c_frames_cannot_be_unwound_python_stacks_of_one_moment_are_left(tmp_path):
    tool = program(tmp_path / "py-spy", UNWINDS_NOT.format(py_spy=pyspy.find()))
    with python(IN_C, rest="asleep_in_c()") as it:
        (evidence,) = run_steps(
            tmp_path, step_for(it.pid, collector="native", py_spy=tool, budget_ms="9999")
        )

    assert FailureKind.TOOL_FAILED == evidence.failure.kind
    assert "UNW_EINVAL" in evidence.failure.message
    assert "asleep_in_c" in frames(tmp_path, evidence)


def test_the_time_that_a_process_stood_still_is_told(tmp_path, target):
    pausing = stopping(f'sleep 0.2\nkill -CONT $pid\nexec {pyspy.find()} "$@"')
    tool = program(tmp_path / "py-spy", pausing)

    (evidence,) = run_steps(
        tmp_path, step_for(target, collector="native", py_spy=tool, budget_ms="9999")
    )

    assert evidence.failure is None
    assert 190 <= evidence.pause_ms  # a look is 5 ms late at most, where a machine has the time


def test_a_tool_that_stops_its_target_for_too_long_is_killed_and_the_target_goes_on(
    tmp_path, target
):
    mark = f"3600.{random.randrange(10**9)}"
    tool = program(tmp_path / "py-spy", stopping(f"sleep {mark} & sleep {mark}"))

    step = step_for(target, collector="native", py_spy=tool, timeout=3600.0)
    (evidence,) = run_steps(tmp_path, step)

    assert (FailureKind.OVER_BUDGET, Settled.CONTINUED) == (evidence.failure.kind, evidence.settled)
    assert "SIGCONT" in evidence.failure.message
    assert "budget_ms" in evidence.failure.hint
    assert 250 <= evidence.pause_ms
    eventually(lambda: is_as_before(target))
    eventually(lambda: not titled(mark))


def test_a_target_that_hangs_under_a_real_tracer_is_let_go_at_the_budget(tmp_path, target):
    tool = program(tmp_path / "py-spy", SEIZING)

    step = step_for(target, collector="native", py_spy=tool, budget_ms="100", timeout=3600.0)
    (evidence,) = run_steps(tmp_path, step)

    assert (FailureKind.OVER_BUDGET, Settled.AS_BEFORE) == (evidence.failure.kind, evidence.settled)
    eventually(lambda: is_as_before(target))


SEIZING = f"""exec {sys.executable} - "$@" <<'END'
import ctypes, sys, time
libc = ctypes.CDLL(None)
for request in 0x4206, 0x4207:  # PTRACE_SEIZE, PTRACE_INTERRUPT
    libc.ptrace(request, int(sys.argv[-1]), None, None)
time.sleep(3600)
END
"""


@pytest.mark.parametrize("end", ["kill -SEGV $$", "exit 1"])
def test_a_target_that_a_failing_tool_left_stopped_goes_on(tmp_path, target, end):
    tool = program(tmp_path / "py-spy", stopping(end))

    (evidence,) = run_steps(tmp_path, step_for(target, collector="native", py_spy=tool))

    assert (FailureKind.TOOL_FAILED, Settled.CONTINUED) == (evidence.failure.kind, evidence.settled)
    eventually(lambda: is_as_before(target))


IN_THE_KERNEL = """
import ctypes
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)
top = (ctypes.addressof(stack) + len(stack)) & ~15
def hang():  # until a child that shares our memory ends (CLONE_VM | CLONE_VFORK | SIGCHLD)
    ready()
    libc.clone(ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(top), 0x4111, 600)
    wait()
"""


def test_a_target_to_which_the_stop_comes_late_goes_on(tmp_path):
    # As where others take the cores: it must run for a moment to be stopped.
    with python(IN_THE_KERNEL, rest="hang()") as it:
        (child,) = eventually(lambda: procfs.children(it.pid))
        eventually(lambda: procfs.read_row(it.pid).state == "D")
        note = Note.of(procfs.identify(it.pid))
        it.send_signal(signal.SIGSTOP)
        before = settle(tmp_path / "note", note, patience=0.0)
        os.kill(child, signal.SIGKILL)
        after = settle(tmp_path / "note", note, patience=PATIENCE)

        assert (Settled.TRACED, Settled.CONTINUED) == (before, after)
        eventually(lambda: is_as_before(it.pid))


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_target_that_may_not_be_told_to_go_on_is_reported(tmp_path, target, monkeypatch, error):
    def filtered(_pid):
        raise OSError(error, os.strerror(error))

    note = Note.of(procfs.identify(target))
    os.kill(target, signal.SIGSTOP)
    eventually(lambda: procfs.read_row(target).state == "T")
    monkeypatch.setattr("os.pidfd_open", filtered)

    assert Settled.NOT_PERMITTED == settle(tmp_path / "note", note)
    assert "T" == procfs.read_row(target).state


def test_a_target_that_somebody_else_had_stopped_stays_stopped(tmp_path, target):
    os.kill(target, signal.SIGSTOP)
    eventually(lambda: procfs.read_row(target).state == "T")
    tool = program(tmp_path / "py-spy", stopping("kill -SEGV $$"))
    step = step_for(target, collector="native", py_spy=tool)

    gated, forced = run_steps(
        tmp_path, replace(step, gates=(Gate.NOT_STOPPED,)), replace(step, id="forced")
    )

    assert FailureKind.GATED == gated.failure.kind
    assert (FailureKind.TOOL_FAILED, Settled.AS_BEFORE) == (forced.failure.kind, forced.settled)
    assert "T" == procfs.read_row(target).state


# ---------------------------------------------------------------------- whoever is killed


def hold(tmp_path, then="exec sleep {mark}"):
    """Return a tool that stops its target and then does nothing, and a word of its title."""
    mark = f"3600.{random.randrange(10**9)}"
    return program(tmp_path / "py-spy", stopping(then.format(mark=mark))), mark


def parents(pid):
    """Return the parents of a process, the nearest first."""
    found = []
    while (pid := procfs.read_row(pid).ppid) > 1:
        found.append(pid)
    return found


@pytest.mark.parametrize("whom", [[0], [1], [1, 0]], ids=["watcher", "worker", "both"])
def test_a_target_goes_on_when_those_who_watch_the_tool_are_killed(tmp_path, target, whom):
    tool, mark = hold(tmp_path)
    killed = []

    def kill():
        if not killed and (tools := titled(mark)) and procfs.read_row(target).state == "T":
            watcher, worker, *_ = parents(tools[0])
            for pid in [(watcher, worker)[each] for each in whom]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        return False

    step = step_for(target, collector="native", py_spy=tool, budget_ms="1e9")
    (evidence,) = run_steps(tmp_path / "output", step, stopped=kill)

    assert FailureKind.WORKER_DIED == evidence.failure.kind
    eventually(lambda: is_as_before(target))
    eventually(lambda: not titled(mark))


def test_a_target_goes_on_when_the_deadline_ends_its_step(tmp_path, target):
    tool, mark = hold(tmp_path, "sleep {mark} & exec sleep {mark}")
    step = step_for(target, collector="native", py_spy=tool, budget_ms="1e9", timeout=60.0)

    with pool(tmp_path / "output", stopped=lambda: len(titled(mark)) == 2) as (workers, _):
        workers.submit([step], phase=Phase.LATER)
        (evidence,) = workers.wait([step])

    assert (FailureKind.DEADLINE, Settled.CONTINUED) == (evidence.failure.kind, evidence.settled)
    eventually(lambda: is_as_before(target))
    eventually(lambda: not titled(mark))


CONDUCTOR = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from captures import run_steps, step_for
run_steps(Path({output!r}), step_for({pid}, collector="native", py_spy={tool!r}, budget_ms="1e9"))
"""


@pytest.mark.parametrize("all_of_them", [False, True], ids=["alone", "with all its children"])
def test_a_target_goes_on_when_the_capture_is_killed(tmp_path, target, all_of_them):
    tool, mark = hold(tmp_path)
    output = tmp_path / "output"
    script = CONDUCTOR.format(
        tests=str(Path(__file__).parent), output=str(output), pid=target, tool=tool
    )
    conductor = subprocess.Popen([sys.executable, "-c", script])
    try:
        (pid,) = eventually(lambda: procfs.read_row(target).state == "T" and titled(mark))
        above = [each for each in parents(pid) if conductor.pid in (each, *parents(each))]
        victims = [pid, *above] if all_of_them else [conductor.pid]
        for each in victims:
            os.kill(each, signal.SIGSTOP)  # so that none sees another end
        for each in victims:
            os.kill(each, signal.SIGKILL)
    finally:
        conductor.kill()
        conductor.wait()
    eventually(lambda: not any(map(runs, [pid, *above])))

    if all_of_them:
        assert "T" == procfs.read_row(target).state
        sweep(output)  # as every later capture and every daemon does that begins
    eventually(lambda: is_as_before(target))


# ---------------------------------------------------------------------- across containers

CONTAINED = """exec unshare --mount sh -c '
mount -t tmpfs none "$0" && cp -a "$1/." "$0" && shift && exec "$0/bin/python" "$@"
' {folder} {stash} "$@"
"""


@pytest.fixture
def contained(tmp_path):
    """Give a process whose interpreter lies in a file system that only it sees."""
    skip_unless_it_works("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt")
    folder, stash = tmp_path / "container", tmp_path / "stash"
    folder.mkdir()
    environment = {**os.environ, **furnish(stash)}
    environment |= {"LD_LIBRARY_PATH": str(folder / "lib"), "PATH": os.environ["PATH"]}
    launcher = program(tmp_path / "launch", CONTAINED.format(folder=folder, stash=stash))
    with python(IN_C, rest="asleep_in_c()", interpreter=launcher, env=environment) as it:
        assert [] == list(folder.iterdir())
        yield it.pid


@pytest.mark.needs_root
def test_inside_the_root_of_a_container_its_own_libraries_give_the_names(tmp_path, contained):
    (evidence,) = run_steps(
        tmp_path / "output",
        step_for(contained, collector="native", inside_root="yes", budget_ms="9999"),
    )
    names = frames(tmp_path / "output", evidence)

    assert evidence.failure is None
    assert {"asleep_in_c", "time_sleep"} <= names
    eventually(lambda: is_as_before(contained))


@pytest.mark.needs_root
def test_by_default_a_container_is_read_without_entering_its_root(tmp_path, contained):
    (evidence,) = run_steps(
        tmp_path / "output", step_for(contained, collector="native", budget_ms="9999")
    )

    assert "asleep_in_c" in frames(tmp_path / "output", evidence)
    eventually(lambda: is_as_before(contained))


@pytest.mark.parametrize("other", ["true", "script"])
def test_a_program_that_needs_the_containers_loader_is_not_run_in_its_root(tmp_path, target, other):
    ran = tmp_path / "ran"
    tool = shutil.which("true") if other == "true" else program(tmp_path / other, f"touch {ran}")

    (evidence,) = run_steps(
        tmp_path, step_for(target, collector="native", inside_root="yes", py_spy=tool)
    )

    assert FailureKind.NOT_AVAILABLE == evidence.failure.kind
    assert "not linked statically" in evidence.failure.message
    assert not ran.exists()


def test_the_py_spy_that_is_installed_with_us_is_linked_statically():
    descriptor = os.open(pyspy.find(), os.O_RDONLY)
    try:
        assert pyspy.is_static(descriptor)
    finally:
        os.close(descriptor)


def test_the_note_of_a_step_that_ended_well_is_gone(tmp_path, target):
    with pool(tmp_path) as (workers, rooms):
        step = step_for(target, collector="native", budget_ms="9999")
        workers.submit([step], phase=Phase.LATER)
        (evidence,) = workers.wait([step])

    assert evidence.failure is None
    assert [] == list((rooms.path / ".attached").iterdir())
