"""What the kernel says of processes that stand still: threads, peers, locks, limits."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from captures import left, pool, run_steps, step_about, step_for
from processes import PATIENCE, eventually, python
from remote_targets import PROGRAMS, Interpreter, running
from stalls import needs_stalls, stalled

import hangwatch
from hangwatch.core import syscalls
from hangwatch.core.redaction import Redactor
from hangwatch.model.capture import FailureKind, Phase
from hangwatch.system import mountprobe, procfs

MACHINE = os.uname().machine
PEERS = "connections.json"
OURS = Interpreter((sys.executable,), "3")


def asleep_in(pid, tid):
    """Return the call that a thread sleeps in, or ``None``."""
    call = syscalls.decode(procfs.read_call(pid, tid), MACHINE)
    return call if call is not None and procfs.read_thread(pid, tid).state in "SD" else None


def waits_in(name, pid, tid=None):
    """Wait until a thread sleeps in a system call of this name."""
    eventually(lambda: (call := asleep_in(pid, tid or pid)) is not None and call.name == name)


def samples(output, pid, between):
    """Take two samples of the threads of a process; return both documents."""
    with pool(output) as (workers, _):
        found = []
        for sample in (1, 2):
            step = step_for(pid, collector="kernel", sample=sample)
            workers.submit([step], phase=Phase.ONSET)
            (evidence,) = workers.wait([step])
            found.append(left(output, evidence, ("kernel.json", "kernel2.json")[sample - 1]))
            if sample == 1:
                between()
    return found


# ---------------------------------------------------------------------- threads


@contextlib.contextmanager
def blocked(folder):
    """Give a process whose threads each wait in a call of their own, and which is which."""
    folder.mkdir()
    process = subprocess.Popen([sys.executable, str(PROGRAMS / "calling.py"), str(folder)])
    try:
        eventually((folder / "ready").exists)
        said = json.loads((folder / "ready").read_text())
        for name, tid in said["threads"].items():
            waits_in(name.removesuffix("_limited"), process.pid, tid)
        yield process.pid, said
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(MACHINE != "x86_64", reason="the names are those of x86-64")
def test_the_system_call_of_each_thread_is_named_with_what_it_is_about(tmp_path):
    with blocked(tmp_path / "it") as (pid, said):
        (evidence,) = run_steps(tmp_path, step_for(pid, collector="kernel"))
        links = procfs.links(pid)
    threads = {t["tid"]: t.get("call") for t in left(tmp_path, evidence, "kernel.json")["threads"]}
    calls = {name: threads[tid] for name, tid in said["threads"].items()}

    for name, call in calls.items():
        assert name.removesuffix("_limited") == call["name"]
    for name, fd in said["fds"].items():
        assert ([fd], [links[fd]]) == (calls[name]["fds"], calls[name]["on"])
    assert None is calls["epoll_wait"]["timeout_ms"]
    assert 0 < calls["epoll_wait_limited"]["timeout_ms"] <= 4_000_000
    assert (3_000_000, 0) == (calls["poll"]["timeout_ms"], calls["poll"]["count"])
    assert (said["child"], "LOCK_EX") == (calls["wait4"]["child"], calls["flock"]["operation"])
    assert (False, None) == (calls["futex"]["shared"], calls["futex"]["timeout_ms"])
    assert "timeout_ms" not in calls["clock_nanosleep"]  # how long stands in its memory


PACES = """
def tick():
    while True: time.sleep(0.005)
