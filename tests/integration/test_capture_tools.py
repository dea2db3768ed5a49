"""Tools that misbehave, and workers that are killed: a step each, and nothing left running."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from captures import Jumping, capture, pool, program, run_steps, step_for
from processes import eventually, python
from running import runs

from hangwatch.capture.rooms import Rooms, sweep
from hangwatch.core.breaker import REST
from hangwatch.errors import OutputError
from hangwatch.model.capture import FailureKind, Gate, Phase
from hangwatch.system import procfs

EMPTY_DUMP = """echo '[{"pid": 1, "frames": []}]'"""


@pytest.fixture
def target():
    with python("") as process:
        yield process.pid


def dump(tmp_path, target, script, **more):
    """Return the evidence of one dump by a program that plays py-spy."""
    tool = program(tmp_path / "py-spy", script)
    (evidence,) = run_steps(tmp_path / "output", step_for(target, py_spy=tool, **more))
    return evidence


def threads(tmp_path, evidence):
    """Return the threads that a dump by a program that plays py-spy left."""
    (work,) = (tmp_path / "output").glob("*.partial")
    return json.loads((work / evidence.artifacts[0].path).read_text())


def running(word):
    """Return the processes whose title holds *word*."""
    return [row.pid for row in procfs.read_table() if word in title(row.pid)]


def title(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return procfs.read_title(pid)
    return ""  # it ended meanwhile


def test_a_missing_tool_is_told_with_the_command_that_installs_it(tmp_path, target):
    (evidence,) = run_steps(tmp_path, step_for(target, py_spy="/nonexistent/py-spy"))

    assert FailureKind.NOT_INSTALLED == evidence.failure.kind
    assert "pip install py-spy" == evidence.failure.hint


def test_a_tool_that_fails_three_times_in_a_row_is_left_alone_and_then_tried_again(
    tmp_path, target, monkeypatch
):
    clock = Jumping()
    monkeypatch.setattr("captures.CLOCK", clock)
    tool = tmp_path / "py-spy"
    steps = [
        step_for(target, name=f"native/{number}", collector="native", py_spy=str(tool))
        for number in range(8)
    ]

    def then(step):
        if step is steps[5]:
            clock.ahead += REST
        if step is steps[7]:
            clock.ahead += REST
            program(tool, EMPTY_DUMP)

    with pool(tmp_path) as (workers, _):
        for step in steps:
            then(step)
            workers.submit([step], phase=Phase.ONSET)
            workers.wait([step])
        evidence = workers.wait(steps)

    failing, alone = FailureKind.NOT_INSTALLED, FailureKind.BREAKER_OPEN
    assert [failing, failing, failing, alone, alone, failing, alone, None] == [
        item.failure and item.failure.kind for item in evidence
    ]


@pytest.mark.needs_ptrace
def test_a_missing_tool_leaves_no_process_without_stacks(tmp_path, target):
    steps = [
        step_for(target, name=f"stacks/{number}", sample=number, py_spy="/nonexistent/py-spy")
        for number in range(1, 6)
    ]

    evidence = run_steps(tmp_path, *steps)

    assert {FailureKind.NOT_INSTALLED} == {item.failure.kind for item in evidence}
    assert [1] * 5 == [len(item.artifacts) for item in evidence]


@pytest.mark.needs_ptrace
def test_a_tool_that_hung_is_not_waited_for_again(tmp_path, target, monkeypatch):
    monkeypatch.setattr("hangwatch.capture.pool.width", lambda: 1)
    count = tmp_path / "count"
    tool = program(tmp_path / "py-spy", f"echo x >> {count}; exec sleep 3600")
    steps = [
        step_for(target, name=f"stacks/{number}", sample=number, timeout=4.0, py_spy=tool)
        for number in (1, 2)
    ]

    evidence = run_steps(tmp_path, *steps)

    assert [FailureKind.TIMED_OUT] * 2 == [item.failure.kind for item in evidence]
    assert [1, 1] == [len(item.artifacts) for item in evidence]
    assert "x\n" == count.read_text()


def test_failures_that_are_the_targets_own_do_not_open_the_breaker(tmp_path, target):
    steps = [step_for(target, name=f"stacks/{number}", ticks=1) for number in range(5)]

    evidence = run_steps(tmp_path, *steps)

    assert {FailureKind.PID_REUSED} == {item.failure.kind for item in evidence}


def test_a_tool_that_hangs_is_killed_with_everything_it_started(tmp_path, target):
    mark = f"3600.{random.randrange(10**9)}"

    evidence = dump(tmp_path, target, f"sleep {mark} & sleep {mark}", timeout=2.0)

    assert FailureKind.TIMED_OUT == evidence.failure.kind
    eventually(lambda: not running(mark))


def test_a_tool_that_floods_its_output_is_cut_off(tmp_path, target):
    evidence = dump(tmp_path, target, "exec yes")

    assert FailureKind.TOO_LARGE == evidence.failure.kind
    assert evidence.failure.stand_in


def test_a_tool_that_crashes_is_told_by_its_signal(tmp_path, target):
    evidence = dump(tmp_path, target, "kill -SEGV $$")

    assert FailureKind.TOOL_FAILED == evidence.failure.kind
    assert evidence.failure.message.startswith(f"py-spy died of signal {signal.SIGSEGV:d}")


@pytest.mark.parametrize("nonsense", ["", "hello", "{}", "[1]", '[{"frames": 1}]'])
def test_a_tool_that_writes_nonsense_is_not_believed(tmp_path, target, nonsense):
    evidence = dump(tmp_path, target, f"echo '{nonsense}'")

    assert FailureKind.TOOL_FAILED == evidence.failure.kind
    assert "hangwatch" == threads(tmp_path, evidence)[0]["reader"]


def test_a_dump_that_was_torn_is_taken_again(tmp_path, target):
    count = tmp_path / "count"
    torn = "Error: Failed to get stack traces\n\nCaused by:\n    0: Bad address (os error 14)"
    script = f"""echo x >> {count}
