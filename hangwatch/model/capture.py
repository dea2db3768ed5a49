"""Plans and what they leave: steps, evidence, artifacts, failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.incident import Incident, Transition
from hangwatch.model.observation import GpusSeen, HealthSeen, ProcessesSeen, StacksSeen
from hangwatch.model.policy import Policy
from hangwatch.model.process import Listener
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Epoch, Instant

MAX_MEMORY: Final = 2 << 30
"""Bytes of address space for a step and each tool it starts; py-spy needs a tenth."""


class Scope(StrEnum):
    """What one run of a collector is about."""

    PROCESS = "process"
    ENDPOINT = "endpoint"
    LOG = "log"
    NODE = "node"


class Stage(StrEnum):
    """When a step runs."""

    A = "A"
    """At once, twice where it has two samples."""
    PAUSE = "pause"
    """In what the first sample leaves of the pause before the second; never longer."""
    B = "B"
    """After both samples, behind the gates."""


class Phase(StrEnum):
    """Where evidence stands in the story of an incident."""

    BASELINE = "baseline"
    ONSET = "onset"
    LATER = "later"
    AFTERMATH = "aftermath"


class Gate(StrEnum):
    """A condition that is looked at again right before a step runs."""

    HUNG = "hung"
    """The verdict is ``hung``."""
    NO_D_STATE = "no_d_state"
    """No thread of the target is in D state."""
    NOT_STOPPED = "not_stopped"
    """No thread of the target is in T or t."""
    NO_TRACER = "no_tracer"
    """Nobody traces the target."""


class Means(StrEnum):
    """How a watched process was touched."""

    MEMORY = "memory"
    """Its memory was read while it ran."""
    ATTACH = "attach"
    """A tool attached to it, and stopped it for a moment."""
    ASK = "ask"
    """It was asked for a dump, by a byte in a named pipe that it made for that."""
    SIGCONT = "sigcont"
    """It was sent this signal, because something of ours had left it stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One line of the audit trail.

    Attributes:
        at: When: before it happens.
        process: Who.
        step: Id of the step, or what else did it.
        means: How.
        incident: Id of the incident or run, or ``""``.
    """

    at: Instant
    process: ProcessId
    step: str
    means: Means
    incident: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One process of the capture.

    Attributes:
        process: Its identity; checked again before each read.
        role: What it does.
        title: Its title for people, redacted.
        comm: Name of its main thread by the kernel.
        ppid: Its parent.
        rank: Rank or engine number, if known.
        gpu: Index of the GPU it holds, if known.
        gpus: Numbers of the ``/dev/nvidiaN`` that it has open: CUDA opens those of all GPUs.
        instance: Name of the engine instance it belongs to, if known.
        why: How it was found: ``port 23333 of …``, ``child of 42``, ``same raylet as 42``.
        suspicion: Higher is captured first.
        python: ``False`` for a program that has no Python in it.
        listeners: TCP addresses that it listens on.
        logs: Regular files that it has open for writing.
    """

    process: ProcessId
    role: Role
    title: str = ""
    comm: str = ""
    ppid: int = 0
    rank: int | None = None
    gpu: int | None = None
    gpus: tuple[int, ...] = ()
    instance: str = ""
    why: str = ""
    suspicion: int = 0
    python: bool = True
    listeners: tuple[Listener, ...] = ()
    logs: tuple[str, ...] = ()

    @property
    def folder(self) -> PurePosixPath:
        """Where its evidence lies in a bundle."""
        return PurePosixPath("processes", f"{self.role}-{self.process.pid}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run of one collector.

    Attributes:
        id: Unique in the plan: ``stacks/4242/1``.
        collector: Name of the collector.
        scope: What it is about.
        stage: When it runs.
        sample: 1 for the first sample, 2 for the second.
        rung: Rung of the ladder, 1 for what is gone first.
        target: The process, for ``Scope.PROCESS``.
        targets: The processes, for ``Scope.NODE`` steps that are about all of them at once.
        subject: URL, log path or ``""`` for the other scopes.
        folder: Where its artifacts lie in the bundle.
        timeout: Seconds after which it is killed.
        gates: What must hold right before it.
        attaches: Whether it stops the target with ptrace.
        budget_ms: Milliseconds that it may stand still for that.
        reads_memory: Whether it reads the target's memory.
        asks: Whether it asks the target for a dump, by a named pipe of its own.
        waits: Whether it waits for others rather than computes.
        memory: Bytes of address space that it and each tool it starts may have.
        harms: Whether it runs after all others, because it leaves the target broken.
        options: Further settings of the collector, plain strings.
    """

    id: str
    collector: str
    scope: Scope
    stage: Stage
    sample: int
    rung: int
    folder: PurePosixPath
    timeout: float
    target: Target | None = None
    targets: tuple[Target, ...] = ()
    subject: str = ""
    gates: tuple[Gate, ...] = ()
    attaches: bool = False
    budget_ms: float | None = None
    reads_memory: bool = False
    asks: bool = False
    waits: bool = False
    memory: int = MAX_MEMORY
    harms: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def means(self) -> Means | None:
        """How it touches its target, for the audit trail; ``None`` if it does not."""
        if self.attaches:
            return Means.ATTACH
        if self.asks:
            return Means.ASK
        return Means.MEMORY if self.reads_memory else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """What will be done, in order; what ``--dry-run`` prints.

    Attributes:
        targets: Every process, the most suspicious first.
        steps: In order of volatility; samples 1 and 2 of stage A, then stage B.
        sample_gap: Seconds between the two samples.
        at_once: Steps that compute at the same time; ``None`` where it is not known.
        waiting_at_once: Steps that wait for others at the same time, beside them.
        deadline: Seconds after which whatever arrived is bundled.
        notes: What is left out, and why.
    """

    targets: tuple[Target, ...]
    steps: tuple[Step, ...]
    sample_gap: float
    deadline: float
    at_once: int | None = None
    waiting_at_once: int | None = None
    notes: tuple[str, ...] = ()


class FailureKind(StrEnum):
    """Why a step has less than it should."""

    TARGET_GONE = "target_gone"
    PID_REUSED = "pid_reused"
    NOT_PERMITTED = "not_permitted"
    NOT_PYTHON = "not_python"
    UNKNOWN_LAYOUT = "unknown_layout"
    """It is a Python whose structures are not known here; nothing was guessed."""
    NOT_INSTALLED = "not_installed"
    NOT_AVAILABLE = "not_available"
    """There is nothing of this kind here: no driver, no endpoint."""
    TIMED_OUT = "timed_out"
    OVER_BUDGET = "over_budget"
    """It stopped its target for longer than it may, and was killed."""
    WORKER_DIED = "worker_died"
    TOOL_FAILED = "tool_failed"
    TOO_LARGE = "too_large"
    GATED = "gated"
    """A gate did not hold; the message says which."""
    DEADLINE = "deadline"
    """The capture ended before its turn came."""
    BREAKER_OPEN = "breaker_open"
    """Three failures of this kind in a row; not tried any more."""
    CRASHED = "crashed"
    """A bug of ours; ``message`` has the traceback."""
    WITHHELD = "withheld"
    """It could not be redacted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a step failed.

    Attributes:
        kind: The class of failure.
        message: What happened, one sentence (``CRASHED``: a traceback).
        hint: The next thing to type, or ``""``.
        stand_in: What did the work instead, which is among the artifacts; ``""`` if nothing did.
    """

    kind: FailureKind
    message: str
    hint: str = ""
    stand_in: str = ""


class Settled(StrEnum):
    """How a process is found after something that attached to it ended in an unplanned way."""

    AS_BEFORE = "as_before"
    CONTINUED = "continued"
    """It was left stopped, and was sent SIGCONT."""
    TRACED = "traced"
    """It is still traced, or about to stop."""
    NOT_PERMITTED = "not_permitted"
    """It was left stopped, and we may not send it a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file that a step left.

    Attributes:
        path: Its place in the bundle.
        size: Bytes.
        complete: ``False`` if the step was cut off while it wrote.
    """

    path: PurePosixPath
    size: int
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one step left; exactly one for each planned step, in order, whatever happened.

    Attributes:
        step: Id of the step.
        collector: Name of the collector.
        target: The process, if it is about one.
        sample: 1 or 2.
        phase: Where it stands in the story.
        started_at: When the step began, or ``None`` if it never did.
        elapsed: Seconds it took.
        artifacts: What it left.
        failure: How it failed, or ``None``.
        pause_ms: How long the target stood still for it, where that can happen at all.
        settled: How the target was found after a step that attached to it and failed, or ``None``.
    """

    step: str
    collector: str
    sample: int
    phase: Phase
    target: ProcessId | None = None
    started_at: Instant | None = None
    elapsed: float = 0.0
    artifacts: tuple[Artifact, ...] = ()
    failure: Failure | None = None
    pause_ms: float = 0.0
    settled: Settled | None = None


class CollectorError(Exception):
    """A collector knows why it cannot go on; what it wrote so far is kept."""

    def __init__(
        self, kind: FailureKind, message: str, hint: str = "", *, stand_in: str = ""
    ) -> None:
        super().__init__(message)
        self.failure = Failure(kind=kind, message=message, hint=hint, stand_in=stand_in)


class Sink(Protocol):
    """A file that a step writes, from its head to its end."""

    def write(self, data: bytes, /) -> int:
        """Append *data*; return its length.

        Raises:
            CollectorError: ``TOO_LARGE`` when the step's quota is used up.
        """


class Room(Protocol):
    """Where one step may write."""

    @property
    def note(self) -> Path:
        """Where it is noted what the step attaches to, while it does."""

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Open a new file *name* in the step's room; bounded in size.

        Raises:
            CollectorError: ``TOO_LARGE`` when the step's quota is used up.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""

    def earlier(self, name: str) -> bytes | None:
        """Return what an earlier step left as *name* in this step's folder, or ``None``."""

    def paused(self, milliseconds: float) -> None:
        """Say how long the target stood still for this step, as seen from outside."""


class CaptureKind(StrEnum):
    """Why a capture is made."""

    INCIDENT = "incident"
    NOTICE = "notice"
    """No engine is at fault: what can be had without touching any of them."""
    RUN = "run"
    """Nothing is wrong: a record of a healthy process or fleet."""
    BASELINE = "baseline"
    """Nothing is wrong: a cheap look every few minutes, for a later one to be compared with."""
    AFTERMATH = "aftermath"
    """What became of the processes of an incident, minutes after its capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """One kind of evidence.

    Attributes:
        name: Unique; the first part of its steps' ids.
        title: What it gets, for ``hangwatch list`` and for the plan.
        scope: What one run is about.
        rung: Rung of the ladder.
        stage: When it runs.
        samples: How many times: 1, or 2 for what is compared.
        timeout: Seconds.
        collect: Reads the target of the step and writes into the room.
        needs: What it takes, for people: ``same pid namespace``.
        python_only: Skipped for targets without Python.
        attaches: Whether it stops the target.
        budget_ms: Milliseconds for which it may, unless its option of that name says otherwise.
        reads_memory: Whether it reads the target's memory.
        asks: Whether it asks the target for a dump, by a named pipe of its own.
        gates: What must hold right before it.
        waits: Whether it waits for others (a server, a driver) rather than computes: such steps
            run beside the others, so that one that answers late delays nothing.
        unhurried: Whether it lets every other step of its stage and sample go first.
        kinds: The only captures that it is for; empty for all that have its rung.
        opt_in: Whether it runs only where somebody asked for it by name.
        roles: The only processes that it is about, by what they do; empty for all. One for a whole
            node runs where there is any of them.
        memory: Bytes of address space that it and each tool it starts may have.
        gpu_only: Skipped for targets that have no GPU open.
        most: The most suspicious so many targets only; 0 for all.
        harms: Whether it runs after all others, because it leaves the target broken.
        options: What can be set of it, each with a line for people.
    """

    name: str
    title: str
    scope: Scope
    rung: int
    stage: Stage
    timeout: float
    collect: Callable[[Step, Room], None]
    samples: int = 1
    needs: str = ""
    python_only: bool = False
    attaches: bool = False
    budget_ms: float | None = None
    reads_memory: bool = False
    asks: bool = False
    gates: tuple[Gate, ...] = ()
    waits: bool = False
    unhurried: bool = False
    kinds: frozenset[CaptureKind] = frozenset()
    opt_in: bool = False
    roles: frozenset[Role] = frozenset()
    memory: int = MAX_MEMORY
    gpu_only: bool = False
    most: int = 0
    harms: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedInstance:
    """An engine instance that the capture is about.

    Attributes:
        instance: Its key; ``instance.name`` names it in targets and reports.
        pid: The process that prints its beats, or ``None`` if unknown.
        stopped: Whether it is a member of the incident.
        url: Base URL at which its server was found to answer, or ``""``.
        profile: Name of its engine's profile, or ``""`` where its title says enough.
        verdict: Word of its verdict when this was asked for, or ``""``.
    """

    instance: InstanceKey
    pid: int | None = None
    stopped: bool = True
    url: str = ""
    profile: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterBundle:
    """The bundle that a later look follows.

    Attributes:
        bundle: Its path.
        number: Of the look, from 1.
        captured_at: When the bundle was written.
        last: Whether the incident is over.
    """

    bundle: str
    number: int
    captured_at: Instant
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """Everything that a capture needs to know; sent to the conductor as it is.

    Attributes:
        id: Unique on this state directory: the incident's id, or one made for a run.
        kind: Why.
        output: Directory that receives the bundle; the work directory lies in it too.
        profile: Name of the engine profile.
        profiles: Engines that may be met; empty for all built-in ones.
        policy: The limits in use.
        epoch: Maps instants to wall time.
        incident: What happened, or ``None``.
        verdict: Word of the verdict at the start.
        instances: The engines, those that stopped first.
        seeds: Processes to start the search from, besides the instances' own.
        logs: Logs that are followed, as named.
        beats: The last beats of every instance, oldest first.
        transitions: How the verdicts changed.
        settings: Resolved settings: name to ``{"value": …, "origin": …}``.
        options: Settings of collectors: name to option to value.
        collect: Names of the collectors, of those that run only by request, that are asked for.
        deadline: Seconds after which whatever arrived is bundled.
        state: State directory, where the pseudonym key lies; ``""`` for one of this capture.
        after: The bundle that this follows; for ``CaptureKind.AFTERMATH``.
        api_key_file: File with API keys of the servers, or ``""``; the keys themselves are read
            where they are sent, and where the bundle is redacted.
    """

    id: str
    kind: CaptureKind
    output: str
    profile: str
    policy: Policy
    epoch: Epoch
    profiles: tuple[EngineProfile, ...] = ()
    incident: Incident | None = None
    verdict: str = ""
    instances: tuple[CapturedInstance, ...] = ()
    seeds: tuple[int, ...] = ()
    logs: tuple[str, ...] = ()
    beats: tuple[Heartbeat, ...] = ()
    transitions: tuple[Transition, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    collect: tuple[str, ...] = ()
    deadline: float = 60.0
    state: str = ""
    api_key_file: str = ""
    after: AfterBundle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a capture has come.

    Attributes:
        part: What is going on: ``looking``, ``first sample``, ``pause``, ``second sample``,
            ``judging``, ``the rest``, ``bundling``.
        done: Steps that left their evidence.
        failed: How many of them have a failure.
        total: Steps planned; 0 before the plan.
        elapsed: Seconds since the capture began.
    """

    part: str
    done: int = 0
    failed: int = 0
    total: int = 0
    elapsed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageA:
    """What stage A says to ``judge``.

    Attributes:
        stacks: Of each instance.
        processes: Of each instance.
        answers: What servers and the GPU driver had answered by then; those that keep us waiting
            are not waited for.
    """

    stacks: tuple[StacksSeen, ...] = ()
    processes: tuple[ProcessesSeen, ...] = ()
    answers: tuple[HealthSeen | GpusSeen, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOutcome:
    """What a capture left, before it is bundled.

    Attributes:
        work: Work directory; its name ends in ``.partial``. Files lie in it as in the bundle,
            not redacted. Whoever gets the outcome removes it.
        plan: What was planned.
        evidence: One for each step of the plan, in its order.
        stage_a: What the two samples amounted to.
        verdict: Word of the verdict after stage A.
        started_at: When the capture was asked for.
        first_evidence_at: When the first step left something; ``None`` if none did.
        touches: The audit trail.
        ended_at: When the last step ended.
        stopped: Whether it was ended early, by request.
        abandoned: Workers that did not end even when killed.
    """

    work: str
    plan: CapturePlan
    evidence: tuple[Evidence, ...]
    started_at: Instant
    ended_at: Instant
    stage_a: StageA = StageA()
    verdict: str = ""
    first_evidence_at: Instant | None = None
    touches: tuple[Touch, ...] = ()
    stopped: bool = False
    abandoned: int = 0

    @property
    def targets(self) -> tuple[Target, ...]:
        """Every process, the most suspicious first."""
        return self.plan.targets
