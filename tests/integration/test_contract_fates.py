"""The safety contract: targets that are large, half dead, or change while they are captured."""

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from captures import capture, program, read, run_steps, step_for
from processes import PATIENCE, eventually, python
from remote_targets import running
from test_contract import OURS, in_d_state, skip_unless_it_works
from test_native import SEIZING

from hangwatch.model.capture import FailureKind
from hangwatch.system import procfs

pytestmark = pytest.mark.needs_ptrace


ENGINE = ("mp_engine_proc",)
"""A word of its title, by which a process is taken for an engine: rung 6 is for these alone."""


def failures(outcome, pid):
    """Return how the steps about a process failed; those that were never begun did not."""
    return {
        evidence.step: evidence.failure
        for evidence in outcome.evidence
        if evidence.target is not None and evidence.target.pid == pid
        if evidence.failure is not None and evidence.failure.kind is not FailureKind.GATED
    }


# ---------------------------------------------------------------------- large

THRONG = """
threading.stack_size(64 << 10)
for _ in range(2000): threading.Thread(target=wait, daemon=True).start()
"""


def test_every_one_of_two_thousand_threads_is_captured_and_goes_on(tmp_path):
    with python(THRONG, arguments=ENGINE) as it:
        before = procfs.thread_states(it.pid)
        outcome, evidence = capture(it.pid, output=tmp_path, rejudge=lambda _: "hung")
        folder = f"processes/engine-{it.pid}"
        kernel = json.loads(read(outcome, folder, "kernel2.json"))
        stacks = json.loads(read(outcome, folder, "threads2.json"))

        assert before == procfs.thread_states(it.pid)
        assert not procfs.is_traced(it.pid)
    # To stop and unwind them all may take longer than they may stand still.
    native = evidence[f"native/{it.pid}"]
    assert native.started_at
    assert {FailureKind.OVER_BUDGET} >= {
        failure.kind for failure in failures(outcome, it.pid).values()
    }
    assert [2001, 2001] == [len(kernel["threads"]), len(stacks)]


# ---------------------------------------------------------------------- half dead


def letters(pid):
    """Return the states of the threads; one that runs is one that sleeps."""
    return {tid: state.replace("R", "S") for tid, state in procfs.thread_states(pid).items()}


def test_a_process_whose_main_thread_has_ended_is_captured_by_its_others(tmp_path):
    with running(OURS, "states", "leaderless", folder=tmp_path) as (process, _):
        eventually(lambda: procfs.read_row(process.pid).state == "Z")
        before = letters(process.pid)
        outcome, _ = capture(process.pid, output=tmp_path / "output")
        folder = f"processes/api_server-{process.pid}"
        tasks = json.loads(read(outcome, folder, "tasks2.json"))["tasks"]
        stacks = json.loads(read(outcome, folder, "threads2.json"))

        assert before == letters(process.pid)
    assert "waiter" in {task["name"] for task in tasks}
    assert any(
        frame["name"].endswith("run_forever") for thread in stacks for frame in thread["frames"]
    )
    # The kernel gives the environment of a process by its main thread alone.
    assert {f"environment/{process.pid}": FailureKind.TARGET_GONE} == {
        step: failure.kind for step, failure in failures(outcome, process.pid).items()
    }


# ---------------------------------------------------------------------- changing

CHANGING = """
import signal
def change():
    os.read(0, 1)
    {change}
threading.Thread(target=change, daemon=True).start()
"""
CHANGES = {
    "ends": "os._exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "executes a Python": "os.execv(sys.executable, ['python', '-c', 'import time; time.sleep(9)'])",
    "executes no Python": "os.execv('/bin/sleep', ['sleep', '600'])",
    "forks": """
    while True:
        if os.fork() == 0: time.sleep(0.02); os._exit(0)
        os.wait()
    """,
    "starts and ends threads": """
    while True:
        threading.Thread(target=time.sleep, args=(0.01,)).start(); time.sleep(0.001)
    """,
}
MOMENTS = 2


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_target_that_changes_in_the_middle_costs_its_own_steps_at_most(tmp_path, change):
    for seed in range(MOMENTS):
        share = random.Random(f"{change} {seed}").random()
        body = CHANGING.format(change=CHANGES[change])
        with (
            python(body, stdin=subprocess.PIPE, arguments=ENGINE) as it,
            python("") as bystander,
        ):

            def at_the_moment(progress, it=it, share=share):
                reached = progress.total and progress.done >= share * progress.total
                if reached and not it.stdin.closed:
                    it.stdin.write(b"!")
                    it.stdin.close()

            outcome, _ = capture(
                it.pid,
                bystander.pid,
                output=tmp_path / str(seed),
                progress=at_the_moment,
                rejudge=lambda _: "hung",
            )
            assert it.stdin.closed, f"seed {seed}: the moment never came"
            print(f"{change}, seed {seed}, after {share:.0%}: {failures(outcome, it.pid)}")

            assert [step.id for step in outcome.plan.steps] == [e.step for e in outcome.evidence]
            assert {} == failures(outcome, bystander.pid)
            crashed = [e for e in outcome.evidence if e.failure and e.failure.kind in OUR_FAULT]
            assert [] == crashed
            if "ecutes" in change:
                assert {"R", "S"} >= set(procfs.thread_states(it.pid).values())
                assert not procfs.is_traced(it.pid)


