"""The safety contract: what a capture may never do to what it watches."""

import contextlib
import ctypes
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from captures import CLOCK, Jumping, capture, program, read, request_for, run_steps, step_for
from processes import PATIENCE, eventually, furnish, python, skip_unless_it_works, titled
from remote_targets import Interpreter, running

from hangwatch import registry
from hangwatch.capture.run import run
from hangwatch.lab.launch import Server
from hangwatch.model.capture import FailureKind, Gate, Means, Stage
from hangwatch.system import http, procfs

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WAIT_ALL = 0x40000000
"""``__WALL``: threads and processes alike."""
GATES = {Gate.HUNG, Gate.NO_D_STATE, Gate.NOT_STOPPED, Gate.NO_TRACER}
STACKS = registry.collectors()["stacks"]
OURS = Interpreter((sys.executable,), platform.python_version())


def ptrace(request, pid):
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if call(request, pid, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def traced(_folder):
    """Give a process that this thread traces and lets run: nobody else can attach to it."""
    with python("") as it:
        ptrace(PTRACE_SEIZE, it.pid)
        yield it.pid
        ptrace(PTRACE_INTERRUPT, it.pid)  # only who stands still is let go
        os.waitpid(it.pid, WAIT_ALL)
        ptrace(PTRACE_DETACH, it.pid)


@contextlib.contextmanager
def traced_in_one_thread(_folder):
    """Give a process of which this thread traces a thread that is not the main one."""
    with python("threading.Thread(target=wait, daemon=True).start()") as it:
        (tid,) = set(procfs.thread_ids(it.pid)) - {it.pid}
        ptrace(PTRACE_SEIZE, tid)
        yield it.pid
        ptrace(PTRACE_INTERRUPT, tid)
        os.waitpid(tid, WAIT_ALL)
        ptrace(PTRACE_DETACH, tid)


@contextlib.contextmanager
def in_d_state(folder):
    """Give a process with a thread that hangs in the kernel."""
    with running(OURS, "states", "forking", folder=folder) as (process, _):
        (child,) = eventually(lambda: procfs.children(process.pid))
        try:
            eventually(lambda: "D" in procfs.thread_states(process.pid).values())
            yield process.pid
        finally:
            os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------------- it goes on


@pytest.mark.needs_ptrace
def test_a_process_is_read_without_attaching_to_it(tmp_path):
    with traced(tmp_path) as pid:
        _, evidence = capture(pid, output=tmp_path)
        row = procfs.read_row(pid)

    steps = [f"{collector}/{pid}/{n}" for collector in ("stacks", "tasks") for n in (1, 2)]
    assert [None] * 4 == [evidence[step].failure for step in steps]
    assert (threading.get_native_id(), "S") == (row.tracer_pid, row.state)


LISTENING = """
import signal
heard = os.open({file!r}, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}}:
    signal.signal(number, lambda *_: None)
signal.set_wakeup_fd(heard)
"""


@pytest.mark.parametrize("seconds", [1.5, 0.4], ids=["tool", "worker"])  # who is killed
def test_no_signal_reaches_a_process_whose_steps_are_killed(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setitem(registry.collectors(), "stacks", replace(STACKS, timeout=seconds))
    tool = program(tmp_path / "py-spy", "exec sleep 3600")
    heard = tmp_path / "heard"
    with python(LISTENING.format(file=str(heard))) as it:
        _, evidence = capture(it.pid, output=tmp_path, options={"stacks": {"py_spy": tool}})
        state = procfs.read_row(it.pid).state
        changed = os.waitid(os.P_PID, it.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)

        assert FailureKind.TIMED_OUT == evidence[f"stacks/{it.pid}/1"].failure.kind
        assert ("S", None) == (state, changed)
        it.send_signal(signal.SIGUSR1)
        eventually(heard.read_bytes)
        assert [signal.SIGUSR1] == list(heard.read_bytes())  # ours, and none before


def test_what_a_tool_started_ends_with_a_worker_that_is_killed_at_the_deadline(
    tmp_path, monkeypatch
):
    mark = f"3600.{random.randrange(10**9)}"
    clock = Jumping()
    monkeypatch.setattr("captures.CLOCK", clock)
    tool = program(tmp_path / "py-spy", f"trap '' TERM; sleep {mark} & sleep {mark}")

    def pass_the_deadline():
        if len(titled(mark)) == 2:
            clock.ahead = 2 * PATIENCE
        return False

    with python("") as it:
        step = step_for(it.pid, py_spy=tool, timeout=PATIENCE)
        (evidence,) = run_steps(
            tmp_path / "output", step, stopped=pass_the_deadline, patience=10 * PATIENCE
        )

    assert (FailureKind.TIMED_OUT, f"it did not end within {PATIENCE:g} s") == (
        evidence.failure.kind,
        evidence.failure.message,
    )
    eventually(lambda: not titled(mark))


# ---------------------------------------------------------------------- what it is asked

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def parse_request(self):
        with open({file!r}, "ab") as asked: asked.write(self.raw_requestline)
        return super().parse_request()
    def do_GET(self):
        self.send_response(302)
        self.send_header("Location", "/terminate")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


def test_a_server_is_asked_nothing_but_the_paths_of_its_profile(tmp_path):
    asked = tmp_path / "asked"
    with python(SERVER.format(file=str(asked))) as it:
        capture(it.pid, output=tmp_path)

    endpoints = registry.profile("lmdeploy").endpoints
    expected = {f"GET {endpoints[purpose]} HTTP/1.1" for purpose in ("health", "metrics")}
    assert expected == set(asked.read_text().splitlines())


def test_a_capture_asks_each_server_what_its_own_engine_allows(tmp_path):
    asked, theirs = tmp_path / "asked", tmp_path / "theirs"
    with (
        python(SERVER.format(file=str(asked))) as hung,
        python(SERVER.format(file=str(theirs))) as well,
    ):
        request = request_for(hung.pid, well.pid, output=tmp_path)
        member, sibling = request.instances
        sibling = replace(sibling, stopped=False, profile="sglang")
        run(replace(request, instances=(member, sibling)), clock=CLOCK)

    paths = registry.profile("sglang").endpoints
    assert paths["health"] != registry.profile("lmdeploy").endpoints["health"]
    assert sorted(f"GET {path} HTTP/1.1" for path in paths.values()) == sorted(
        theirs.read_text().splitlines()
    )
    assert 4 == len(asked.read_text().splitlines())


ELSEWHERE = """
import ctypes, socket
assert 0 == ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
server = socket.create_server(("0.0.0.0", {port}))
"""


@pytest.mark.needs_root
def test_a_socket_of_another_network_namespace_is_not_mistaken_for_one_of_ours(tmp_path):
    skip_unless_it_works("unshare", "--net", "true")
    with socket.create_server(("127.0.0.1", 0)) as innocent:
        innocent.setblocking(False)
        with python(ELSEWHERE.format(port=innocent.getsockname()[1])) as it:
            (listener,) = procfs.listeners(it.pid)
            response = http.get(procfs.identify(it.pid), listener, "/health", timeout=PATIENCE)
            outcome, _ = capture(it.pid, output=tmp_path)
            folder = f"processes/api_server-{it.pid}"
            health = json.loads(read(outcome, folder, "health.json"))

        assert response.error.endswith("another network namespace")
        assert health["error"].endswith("another network namespace")
        with pytest.raises(BlockingIOError):  # nobody waits to be let in
            innocent.accept()


# ---------------------------------------------------------------------- what is its own

SECRETIVE = """
import asyncio, types
secret = open({file!r}).read()

class MetricsProcessor:  # of LMDeploy, whose numbers are read
    def __init__(self):
        self.scheduler_stats = types.SimpleNamespace(
            num_total_reqs=secret, num_succeeded_reqs=7, num_errored_reqs=secret.encode())
        self.metrics_queue = types.SimpleNamespace(_queue=secret)
    async def _run_metrics_handler(self): await asyncio.Event().wait()

async def in_a_coroutine(given):
    local = given + " of a coroutine"
    await asyncio.Event().wait()

async def main():
    tasks = [asyncio.create_task(each) for each in (
        in_a_coroutine(secret), MetricsProcessor()._run_metrics_handler())]
    asyncio.get_running_loop().call_later(0.01, suspended.set)
    await asyncio.gather(*tasks)

def in_a_frame(given):
    local = given + " of a frame"
    ready()
    wait()

suspended = threading.Event()
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
suspended.wait()
"""


@pytest.mark.needs_ptrace
def test_no_value_of_a_local_variable_is_written_anywhere(tmp_path):
    secret = f"sw0rdfish-{random.randrange(10**9)}"
    (tmp_path / "secret").write_text(secret)
    body = SECRETIVE.format(file=str(tmp_path / "secret"))
    with python(body, rest="in_a_frame(secret)") as it:
        outcome, _ = capture(it.pid, output=tmp_path / "output")
        folder = f"processes/api_server-{it.pid}"
        frames, tasks = (read(outcome, folder, name) for name in ("threads.json", "tasks.json"))

    (counters,) = (each for each in json.loads(tasks)["state"] if each["name"] == "counters")
    assert {"succeeded": 7} == counters["rows"][0]["values"]
    assert "in_a_frame" in frames
    assert "in_a_coroutine" in tasks
    files = [path for path in Path(outcome.work).rglob("*") if path.is_file()]
    assert [] == [path for path in files if secret.encode() in path.read_bytes()]


CAPTURER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from captures import capture
capture({pid}, output=Path({output!r}))
"""


@pytest.mark.needs_ptrace
def test_no_program_or_library_of_a_container_is_executed(tmp_path):
    trace = ["strace", "-f", "-qq", "-y", "-e", "trace=execve,execveat,mmap"]
    skip_unless_it_works(*trace, "-o", os.devnull, "true")
    container = tmp_path / "container"
    environment = {**os.environ, **furnish(container)}
    interpreter = str(container / "bin/python")
    with python("", interpreter=interpreter, env=environment) as it:
        assert interpreter == procfs.read_link(it.pid, "exe")
        script = CAPTURER.format(
            tests=str(Path(__file__).parent), pid=it.pid, output=str(tmp_path / "output")
        )
        log = tmp_path / "trace"
        subprocess.run(
            [*trace, "-o", str(log), sys.executable, "-c", script], check=True, timeout=PATIENCE
        )

    said = log.read_text()
    executed = set(re.findall(r'execve(?:at)?\(.*?"([^"]*)"', said))
    mapped = set(re.findall(r"mmap\(.*PROT_EXEC.*<(/[^>]*)>", said))
    assert {sys.executable, str(Path(sys.executable).with_name("py-spy"))} == executed
    assert mapped
    assert set() == {path for path in mapped if Path(path).is_relative_to(container)}


# ---------------------------------------------------------------------- what attaches


@pytest.mark.needs_ptrace
@pytest.mark.parametrize(
    ("state", "gate", "said"),
    [
        (in_d_state, Gate.NO_D_STATE, "a thread of the process is in D state"),
        (traced, Gate.NO_TRACER, "traces it already"),
        (traced_in_one_thread, Gate.NO_TRACER, "traces it already"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_gate_is_closed_by_the_state_that_it_forbids(tmp_path, state, gate, said):
    with state(tmp_path) as pid:
        free = step_for(pid, collector="kernel", name="free")
        gated, allowed = run_steps(tmp_path, replace(free, id="gated", gates=(gate,)), free)

    assert FailureKind.GATED == gated.failure.kind
    assert said in gated.failure.message
    assert () == gated.artifacts
    assert allowed.failure is None


@pytest.mark.needs_ptrace
def test_a_process_that_hangs_in_the_kernel_is_read_after_all_others(tmp_path, monkeypatch):
    monkeypatch.setattr("hangwatch.capture.pool.width", lambda: 1)
    with in_d_state(tmp_path) as hung, python("") as healthy:
        outcome, evidence = capture(hung, healthy.pid, output=tmp_path / "output")

    first = [f"{collector}/{pid}/1" for pid in (healthy.pid, hung) for collector in READERS]
    planned = [step.id for step in outcome.plan.steps if step.id in first]
    assert f"tasks/{hung}/1" == planned[0]
    assert first == sorted(first, key=lambda step: evidence[step].started_at)


@pytest.mark.needs_ptrace
def test_memory_is_not_read_before_the_states_of_all_threads_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr("hangwatch.capture.pool.width", lambda: 4)
    crowd = "for _ in range(500): threading.Thread(target=wait, daemon=True).start()"
    with python(crowd) as one, python(crowd) as other:
        _, evidence = capture(one.pid, other.pid, output=tmp_path / "output")

    for pid in (one.pid, other.pid):
        known = evidence[f"kernel/{pid}/1"]
        begun = [evidence[f"{reader}/{pid}/1"].started_at for reader in READERS]
        assert known.started_at + known.elapsed <= min(begun)


READERS = ("tasks", "stacks")
"""Collectors of rungs 4 and 5, in this order."""


def is_safe(collector):
    """Say whether a collector never attaches, or only late and behind every gate."""
    return not collector.attaches or (collector.stage is Stage.B and set(collector.gates) >= GATES)


def test_whatever_attaches_waits_for_the_verdict_behind_every_gate():
    collectors = registry.collectors().values()
    attaching = replace(STACKS, attaches=True, stage=Stage.B, gates=tuple(GATES))

    assert [] == [each.name for each in collectors if not is_safe(each)]
    assert {False} == {each.attaches for each in collectors if each.stage is Stage.A}
    assert is_safe(attaching)
    assert not is_safe(replace(attaching, stage=Stage.A))
    assert [] == [gate for gate in GATES if is_safe(replace(attaching, gates=(*GATES - {gate},)))]


@pytest.mark.needs_ptrace
def test_nothing_attaches_to_an_engine_that_goes_on_beside_one_that_hangs(tmp_path):
    for name in ("hangs", "late", "serves"):
        (tmp_path / name).mkdir()
    with (
        Server(tmp_path / "hangs") as hangs,
        Server(tmp_path / "late") as late,
        Server(tmp_path / "serves") as serves,
    ):
        request = request_for(hangs.pid, late.pid, serves.pid, output=tmp_path / "output")
        one, two, three = request.instances
        began = replace(
            request, instances=(one, replace(two, stopped=False), replace(three, stopped=False))
        )
        judged = replace(began, instances=(one, two, replace(three, stopped=False)))
        outcome = run(began, clock=CLOCK, rejudge=lambda _: "hung", latest=lambda: judged)
        engines = (hangs.engine_pid, late.engine_pid, serves.engine_pid)

    native = {each.target.pid: each for each in outcome.evidence if each.collector == "native"}
    attached = {touch.process.pid for touch in outcome.touches if touch.means is Means.ATTACH}
    assert set(engines) == set(native)
    assert {hangs.engine_pid, late.engine_pid} == attached
    assert FailureKind.GATED is native[serves.engine_pid].failure.kind