for f in (wait, tick): threading.Thread(target=f, daemon=True).start()
"""


def test_a_frozen_thread_is_told_from_one_that_ticks(tmp_path):
    with python(PACES) as it:
        main, frozen, ticking = sorted(procfs.thread_ids(it.pid))

        def tick():
            begun = procfs.read_thread(it.pid, ticking).vol_ctxt
            eventually(lambda: procfs.read_thread(it.pid, ticking).vol_ctxt > begun + 20)

        _, second = samples(tmp_path, it.pid, tick)
    threads = {thread["tid"]: thread for thread in second["threads"]}

    assert ["frozen", "frozen"] == [threads[tid]["pace"] for tid in (main, frozen)]
    assert {0} == {threads[frozen]["grew"][name] for name in ("run_ns", "slices", "vol_ctxt")}
    assert threads[ticking]["pace"] in ("ticking", "busy")
    assert threads[ticking]["grew"]["vol_ctxt"] > 20
    assert 2 == second["paces"]["frozen"]


def test_a_stopped_process_is_stopped_in_every_thread(tmp_path):
    with python(PACES) as it:
        it.send_signal(signal.SIGSTOP)
        eventually(lambda: set(procfs.thread_states(it.pid).values()) == {"T"})
        _, second = samples(tmp_path, it.pid, lambda: None)

    assert {"stopped": 3} == second["paces"]


def test_a_thread_that_is_gone_in_the_second_sample_is_named(tmp_path):
    go = "\nthreading.Thread(target=lambda: os.read(0, 1), daemon=True).start()"
    with python(go, stdin=subprocess.PIPE) as it:
        (gone,) = set(procfs.thread_ids(it.pid)) - {it.pid}

        def end():
            it.stdin.write(b"x")
            it.stdin.flush()
            eventually(lambda: gone not in procfs.thread_ids(it.pid))

        _, second = samples(tmp_path, it.pid, end)
        it.stdin.close()

    assert [gone] == second["ended"]


@pytest.mark.needs_root
def test_a_thread_in_d_state_is_blocked_and_its_kernel_stack_comes_first(tmp_path):
    with running(OURS, "states", "forking", folder=tmp_path) as (process, _):
        (child,) = eventually(lambda: procfs.children(process.pid))
        try:
            eventually(lambda: "D" in procfs.thread_states(process.pid).values())
            (waiting,) = [t for t, s in procfs.thread_states(process.pid).items() if s == "D"]
            _, second = samples(tmp_path, process.pid, lambda: None)
            stack = next(tmp_path.glob(f"*.partial/processes/*/stack_{process.pid}.txt"))
            first = stack.read_text().splitlines()
        finally:
            os.kill(child, signal.SIGKILL)
    (thread,) = [thread for thread in second["threads"] if thread["tid"] == waiting]

    assert ("blocked", "D") == (thread["pace"], thread["state"])
    assert ("clone", True) == (thread["call"]["name"], thread["call"]["vfork"])
    assert first[0].startswith(f"thread {waiting} ")
    assert "kernel_clone" in " ".join(first[1:6])


@pytest.mark.slow
def test_two_thousand_threads_are_read_within_the_time_of_the_step(tmp_path):
    body = "threading.stack_size(1 << 16)\nfor _ in range(1999): "
    with python(body + "threading.Thread(target=wait, daemon=True).start()") as it:
        (evidence,) = run_steps(tmp_path, step_for(it.pid, collector="kernel"))

    assert evidence.failure is None
    assert 2000 == len(left(tmp_path, evidence, "kernel.json")["threads"])


# ---------------------------------------------------------------------- descriptors


def test_descriptors_are_listed_with_what_the_kernel_knows_of_them(tmp_path):
    log = tmp_path / "a.log"
    body = f"""
