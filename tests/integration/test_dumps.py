"""Dumps that a process is asked for by its own named pipe: flight recorder and GPU core."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from hangwatch.capture.rooms import StepRoom
from hangwatch.collectors import flight_recorder, gpu_core
from hangwatch.model.capture import Collector, CollectorError, FailureKind, Step, Target
from hangwatch.model.identity import Role
from hangwatch.system import procfs, triggers

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gpu"
PROGRAM = Path(__file__).parent / "programs" / "dumping.py"
REAL = FIXTURES / "nccl-trace-rank-0.pickle"
LIMIT = 60.0


@contextlib.contextmanager
def process(
    folder: Path, pipe: Path, file: Path, source: Path, *after: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that can be asked; it is ready."""
    ready = folder / "ready"
    running = subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, (ready, pipe, file, source)), *after],
        env={"PATH": os.defpath, **variables},
    )
    try:
        deadline = time.monotonic() + LIMIT
        while not ready.exists():
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.01)
        yield running
    finally:
        running.kill()
        running.wait()


def collect(
    collector: Collector, pid: int, room: Path, timeout: float = LIMIT, **options: str
) -> None:
    step = Step(
        id=f"{collector.name}/{pid}",
        collector=collector.name,
        scope=collector.scope,
        stage=collector.stage,
        sample=1,
        rung=10,
        folder=PurePosixPath(),
        timeout=timeout,
        target=Target(process=procfs.identify(pid), role=Role.ENGINE),
        options=options,
    )
    room.mkdir(exist_ok=True)
    collector.collect(step, StepRoom(room, room))


def flight_of(folder: Path, **more: str) -> dict[str, str]:
    return {
        flight_recorder.PIPE: f"{folder}/nccl-",
        flight_recorder.FILES[1]: f"{folder}/trace-",
    } | more


# ---------------------------------------------------------------------- flight recorder


def test_the_last_collectives_are_asked_for_and_written_as_data(tmp_path):
    pipe, file = tmp_path / "nccl-3.pipe", tmp_path / "trace-3"
    with process(tmp_path, pipe, file, REAL, **flight_of(tmp_path)) as running:
        collect(flight_recorder.COLLECTOR, running.pid, tmp_path / "room")

        assert running.poll() is None

    found = json.loads((tmp_path / "room" / "flight_recorder.json").read_text())
    assert (3, 1, str(file)) == (found["rank"], found["not_ended"], found["file"])
    assert "nccl:all_reduce" == found["entries"][-1]["profiling_name"]


def test_an_earlier_dump_is_not_taken_for_the_answer(tmp_path):
    (tmp_path / "trace-0").write_bytes(REAL.read_bytes())
    pipe, file = tmp_path / "nccl-0.pipe", tmp_path / "trace-0"
    with (
        process(tmp_path, pipe, file, REAL, "mute", **flight_of(tmp_path)) as running,
        pytest.raises(CollectorError) as caught,
    ):
        collect(flight_recorder.COLLECTOR, running.pid, tmp_path / "room", timeout=2.0)

    assert FailureKind.TIMED_OUT == caught.value.failure.kind


def test_a_dump_that_would_execute_something_is_refused(tmp_path):
    evil = tmp_path / "evil"
    evil.write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    pipe, file = tmp_path / "nccl-0.pipe", tmp_path / "trace-0"
    with (
        process(tmp_path, pipe, file, evil, **flight_of(tmp_path)) as running,
        pytest.raises(CollectorError, match="more than data: GLOBAL"),
    ):
        collect(flight_recorder.COLLECTOR, running.pid, tmp_path / "room")


def test_a_pipe_whose_name_another_process_took_is_still_this_ones(tmp_path):
    pipe, file = tmp_path / "nccl-0.pipe", tmp_path / "trace-0"
    with process(tmp_path, pipe, file, REAL, **flight_of(tmp_path)) as running:
        pipe.unlink()
        os.mkfifo(pipe)
        collect(flight_recorder.COLLECTOR, running.pid, tmp_path / "room")

    assert (tmp_path / "room" / "flight_recorder.json").exists()


def test_a_file_that_vanishes_in_the_middle_is_not_taken_for_a_missing_pipe(tmp_path):
    pipe, file = tmp_path / "nccl-0.pipe", tmp_path / "trace-0"
    with (
        process(tmp_path, pipe, file, REAL) as running,
        pytest.raises(FileNotFoundError, match="the dump"),
        triggers.opened_by(procfs.identify(running.pid), re.compile(re.escape(pipe.name))),
    ):
        raise FileNotFoundError("the dump")


def test_a_process_that_was_not_prepared_is_told_how_to_be(tmp_path):
    pipe = tmp_path / "nccl-0.pipe"
    with (
        process(tmp_path, pipe, tmp_path / "f", REAL) as running,
        pytest.raises(CollectorError) as caught,
    ):
        collect(flight_recorder.COLLECTOR, running.pid, tmp_path / "room")

    assert "hangwatch env" in caught.value.failure.hint
    assert not (tmp_path / "f").exists()


