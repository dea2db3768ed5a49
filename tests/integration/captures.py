"""Captures of real processes for tests."""

import json
import stat
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import jsonschema

from hangwatch import registry
from hangwatch.capture.pool import Pool
from hangwatch.capture.rooms import Rooms
from hangwatch.capture.run import run
from hangwatch.capture.schemas import schemas
from hangwatch.model.capture import (
    CapturedInstance,
    CaptureKind,
    CaptureRequest,
    Phase,
    Scope,
    Stage,
    Step,
    Target,
)
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.system import procfs
from hangwatch.system.clock import SystemClock

CLOCK = SystemClock()


class Jumping:
    """The system's clock, put forward when a test says so."""

    def __init__(self):
        self.ahead = 0.0

    def now(self):
        return Instant(SystemClock().now() + self.ahead)

    def sleep(self, seconds):
        SystemClock().sleep(seconds)


def request_for(*pids, output, gap=0.1, deadline=60.0, profile="lmdeploy", **more):
    """Return a request to capture processes as engine instances."""
    return CaptureRequest(
        id="test",
        kind=CaptureKind.INCIDENT,
        output=str(output),
        profile=profile,
        policy=Policy(sample_gap=gap),
        epoch=CLOCK.epoch(),
        verdict="suspected_hang",
        instances=tuple(
            CapturedInstance(instance=InstanceKey(pid=pid), pid=pid, profile=profile)
            for pid in pids
        ),
        deadline=deadline,
        **more,
    )


def capture(*pids, output, progress=lambda _p: None, rejudge=lambda _a: "", **more):
    """Capture processes; return the outcome and its evidence by step."""
    outcome = run(
        request_for(*pids, output=output, **more), clock=CLOCK, progress=progress, rejudge=rejudge
    )
    return outcome, {evidence.step: evidence for evidence in outcome.evidence}


def step_for(pid, *, collector="stacks", sample=1, timeout=10.0, name="", ticks=None, **options):
    """Return a step about a process as it is now."""
    process = ProcessId(pid, procfs.start_ticks(pid) if ticks is None else ticks)
    target = Target(process=process, role=Role.ENGINE)
    known = registry.collectors()[collector]
    return Step(
        id=name or f"{collector}/{pid}/{sample}",
        collector=collector,
        scope=Scope.PROCESS,
        stage=Stage.A,
        sample=sample,
        rung=5,
        folder=target.folder,
        timeout=timeout,
        target=target,
        attaches=known.attaches,
        reads_memory=known.reads_memory,
        memory=known.memory,
        options=options,
    )


def step_about(*pids, collector, sample=1, timeout=30.0, **options):
    """Return a step about several processes at once, as they are now."""
    return Step(
        id=f"{collector}/{sample}",
        collector=collector,
        scope=Scope.NODE,
        stage=Stage.A,
        sample=sample,
        rung=1,
        folder=PurePosixPath(),
        timeout=timeout,
        targets=tuple(Target(process=procfs.identify(pid), role=Role.ENGINE) for pid in pids),
        waits=registry.collectors()[collector].waits,
        options=options,
    )


def left(output, evidence, name):
    """Return a document that steps left below *output*; it keeps to its schema."""
    (path,) = [item.path for item in evidence.artifacts if item.path.name == name]
    document = json.loads((next(output.glob("*.partial")) / path).read_text())
    kind = name.removesuffix(".json").rstrip("2")
    jsonschema.validate(document, schemas()[f"loose-evidence.{kind}.1"])
    return document


@contextmanager
def pool(output, *, patience=60.0, **more):
    """Give a pool and its rooms."""
    rooms = Rooms.create(output, "test")
    workers = Pool(rooms, CLOCK, until=CLOCK.now() + patience, **more)
    try:
        yield workers, rooms
    finally:
        workers.close()


def run_steps(output, *steps, **more):
    """Run steps in a pool; return the evidence."""
    with pool(output, **more) as (workers, _):
        workers.submit(steps, phase=Phase.ONSET)
        return workers.wait(steps)


def program(path, script):
    """Write an executable shell script that plays a tool."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def read(outcome, *parts):
    """Return a file of a capture's work directory."""
    return Path(outcome.work, *parts).read_text(encoding="utf-8")