if [ $(wc -l < {count}) -lt 3 ]; then echo '{torn}' >&2; exit 1; fi
{EMPTY_DUMP}"""

    assert dump(tmp_path, target, script).failure is None


def test_a_dump_that_is_always_torn_is_given_up_and_its_words_are_kept(tmp_path, target):
    count = tmp_path / "count"
    script = f"""echo x >> {count}
echo 'Error: Failed to get stack traces' >&2
echo 'Caused by:' >&2
echo '    0: Bad address (os error 14)' >&2
exit 1"""

    evidence = dump(tmp_path, target, script)

    assert FailureKind.TOOL_FAILED == evidence.failure.kind
    assert "3 attempts" in evidence.failure.message
    assert "Bad address" in evidence.failure.message
    assert "x\n" * 3 == count.read_text()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Error: Failed to find python version from target process", FailureKind.NOT_PYTHON),
        (
            "Permission Denied: Try running again with elevated permissions",
            FailureKind.NOT_PERMITTED,
        ),
        (
            "Error: Check that the process is running.\nReason: Permission denied (os error 13)",
            FailureKind.NOT_PERMITTED,
        ),
        ("Error: No such file or directory (os error 2)", FailureKind.TOOL_FAILED),
        ("Error: something that nobody ever saw", FailureKind.TOOL_FAILED),
    ],
)
def test_what_the_tool_says_is_understood(tmp_path, target, words, kind):
    assert kind == dump(tmp_path, target, f"cat >&2 <<'END'\n{words}\nEND\nexit 1").failure.kind


def test_a_killed_worker_costs_its_step_and_its_tool_dies_with_it(tmp_path, target):
    mark = f"3600.{random.randrange(10**9)}"
    tool = program(tmp_path / "py-spy", f"exec sleep {mark}")
    stuck = step_for(target, py_spy=tool, name="stuck")
    next_ = step_for(target, collector="kernel", name="next")

    killed = []

    def kill_the_worker():
        if not killed and (procs := running(mark)):
            killed.append(procfs.read_row(procs[0]).ppid)  # once: an orphan's parent is init
            os.kill(killed[0], signal.SIGKILL)
        return False

    evidence = run_steps(tmp_path / "output", stuck, next_, stopped=kill_the_worker)

    assert FailureKind.WORKER_DIED == evidence[0].failure.kind
    assert evidence[1].failure is None
    eventually(lambda: not running(mark))


def test_a_gate_is_looked_at_right_before_the_step(tmp_path, target):
    step = replace(step_for(target, collector="kernel"), gates=(Gate.NOT_STOPPED,))
    os.kill(target, signal.SIGSTOP)
    eventually(lambda: procfs.read_row(target).state == "T")

    (closed,) = run_steps(tmp_path, step)
    os.kill(target, signal.SIGCONT)
    eventually(lambda: procfs.read_row(target).state == "S")
    (open_,) = run_steps(tmp_path, step)

    assert (FailureKind.GATED, "the process is stopped") == (
        closed.failure.kind,
        closed.failure.message,
    )
    assert open_.failure is None


def test_steps_that_yield_run_after_all_others(tmp_path, target, monkeypatch):
    monkeypatch.setattr("hangwatch.capture.pool.width", lambda: 1)
    order = []
    steps = [step_for(target, collector="kernel", name=f"{n}", sample=n) for n in range(1, 6)]

    run_steps(
        tmp_path,
        *steps,
        tell=lambda step, _: order.append(step.id),
        last=lambda step: step.id in ("1", "2"),
    )

    assert ["3", "4", "5", "1", "2"] == order


def test_no_worker_is_left_after_a_capture(tmp_path, target):
    capture(target, output=tmp_path)

    eventually(lambda: not procfs.children(os.getpid()) or not ours(os.getpid()))


def ours(parent):
    return [pid for pid in procfs.children(parent) if "hangwatch.capture.worker" in title(pid)]


CAPTURER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from captures import capture
while True:
    capture({pid}, output=Path({output!r}), gap=0.05)
"""