def test_a_file_that_only_has_the_name_of_the_pipe_is_never_written_to(tmp_path):
    pipe, decoy = tmp_path / "other.pipe", tmp_path / "nccl-0.pipe"
    decoy.write_bytes(b"untouched")
    with (
        process(tmp_path, pipe, tmp_path / "f", REAL, **flight_of(tmp_path)) as running,
        pytest.raises(CollectorError) as caught,
    ):
        collect(flight_recorder.COLLECTOR, running.pid, tmp_path / "room")

    assert FailureKind.NOT_AVAILABLE == caught.value.failure.kind
    assert b"untouched" == decoy.read_bytes()


# ---------------------------------------------------------------------- GPU core


def core_of(folder: Path, **more: str) -> dict[str, str]:
    return {
        gpu_core.ENABLED: "1",
        "CUDA_COREDUMP_PIPE": f"{folder}/gpu-%p.pipe",
        "CUDA_COREDUMP_FILE": f"{folder}/gpu-%p.nvcudmp",
    } | more


@contextlib.contextmanager
def engine(folder: Path, *after: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process prepared for GPU core dumps, whose files bear its own number."""
    source = folder / "source"
    source.write_bytes(b"core" * 1000)
    # Its number is known once it runs, so a shell makes the names.
    script = (
        f"exec {sys.executable} {PROGRAM} ready gpu-$$.pipe gpu-$$.nvcudmp source {' '.join(after)}"
    )
    running = subprocess.Popen(
        ["/bin/sh", "-c", script],
        cwd=folder,
        env={"PATH": os.defpath, **core_of(folder, **more)},
    )
    try:
        deadline = time.monotonic() + LIMIT
        while not (folder / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield running
    finally:
        running.kill()
        running.wait()


def cuda_gdb(folder: Path) -> str:
    """Play cuda-gdb: it prints the head of the dump, and what the real one printed."""
    program = folder / "cuda-gdb"
    program.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do case $word in\n'
        '"target cudacore "*) head -c 4 ${word#target cudacore }; echo;;\n'
        f"esac; done\ncat {FIXTURES}/cuda_gdb-spin.txt\n"
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("after", [(), ("dies",)], ids=["lives on", "ends over it"])
def test_a_dump_is_asked_for_and_read_where_it_lies(tmp_path, after):
    with engine(tmp_path, *after) as running:
        collect(gpu_core.COLLECTOR, running.pid, tmp_path / "room", program=cuda_gdb(tmp_path))
        pid = running.pid

    room = tmp_path / "room"
    found = json.loads((room / "gpu_core.json").read_text())
    assert (str(tmp_path / f"gpu-{pid}.nvcudmp"), 4000) == (found["file"], found["size"])
    assert (room / "gpu_core.txt").read_text().startswith("core\n")
    assert 62 == json.loads((room / "gpu_core_kernels.json").read_text())["kernels"][0]["line"]
    assert {"gpu_core.json", "gpu_core.txt", "gpu_core_kernels.json"} == {
        path.name for path in room.iterdir()
    }


def test_without_cuda_gdb_the_dump_is_told_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with engine(tmp_path) as running, pytest.raises(CollectorError, match="no cuda-gdb here"):
        collect(gpu_core.COLLECTOR, running.pid, tmp_path / "room")

    assert 4000 == json.loads((tmp_path / "room" / "gpu_core.json").read_text())["size"]


def test_an_engine_that_was_not_started_for_it_is_left_alone(tmp_path):
    with (
        engine(tmp_path, **{gpu_core.ENABLED: "0"}) as running,
        pytest.raises(CollectorError) as caught,
    ):
        collect(gpu_core.COLLECTOR, running.pid, tmp_path / "room")

    assert "--gpu-core" in caught.value.failure.hint
    assert not list(tmp_path.glob("*.nvcudmp"))


def test_a_pipe_of_somebody_else_is_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(procfs, "users_of", lambda _pid: frozenset({os.getuid() + 1}))
    with engine(tmp_path) as running, pytest.raises(CollectorError, match="does not belong"):
        collect(gpu_core.COLLECTOR, running.pid, tmp_path / "room")

    assert not list(tmp_path.glob("*.nvcudmp"))


def test_a_dump_is_read_through_no_link(tmp_path):
    with engine(tmp_path) as running:
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        (tmp_path / f"gpu-{running.pid}.nvcudmp").symlink_to(secret)
        with pytest.raises(CollectorError) as caught:
            collect(gpu_core.COLLECTOR, running.pid, tmp_path / "room", timeout=24.0)

    assert FailureKind.TIMED_OUT == caught.value.failure.kind