def test_a_target_that_is_killed_while_it_is_held_is_let_go_to_its_parent(tmp_path):
    tool = program(tmp_path / "py-spy", SEIZING)
    reaped = []

    def kill_it():
        eventually(lambda: procfs.read_row(it.pid).state == "t")
        it.kill()
        it.wait()  # which a tracer holds up
        reaped.append(not evidence)

    evidence = ()
    with python("") as it:
        killer = threading.Thread(target=kill_it)
        killer.start()
        step = step_for(it.pid, collector="native", py_spy=tool, budget_ms="1e9", timeout=PATIENCE)
        evidence = run_steps(tmp_path / "output", step, patience=2 * PATIENCE)
        killer.join()

    assert [True] == reaped
    assert FailureKind.TARGET_GONE == evidence[0].failure.kind
    assert evidence[0].elapsed < PATIENCE / 2


OUR_FAULT = {FailureKind.CRASHED, FailureKind.WORKER_DIED, FailureKind.TIMED_OUT}


# ---------------------------------------------------------------------- another one's number

REUSING = """
import json, subprocess, sys, time
sys.path[:0] = [{tests!r}]
from pathlib import Path
from captures import capture, pool, step_for
from hangwatch.model.capture import Phase
from hangwatch.system import procfs

def start(name):
    code = "def " + name + "(): print('ready', flush=True); input()\\n" + name + "()"
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started.stdout.readline()
    return started

def reuse():
    global heir
    ticks = procfs.start_ticks(watched.pid)
    watched.kill()
    watched.wait()
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(watched.pid - 1))
    heir = start("inno" "cent")
    assert (watched.pid, True) == (heir.pid, procfs.start_ticks(heir.pid) != ticks)

output, heir = Path({output!r}), None
watched = start("watched")
time.sleep(0.05)  # start times are told in hundredths of a second
{capture}
files = [path for path in output.rglob("*") if path.is_file()]
print(json.dumps([
    [[each.step, each.failure and each.failure.kind] for each in evidence if each.target],
    [path.name for path in files if b"inno" b"cent" in path.read_bytes()],
    [path.name for path in files if b"watched" in path.read_bytes()],
    procfs.read_row(heir.pid).state]))
heir.kill()
"""
AFTER_THE_PLAN = """
def planned(progress):
    if heir is None and progress.part == "first sample": reuse()
evidence = capture(watched.pid, output=output, progress=planned)[0].evidence
"""
BETWEEN_THE_SAMPLES = """
first, second = ([step_for(watched.pid, collector=name, sample=sample)
                  for name in ("kernel", "tasks", "stacks", "environment")] for sample in (1, 2))
with pool(output) as (workers, _):
    workers.submit(first, phase=Phase.ONSET)
    assert {None} == {each.failure for each in workers.wait(first)}
    reuse()
    workers.submit(second, phase=Phase.ONSET)
    evidence = workers.wait(second)
"""


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("capture", "own"),
    [(AFTER_THE_PLAN, set()), (BETWEEN_THE_SAMPLES, {"threads.json"})],
    ids=["after the plan", "between the samples"],
)
def test_whoever_has_the_number_of_a_target_by_now_is_not_read(tmp_path, capture, own):
    own_numbers = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    skip_unless_it_works(*own_numbers, "sh", "-c", "echo 1000 >/proc/sys/kernel/ns_last_pid")
    output = tmp_path / "output"
    script = REUSING.format(tests=str(Path(__file__).parent), output=str(output), capture=capture)
    said = subprocess.run(
        [*own_numbers, sys.executable, "-c", script],
        check=True, stdout=subprocess.PIPE, timeout=PATIENCE,
    ).stdout  # fmt: skip
    steps, of_the_heir, of_the_watched, state = json.loads(said)

    assert {FailureKind.PID_REUSED} == {kind for _, kind in steps} - {FailureKind.GATED}
    assert ([], own, "S") == (of_the_heir, own & set(of_the_watched), state)


# ---------------------------------------------------------------------- a thread in D state


def test_nothing_that_attaches_is_called_for_a_process_that_hangs_in_the_kernel(tmp_path):
    calls = tmp_path / "calls"
    py_spy = Path(sys.executable).with_name("py-spy")
    tool = program(tmp_path / "py-spy", f'echo "$@" >> {calls}\nexec {py_spy} "$@"')
    options = {name: {"py_spy": tool} for name in ("stacks", "native")}
    with in_d_state(tmp_path) as pid:
        outcome, evidence = capture(
            pid, output=tmp_path / "output", rejudge=lambda _: "hung", options=options
        )
        states = {*procfs.thread_states(pid).values()}

    called = [call.split() for call in calls.read_text().splitlines()]
    assert str(pid) in {call[-1] for call in called}
    assert [] == [call for call in called if call[-1] == str(pid) and "--nonblocking" not in call]
    assert {"S", "D"} == states - {"R"}
    read_all = [f"{name}/{pid}/{n}" for name in ("kernel", "tasks", "stacks") for n in (1, 2)]
    assert [None] * 6 == [evidence[step].failure for step in read_all]
    gated = {
        evidence[step.id].failure.kind
        for step in outcome.plan.steps
        if step.attaches and step.target.process.pid == pid
    }
    assert {FailureKind.GATED} >= gated