@pytest.mark.parametrize("seed", range(4))
def test_killing_a_capture_at_any_moment_leaves_the_target_running_and_no_bundle(
    tmp_path, target, seed
):
    output = tmp_path / "output"
    script = CAPTURER.format(
        tests=str(Path(__file__).parent),
        pid=target,
        output=str(output),
    )
    capturer = subprocess.Popen([sys.executable, "-c", script])
    try:
        eventually(lambda: ours(capturer.pid))
        workers = ours(capturer.pid)
        # The moment is the point here, not a wait for something.
        time.sleep(random.Random(seed).uniform(0.0, 0.6))
        capturer.send_signal(signal.SIGSTOP)  # so that no worker starts unseen
        eventually(lambda: procfs.read_row(capturer.pid).state == "T")
        workers = [*workers, *ours(capturer.pid)]
    finally:
        capturer.kill()
        capturer.wait()

    eventually(lambda: not any(map(runs, workers)))
    assert procfs.read_row(target).state in ("S", "R")
    assert procfs.read_row(target).tracer_pid == 0
    assert all(path.name.endswith(".partial") for path in output.iterdir())
    sweep(output)
    assert [] == list(output.iterdir())


def test_the_work_of_a_capture_that_still_runs_is_not_swept_away(tmp_path):
    rooms = Rooms.create(tmp_path, "test")

    assert () == sweep(tmp_path)
    assert rooms.path.exists()


def test_the_work_of_another_machine_on_the_same_disk_is_left_alone_for_a_day(tmp_path):
    theirs = tmp_path / "hangwatch-x.00000000-1-1.partial"
    theirs.mkdir()

    assert () == sweep(tmp_path)
    os.utime(theirs, (0, 0))
    assert (theirs,) == sweep(tmp_path)


def test_a_directory_that_cannot_be_made_is_told_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OutputError, match="cannot write into"):
        Rooms.create(tmp_path / "file", "test")


def test_a_worker_loads_none_of_the_heavy_libraries():
    script = (
        "import sys, importlib, pkgutil, hangwatch.capture.worker, hangwatch.collectors as c\n"
        "for m in pkgutil.iter_modules(c.__path__):\n"
        "    importlib.import_module(f'{c.__name__}.{m.name}')\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()

    heavy = {"pydantic", "rich", "click", "jinja2", "structlog", "ray", "torch", "watchdog"}
    assert set() == heavy & set(loaded)
