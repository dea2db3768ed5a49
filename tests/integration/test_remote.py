"""The reader of tasks, against what real programs say of themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from remote_targets import Interpreter, interpreters, running

from hangwatch import remote
from hangwatch.remote import Snapshot, Task

pytestmark = pytest.mark.needs_ptrace

SEEDS = int(os.environ.get("HANGWATCH_PROOF_SEEDS", "1"))
TASKS = int(os.environ.get("HANGWATCH_PROOF_TASKS", "240"))
READINGS = int(os.environ.get("HANGWATCH_PROOF_READINGS", "6"))

FOUND = interpreters()
if "HANGWATCH_PROOF_FILE" not in os.environ:
    # One of each minor version will do, ours among them.
    FOUND = [*{each.minor: each for each in (*FOUND, *(x for x in FOUND if x.is_ours))}.values()]
EVERY = pytest.mark.parametrize("interpreter", FOUND, ids=str)
ONE = next(each for each in FOUND if each.is_ours)


def tell(figures: dict[str, object]) -> None:
    """Write the figures of a proof to a file, a line each, if one was asked for."""
    path = os.environ.get("HANGWATCH_PROOF_FILE")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(figures) + "\n")


def differences(found: Task | None, truth: dict[str, Any], everybody: dict[str, Any]) -> list[str]:
    if found is None:
        return ["missing"]
    wrong = [
        name
        for name in ("name", "state", "loop", "waiter", "must_cancel")
        if getattr(found, name) != truth[name]
    ]
    if [[f.function, f.file, f.line] for f in found.chain] != truth["chain"]:
        wrong.append("chain")
    if found.torn:
        wrong.append(f"torn: {found.torn}")
    if found.awaits.kind == "unknown":
        wrong.append("unknown")
    if truth["expected"]:
        kind, target, tasks = truth["expected"]
        if found.awaits.kind != kind or (target and found.awaits.object != target):
            wrong.append(f"awaits {found.awaits}, not {kind} {target}")
        pending = {i for i in tasks if everybody.get(str(i), {}).get("state") == "pending"}
        if tasks and kind not in ("task", "shield") and set(found.awaits.tasks) != pending:
            wrong.append("awaited tasks")
    return wrong


def acquainted(pid: int) -> remote.RemotePython:
    """Attach to a process that an earlier reader knows well."""
    return remote.attach(pid, known=remote.attach(pid).learn())


def check_graph(
    interpreter: Interpreter,
    seed: int,
    folder: Path,
    *extra: str,
    attach: Callable[[int], remote.RemotePython] = remote.attach,
) -> int:
    with running(interpreter, "graph", seed, TASKS, *extra, folder=folder) as (process, truth):
        snapshot = attach(process.pid).tasks()

    everybody = truth["tasks"]
    tasks = {str(task.id): task for task in snapshot.tasks}
    # Nobody can find a task that is over and was eager, or ran on 3.14: it has left the registries.
    expected = {
        key: task for key, task in everybody.items() if task["state"] == "pending" or key in tasks
    }
    wrong = {
        task["name"]: found
        for key, task in expected.items()
        if (found := differences(tasks.get(key), task, everybody))
    }
    direct = {
        (int(key), task["waiter"])
        for key, task in expected.items()
        if everybody.get(str(task["waiter"]), {}).get("state") == "pending"
    }
    edges = {(edge.waiter, edge.awaited) for edge in snapshot.waits.edges}
    running_loops = {loop.id for loop in snapshot.loops if loop.thread_id}
    extra_pending = {
        task.name
        for key, task in tasks.items()
        if key not in everybody and task.state == "pending" and task.chain[0].function != "live"
    }

    assert {} == wrong
    assert set() == direct - edges
    assert {task["loop"] for task in everybody.values()} == running_loops
    assert () == snapshot.problems
    assert set() == extra_pending
    tell(
        {
            "proof": "static",
            "python": interpreter.version,
            "extra": extra,
            "seed": seed,
            "tasks": len(expected),
            "exact": len(expected) - len(wrong),
            "edges": len(direct),
            "elapsed": snapshot.elapsed,
        }
    )
    return len(expected)


@EVERY
@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_task_of_a_program_at_rest_is_read_exactly(
    interpreter: Interpreter, seed: int, tmp_path: Path
):
    assert check_graph(interpreter, seed, tmp_path) > TASKS / 2


@EVERY
def test_every_task_is_read_exactly_by_whoever_knows_the_process(
    interpreter: Interpreter, tmp_path: Path
):
    assert check_graph(interpreter, 0, tmp_path, attach=acquainted) > TASKS / 2


@EVERY
@pytest.mark.parametrize("seed", range(max(1, SEEDS // 2)))
def test_deadlocks_are_found_and_none_is_invented(
    interpreter: Interpreter, seed: int, tmp_path: Path
):
    with running(interpreter, "deadlock", seed, folder=tmp_path) as (process, truth):
        snapshot = remote.attach(process.pid).tasks()

    owner = {int(lock): task for lock, task in truth["owner"].items()}
    wants = {int(task): lock for task, lock in truth["wants"].items()}
    ours = {(edge.waiter, edge.object) for edge in snapshot.waits.edges if edge.kind == "lock"}
    edges = {(task, owner[lock]) for task, lock in wants.items()}
    edges |= {(int(task), other) for task, others in truth["awaits"].items() for other in others}
    main = next(task.id for task in snapshot.tasks if task.chain[0].function == "main")

    assert set(wants.items()) == ours
    assert edges == {(edge.waiter, edge.awaited) for edge in snapshot.waits.edges}
    parts = knots(edges)
    assert len(parts) == len(snapshot.waits.cycles)
    for cycle in snapshot.waits.cycles:
        assert any(set(cycle) <= part for part in parts)
        steps = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
        assert set(steps) <= edges
    assert main not in {edge.waiter for edge in snapshot.waits.edges}
    tell(
        {
            "proof": "deadlock",
            "python": interpreter.version,
            "seed": seed,
            "owners": len(owner),
            "waits": len(edges),
            "cycles": len(parts),
        }
    )


def knots(edges: set[tuple[int, int]]) -> list[set[int]]:
    """Return the groups of tasks that wait for each other, by plain reachability."""
    nodes = {node for edge in edges for node in edge}
    reach = {node: {b for a, b in edges if a == node} for node in nodes}
    changed = True
    while changed:
        changed = False
        for node in nodes:
            more = set().union(*(reach[other] for other in reach[node])) - reach[node]
            if more:
                reach[node] |= more
                changed = True
    found: list[set[int]] = []
    for node in nodes:
        if node in reach[node] and not any(node in part for part in found):
            found.append({other for other in reach[node] if node in reach[other]})
    return found


@EVERY
def test_tasks_that_move_at_full_speed_are_right_or_marked(
    interpreter: Interpreter, tmp_path: Path
):
    counts: Counter[str] = Counter()
    wrong: list[object] = []
    with running(interpreter, "busy", 150, folder=tmp_path) as (process, truth):
        legal = {letter: set(chains) for letter, chains in truth["legal"].items()}
        target = remote.attach(process.pid)
        for _ in range(READINGS):
            snapshot = target.tasks()
            seen = {str(task.id): task for task in snapshot.tasks}
            for key, expected in truth["tasks"].items():
                counts["resting"] += 1
                if differences(seen.get(key), {**expected, "expected": None}, {}):
                    wrong.append(expected["name"])
            for task in snapshot.tasks:
                letter = task.name[0]
                if letter not in "mscf" or task.state in ("done", "cancelled"):
                    continue
                counts["moving"] += 1
                if task.torn:
                    counts["marked"] += 1
                elif task.state != "running" and task.awaits.kind != "not_started":
                    chain = [[f.function, f.file, f.line] for f in task.chain]
                    if json.dumps(chain) not in legal[letter]:
                        wrong.append((task.name, chain))
        assert process.poll() is None

    tell({"proof": "full speed", "python": interpreter.version, **counts, "wrong": len(wrong)})
    assert [] == wrong
    assert counts["moving"] > 0


@EVERY
def test_a_blocked_loop_shows_the_call_that_blocks_it(interpreter: Interpreter, tmp_path: Path):
    with running(interpreter, "blocked", folder=tmp_path) as (process, truth):
        target = remote.attach(process.pid)
        snapshot = target.tasks()
        threads = target.threads()

    tasks = {task.name: task for task in snapshot.tasks}
    culprit = tasks["culprit"]
    names = {thread.name: thread for thread in threads}
    assert "running" == culprit.state
    assert ["outer", "inner", "deep"] == [frame.function for frame in culprit.chain]
    assert truth["line"] == culprit.chain[-1].line
    assert "pending" == tasks["python-task"].state
    assert "event" == tasks["python-task"].awaits.kind
    assert "not_started" == tasks["not-started"].awaits.kind
    assert {"left-0", "left-1", "left-2"} <= tasks.keys()
    assert tasks["late"].awaits.due_in is not None
    assert tasks["late"].awaits.due_in < 0
    assert "overdue" in tasks["late"].awaits.detail
    assert {"main", "waiter"} <= tasks.keys()
    assert "deep" == names["MainThread"].frames[0].function.rsplit(".", 1)[-1]
    main_loop = next(loop for loop in snapshot.loops if loop.thread_id)
    assert truth["thread"] == main_loop.thread_id == names["MainThread"].thread_id
    assert main_loop.id == names["MainThread"].loop
    assert () == tuple(problem for problem in snapshot.problems if problem.kind != "torn")


@EVERY
def test_blocked_threads_name_their_lock_and_its_owner(interpreter: Interpreter, tmp_path: Path):
    with running(interpreter, "locked", folder=tmp_path) as (process, truth):
        threads = {each.name: each for each in remote.attach(process.pid).threads()}

    def wait(name: str) -> tuple[str, int, str]:
        found = threads[name].waits
        assert found is not None
        owner = next((each.name for each in threads.values() if each.ident == found.owner), "")
        return found.type, found.object, owner

    assert ("Lock", truth["second"], "second") == wait("first")
    assert ("Lock", truth["first"], "first") == wait("second")
    assert ("RLock", truth["again"], "holder") == wait("wants")
    for name in ("queue", "event", "condition", "semaphore", "future"):
        assert ("Lock", "") == wait(name)[::2]
    assert threads["holder"].waits is None
    assert threads["free"].waits is None


@EVERY
def test_a_deadlock_across_two_loops_is_found(interpreter: Interpreter, tmp_path: Path):
    with running(interpreter, "crossing", folder=tmp_path) as (process, _):
        snapshot = remote.attach(process.pid).tasks()

    tasks = {task.id: task for task in snapshot.tasks}
    (cycle,) = snapshot.waits.cycles
    assert {"here", "there", "messenger"} == {tasks[id_].name for id_ in cycle}
    assert 2 == len({tasks[id_].loop for id_ in cycle})


@EVERY
def test_the_holder_of_the_gil_is_named(interpreter: Interpreter, tmp_path: Path):
    with running(interpreter, "hogged", folder=tmp_path) as (process, _):
        target = remote.attach(process.pid)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            # Whoever wants the GIL wakes up every 5 ms to say so, and is not asleep then.
            threads = {each.name: each for each in target.threads()}
            hogs = [frame.function for frame in threads["hog"].frames[1:2]]
            if threads["want"].waits is not None and hogs == ["hog"]:
                break

    hog, want = threads["hog"], threads["want"]
    assert hog.holds_gil
    assert not want.holds_gil
    assert "hog" == hog.frames[1].function
    assert want.waits is not None
    assert ("GIL", hog.ident) == (want.waits.type, want.waits.owner)


def test_uvloop_is_read_like_any_other_loop(tmp_path: Path):
    pytest.importorskip("uvloop")

    assert check_graph(ONE, 1, tmp_path, "uvloop") > TASKS / 2


@pytest.mark.slow
@EVERY
def test_layouts_agree_with_debug_information(interpreter: Interpreter):
    if shutil.which("gdb") is None or len(interpreter.command) > 1:
        pytest.skip("needs gdb, and an interpreter outside a chroot")
    tool = Path(__file__).parents[2] / "tools" / "remote_layout.py"
    done = subprocess.run(
        [sys.executable, str(tool), interpreter.command[0], "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    if "no debug information" in done.stderr:
        pytest.skip("it has no debug information")

    assert "0 differ" in done.stdout, done.stdout + done.stderr


# ---------------------------------------------------------------------- states of the target


def test_a_stopped_process_is_read_and_stays_stopped(tmp_path: Path):
    with running(ONE, "blocked", folder=tmp_path) as (process, _):
        process.send_signal(signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        snapshot = remote.attach(process.pid).tasks()
        state = state_of(process.pid)

    assert "culprit" in {task.name for task in snapshot.tasks}
    assert "T" == state


def test_the_target_does_not_notice(tmp_path: Path):
    with running(ONE, "blocked", folder=tmp_path) as (process, _):
        target = remote.attach(process.pid)
        before = context_switches(process.pid)
        for _ in range(5):
            target.tasks()
        after = context_switches(process.pid)
        tracer = status(process.pid)["TracerPid"]

    assert before == after
    assert "0" == tracer


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def state_of(pid: int) -> str:
    return status(pid)["State"][0]


def wait_for_state(pid: int, state: str) -> None:
    while state_of(pid) != state:
        time.sleep(0.01)


def context_switches(pid: int) -> int:
    return int(status(pid)["voluntary_ctxt_switches"])


def test_there_is_no_such_process():
    with pytest.raises(remote.ProcessGoneError, match="there is no process 4194303"):
        remote.attach(4194303)


def test_a_process_without_python_is_refused_with_a_sentence():
    with sleeping("sleep", "60") as pid, pytest.raises(remote.NotPythonError, match="_PyRuntime"):
        remote.attach(pid)


def test_a_zombie_is_refused_with_a_sentence():
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_for_state(process.pid, "Z")
    try:
        with pytest.raises(remote.ProcessGoneError, match="zombie"):
            remote.attach(process.pid)
    finally:
        process.wait()


def test_a_process_that_ends_between_two_readings_is_told_to_be_gone(tmp_path: Path):
    with running(ONE, "blocked", folder=tmp_path) as (process, _):
        target = remote.attach(process.pid)
        process.kill()
        process.wait()

        with pytest.raises(remote.ProcessGoneError, match="no process"):
            target.tasks()


def test_python_without_asyncio_has_threads_and_no_tasks():
    code = "import threading; print(flush=True); threading.Event().wait()"
    with sleeping(sys.executable, "-c", code) as pid:
        target = remote.attach(pid)

        assert () == target.tasks().tasks
        assert ["MainThread"] == [thread.name for thread in target.threads()]
        assert (False,) == tuple(each.asyncio for each in target.interpreters)


@pytest.mark.needs_root
def test_a_refusal_says_what_helps(tmp_path: Path):
    if os.geteuid():
        pytest.skip("needs root to become somebody else")
    code = (
        "import os, sys\n"
        "from hangwatch import remote\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: remote.attach(int(sys.argv[1]))\n"
        "except remote.NotPermittedError as error: print(error)\n"
    )
    with running(ONE, "blocked", folder=tmp_path) as (process, _):
        done = subprocess.run(
            [sys.executable, "-c", code, str(process.pid)],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
        )

    assert "belongs to another user" in done.stdout
    assert "SYS_PTRACE" in done.stdout


# ---------------------------------------------------------------------- the verb


def hangwatch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hangwatch", "tasks", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("stuck")
    with running(ONE, "blocked", folder=folder) as (process, _):
        yield process.pid


def test_the_verb_shows_tasks_and_escapes_what_a_terminal_would_obey(stuck: int):
    done = hangwatch("--pid", str(stuck))

    assert 0 == done.returncode
    assert "'culprit' running" in done.stdout
    assert "'MainThread'" in done.stdout
    assert "\x1b" not in done.stdout
    assert r"escape \x1b[31m\n" in done.stdout


def test_the_verb_prints_the_contract(stuck: int):
    done = hangwatch("--pid", str(stuck), "--json", "--all-threads")
    found = json.loads(done.stdout)
    culprit = next(task for task in found["tasks"] if task["name"] == "culprit")

    assert "hangwatch.tasks/1" == found["schema"]
    assert {"python", "loops", "tasks", "edges", "cycles", "problems"} <= found.keys()
    assert {"function", "file", "line"} <= culprit["chain"][0].keys()
    assert {"kind", "detail", "task"} <= culprit["awaits"].keys()
    assert "MainThread" in {thread["name"] for thread in found["threads"]}
    schema = json.loads((resources.files("hangwatch") / "schemas/tasks-1.json").read_text())
    jsonschema.validate(found, schema)


@pytest.mark.parametrize("form", ["--tree", "--graph"])
def test_the_verb_has_other_forms(stuck: int, form: str):
    assert 0 == hangwatch("--pid", str(stuck), form).returncode


def test_watching_a_hung_process_shows_that_nothing_moves(stuck: int):
    done = hangwatch("--pid", str(stuck), "--watch", "--count", "3", "--interval", "0.1")

    assert 2 == done.stdout.count("0 moved")
    assert "0 wake-ups" in done.stdout


def test_the_verb_tells_an_error_in_one_sentence():
    done = hangwatch("--pid", "4194303")

    assert 1 == done.returncode
    assert "hangwatch: there is no process 4194303\n" == done.stderr


class sleeping:  # noqa: N801  # reads as a phrase
    """Runs a program for the length of a block."""

    def __init__(self, *command: str) -> None:
        self.command = command

    def __enter__(self) -> int:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE)
        if self.command[0] == sys.executable:
            assert self.process.stdout is not None
            self.process.stdout.readline()
        else:
            time.sleep(0.1)
        return self.process.pid

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_snapshot_finds_a_task_by_its_id():
    assert Snapshot(pid=1, python="3.11.7").task(1) is None
