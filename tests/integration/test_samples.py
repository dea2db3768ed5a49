"""Where threads are twenty times a second, in the pause between the two samples of a capture."""

import os
import random
import signal

import pytest
from captures import CLOCK, capture, pool, program, read, step_for
from processes import PATIENCE, eventually, python

from hangwatch.core import sampling
from hangwatch.model.capture import FailureKind, Phase
from hangwatch.system import procfs

POLLING = """
import asyncio
def look_at_the_gpu(): time.sleep(0.004)
def look_at_the_queue(): time.sleep(0.004)
async def poll():
    ready()
    while True:
        look_at_the_gpu()
        look_at_the_queue()
        await asyncio.sleep(0.002)
def stuck(): wait()
threading.Thread(target=stuck, name="a; b", daemon=True).start()
"""


def polling(folder):
    """Return a body that runs the poller from a file, so that its frames have names."""
    path = folder / "poller.py"
    path.write_text(POLLING)
    return f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))"


def sampled(output, pid, *, seconds=PATIENCE, **options):
    """Return the evidence of one sampling, and the file it left or ``None``."""
    with pool(output) as (workers, rooms):
        first = step_for(pid, collector="kernel")  # by then there is a worker
        workers.submit([first], phase=Phase.ONSET)
        workers.wait([first])
        step = step_for(
            pid,
            collector="samples",
            name="samples/1",
            timeout=PATIENCE,
            until=repr(CLOCK.now() + seconds),
            **options,
        )
        workers.submit([step], phase=Phase.ONSET)
        (evidence,) = workers.wait([step])
        path = rooms.place(step.folder) / "samples.txt"
        return evidence, path.read_bytes() if path.exists() else None


@pytest.mark.needs_ptrace
def test_the_pause_of_a_capture_shows_what_a_polling_coroutine_does(tmp_path):
    with python(polling(tmp_path), rest="asyncio.run(poll())") as it:
        for gap in (3.0, 10.0, 30.0):  # a busy machine needs all of a short pause to look once
            outcome, evidence = capture(it.pid, output=tmp_path, gap=gap)
            if evidence[f"samples/{it.pid}"].failure is None:
                break
        text = read(outcome, f"processes/api_server-{it.pid}", "samples.txt")

    seen = sampling.parse(text.encode()).threads
    (moving, *_), (name, still) = seen[f"thread ({it.pid})"], seen.popitem()
    innermost = {stack.rpartition(";")[2].split()[0] for stack in seen[f"thread ({it.pid})"]}
    assert {"look_at_the_gpu", "look_at_the_queue"} <= innermost
    assert "MainThread" in moving
    assert (f"{name}: a; b", 1) == (next(iter(still)).partition(";Thread.")[0], len(still))


def test_where_the_first_sample_leaves_no_time_nothing_is_sampled_and_the_plan_says_so(tmp_path):
    with python("") as it:
        _, evidence = capture(it.pid, output=tmp_path, gap=0.1)

    failure = evidence[f"samples/{it.pid}"].failure
    assert FailureKind.GATED == failure.kind
    assert failure.message.startswith("the first sample left ")


def test_a_target_that_ends_meanwhile_leaves_what_was_seen_of_it(tmp_path):
    with python("") as it:
        kill = f"kill -9 {it.pid}; until grep -q 'State:.Z' /proc/{it.pid}/status; do :; done"
        tool = program(tmp_path / "py-spy", f"{kill}; echo 'thread (1): M;f (a.py:1) 3'")
        evidence, text = sampled(tmp_path, it.pid, py_spy=tool)
        assert -signal.SIGKILL == it.wait()

    assert FailureKind.TARGET_GONE == evidence.failure.kind
    assert b"thread (1): M;f (a.py:1) 3\n" in text


def test_a_profiler_that_does_not_end_is_killed_with_what_it_started(tmp_path):
    mark = f"3600.{random.randrange(10**9)}"
    with python("") as it:
        tool = program(tmp_path / "py-spy", f"trap '' INT; sleep {mark} & sleep {mark}")
        evidence, _ = sampled(tmp_path, it.pid, seconds=3.0, py_spy=tool)

    assert (FailureKind.TIMED_OUT, "py-spy did not end in time and was killed") == (
        evidence.failure.kind,
        evidence.failure.message,
    )
    eventually(lambda: not [p for p in procfs.pids() if mark in title(p)])


def title(pid):
    try:
        return procfs.read_title(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_profiler_that_floods_its_output_is_cut_off(tmp_path):
    with python("") as it:
        tool = program(tmp_path / "py-spy", "exec yes")
        evidence, _ = sampled(tmp_path, it.pid, py_spy=tool)

    assert FailureKind.TOO_LARGE == evidence.failure.kind


def test_a_profiler_that_writes_nonsense_is_not_believed(tmp_path):
    with python("") as it:
        tool = program(tmp_path / "py-spy", "echo hello")
        evidence, text = sampled(tmp_path, it.pid, py_spy=tool)

    assert (FailureKind.TOOL_FAILED, None) == (evidence.failure.kind, text)


def test_a_program_without_python_is_told_from_a_failure(tmp_path):
    with python("import subprocess; child = subprocess.Popen(['/bin/sleep', '60'])") as it:
        (child,) = procfs.children(it.pid)
        evidence, _ = sampled(tmp_path, child)
        os.kill(child, signal.SIGKILL)

    assert FailureKind.NOT_PYTHON == evidence.failure.kind


def test_a_turn_that_comes_too_late_is_not_taken(tmp_path):
    with python("") as it:
        evidence, _ = sampled(tmp_path, it.pid, seconds=0.0)

    assert FailureKind.DEADLINE == evidence.failure.kind