import fcntl, select
log = open({str(log)!r}, "a"); log.write("12345"); log.flush(); fcntl.flock(log, fcntl.LOCK_EX)
reading, writing = os.pipe(); os.set_blocking(reading, False)
event = os.eventfd(5); poll = select.epoll(); poll.register(reading); poll.register(event)
gone = open({str(tmp_path / "gone")!r}, "w"); os.unlink({str(tmp_path / "gone")!r})
device = open("/dev/zero")
"""
    with python(body) as it:
        (evidence,) = run_steps(tmp_path, step_for(it.pid, collector="fds"))
    document = left(tmp_path, evidence, "fds.json")
    by_link = {}
    for each in document["fds"]:
        by_link.setdefault(each["link"], each)
    kinds = {each["kind"]: each for each in document["fds"]}
    (reading,) = [e["fd"] for e in document["fds"] if "nonblock" in e.get("flags", ())]

    assert ("w", 5) == (by_link[str(log)]["mode"], by_link[str(log)]["position"])
    assert "append" in by_link[str(log)]["flags"]
    assert "FLOCK" in by_link[str(log)]["locks"][0]
    assert by_link[str(tmp_path / "gone")]["deleted"]
    assert 5 == kinds["eventfd"]["count"]
    assert sorted([reading, kinds["eventfd"]["fd"]]) == kinds["eventpoll"]["watches"]
    assert "device" == by_link["/dev/zero"]["kind"]
    assert len(document["fds"]) == sum(document["kinds"].values())


# ---------------------------------------------------------------------- peers

MUTUAL = """
import socket
down_r, down_w = os.pipe(); up_r, up_w = os.pipe()
mine, theirs = socket.socketpair()
def send(end): end.sendall(b"x" * (1 << 24))
child = os.fork()
if child == 0:
    os.close(down_w); os.close(up_r); mine.close()
    threading.Thread(target=send, args=(theirs,), daemon=True).start()
    os.read(down_r, 1)
    os._exit(0)
