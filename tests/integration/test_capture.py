"""Captures of real processes, in every state that a process can be in."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from captures import CLOCK, capture, read, request_for, run_steps, step_for
from processes import PATIENCE, eventually, python

from hangwatch.capture.run import dry_run
from hangwatch.errors import ConfigError, OutputError
from hangwatch.model.capture import FailureKind, Scope
from hangwatch.model.observation import ProcessesSeen
from hangwatch.system import procfs
from hangwatch.system.packages import head

FROZEN = """
import asyncio
def wait_for_the_store(): threading.Event().wait()
async def step(): wait_for_the_store()
async def main():
    ready()
    await step()
"""

FORTY_THREADS = """
def deep(n):
    if n: return deep(n - 1)
    wait()
for _ in range(40): threading.Thread(target=deep, args=(50,), daemon=True).start()
"""


def test_every_planned_step_leaves_exactly_one_evidence_in_order(tmp_path):
    with python(FORTY_THREADS) as one, python("") as two:
        outcome, evidence = capture(one.pid, two.pid, output=tmp_path)

    assert [step.id for step in outcome.plan.steps] == [e.step for e in outcome.evidence]
    expected = {
        f"{collector}/{pid}/{sample}"
        for collector in ("kernel", "stacks")
        for pid in (one.pid, two.pid)
        for sample in (1, 2)
    } | {"process_table/1", "process_table/2", f"environment/{one.pid}", f"environment/{two.pid}"}
    assert expected <= set(evidence)
    assert {None} == {evidence[step].failure for step in expected}


def test_forty_threads_are_all_in_both_samples(tmp_path):
    with python(FORTY_THREADS) as it:
        outcome, _ = capture(it.pid, output=tmp_path)
        folder = f"processes/api_server-{it.pid}"
        stacks = [json.loads(read(outcome, folder, name)) for name in THREADS]
        kernel = [json.loads(read(outcome, folder, name)) for name in KERNEL]

    assert [41, 41] == [len(threads) for threads in stacks]
    assert [41, 41] == [len(document["threads"]) for document in kernel]
    deep = [thread for thread in stacks[1] if any(f["name"] == "deep" for f in thread["frames"])]
    assert 40 == len(deep)


THREADS = ("threads.json", "threads2.json")
KERNEL = ("kernel.json", "kernel2.json")


def test_a_loop_blocked_in_a_call_is_frozen_at_the_frame_that_blocks_it(tmp_path):
    said = []
    engine = tmp_path / "engine.py"
    engine.write_text(FROZEN)
    body = f"exec(compile(open({str(engine)!r}).read(), {str(engine)!r}, 'exec'))"
    with python(body, rest="asyncio.run(main())") as it:
        outcome, _ = capture(it.pid, output=tmp_path, rejudge=lambda a: said.append(a) or "hung")

    (stage_a,) = said
    assert stage_a == outcome.stage_a
    (seen,) = stage_a.stacks
    assert ("frozen", it.pid) == (seen.stacks.motion, seen.stacks.pid)
    assert "wait_for_the_store" in seen.stacks.frame
    assert "hung" == outcome.verdict


def test_the_process_table_has_rates_in_its_second_sample(tmp_path):
    with python("") as it:
        outcome, _ = capture(it.pid, output=tmp_path)
        (row,) = json.loads(read(outcome, "procs2.json"))

    assert (it.pid, "api_server", "S") == (row["pid"], row["role"], row["state"])
    assert row["cpu_pct"] < 50
    assert row["vol_ctxt_per_s"] >= 0


def test_a_target_that_ends_between_the_samples_keeps_its_first_sample(tmp_path):
    with python("") as it, python("") as other:

        def end(progress):
            if progress.part == "pause" and it.returncode is None:
                it.kill()
                it.wait()

        outcome, evidence = capture(it.pid, other.pid, output=tmp_path, progress=end, gap=5.0)

    assert evidence[f"stacks/{it.pid}/1"].artifacts
    assert FailureKind.TARGET_GONE == evidence[f"stacks/{it.pid}/2"].failure.kind
    assert evidence[f"stacks/{other.pid}/2"].failure is None
    processes = {seen.instance.pid: seen for seen in outcome.stage_a.processes}
    assert isinstance(processes[it.pid], ProcessesSeen)
    assert processes[it.pid].processes[0].state in ("Z", "")


def test_a_target_that_is_gone_before_the_capture_is_noted(tmp_path):
    with python("") as it:
        pass

    outcome, evidence = capture(it.pid, output=tmp_path)

    assert f"process {it.pid} is gone" in outcome.plan.notes
    assert "process_table/1" in evidence


def test_a_pid_that_was_reused_is_not_read(tmp_path):
    with python("") as it:
        (evidence,) = run_steps(tmp_path, step_for(it.pid, ticks=1))

    assert FailureKind.PID_REUSED == evidence.failure.kind
    assert () == evidence.artifacts


def test_a_stopped_target_is_captured_and_stays_stopped(tmp_path):
    with python(FORTY_THREADS) as it:
        it.send_signal(signal.SIGSTOP)
        eventually(lambda: procfs.read_row(it.pid).state == "T")

        _, evidence = capture(it.pid, output=tmp_path)

        assert "T" == procfs.read_row(it.pid).state
        assert evidence[f"stacks/{it.pid}/2"].failure is None


def test_a_child_without_python_is_told_from_one_that_failed(tmp_path):
    body = "import subprocess; subprocess.Popen(['/bin/sleep', '60'])"
    with python(body, start_new_session=True) as it:
        (child,) = procfs.children(it.pid)
        _, evidence = capture(it.pid, output=tmp_path)
        os.killpg(it.pid, signal.SIGKILL)

    assert FailureKind.NOT_PYTHON == evidence[f"stacks/{child}/1"].failure.kind
    assert evidence[f"kernel/{child}/1"].failure is None


def test_a_zombie_keeps_its_row_in_the_table(tmp_path):
    body = "import subprocess; held = subprocess.Popen(['/bin/true'])"  # or its end reaps it
    with python(body) as it:
        (child,) = procfs.children(it.pid)
        eventually(lambda: procfs.read_row(child).state == "Z")
        outcome, evidence = capture(it.pid, output=tmp_path)
        rows = {row["pid"]: row for row in json.loads(read(outcome, "procs2.json"))}

    assert "Z" == rows[child]["state"]
    assert FailureKind.TARGET_GONE == evidence[f"stacks/{child}/1"].failure.kind


def interpreters():
    found = sorted(Path.home().glob(".pyenv/versions/3.1[0-9].*/bin/python"))
    return [path for path in found if re.search(r"3\.1[0-4]\.", str(path))] or [sys.executable]


@pytest.mark.parametrize("interpreter", interpreters(), ids=lambda path: Path(path).parts[-3])
def test_stacks_of_every_interpreter_that_is_here(tmp_path, interpreter):
    with python(
        "def recognised(): ready(); wait()", interpreter=interpreter, rest="recognised()"
    ) as it:
        (evidence,) = run_steps(tmp_path, step_for(it.pid))
        threads = json.loads(
            (next(tmp_path.glob("*.partial")) / evidence.artifacts[0].path).read_text()
        )

    assert "recognised" in {frame["name"] for frame in threads[0]["frames"]}


UNPRIVILEGED = """
import json, sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from captures import run_steps, step_for
(evidence,) = run_steps(Path({output!r}), step_for({pid}, collector={collector!r}))
print(json.dumps([evidence.failure.kind, evidence.failure.hint]))
"""


@pytest.mark.needs_root
@pytest.mark.parametrize("collector", ["stacks", "tasks", "environment"])
def test_a_process_that_may_not_be_read_says_what_to_do(tmp_path, collector):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("dropping a capability needs root and setpriv")
    with python("") as it:
        script = UNPRIVILEGED.format(
            tests=str(Path(__file__).parent),
            output=str(tmp_path),
            pid=it.pid,
            collector=collector,
        )
        drop = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all"]
        said = subprocess.run(
            [*drop, sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )

    kind, hint = json.loads(said.stdout)
    assert FailureKind.NOT_PERMITTED == kind
    assert "SYS_PTRACE" in hint


def test_a_capture_that_is_asked_to_end_keeps_what_it_has(tmp_path):
    parts = []
    with python("") as it:
        request = request_for(it.pid, output=tmp_path, gap=30.0)
        from hangwatch.capture.run import run

        outcome = run(
            request,
            clock=CLOCK,
            progress=lambda progress: parts.append(progress.part),
            stopped=lambda: "pause" in parts,
        )

    evidence = {e.step: e for e in outcome.evidence}
    assert outcome.stopped
    assert evidence[f"stacks/{it.pid}/1"].artifacts
    assert FailureKind.DEADLINE == evidence[f"stacks/{it.pid}/2"].failure.kind
    assert outcome.ended_at - outcome.started_at < 30.0


def test_what_the_deadline_cuts_off_is_said(tmp_path):
    with python("") as it:
        outcome, evidence = capture(it.pid, output=tmp_path, gap=60.0, deadline=10.0)

    assert FailureKind.DEADLINE == evidence[f"kernel/{it.pid}/2"].failure.kind
    assert len(outcome.plan.steps) == len(outcome.evidence)


def test_a_dry_run_plans_the_same_and_leaves_nothing(tmp_path):
    with python("") as it:
        plan = dry_run(request_for(it.pid, output=tmp_path), clock=CLOCK)
        outcome, _ = capture(it.pid, output=tmp_path / "other")

    assert [step.id for step in outcome.plan.steps] == [step.id for step in plan.steps]
    assert not list(tmp_path.glob("*.partial"))


def test_no_list_of_all_processes_of_the_machine_is_left(tmp_path):
    with python("") as it:
        outcome, _ = capture(it.pid, output=tmp_path)

    assert [] == list(Path(outcome.work).rglob("*census*"))


def test_an_output_that_is_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OutputError, match="choose another directory with --output"):
        capture(os.getpid(), output=tmp_path / "file")


def test_an_unknown_profile_is_refused(tmp_path):
    from dataclasses import replace

    from hangwatch.capture.run import run

    with pytest.raises(ConfigError, match="there is no profile 'nonsense'"):
        run(replace(request_for(output=tmp_path), profile="nonsense"), clock=CLOCK)


SERVER = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if MUTE: wait()
        sick = self.path == "/health"
        self.send_response(503 if sick else 200)
        self.end_headers()
        self.wfile.write(b'{"status": "unhealthy", "message": "stuck"}' if sick else b"tokens 1\\n")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


def test_a_server_is_asked_twice_at_its_own_socket(tmp_path):
    with python("MUTE = False" + SERVER) as it:
        outcome, evidence = capture(it.pid, output=tmp_path)
        (listener,) = procfs.listeners(it.pid)
        folder = f"processes/api_server-{it.pid}"
        health = [json.loads(read(outcome, folder, n)) for n in ("health.json", "health2.json")]
        metrics = read(outcome, folder, "metrics2.prom")

    assert [(503, "unhealthy", "stuck", listener.url)] * 2 == [
        (h["http"], h["status"], h["message"], h["url"]) for h in health
    ]
    assert "tokens 1\n" == metrics
    assert evidence["endpoints/2"].failure is None


@pytest.mark.slow
def test_a_server_that_never_answers_does_not_delay_the_judging(tmp_path):
    judged = []
    with python("MUTE = True" + SERVER) as it:
        outcome, evidence = capture(
            it.pid,
            output=tmp_path,
            rejudge=lambda _: judged.append(CLOCK.now()) or "",
            options={"endpoints": {"request_timeout": "8"}},
        )
        folder = f"processes/api_server-{it.pid}"
        health, again = (
            json.loads(read(outcome, folder, name)) for name in ("health.json", "health2.json")
        )

    first = evidence["endpoints/1"]
    assert (None, "timeout after 8 s") == (health["http"], health["error"])
    assert judged[0] < first.started_at + first.elapsed
    assert evidence["endpoints/2"].started_at >= first.started_at + first.elapsed
    assert "timeout after 5 s" == again["error"]


def test_a_named_pipe_is_not_opened_for_that_would_kill_its_writer(tmp_path):
    pipe = tmp_path / "fifo.log"
    os.mkfifo(pipe)
    with python("", rest=f"ready(); open({str(pipe)!r}, 'wb', buffering=0).write(b'x')") as it:
        eventually(lambda: procfs.read_row(it.pid).state == "S")
        step = replace(
            step_for(it.pid, collector="logs"),
            target=None,
            scope=Scope.LOG,
            subject=str(pipe),
            folder=PurePosixPath("logs"),
            options={"name": "fifo.log", "named": "yes"},
        )
        (evidence,) = run_steps(tmp_path / "output", step)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        written = eventually(lambda: arrived(reader))
        os.close(reader)

    assert FailureKind.NOT_AVAILABLE == evidence.failure.kind
    assert b"x" == written


def arrived(reader):
    try:
        return os.read(reader, 10)
    except BlockingIOError:
        return b""


def test_the_end_of_a_deleted_log_is_read_through_its_descriptor(tmp_path):
    log = tmp_path / "worker-1.out"
    body = f"""
