"""Each fault of the laboratory is, from outside, what it claims to be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from remote_targets import interpreters
from running import state_of

from hangwatch import remote
from hangwatch.lab import faults, launch
from hangwatch.lab.launch import LAB, Bare

pytestmark = pytest.mark.needs_ptrace

ALL = faults.everything()


@dataclass(frozen=True)
class Seen:
    """A process with its fault, as it is seen from outside.

    Attributes:
        name: Of the fault.
        pid: Of the process.
        truth: What it told.
        folder: Where it leaves files.
    """

    name: str
    process: subprocess.Popen[bytes]
    truth: dict[str, Any]
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def culprit(self) -> int:
        return int(self.truth["culprit_pid"])

    def thread(
        self, function: str, line: str, pid: int = 0, file: str = ""
    ) -> remote.Thread | None:
        """Return the thread with a frame of *function* that stands in that line of the fault."""
        threads = remote.attach(pid or self.pid).threads()
        return next((t for t in threads if self._stands(t.frames, function, line, file)), None)

    def awaits(self, function: str, line: str) -> remote.Awaits | None:
        """Return what the model agent awaits, if it stands in that line."""
        task = self.tasks().get("ModelAgentLoop")
        found = task is not None and self._stands(task.chain, function, line)
        return task.awaits if task is not None and found else None

    def tasks(self) -> dict[str, remote.Task]:
        return {task.name: task for task in remote.attach(self.pid).tasks().tasks}

    def clients(self) -> list[remote.Task]:
        tasks = self.tasks().values()
        return [t for t in tasks if t.chain and t.chain[0].function.endswith("run")]

    def _stands(
        self, frames: tuple[remote.Frame, ...], function: str, line: str, file: str = ""
    ) -> bool:
        path = LAB / "faults" / (file or f"{self.name.replace('-', '_')}.py")
        source = path.read_text().splitlines()
        return any(
            frame.file == str(path)
            # Before 3.11 a function does not know its class.
            and frame.function.rpartition(".")[2] == function
            and line in source[frame.line - 1]
            for frame in frames
        )


def state(tid: int) -> str:
    return state_of(tid)


def waits_in(tid: int) -> str:
    return Path(f"/proc/{tid}/wchan").read_text()


def main_thread_polls(seen: Seen) -> bool:
    return state(seen.pid) == "S" and "epoll" in waits_in(seen.pid)


def await_never(seen: Seen) -> object:
    awaits = seen.awaits("wait_for_event", "await event.wait()")
    return awaits and awaits.kind == "event" and main_thread_polls(seen)


def lost_wakeup(seen: Seen) -> object:
    awaits = seen.awaits("take", "await self.arrived.wait()")
    return awaits and awaits.kind == "event" and main_thread_polls(seen)


def blocked_call(seen: Seen) -> object:
    thread = seen.thread("get", "self._ours.recv(4096)")
    return thread and "unix_stream" in waits_in(thread.thread_id)


def spin(seen: Seen) -> object:
    return seen.thread("compile_grammar", "") and state(seen.pid) == "R"


def lock_order(seen: Seen) -> object:
    encodes = seen.thread("encode", "with self.merges:")
    decodes = seen.thread("decode", "with self.vocabulary:")
    return (
        encodes
        and decodes
        and all("futex" in waits_in(thread.thread_id) for thread in (encodes, decodes))
        and encodes.waits
        and decodes.waits
        and encodes.waits.object != decodes.waits.object
        and main_thread_polls(seen)
    )


def fork_lock(seen: Seen) -> object:
    (only,) = Path(f"/proc/{seen.culprit}/task").iterdir()
    child = seen.thread("child_main", "with LOCK:", seen.culprit)
    waits = seen.thread("wait_for_child", "os.read(answer")
    return (
        child
        and child.waits
        and "futex" in waits_in(int(only.name))
        and waits
        and "pipe_read" in waits_in(waits.thread_id)
    )


def import_lock(seen: Seen) -> object:
    loader = seen.thread("load_plugins", "import_module(__name__)", file="_plugin.py")
    importer = seen.thread("<module>", "loader.join()", file="_plugin.py")
    return (
        loader
        and importer
        and any("_ModuleLock" in f.function or "acquire" in f.function for f in loader.frames)
        and all("futex" in waits_in(thread.thread_id) for thread in (loader, importer))
    )


def stale_file_lock(seen: Seen) -> object:
    return seen.thread("wait", "time.sleep(0.1)") and list(seen.folder.glob("kernels-*.lock"))


def gil_held(seen: Seen) -> object:
    thread = seen.thread("call_into_c", "c.pthread_mutex_lock(mutex)")
    ticker = seen.thread("tick", "time.sleep(0.1)")
    return (
        thread
        and thread.holds_gil
        and "futex" in waits_in(thread.thread_id)
        and ticker
        and "futex" in waits_in(ticker.thread_id)
    )


def queue_wait(seen: Seen) -> object:
    engine = seen.thread("get_response", "self.answers.recv()")
    worker = seen.thread("wait_for_command", "commands.recv()", seen.culprit)
    return (
        engine
        and worker
        and all("pipe_read" in waits_in(thread.thread_id) for thread in (engine, worker))
    )


def stdout_full(seen: Seen) -> object:
    pipe = Path(f"/proc/{seen.pid}/fd/1").readlink()
    theirs = {path.readlink() for path in Path(f"/proc/{seen.culprit}/fd").iterdir()}
    return (
        seen.thread("print_line", "print(")
        and "pipe_write" in waits_in(seen.pid)
        and str(pipe).startswith("pipe:")
        and pipe in theirs
        and "tee\n" == Path(f"/proc/{seen.culprit}/comm").read_text()
    )


def scheduler_stuck(seen: Seen) -> object:
    task = seen.tasks()["MainLoopMain"]
    return task.awaits.kind == "sleep" and any(
        frame.function.endswith("no_running_warning") for frame in task.chain
    )


def livelock(seen: Seen) -> object:
    return seen.thread("accept_or_roll_back", "sum(")


def collective(seen: Seen) -> object:
    children = Path(f"/proc/{seen.pid}/task/{seen.pid}/children").read_text().split()
    ranks = {
        comm[-2:-1]: int(child)
        for child in children
        if (comm := Path(f"/proc/{child}/comm").read_text()).startswith("ExecutorProc-")
    }
    return (
        ["0", "1", "2", "3"] == sorted(ranks)
        and ranks["2"] == seen.culprit
        and seen.thread("all_reduce", "total = value + sum(", ranks["0"])
        and all(seen.thread("all_reduce", "links[0].recv()", ranks[rank]) for rank in "13")
        and seen.thread("wait_for_batch", "engine.recv()", seen.culprit)
    )


def collective_gloo(seen: Seen) -> object:
    children = Path(f"/proc/{seen.pid}/task/{seen.pid}/children").read_text().split()
    inside = [
        child
        for child in map(int, children)
        if any(
            frame.function == "all_reduce" and frame.file.endswith("distributed_c10d.py")
            for thread in remote.attach(child).threads()
            for frame in thread.frames
        )
    ]
    missing = seen.thread("wait_for_batch", "engine.recv()", seen.culprit)
    return len(inside) == 1 and seen.culprit not in inside and missing


def child_killed(seen: Seen) -> object:
    waits = seen.thread("wait_for_worker", "self.answers.recv()", file="child_killed.py")
    return waits and "pipe_read" in waits_in(waits.thread_id) and state(seen.culprit) == "Z"


def engine_task_dead(seen: Seen) -> object:
    tasks = seen.tasks()
    return "MainLoopMain" in tasks and (
        "ModelAgentLoop" not in tasks or tasks["ModelAgentLoop"].state == "done"
    )


def ended(seen: Seen) -> object:
    return seen.process.poll() == 1


def stopped(seen: Seen) -> object:
    return state(seen.pid) == "T"


def d_state(seen: Seen) -> object:
    thread = seen.thread("wait_in_the_kernel", "c.clone(")
    return thread and state(thread.thread_id) == "D"


def stalled_volume(seen: Seen) -> object:
    thread = seen.thread("read_weights", 'path.open("rb")')
    return thread and state(thread.thread_id) == "D" and "fuse" in waits_in(thread.thread_id)


def goes_on(seen: Seen) -> object:
    ticks = [tick(seen), eventually(lambda: tick(seen) > 0 and tick(seen))]
    return eventually(lambda: tick(seen) > max(ticks))


def tick(seen: Seen) -> int:
    """Return how often the process gave its CPU away."""
    status = Path(f"/proc/{seen.pid}/status").read_text()
    match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
    assert match is not None
    return int(match[1])


def nobody_asks(seen: Seen) -> object:
    clients = seen.clients()
    return len(clients) == 8 and all(task.awaits.kind == "event" for task in clients)


def starved(seen: Seen) -> object:
    title = Path(f"/proc/{seen.culprit}/cmdline").read_bytes()
    return (
        nobody_asks(seen)
        and b"xtuner/v1/train/cli/rl.py" in title
        and seen.thread("wait_for_rewards", "rewards.get()", seen.culprit)
    )


def polls(seen: Seen) -> object:
    return seen.awaits("get_output_async", "await asyncio.sleep(0.001)")


def polls_gpu(seen: Seen) -> object:
    chain = seen.tasks()["ModelAgentLoop"].chain
    return any(frame.function == "get_output_async" for frame in chain)


LOOKS: dict[str, Callable[[Seen], object]] = {
    "asleep": nobody_asks,
    "await-never": await_never,
    "blocked-call": blocked_call,
    "child-killed": child_killed,
    "child-oom": child_killed,
    "collective": collective,
    "collective-gloo": collective_gloo,
    "d-state": d_state,
    "engine-exit": ended,
    "engine-task-dead": engine_task_dead,
    "exit": ended,
    "fork-lock": fork_lock,
    "gil-held": gil_held,
    "gpu-kernel": polls_gpu,
    "idle": nobody_asks,
    "import-lock": import_lock,
    "livelock": livelock,
    "lock-order": lock_order,
    "long-prefill": polls,
    "lost-wakeup": lost_wakeup,
    "queue-wait": queue_wait,
    "scheduler-stuck": scheduler_stuck,
    "sigstop-self": stopped,
    "slow": goes_on,
    "spin": spin,
    "stale-file-lock": stale_file_lock,
    "stalled-volume": stalled_volume,
    "starved-upstream": starved,
    "stdout-full": stdout_full,
}


def look(name: str, folder: Path, python: str = sys.executable) -> None:
    if reason := ALL[name].unavailable():
        pytest.skip(f"{name} cannot happen here: {reason}")
    truth_file = folder / "truth.json"
    quick = ("--after", "0.2", "--interval", "0.4", "--truth", str(truth_file))
    with Bare(name, *quick, python=python) as bare:
        truth = bare.truth()
        assert (name, bare.pid) == (truth["fault"], truth["pid"])
        assert truth["frame"] in (*ALL[name].culprits, "")
        seen = Seen(name, bare.process, truth, folder)

        assert eventually(lambda: attempt(seen))


def attempt(seen: Seen) -> object:
    """Look once; what is read in the middle of a change is read again."""
    try:
        return LOOKS[seen.name](seen)
    except (remote.RemoteError, OSError, KeyError, ValueError):
        return LOOKS[seen.name] is ended and ended(seen)


@pytest.mark.parametrize("name", [name for name, fault in ALL.items() if fault.bare])
def test_a_bare_process_with_the_fault_is_from_outside_what_it_claims(name, tmp_path):
    look(name, tmp_path)


ELSEWHERE = [str(each) for each in interpreters() if not each.is_ours]


@pytest.mark.parametrize("version", ELSEWHERE)
@pytest.mark.parametrize("name", ["import-lock", "gil-held", "await-never"])
def test_it_is_the_same_under_other_interpreters(name, version, tmp_path):
    (python,) = next(each.command for each in interpreters() if str(each) == version)

    look(name, tmp_path, python)


def test_a_fault_that_needs_a_log_is_refused_by_a_bare_process():
    done = subprocess.run(
        [sys.executable, str(LAB / "bare.py"), "log-rotation"],
        check=False,
        capture_output=True,
        text=True,
    )

    assert 2 == done.returncode
    assert "invalid choice: 'log-rotation'" in done.stderr


@pytest.mark.skipif(not ALL["collective-gloo"].unavailable(), reason="torch is installed")
def test_a_fault_that_cannot_happen_here_is_refused_with_its_reason():
    for program in (("bare.py",), ("server.py", "serve", "api_server", "m", "--fault")):
        done = subprocess.run(
            [sys.executable, str(LAB / program[0]), *program[1:], "collective-gloo"],
            check=False,
            capture_output=True,
            text=True,
        )

        assert "collective-gloo cannot happen here: torch is not installed" in done.stderr
        assert done.returncode in (1, 2)


def test_a_bare_process_works_on_when_its_fault_has_ended(tmp_path):
    with Bare("blocked-call", "--after", "0.2", "--interval", "0.2", "--lasts", "0.5") as bare:
        seen = Seen("blocked-call", bare.process, bare.truth(), tmp_path)

        assert eventually(lambda: seen.thread("get", "") is None and goes_on(seen))


def test_every_fault_is_looked_at():
    assert {name for name, fault in ALL.items() if fault.bare} == set(LOOKS)


def test_the_laboratory_needs_the_standard_library_only():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import bare, fleet, server; "
        "import faults; faults.everything(); "
        "print([name for name in sys.modules if name.startswith('hangwatch')])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(LAB)],
        check=False,
        capture_output=True,
        text=True,
    )

    assert "[]\n" == done.stdout, done.stderr
    assert launch.LAB == LAB