os.close(down_r); os.close(up_w); theirs.close()
threading.Thread(target=send, args=(mine,), daemon=True).start()
"""


def test_two_processes_that_wait_for_each_other_make_a_cycle(tmp_path):
    with python(MUTUAL, rest="ready(); os.read(up_r, 1)") as it:
        (child,) = procfs.children(it.pid)
        for pid in (it.pid, child):
            (other,) = eventually(lambda pid=pid: set(procfs.thread_ids(pid)) - {pid})
            waits_in("read", pid)
            waits_in("sendto", pid, other)
        (evidence,) = run_steps(tmp_path, step_about(it.pid, child, collector="connections"))
        document = left(tmp_path, evidence, PEERS)
    edges = {
        (wait["kind"], wait["call"], wait["pid"], tuple(peer["pid"] for peer in wait["for"]))
        for wait in document["waits"]
    }

    assert {
        ("pipe", "read", it.pid, (child,)),
        ("pipe", "read", child, (it.pid,)),
        ("unix", "sendto", it.pid, (child,)),
        ("unix", "sendto", child, (it.pid,)),
    } == edges
    (pair,) = [each for each in document["connections"] if each["kind"] == "unix"]
    assert all(end["unsent"] >= end["room"] and end["unread"] > 0 for end in pair["ends"])
    assert 2 == [each.get("state") for each in document["connections"]].count("empty")


def test_a_full_stdout_pipe_names_who_does_not_read_it(tmp_path):
    body = "def shout():\n    while True: os.write(1, b'x' * 4096)"
    with python(body, rest="ready(); shout()") as it:
        waits_in("write", it.pid)
        (evidence,) = run_steps(tmp_path, step_about(it.pid, collector="connections"))
        document = left(tmp_path, evidence, PEERS)
        reading = it.stdout.fileno()
    (wait,) = document["waits"]
    (pipe,) = [each for each in document["connections"] if each.get("state") == "full"]
    writers, readers = (end["holders"] for end in pipe["ends"])

    assert ("write", 1) == (wait["call"], wait["fd"])
    assert [{"pid": os.getpid(), "fd": reading}] == wait["for"] == readers
    assert [{"pid": it.pid, "fd": 1}] == writers
    assert document["others"][str(os.getpid())]


def test_a_reader_that_holds_the_writing_side_too_waits_for_itself(tmp_path):
    with python("r, w = os.pipe()", rest="ready(); os.read(r, 1)") as it:
        waits_in("read", it.pid)
        (evidence,) = run_steps(tmp_path, step_about(it.pid, collector="connections"))
    (wait,) = left(tmp_path, evidence, PEERS)["waits"]

    assert [it.pid] == [peer["pid"] for peer in wait["for"]]


def test_a_connection_on_loopback_leads_to_the_other_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        body = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.send(b'12345')"
        )
        with python(body, rest="ready(); s.recv(1)") as it:
            accepted, _ = server.accept()
            waits_in("recvfrom", it.pid)
            eventually(lambda: accepted.recv(10, socket.MSG_PEEK) == b"12345")
            (evidence,) = run_steps(tmp_path, step_about(it.pid, collector="connections"))
            document = left(tmp_path, evidence, PEERS)
            here = {"pid": os.getpid(), "fd": accepted.fileno()}
            accepted.close()
    (wait,) = document["waits"]
    (tcp,) = [each for each in document["connections"] if each["kind"] == "tcp"]
    near, far = sorted(tcp["ends"], key=lambda end: end["address"] == f"127.0.0.1:{port}")

    assert [here] == wait["for"] == far["holders"]
    assert ("established", 5, 0) == (tcp["state"], far["unread"], near["unread"])


def test_callers_that_nobody_accepts_are_counted(tmp_path):
    body = "import socket; s = socket.create_server(('127.0.0.1', 0))"
    with python(body) as it:
        (listener,) = procfs.listeners(it.pid)
        with socket.create_connection(("127.0.0.1", listener.port)):
            (evidence,) = run_steps(tmp_path, step_about(it.pid, collector="connections"))
    (tcp,) = [
        each for each in left(tmp_path, evidence, PEERS)["connections"] if each["kind"] == "tcp"
    ]

    assert ("listen", 1) == (tcp["state"], tcp["ends"][0]["callers"])


# ---------------------------------------------------------------------- locks

LOCKED = """
import fcntl
f = open({path!r}, "a"); fcntl.flock(f, fcntl.LOCK_EX)
"""
ASKING = "import fcntl; f = open({path!r}, 'a')"
ASK = "ready(); fcntl.flock(f, fcntl.LOCK_EX)"


def test_who_holds_a_lock_and_who_waits_for_it_are_named(tmp_path):
    path = str(tmp_path / "a.lock")
    with (
        python(LOCKED.format(path=path)) as holder,
        python(ASKING.format(path=path), rest=ASK) as waiter,
    ):
        waits_in("flock", waiter.pid)
        (evidence,) = run_steps(tmp_path, step_about(waiter.pid, collector="locks"))
    (lock,) = left(tmp_path, evidence, "locks.json")["locks"]

    assert (path, "flock", "write") == (lock["path"], lock["kind"], lock["mode"])
    assert [holder.pid] == [each["pid"] for each in lock["holders"]]
    assert [waiter.pid] == [each["pid"] for each in lock["waiters"]]
    assert (holder.pid, True) == (lock["taken_by"]["pid"], lock["taken_by"]["alive"])


def test_a_lock_whose_taker_is_dead_is_held_by_who_inherited_the_file(tmp_path):
    path = str(tmp_path / "a.lock")
    body = LOCKED.format(path=path) + (
        "import subprocess\n"
        "heir = subprocess.Popen(['/bin/cat'], stdin=0, stdout=-3, pass_fds=[f.fileno()])\n"
    )
    reading, writing = os.pipe()  # the heir ends with it
    with python(body, stdin=reading) as taker:
        (heir,) = procfs.children(taker.pid)
    try:
        with python(ASKING.format(path=path), rest=ASK) as waiter:
            waits_in("flock", waiter.pid)
            (evidence,) = run_steps(tmp_path, step_about(waiter.pid, collector="locks"))
    finally:
        os.close(writing)
        os.close(reading)
    (lock,) = left(tmp_path, evidence, "locks.json")["locks"]

    assert [heir] == [each["pid"] for each in lock["holders"]]
    assert {"pid": taker.pid, "alive": False} == lock["taken_by"]


def test_a_posix_lock_is_its_takers(tmp_path):
    path = str(tmp_path / "a.lock")
    holding = f"import fcntl; f = open({path!r}, 'a'); fcntl.lockf(f, fcntl.LOCK_EX, 10)"
    ask = "ready(); fcntl.lockf(f, fcntl.LOCK_EX, 10)"
    with python(holding) as holder, python(ASKING.format(path=path), rest=ask) as waiter:
        waits_in("fcntl", waiter.pid)
        step = step_about(holder.pid, waiter.pid, collector="locks")
        (evidence,) = run_steps(tmp_path, step)
    (lock,) = left(tmp_path, evidence, "locks.json")["locks"]

    assert ("posix", [0, 9], holder.pid) == (lock["kind"], lock["span"], lock["taken_by"]["pid"])
    assert ["F_SETLKW"] == [each["operation"] for each in lock["waiters"]]


FUTEXES = """
import multiprocessing
lock = threading.Lock(); lock.acquire()
semaphore = multiprocessing.get_context("fork").Semaphore(0)
if os.fork() == 0:
    semaphore.acquire()
