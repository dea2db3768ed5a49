"""``hangwatch attach`` on servers that really hang, and on what cannot be watched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from running import Hangwatch, runs, state_of, wait_for

from hangwatch.capture.pool import width
from hangwatch.lab.launch import Server
from hangwatch.system import procfs

QUICK = ("--heartbeat-interval", "1", "--stall-after", "6")
ALARMED = {"suspected_hang", "hung", "blocked", "dead"}


def run(*arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HANGWATCH_")}
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "hangwatch", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | {"HANGWATCH_SAMPLE_GAP": "1"},
        check=False,
    )


def folders(tmp_path: Path) -> tuple[str, ...]:
    return ("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state"))


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, "--fault", "blocked-call") as running:
        wait_for(lambda: running.log.read_text().count("Avg thr") > 1, "two beats")
        yield running


@pytest.mark.slow
def test_what_hangs_is_captured_at_once_and_explained(tmp_path, server):
    server.start_fault()
    server.truth()
    time.sleep(7.0)  # silence of more than --stall-after; nothing to wait for but time
    done = run("attach", "--pid", str(server.engine_pid), "--now", "--json", *QUICK,
               *folders(tmp_path))  # fmt: skip

    answer = json.loads(done.stdout)
    schema = files("hangwatch") / "schemas" / "hangwatch.attach.1.schema.json"
    jsonschema.validate(answer, json.loads(schema.read_text()))
    assert 3 == done.returncode
    assert ("hung", "event-loop-blocked") == (answer["verdict"], answer["cause"])
    assert Path(answer["bundle"]).exists()
    assert {server.pid, server.engine_pid} == {p["pid"] for p in answer["processes"]}
    assert {str(server.pid), str(server.engine_pid)} == answer["pause_ms"].keys()
    assert 0.0 == answer["pause_ms"][str(server.pid)]  # only engines are attached to
    assert all(step["ok"] or step["message"] for step in answer["steps"])
    assert answer["elapsed_s"] < 60


@pytest.mark.slow
def test_a_healthy_server_is_captured_too_and_that_is_no_alarm(tmp_path, healthy):
    done = run("attach", "--pid", str(healthy.pid), "--now", *QUICK, *folders(tmp_path))

    (bundle,) = (tmp_path / "out").glob("*.tar.gz")
    assert 0 == done.returncode
    assert str(bundle) == done.stdout.splitlines()[-1]


def test_a_dry_run_prints_every_step_and_leaves_nothing(tmp_path, healthy):
    done = run("attach", "--pid", str(healthy.pid), "--dry-run", *folders(tmp_path))

    assert 0 == done.returncode
    assert f"stacks/{healthy.engine_pid}/2" in done.stdout
    (native,) = (line for line in done.stdout.splitlines() if "native/" in line)
    assert f"native/{healthy.engine_pid}" in native
    gates = "if the verdict is hung, no thread is in D state, it is not stopped, nobody traces it"
    assert gates in native
    assert "stops the target for 250 ms at most" in native
    assert "s between the samples" in done.stdout
    assert f"{width()} at a time" in done.stdout
    assert healthy.url in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_can_be_data(tmp_path, healthy):
    done = run("attach", "--pid", str(healthy.pid), "--dry-run", "--json", *folders(tmp_path))

    plan = json.loads(done.stdout)
    assert "hangwatch.plan/1" == plan["schema"]
    assert {healthy.pid, healthy.engine_pid} == {target["pid"] for target in plan["targets"]}
    assert width() == plan["at_once"]
    assert [250.0] == [step["budget_ms"] for step in plan["steps"] if step["attaches"]]
    assert "" == done.stderr


@pytest.mark.slow
def test_an_attached_server_that_hangs_is_caught_and_ctrl_c_ends_it(tmp_path, server):
    arguments = ("attach", "--pid", str(server.engine_pid), "--json", *QUICK, *folders(tmp_path))
    with Hangwatch(*arguments, environment={"HANGWATCH_SAMPLE_GAP": "1"}) as attached:
        kin = attached.wait("kin")
        attached.wait("transition", after="ok", pid=server.pid)
        server.start_fault()
        bundle = attached.wait("bundle")
        code = attached.end(signal.SIGINT)

    assert 0 == code
    assert [server.pid] == kin["servers"]
    assert [str(server.log)] == kin["logs"]
    assert bundle["verdict"] in ALARMED
    assert Path(bundle["bundle"]).exists()
    assert not list((tmp_path / "state").glob("attach-*"))
    assert runs(server.pid)


@pytest.mark.slow
def test_a_server_without_a_readable_log_is_watched_by_its_endpoints(tmp_path):
    with (
        Path(os.devnull).open("wb") as nothing,
        Server(tmp_path, "--fault", "blocked-call", stdout=nothing) as server,
    ):
        arguments = ("attach", "--pid", str(server.pid), "--json", *QUICK, *folders(tmp_path))
        with Hangwatch(*arguments) as attached:
            kin = attached.wait("kin")
            attached.wait("transition", instance=str(server.pid))
            attached.end()

    assert server.pid in kin["servers"]


def test_a_stopped_server_is_still_stopped_after_its_capture(tmp_path, healthy):
    os.kill(healthy.engine_pid, signal.SIGSTOP)
    wait_for(lambda: state_of(healthy.engine_pid) == "T", "the stop")
    done = run("attach", "--pid", str(healthy.pid), "--now", "--json", *QUICK, *folders(tmp_path))
    stopped = state_of(healthy.engine_pid)
    os.kill(healthy.engine_pid, signal.SIGCONT)

    assert done.returncode in {0, 3}
    assert "T" == stopped


# What cannot be: one sentence with its remedy, 1 or 2, no traceback, nothing that looks whole.


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    assert "" == done.stdout
    return done.stderr


@pytest.fixture
def ended():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("how", [(), ("--now",), ("--dry-run",)])
def test_a_pid_that_does_not_exist_is_one_sentence(tmp_path, ended, how):
    done = run("attach", "--pid", str(ended), *how, *folders(tmp_path))

    assert 1 == done.returncode
    assert complaint(done).startswith(f"hangwatch: there is no process {ended}")
    assert not (tmp_path / "out").exists()


def is_kernel_thread(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return procfs.read_row(pid).kernel
    return False


def test_a_thread_of_the_kernel_is_one_sentence(tmp_path):
    kernel = next((str(pid) for pid in procfs.pids() if is_kernel_thread(pid)), None)
    if kernel is None:
        pytest.skip("no thread of the kernel can be seen here")
    done = run("attach", "--pid", kernel, *folders(tmp_path))

    assert 1 == done.returncode
    assert "is a thread of the kernel" in complaint(done)


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_of_a_process_of_somebody_else_is_captured_what_can_be_had_and_not_watched(tmp_path):
    bare = ("setpriv", "--bounding-set=-sys_ptrace")
    with subprocess.Popen(["sleep", "60"], user=65534, group=65534, extra_groups=[]) as target:
        attach = ("attach", "--pid", str(target.pid), *folders(tmp_path))
        watched = run(*attach, wrapper=bare)
        captured = run(*attach, "--now", wrapper=bare)
        target.kill()

    assert 1 == watched.returncode
    assert "SYS_PTRACE" in complaint(watched)
    assert 0 == captured.returncode
    assert "may not be looked into: run as its user or as root" in captured.stderr
    with tarfile.open(captured.stdout.splitlines()[-1]) as bundle:
        names = {Path(name).name for name in bundle.getnames()}
    assert {"procs.json", "kernel.json", "cgroups.json", "machine.json"} <= names
    assert "add: [SYS_PTRACE]" in " ".join(captured.stdout.split())


def test_a_process_that_looks_like_no_engine_is_said_to_be_a_guess(tmp_path, healthy):
    with subprocess.Popen(["sleep", "600"]) as stranger:
        done = run("attach", "--pid", str(stranger.pid), "--dry-run", *folders(tmp_path))
        stranger.kill()
    known = run("attach", "--pid", str(healthy.pid), "--dry-run", *folders(tmp_path))

    assert f"so {stranger.pid} is taken for one" in done.stderr
    assert "is taken for one" not in known.stderr


@pytest.mark.slow
def test_what_hangs_now_is_hung_though_its_log_is_nowhere_to_be_read(tmp_path):
    with Server(tmp_path, "--fault", "blocked-call", stdout=subprocess.DEVNULL) as server:
        wait_for(lambda: health(server.url) == "healthy", "the first look of its monitor")
        server.start_fault()
        server.truth()
        wait_for(lambda: health(server.url) == "unhealthy", "its own monitor's word")
        done = run("attach", "--pid", str(server.pid), "--now", "--json", *folders(tmp_path))

    answer = json.loads(done.stdout)
    assert ("hung", "event-loop-blocked") == (answer["verdict"], answer["cause"])
    assert 3 == done.returncode


def health(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return json.load(response)["status"]
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)["status"]


def test_now_and_dry_run_exclude_each_other(tmp_path):
    done = run("attach", "--pid", str(os.getpid()), "--now", "--dry-run", *folders(tmp_path))

    assert 2 == done.returncode
    assert "leave one of them out" in complaint(done)


@pytest.mark.parametrize(
    "verb", [("watch", "--log", "x.log"), ("attach", "--pid", "SELF", "--now")]
)
def test_an_output_folder_that_cannot_be_made_is_one_sentence(tmp_path, verb):
    (tmp_path / "file").write_text("")
    words = [str(os.getpid()) if word == "SELF" else word for word in verb]
    done = run(*words, "--output", str(tmp_path / "file" / "out"),
               "--state", str(tmp_path / "state"))  # fmt: skip

    assert 1 == done.returncode
    assert "cannot write bundles to" in complaint_of(done)
    assert "--output" in complaint_of(done)


def complaint_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last sentence, behind what was found."""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small filesystem")
def test_a_full_output_folder_is_one_sentence(tmp_path):
    out = tmp_path / "full"
    out.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(out)], check=False
    )
    if made.returncode:
        pytest.skip("no right to mount")
    try:
        done = run("watch", "--log", "x.log", "--output", str(out),
                   "--state", str(tmp_path / "state"))  # fmt: skip
        left = list(out.iterdir())
    finally:
        subprocess.run(["umount", str(out)], check=True)

    assert 1 == done.returncode
    assert "No space left on device" in complaint(done)
    assert [] == left


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stal_after = 3\n", "unknown setting 'stal_after'; did you mean stall_after?"),
        ('stall_after = "soon"\n', "stall_after takes a number of seconds greater than 0"),
        ("= 3\n", "not valid TOML"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_sentence_with_its_place(tmp_path, text, words):
    file = tmp_path / "hangwatch.toml"
    file.write_text(text)
    done = run("watch", "--config", str(file), *folders(tmp_path))

    assert 2 == done.returncode
    assert complaint(done).startswith(f"hangwatch: {file}")
    assert words in done.stderr
    assert 1 == done.stderr.count("\n")


def test_an_unknown_profile_is_one_sentence_that_names_those_there_are(tmp_path):
    done = run("watch", "--log", "x.log", "--profile", "lmdeplo", *folders(tmp_path))

    assert 2 == done.returncode
    assert "choose one of lmdeploy" in complaint(done)


def test_an_empty_log_name_is_one_sentence(tmp_path):
    done = run("watch", "--log", "", *folders(tmp_path))

    assert 2 == done.returncode
    assert "--log needs a path or a pattern" in complaint(done)


def test_events_and_the_copied_stream_cannot_share_standard_output(tmp_path):
    done = run("watch", "--log", "-", "--json", *folders(tmp_path))

    assert 2 == done.returncode
    assert "both want standard output" in complaint(done)