out = open({str(log)!r}, "w")
out.write("first\\n" * 100_000 + "last\\n"); out.flush()
os.unlink({str(log)!r})
"""
    with python(body) as it:
        outcome, evidence = capture(it.pid, output=tmp_path / "output")
        tail = read(outcome, "logs", "worker-1.out")

    assert evidence["logs/worker-1.out"].failure is None
    assert tail.startswith("first\n")
    assert tail.endswith("last\n")
    assert len(tail) <= 256 << 10


def test_only_allowed_variables_leave_the_process(tmp_path):
    environment = {**os.environ, "NCCL_DEBUG": "INFO", "MY_PASSWORD": "hunter2"}
    with python("", env=environment) as it:
        outcome, _ = capture(it.pid, output=tmp_path)
        folder = f"processes/api_server-{it.pid}"
        variables = json.loads(read(outcome, folder, "environ.json"))

    assert "INFO" == variables["NCCL_DEBUG"]
    for path in Path(outcome.work).rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()


@pytest.mark.parametrize("packed", [False, True])
def test_a_repository_that_refers_to_another_file_does_not_bring_it_into_the_bundle(
    tmp_path, packed
):
    (tmp_path / ".git").mkdir()
    (tmp_path / "private").write_text("hunter2\n")
    (tmp_path / ".git/HEAD").write_text("ref: ../private\n")
    if packed:
        (tmp_path / "private").unlink()
        (tmp_path / ".git/packed-refs").write_text("hunter2 ../private\n")

    assert head(os.getpid(), PurePosixPath(tmp_path)) is None


def test_versions_and_the_commit_of_an_editable_package_are_read_from_files(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    packages = tmp_path / "venv/lib/python{}.{}/site-packages".format(*sys.version_info[:2])
    metadata = packages / "lmdeploy-0.18.0.dist-info"
    metadata.mkdir(parents=True)
    source = tmp_path / "source"
    origin = {"url": f"file://{source}", "dir_info": {"editable": True}}
    (metadata / "direct_url.json").write_text(json.dumps(origin))
    (source / ".git/refs/heads").mkdir(parents=True)
    (source / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (source / ".git/refs/heads/main").write_text(f"{commit}\n")
    with python("", env={**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}) as it:
        outcome, _ = capture(it.pid, output=tmp_path / "output")
        folder = f"processes/api_server-{it.pid}"
        lmdeploy = json.loads(read(outcome, folder, "versions.json"))["packages"]["lmdeploy"]

    assert ("0.18.0", True, commit) == (
        lmdeploy["version"],
        lmdeploy["editable"],
        lmdeploy["commit"],
    )