for _ in range(5): threading.Thread(target=lock.acquire, daemon=True).start()
threading.Thread(target=semaphore.acquire, daemon=True).start()
"""


def test_threads_that_wait_for_one_lock_are_grouped_across_processes(tmp_path):
    with python(FUTEXES) as it:
        (child,) = procfs.children(it.pid)
        try:
            waits_in("futex", child)
            for tid in eventually(lambda: len(t := procfs.thread_ids(it.pid)) == 7 and t):
                waits_in("futex", it.pid, tid)
            step = step_about(it.pid, child, collector="futexes")
            (evidence,) = run_steps(tmp_path, step)
        finally:
            os.kill(child, signal.SIGKILL)
    private, shared = left(tmp_path, evidence, "futexes.json")["groups"]

    assert (False, 5) == (private["shared"], len(private["waiters"]))
    assert {it.pid} == {waiter["pid"] for waiter in private["waiters"]}
    assert {it.pid, child} == {waiter["pid"] for waiter in shared["waiters"]}
    assert "/dev/shm/" in shared["file"]["path"]


# ---------------------------------------------------------------------- limits


@contextlib.contextmanager
def group(tree):
    """Give a new control group below a mounted tree."""
    path = Path(tree, f"hangwatch-test-{os.getpid()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        yield path
    finally:
        eventually(lambda: not (path / "cgroup.procs").read_text().strip())
        path.rmdir()


def trees(kind):
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words = after.split()
        if words[0] == ("cgroup2" if kind == "2" else "cgroup") and (
            kind == "2" or kind in words[2].split(",")
        ):
            yield before.split()[4]


def tree(kind):
    found = list(trees(kind))
    if not found:
        pytest.skip(f"no control groups of this kind here: {kind}")
    return found[0]


@pytest.mark.needs_root
def test_the_memory_limit_of_a_control_group_is_told(tmp_path):
    with group(tree("memory")) as path, python("") as it:
        (path / "memory.limit_in_bytes").write_text(str(512 << 20))
        (path / "cgroup.procs").write_text(str(it.pid))
        (evidence,) = run_steps(tmp_path, step_about(it.pid, collector="cgroups"))
        it.kill()
        it.wait()
    groups = left(tmp_path, evidence, "cgroups.json")["groups"]
    (ours,) = [each for each in groups if each["path"].endswith(path.name)]

    assert ([it.pid], 512 << 20) == (ours["processes"], ours["memory"]["max"])
    assert 0 <= ours["memory"]["oom_kill"]


@pytest.mark.needs_root
def test_a_frozen_control_group_is_told(tmp_path):
    with group(tree("2")) as path, python("") as it:
        (path / "cgroup.procs").write_text(str(it.pid))
        (path / "cgroup.freeze").write_text("1")
        eventually(lambda: "frozen 1" in (path / "cgroup.events").read_text())
        try:
            (evidence,) = run_steps(tmp_path, step_about(it.pid, collector="cgroups"))
        finally:
            (path / "cgroup.freeze").write_text("0")
        it.kill()
        it.wait()
    groups = left(tmp_path, evidence, "cgroups.json")["groups"]
    (ours,) = [each for each in groups if each["path"].endswith(path.name)]

    assert {"frozen": True, "asked": True} == ours["freezer"]


@needs_stalls
def test_a_file_system_that_does_not_answer_is_named_and_nobody_waits_for_it(tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    process = subprocess.Popen([*stalled(volume), "sleep", "3600"])
    try:
        eventually(lambda: str(volume) in procfs.mounts(process.pid))
        steps = [
            step_about(process.pid, collector="mounts", deadline="0.5"),
            step_about(process.pid, collector="cgroups"),
        ]
        evidence = run_steps(tmp_path / "output", *steps)
        document = left(tmp_path / "output", evidence[0], "mounts.json")
    finally:
        process.kill()
        process.wait()
    (mount,) = [each for each in document["mounts"] if each["point"] == str(volume)]

    assert ("fuse", False, [process.pid]) == (mount["kind"], mount["answered"], mount["processes"])
    assert [None, None] == [each.failure for each in evidence]


@needs_stalls
def test_a_file_system_that_does_not_answer_hides_no_other(tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    process = subprocess.Popen([*stalled(volume), "sleep", "3600"])
    try:
        eventually(lambda: str(volume) in procfs.mounts(process.pid))
        stalls = f"/proc/{process.pid}/root{volume}"
        answers, ended = mountprobe.ask([stalls, str(tmp_path), f"{tmp_path}/nothing"], 2.0)
    finally:
        process.kill()
        process.wait()

    assert ended
    assert answers[0] is None
    assert "" == answers[1].error
    assert "No such file" in answers[2].error


@needs_stalls
def test_who_asked_a_file_system_and_cannot_be_killed_is_left_behind(tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "deaf.py"), str(volume), "sleep", "3600"]
    )
    try:
        eventually(lambda: procfs.read_row(process.pid).comm == "sleep")
        output = tmp_path / "output"
        (evidence,) = run_steps(output, step_about(process.pid, collector="mounts", deadline="0.5"))
        document = left(output, evidence, "mounts.json")
    finally:
        process.kill()
        process.wait()
    (mount,) = [each for each in document["mounts"] if each["point"] == str(volume)]

    assert (False, False, None) == (
        mount["answered"],
        document["probe_ended"],
        evidence.failure,
    )
    eventually(lambda: not [pid for pid in procfs.pids() if asks(pid, volume)])


def asks(pid, volume):
    with contextlib.suppress(OSError):
        title = procfs.read_title(pid)
        return "hangwatch.system.mountprobe" in title and str(volume) in title
    return False


BUILT = """
baton = os.open({path!r}, os.O_CREAT | os.O_EXCL)
"""


@pytest.mark.parametrize("alive", [True, False], ids=["built", "abandoned"])
def test_a_lock_file_says_whether_who_made_it_is_still_there(tmp_path, alive):
    folder = tmp_path / "py311_cu130" / "kernels"
    folder.mkdir(parents=True)
    path = str(folder / "lock")
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with python("", env=environment) as waiting, contextlib.ExitStack() as builders:
        builder = builders.enter_context(python(BUILT.format(path=path)))
        if not alive:
            builders.close()
        step = step_about(waiting.pid, collector="lock_files")
        (evidence,) = run_steps(tmp_path / "output", step)
        (artifact,) = evidence.artifacts
        folder = next((tmp_path / "output").glob("*.partial"))
        said = json.loads((folder / artifact.path).read_text())[path]

    assert "fs.json" == artifact.path.name
    assert (True, builder.pid if alive else None) == (said["exists"], said["holder_pid"])
    assert 0 <= said["age_s"] < 600


# ---------------------------------------------------------------------- without rights

COLLECT = """
import json, sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from captures import run_steps, step_about, step_for
output = Path({output!r})
steps = [step_for({pid}, collector=name) for name in ("kernel", "fds")]
names = ("connections", "locks", "futexes", "cgroups", "kernel_log", "process_table")
steps += [step_about({pid}, collector=name) for name in names]
found = {{}}
for step, evidence in zip(steps, run_steps(output, *steps)):
    texts = [(next(output.glob("*.partial")) / a.path).read_text() for a in evidence.artifacts]
    failure = evidence.failure and [evidence.failure.kind, evidence.failure.hint]
    found[step.collector] = [failure, texts]
