"""The reader of tasks on targets in states in which other tools fail, hang, or leave damage.

Each is a real process. What is read must be right, and the target afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from remote_targets import Interpreter, free_threaded, interpreters, running

from hangwatch import remote
from hangwatch.remote import Snapshot, procfs
from hangwatch.remote.memory import Cost, ProcessSource, Range

pytestmark = pytest.mark.needs_ptrace

FOUND = interpreters()
EVERY = pytest.mark.parametrize("interpreter", FOUND, ids=str)
ONE = next(each for each in FOUND if each.is_ours)
ROOT = pytest.mark.needs_root
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
WAIT_ALL = 0x40000000
"""``__WALL``: threads and processes alike."""
NOBODY = 65534


# ---------------------------------------------------------------------- what must hold


def check(snapshot: Snapshot, line: int) -> None:
    tasks = {task.name: task for task in snapshot.tasks}
    waiter = tasks["waiter"]

    assert ["waiter", "leaf"] == [frame.function for frame in waiter.chain[:2]]
    assert line == waiter.chain[1].line
    assert "event" == waiter.awaits.kind
    assert "ticker" in tasks
    # The ticker may be caught in the middle of a tick, or of being noted as the running task.
    assert all(
        problem.kind == "torn" and problem.where.startswith(("task 'ticker'", "interpreter "))
        for problem in snapshot.problems
    )


def status(pid: int, tid: int | None = None) -> dict[str, str]:
    path = Path(f"/proc/{pid}/task/{tid or pid}/status")
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {name: value.strip() for name, _, value in pairs}


def states(pid: int) -> dict[int, tuple[str, str]]:
    """Return state and tracer of each thread."""
    found: dict[int, tuple[str, str]] = {}
    for tid in procfs.thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            each = status(pid, tid)
            found[tid] = (each["State"][0], each["TracerPid"])
    return found


def letters(pid: int) -> set[str]:
    return {letter for letter, _ in states(pid).values()}


def progress(pid: int) -> int:
    return sum(procfs.switches(pid).values())


def goes_on(pid: int) -> bool:
    """Whether the target, which nobody traces or stops, does what it did before."""
    assert {"0"} == {tracer for _, tracer in states(pid).values()}
    before = progress(pid)
    return bool(eventually(lambda: progress(pid) > before + 3))


@contextlib.contextmanager
def left_alone(pid: int) -> Iterator[None]:
    """Check that threads which cannot move look the same before and after."""
    before = states(pid)
    yield
    assert before == states(pid)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for tid in procfs.thread_ids(pid):
        found += map(int, Path(f"/proc/{pid}/task/{tid}/children").read_text().split())
    return found


@dataclasses.dataclass(frozen=True)
class Target:
    pid: int
    line: int

    def check(self) -> None:
        """Read it twice, as it is done in a capture: by a new reader, and again by that one."""
        reader = remote.attach(self.pid)
        check(reader.tasks(), self.line)
        check(reader.tasks(), self.line)
        assert "leaf" not in str(reader.threads())  # it is on no stack


@contextlib.contextmanager
def target(
    interpreter: Interpreter, state: str, folder: Path, **environment: str
) -> Iterator[Target]:
    with running(interpreter, "states", state, folder=folder, environment=environment) as (
        process,
        truth,
    ):
        yield Target(process.pid, truth["line"])


@pytest.fixture(scope="module", params=FOUND, ids=str)
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """A healthy process of each interpreter, for the states that it can be brought back from."""
    with target(request.param, "plain", tmp_path_factory.mktemp("plain")) as found:
        yield found


# ---------------------------------------------------------------------- held by somebody


def test_a_stopped_process_is_read_and_stays_stopped(plain: Target):
    os.kill(plain.pid, signal.SIGSTOP)
    try:
        eventually(lambda: letters(plain.pid) == {"T"})
        with left_alone(plain.pid):
            plain.check()
    finally:
        os.kill(plain.pid, signal.SIGCONT)

    assert goes_on(plain.pid)


def test_a_process_that_somebody_traces_is_read_and_stays_traced(plain: Target):
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert 0 == ptrace(PTRACE_ATTACH, plain.pid, None, None), os.strerror(ctypes.get_errno())
    try:
        os.waitpid(plain.pid, WAIT_ALL)
        assert ("t", str(os.getpid())) == states(plain.pid)[plain.pid]
        plain.check()
        assert ("t", str(os.getpid())) == states(plain.pid)[plain.pid]
    finally:
        assert 0 == ptrace(PTRACE_DETACH, plain.pid, None, None)

    assert goes_on(plain.pid)


FREEZERS = {
    "v1": (Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
    "v2": (Path("/sys/fs/cgroup/unified"), "cgroup.freeze", "1", "0"),
    "v2 alone": (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"),
}


@ROOT
@pytest.mark.parametrize("kind", FREEZERS)
def test_a_frozen_process_is_read_and_stays_frozen(plain: Target, kind: str):
    root, switch, freeze, thaw = FREEZERS[kind]
    group = root / f"hangwatch-test-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        try:
            group.mkdir()
            undo.callback(group.rmdir)
            (group / switch).read_text()
            (group / "cgroup.procs").write_text(str(plain.pid))
        except OSError as error:
            pytest.skip(f"no freezer of cgroup {kind} to use here: {error}")
        undo.callback((root / "cgroup.procs").write_text, str(plain.pid))
        (group / switch).write_text(freeze)
        undo.callback((group / switch).write_text, thaw)
        eventually(lambda: is_frozen(group))
        with left_alone(plain.pid):
            before = progress(plain.pid)
            plain.check()
            assert before == progress(plain.pid)
            assert is_frozen(group)

    assert goes_on(plain.pid)


def is_frozen(group: Path) -> bool:
    if (group / "freezer.state").exists():
        return (group / "freezer.state").read_text().strip() == "FROZEN"
    return "frozen 1" in (group / "cgroup.events").read_text().splitlines()


@EVERY
def test_a_process_with_a_thread_that_hangs_in_the_kernel_is_read(
    interpreter: Interpreter, tmp_path: Path
):
    with target(interpreter, "forking", tmp_path) as found:
        (child,) = eventually(lambda: children(found.pid))
        try:
            eventually(lambda: "D" in letters(found.pid))
            found.check()
            assert "D" in letters(found.pid)
        finally:
            os.kill(child, signal.SIGKILL)
        eventually(lambda: "D" not in letters(found.pid))

        assert goes_on(found.pid)


# ---------------------------------------------------------------------- half gone


@EVERY
def test_a_process_whose_main_thread_has_ended_is_read(interpreter: Interpreter, tmp_path: Path):
    with target(interpreter, "leaderless", tmp_path) as found:
        eventually(lambda: states(found.pid)[found.pid][0] == "Z")
        found.check()
        (alive,) = set(procfs.thread_ids(found.pid)) - {found.pid}
        dataclasses.replace(found, pid=alive).check()

        assert goes_on(found.pid)


@contextlib.contextmanager
def copied(interpreter: Interpreter, folder: Path) -> Iterator[tuple[Interpreter, Path, str]]:
    """Copy the program and its ``libpython``: yield the interpreter, that file and its home."""
    if interpreter.root != Path("/"):
        pytest.skip("its files are those of a chroot")
    code = (
        "import json, os, sys\n"
        "maps = [line.split()[-1] for line in open('/proc/self/maps')]\n"
        "library = next((path for path in maps if '/libpython3' in path), '')\n"
        "print(json.dumps([sys.base_prefix, os.readlink('/proc/self/exe'), library]))\n"
    )
    done = subprocess.run([*interpreter.command, "-c", code], check=True, capture_output=True)
    home, program, library = json.loads(done.stdout)
    # Some builds look for their library in ../lib, seen from the program.
    for name in ("bin", "lib"):
        (folder / name).mkdir()
    copy = Path(shutil.copy(program, folder / "bin" / "python"))
    held = Path(shutil.copy(library, folder / "lib")) if library else copy
    yield dataclasses.replace(interpreter, command=(str(copy),)), held, home


@EVERY
@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_a_process_whose_libpython_was_taken_away_is_read(
    interpreter: Interpreter, fate: str, tmp_path: Path
):
    with (
        copied(interpreter, tmp_path) as (copy, library, home),
        target(copy, "plain", tmp_path, **settings(library, home)) as found,
    ):
        library.unlink()
        if fate == "replaced":
            library.write_bytes(b"\x7fELF\x02 of another release")
        found.check()

        assert f"{library} (deleted)" in Path(f"/proc/{found.pid}/maps").read_text()
        assert goes_on(found.pid)


@EVERY
def test_a_stripped_build_is_read(interpreter: Interpreter, tmp_path: Path):
    if shutil.which("strip") is None:
        pytest.skip("needs strip, of binutils")
    with copied(interpreter, tmp_path) as (copy, library, home):
        subprocess.run(["strip", str(library)], check=True)
        with target(copy, "plain", tmp_path, **settings(library, home)) as found:
            library.unlink()  # so that nothing can be looked up in the file
            found.check()


def settings(library: Path, home: str) -> dict[str, str]:
    """Make a copied program use the copied library, and the standard library of the original."""
    preload = {"LD_PRELOAD": str(library)} if library.name.startswith("libpython") else {}
    return {"PYTHONHOME": home, **preload}


def test_static_and_shared_builds_are_both_among_the_tested():
    kinds = set()
    for each in FOUND:
        done = subprocess.run(
            [*each.command, "-c", "print('/libpython3' in open('/proc/self/maps').read())"],
            check=False,
            capture_output=True,
            text=True,
        )
        kinds.add(done.stdout.strip())
    if "False" not in kinds:
        pytest.skip("no static build is installed here; Debian's python3 is one")

    assert {"True", "False"} <= kinds


# ---------------------------------------------------------------------- somewhere else


@EVERY
def test_tasks_of_several_interpreters_are_read_and_told_apart(
    interpreter: Interpreter, tmp_path: Path
):
    with target(interpreter, "interpreters", tmp_path) as found:
        snapshot = remote.attach(found.pid).tasks()
        check(snapshot, found.line)
        tasks = {task.name: task for task in snapshot.tasks}
        sub = tasks["sub-waiter"]
        loops = {loop.id: loop for loop in snapshot.loops}

        assert ["sub_leaf", "event"] == [sub.chain[0].function, sub.awaits.kind]
        assert 2 == len(snapshot.interpreters)
        assert [0, snapshot.interpreters[1].id] == [tasks["waiter"].interpreter, sub.interpreter]
        assert sub.interpreter == loops[sub.loop].interpreter
        assert loops[sub.loop].thread_id != loops[tasks["waiter"].loop].thread_id
        assert goes_on(found.pid)


HIDE = 'mount --bind "$1" "$2" && if [ "$1" != /usr ]; then mount -t tmpfs none "$1"; fi'
"""Moves an installation to where nobody outside can see it."""


@ROOT
@EVERY
def test_a_process_in_a_container_is_read_from_outside(interpreter: Interpreter, tmp_path: Path):
    if interpreter.root != Path("/"):
        pytest.skip("its files are those of a chroot")
    done = subprocess.run(
        [*interpreter.command, "-c", "import sys; print(sys.base_prefix)"],
        check=True,
        capture_output=True,
        text=True,
    )
    prefix = done.stdout.strip()
    inside = tmp_path / "hidden"
    inside.mkdir()
    program = inside / "bin" / f"python3.{interpreter.minor}"
    flags = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    container = dataclasses.replace(
        interpreter,
        command=(
            *("unshare", *flags, "sh", "-c", f'{HIDE}; shift 2; exec "$@"', "sh"),
            *(prefix, str(inside), str(program)),
        ),
    )
    with namespaces(container, "plain", tmp_path, LD_LIBRARY_PATH=str(inside / "lib")) as found:
        assert 2 == len(status(found.pid)["NSpid"].split())
        assert not program.exists()
        found.check()
        snapshot = remote.attach(found.pid).tasks()
        threads = {loop.thread_id for loop in snapshot.loops}

        # Threads are named by the numbers that count outside.
        assert threads <= set(procfs.thread_ids(found.pid))
        assert goes_on(found.pid)


@ROOT
def test_a_process_in_another_user_namespace_is_read_from_its_parent(tmp_path: Path):
    flags = ("unshare", "--user", "--map-root-user", "--fork", "--kill-child")
    inner = dataclasses.replace(ONE, command=(*flags, *ONE.command))
    with namespaces(inner, "plain", tmp_path) as found:
        found.check()

        assert goes_on(found.pid)


@contextlib.contextmanager
def namespaces(
    interpreter: Interpreter, state: str, folder: Path, **environment: str
) -> Iterator[Target]:
    """Run a target as the child of ``unshare``."""
    done = subprocess.run(
        [*interpreter.command[: interpreter.command.index("--kill-child") + 1], "true"],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no namespaces to be had here: {done.stderr.strip()}")
    with target(interpreter, state, folder, **environment) as outer:
        (pid,) = children(outer.pid)
        yield dataclasses.replace(outer, pid=pid)


# ---------------------------------------------------------------------- going, going, gone


class Interrupted:
    """Does something to the target before the n-th read of its memory."""

    def __init__(self, source: ProcessSource, reads: int, event: Callable[[], None]) -> None:
        self.inner, self.left, self.event = source.read, reads, event
        source.read = self.read  # type: ignore[method-assign]

    def read(self, ranges: Sequence[Range], cost: Cost) -> list[bytes | None]:
        self.left -= 1
        if self.left == 0:
            self.event()
        return self.inner(ranges, cost)


def begin_cold(reader: remote.RemotePython) -> None:
    """Let the next reading fetch every page when it comes to it, not most of them with one read."""
    reader.forget()
    reader._memory.touched.clear()


def source_of(reader: remote.RemotePython) -> ProcessSource:
    source = reader._memory.source
    assert isinstance(source, ProcessSource)
    return source


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9])
def test_a_process_that_is_killed_while_it_is_read_leaves_what_was_read(
    tmp_path: Path, share: float
):
    with running(ONE, "graph", 1, 1200, folder=tmp_path) as (process, _):
        reader = remote.attach(process.pid)
        reader.tasks()
        begin_cold(reader)
        whole = reader.tasks()
        begin_cold(reader)

        def kill() -> None:
            process.kill()
            eventually(lambda: status(process.pid)["State"][0] == "Z")

        interrupted = Interrupted(source_of(reader), 1 + int(share * whole.calls), kill)
        if share < 0.1:
            with pytest.raises(remote.ProcessGoneError, match="has ended"):
                reader.tasks()
        else:
            snapshot = reader.tasks()
            assert 0 < len(snapshot.tasks) <= len(whole.tasks)
            assert len(snapshot.tasks) < len(whole.tasks) or share > 0.5
            assert any("has ended" in problem.message for problem in snapshot.problems)

    assert interrupted.left <= 0
    with pytest.raises(remote.ProcessGoneError):
        reader.threads()


@pytest.mark.parametrize("reads", [1, 2, 3, 5, 8, 12])
def test_a_process_that_is_killed_while_it_is_attached_to_is_said_to_be_gone(
    tmp_path: Path, reads: int, monkeypatch: pytest.MonkeyPatch
):
    counted: list[int] = []
    inner = ProcessSource.read
    with target(ONE, "plain", tmp_path) as found:

        def read(self: ProcessSource, ranges: Sequence[Range], cost: Cost) -> list[bytes | None]:
            counted.append(1)
            if len(counted) == reads:
                os.kill(found.pid, signal.SIGKILL)
                eventually(lambda: status(found.pid)["State"][0] == "Z")
            return inner(self, ranges, cost)

        monkeypatch.setattr(ProcessSource, "read", read)
        with pytest.raises(remote.ProcessGoneError, match="has ended"):
            remote.attach(found.pid)


@EVERY
def test_a_process_that_executes_another_program_is_not_taken_for_the_old_one(
    interpreter: Interpreter, tmp_path: Path
):
    with running(interpreter, "states", "executing", folder=tmp_path) as (process, truth):
        output = interpreter.root / "tmp" / tmp_path.name if interpreter.root != Path("/") else None
        output = (output or tmp_path) / "states.json"
        reader = remote.attach(process.pid)
        check(reader.tasks(), truth["line"])

        def execute() -> None:
            output.with_name("states.json.go").touch()
            eventually(output.with_name("states.json.again").exists)

        begin_cold(reader)
        Interrupted(source_of(reader), 3, execute)
        with contextlib.suppress(remote.ProcessGoneError):
            snapshot = reader.tasks()
            assert any("began another program" in each.message for each in snapshot.problems)
        with pytest.raises(remote.ProcessGoneError, match="has begun another program"):
            reader.tasks()

        check(remote.attach(process.pid).tasks(), truth["line"])


def test_a_thread_that_ends_does_not_end_the_reading_of_its_process(tmp_path: Path):
    with target(ONE, "forking", tmp_path) as found:
        (child,) = eventually(lambda: children(found.pid))
        eventually(lambda: "D" in letters(found.pid))
        hung = next(tid for tid, (state, _) in states(found.pid).items() if state == "D")
        reader = remote.attach(found.pid)
        source_of(reader).tid = hung  # as if the main thread had been a zombie
        os.kill(child, signal.SIGKILL)
        eventually(lambda: hung not in procfs.thread_ids(found.pid))

        check(reader.tasks(), found.line)


# ---------------------------------------------------------------------- forbidden

READ = (
    "import sys\n"
    "from hangwatch import remote\n"
    "try: print(len(remote.attach(int(sys.argv[1])).tasks().tasks), 'tasks')\n"
    "except remote.NotPermittedError as error: print(error)\n"
)


def read_as(pid: int, *command: str) -> str:
    """Read from a process of other rights; return what it says."""
    done = subprocess.run(
        [*command, sys.executable, "-c", READ, str(pid)],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(remote.__file__).parents[2],
    )
    if done.returncode and "setpriv" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert 0 == done.returncode, done.stderr
    return done.stdout


def as_user(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


LESS = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
CURE = "add SYS_PTRACE to the container's capabilities"


@ROOT
def test_another_user_is_told_about_the_capability(plain: Target):
    said = read_as(plain.pid, *as_user(NOBODY))

    assert "belongs to another user" in said
    assert CURE in said


@ROOT
def test_a_user_reads_their_own_process_without_any_capability(tmp_path: Path):
    own = dataclasses.replace(ONE, command=(*as_user(NOBODY), *ONE.command))
    folder = as_nobody(tmp_path)
    with target(own, "plain", folder) as found:
        assert "3 tasks\n" == read_as(found.pid, *as_user(NOBODY))


@ROOT
def test_root_without_the_capability_is_told_what_the_target_has_more(plain: Target):
    said = read_as(plain.pid, *LESS)

    assert "it has capabilities that we lack" in said
    assert CURE in said


@ROOT
def test_an_undumpable_process_is_refused_to_its_owner_and_read_with_the_capability(
    tmp_path: Path,
):
    own = dataclasses.replace(ONE, command=(*as_user(NOBODY), *ONE.command))
    with target(own, "undumpable", as_nobody(tmp_path)) as found:
        said = read_as(found.pid, *as_user(NOBODY))
        found.check()

        assert goes_on(found.pid)
    assert "PR_SET_DUMPABLE" in said
    assert CURE in said


@ROOT
def test_root_of_a_user_namespace_is_told_that_its_capability_does_not_count(plain: Target):
    said = read_as(plain.pid, "unshare", "--user", "--map-root-user")

    assert "another user namespace" in said
    assert "nsenter" in said or "parent namespace" in said


def test_a_process_that_forbids_itself_between_two_readings_is_refused_with_the_cure(
    tmp_path: Path,
):
    with target(ONE, "plain", tmp_path) as found:
        reader = remote.attach(found.pid)
        source_of(reader)._readv = refuse
        with pytest.raises(remote.NotPermittedError, match="is not permitted"):
            reader.tasks()


def refuse(*arguments: Any) -> int:
    ctypes.set_errno(1)
    return -1


def test_a_free_threaded_build_is_refused_with_a_sentence(tmp_path: Path):
    command = free_threaded()
    if not command:
        pytest.skip("no build without the GIL is installed here")
    interpreter = dataclasses.replace(ONE, command=tuple(command))
    with (
        target(interpreter, "plain", tmp_path) as found,
        pytest.raises(remote.UnknownLayoutError, match="free-threaded build of Python 3"),
    ):
        remote.attach(found.pid)


def test_yama_is_named_where_it_forbids(monkeypatch: pytest.MonkeyPatch):
    ours = {"CapEff": "0", "Uid": "1000 1000 1000 1000"}
    monkeypatch.setattr(procfs, "_status", lambda pid: ours)
    monkeypatch.setattr(procfs, "_first_line", lambda path: "1")
    said = procfs.explain_refusal(4242)

    assert "Yama" in said
    assert "ptrace_scope is 1" in said
    assert CURE in said


def as_nobody(folder: Path) -> Path:
    """Return a folder that another user can write to."""
    for each in (folder, *folder.parents[:3]):
        each.chmod(0o755 if each != folder else 0o777)
    return folder


def test_nothing_is_left_behind_by_two_hundred_readings(plain: Target):
    reader = remote.attach(plain.pid)
    deadline = time.monotonic() + 5
    count = 0
    while count < 200 and time.monotonic() < deadline:
        check(reader.tasks(), plain.line)
        count += 1

    assert goes_on(plain.pid)
    assert letters(plain.pid) <= {"S", "R"}