print(json.dumps(found))
"""

DROPPED = {
    "root-without-capabilities": ["--bounding-set=-all", "--inh-caps=-all"],
    "another-user": ["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all",
                     "--inh-caps=-all"],
}  # fmt: skip


OUR_PATHS = [str(Path(hangwatch.__file__).parents[1]), *(p for p in sys.path if "-packages" in p)]
TRY = "import hangwatch.capture.worker"
AGAIN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TRY!r}], check=True)"


def runnable(drop, environment):
    """Return a command for our own version of Python, as who has dropped these rights."""
    minor = "python{}.{}".format(*sys.version_info)
    for interpreter in (sys.executable, f"/usr/bin/{minor}", f"/usr/local/bin/{minor}"):
        command = [*drop, interpreter]
        tried = subprocess.run(
            [*command, "-c", AGAIN], check=False, env=environment, capture_output=True
        )
        if tried.returncode == 0:
            return command
    pytest.skip("no interpreter that this user may run")


@pytest.mark.needs_root
@pytest.mark.parametrize("drop", DROPPED.values(), ids=DROPPED)
def test_without_rights_what_can_be_had_is_had_and_what_is_missing_is_said(drop):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("dropping rights needs root and setpriv")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(OUR_PATHS)}
    command = runnable(["setpriv", *drop], environment)
    with (
        tempfile.TemporaryDirectory() as folder,  # that any user can reach
        python("threading.Thread(target=wait, daemon=True).start()") as it,
    ):
        Path(folder).chmod(0o777)
        script = COLLECT.format(
            tests=str(Path(__file__).parent), output=f"{folder}/output", pid=it.pid
        )
        said = subprocess.run(
            [*command, "-B", "-c", script],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
            cwd=folder,
            env=environment,
        )
    found = json.loads(said.stdout)
    threads = json.loads(found["kernel"][1][0])["threads"]
    (row,) = json.loads(found["process_table"][1][0])

    for name in ("kernel", "fds", "connections", "locks", "futexes"):
        kind, hint = found[name][0]
        assert (FailureKind.NOT_PERMITTED, True) == (kind, "SYS_PTRACE" in hint), name
    assert 2 == len(threads)
    assert all(t["state"] == "S" and t["vol_ctxt"] is not None and t["run_ns"] for t in threads)
    assert ("S", 2) == (row["state"], row["threads"])
    for name in ("connections", "locks", "futexes"):
        assert [it.pid] == json.loads(found[name][1][0])["not_readable"], name
    assert found["cgroups"][0] is None
    if Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1":
        kind, hint = found["kernel_log"][0]
        assert (FailureKind.NOT_PERMITTED, True) == (kind, "SYSLOG" in hint)


# ---------------------------------------------------------------------- what leaves the machine

SECRET = "hf_" + "Zq7Rk2Vm9Xc4Tb8Ny3Lw6Hd5"


def test_a_secret_in_a_path_or_an_address_does_not_leave_and_lines_stay(tmp_path):
    path = str(tmp_path / f"{SECRET}.lock")
    body = LOCKED.format(path=path) + (
        f"import socket\ns = socket.socket(socket.AF_UNIX); s.bind('\\0{SECRET}'); s.listen(1)\n"
    )
    with python(body) as it:
        steps = (
            step_for(it.pid, collector="fds"),
            step_about(it.pid, collector="connections"),
            step_about(it.pid, collector="locks"),
        )
        for step in steps:
            (evidence,) = run_steps(tmp_path / "output", step)
            (artifact,) = evidence.artifacts
            data = (next((tmp_path / "output").glob("*.partial")) / artifact.path).read_bytes()
            redacted = Redactor(b"key").file(artifact.path.name, data)

            assert SECRET.encode() in data
            assert SECRET.encode() not in redacted
            assert data.count(b"\n") == redacted.count(b"\n")
            assert json.loads(redacted)["schema"] == json.loads(data)["schema"]
