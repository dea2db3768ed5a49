"""All the evidence of one incident, parsed: what rules and renderers read.

One parser (``hangwatch.core.loose``) makes a dossier out of a bundle, of a folder of *loose
evidence v1*, or of a single log. A field that is empty or ``None`` was not collected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hangwatch.model.capture import Evidence
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Transition
from hangwatch.model.observation import RecordStall
from hangwatch.model.policy import Policy
from hangwatch.model.recording import Change
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import Confidence, StopWindow, Verdict
from hangwatch.model.vitals import Health


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """The place that a sentence rests on.

    Attributes:
        path: File, relative to the bundle.
        line: Line in it, from 1, or ``None`` for the whole file.
        text: What stands there, redacted, cut to 200 characters.
    """

    path: str
    line: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a stack.

    Attributes:
        function: Name as the tool gave it: qualified (``Queue.get``) or plain (``get``).
        file: File name as the tool gave it.
        line: Line, 0 where unknown.
        module: Library of a native frame, or ``""``.
    """

    function: str
    file: str = ""
    line: int = 0
    module: str = ""

    @property
    def name(self) -> str:
        """The last dotted part: equal for qualified and plain names."""
        return self.function.rsplit(".", 1)[-1]

    @property
    def short_file(self) -> str:
        """The path from the package on: ``lmdeploy/serve/openai/api_server.py``."""
        for mark in ("/site-packages/", "/dist-packages/"):
            if mark in self.file:
                return self.file.split(mark, 1)[1]
        parts = self.file.split("/")
        for i, part in enumerate(parts):
            if part.startswith("python3."):
                return "/".join(parts[i + 1 :]) or self.file
        return "/".join(parts[-2:]) if len(parts) > 2 else self.file

    def __str__(self) -> str:
        return f"{self.function} ({self.short_file}:{self.line or '?'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One thread of one process in one sample.

    Attributes:
        pid: Process.
        tid: Kernel thread id, or ``None``.
        name: Thread name by Python, or ``""``.
        sample: 1 or 2.
        frames: Innermost first.
        active: Whether the tool saw it on CPU.
        owns_gil: Whether it held the GIL.
        citation: Where it stands.
    """

    pid: int
    sample: int
    frames: tuple[Frame, ...]
    tid: int | None = None
    name: str = ""
    active: bool = False
    owns_gil: bool = False
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadMotion:
    """One thread over both samples.

    Attributes:
        pid: Process.
        tid: Kernel thread id, or ``None``.
        name: Thread name.
        frames: Of the last sample, innermost first.
        moved: Whether the frames differ between samples; ``None`` with one sample.
        idle: Whether it sits in a wait where idle engines sit too.
        rested: Whether it did so in any sample: a loop that gets back to its wait is not blocked.
        active: On CPU in any sample.
        owns_gil: Held the GIL in any sample.
        citation: Where it stands.
    """

    pid: int
    frames: tuple[Frame, ...]
    tid: int | None = None
    name: str = ""
    moved: bool | None = None
    idle: bool = False
    rested: bool = False
    active: bool = False
    owns_gil: bool = False
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """What the innermost await of a task is about.

    Attributes:
        kind: Class of it: ``lock``, ``event``, ``queue``, ``future``, ``sleep`` …
        detail: What is known of it, for people: ``Queue.get: 0 of 10 items, 3 getters``.
        object: Address of the awaited object in its process, or ``None``.
        tasks: Ids of the tasks that it waits for, the holders of a lock among them.
        due_in: Seconds until a sleep ends, negative if overdue; ``None`` for what is no sleep.
    """

    kind: str = ""
    detail: str = ""
    object: int | None = None
    tasks: tuple[int, ...] = ()
    due_in: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """One asyncio task of one process in one sample.

    Attributes:
        pid: Process.
        sample: 1 or 2.
        id: Its address in the process.
        name: Its name there.
        state: ``pending``, ``running``, ``done`` or ``cancelled``.
        chain: Its await chain, outermost coroutine first.
        awaits: What the innermost await is about.
        loop: Id of its event loop, 0 where unknown.
        waiter: Address of the future that will wake it, or ``None``.
        torn: How it changed while it was read; ``""`` if it did not.
        citation: Where it stands.
    """

    pid: int
    sample: int
    id: int
    name: str
    state: str
    chain: tuple[Frame, ...]
    awaits: Awaited = Awaited()
    loop: int = 0
    waiter: int | None = None
    torn: str = ""
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMotion:
    """One task over both samples; as of the last one.

    Attributes:
        pid: Process.
        id: Its address in the process.
        name: Its name there.
        state: ``pending``, ``running``, ``done`` or ``cancelled``.
        chain: Its await chain, outermost coroutine first.
        awaits: What the innermost await is about.
        loop: Id of its event loop, 0 where unknown.
        moved: Whether it is elsewhere than before, or new; ``None`` if its process was read once.
        deadlocked: Whether it is part of a cycle of tasks that wait for each other.
        citation: Where it stands.
    """

    pid: int
    id: int
    name: str
    state: str
    chain: tuple[Frame, ...]
    awaits: Awaited = Awaited()
    loop: int = 0
    moved: bool | None = None
    deadlocked: bool = False
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    """What the engine's profile asked to be read off one kind of suspended coroutine.

    Attributes:
        name: Of the table: ``scheduler``, ``sequence``.
        rows: Name to number, truth or word of an enumeration; one row an object.
        left_out: Rows that were not read.
        citation: Where it stands.
    """

    name: str
    rows: tuple[Mapping[str, Any], ...]
    left_out: int = 0
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReading:
    """What one reading of a process says beside its tasks.

    Attributes:
        pid: Process.
        sample: 1 or 2.
        python: The version of its interpreter; empty if unknown.
        threads: By id of an event loop, the kernel id of the thread that runs it.
        cycles: Deadlocks: ids of tasks, each waiting for the next, the last for the first.
        numbers: What the engine's own numbers were.
        actors: Ids of the Ray actors that live in the process.
        problems: What could not be read, one sentence each.
        citation: The file.
    """

    pid: int
    sample: int
    python: str = ""
    threads: Mapping[int, int] = field(default_factory=dict)
    cycles: tuple[tuple[int, ...], ...] = ()
    numbers: tuple[EngineNumbers, ...] = ()
    actors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process as ``procs.json`` has it; ``extra`` keeps the keys we do not know.

    Attributes:
        pid: Number.
        ppid: Parent.
        role: Word of the collector.
        state: Letter of ``/proc/PID/stat``; ``""`` unknown.
        rank: Rank or engine number.
        gpu: GPU index.
        title: Title or command line.
        comm: Kernel name.
        wchan: Kernel function it sleeps in.
        cpu_pct: Share of one core, percent.
        vol_ctxt_per_s: Voluntary context switches a second.
        tracer_pid: Who traces it; 0 for nobody.
        citation: Where it stands.
        extra: Every other key.
    """

    pid: int
    ppid: int | None = None
    role: str = ""
    state: str = ""
    rank: int | None = None
    gpu: int | None = None
    title: str = ""
    comm: str = ""
    wchan: str = ""
    cpu_pct: float | None = None
    vol_ctxt_per_s: float | None = None
    tracer_pid: int | None = None
    citation: Citation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStop:
    """When the pattern changed in which a process runs, by the black box.

    Attributes:
        pid: Process.
        change: Whether it fell quiet, spins, ended, or did none of these.
        role: Word of the collector, or ``""``.
        instance: Name of the instance that it works for; ``""`` for none or several.
        earliest: The change came no earlier; ``None`` where there is none.
        latest: It came no later.
        citation: Where it stands.
    """

    pid: int
    change: Change
    role: str = ""
    instance: str = ""
    earliest: Instant | None = None
    latest: Instant | None = None
    citation: Citation | None = None

    @property
    def window(self) -> tuple[Instant, Instant] | None:
        """Between which instants the change came, ``None`` where there is none."""
        if self.earliest is None or self.latest is None:
            return None
        return self.earliest, self.latest


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One GPU in one sample; units in the names.

    Attributes:
        index: Number on the node.
        name: Model.
        sample: 1 or 2.
        utilization_pct: Share of the last second with a kernel running.
        memory_activity_pct: Share of the last second with memory traffic.
        memory_used_mib: Memory in use.
        memory_total_mib: Memory there is.
        power_w: Draw.
        power_limit_w: Limit.
        sm_clock_mhz: Clock.
        ecc_uncorrected: Uncorrected errors since the driver was loaded.
        citation: Where it stands.
    """

    index: int
    name: str = ""
    sample: int = 1
    utilization_pct: float | None = None
    memory_activity_pct: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    ecc_uncorrected: int | None = None
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRecord:
    """One answer of a health endpoint.

    Attributes:
        health: The answer.
        pid: Server process, if known.
        sample: 1 or 2.
        url: Where it was asked.
        citation: Where it stands.
    """

    health: Health
    pid: int | None = None
    sample: int = 1
    url: str = ""
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """One Prometheus sample: ``name{labels} value``."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    sample: int = 1
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """One instance over the whole evidence.

    Attributes:
        instance: Whose.
        verdict: As of the evaluation time.
        last_beat: Its last beat.
        window: When its progress stopped, or ``None``.
        beats: Its last beats, oldest first, at most 360.
        citation: Its last beat's line.
    """

    instance: InstanceKey
    verdict: Verdict
    last_beat: Heartbeat | None = None
    window: StopWindow | None = None
    beats: tuple[Heartbeat, ...] = ()
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AftermathRecord:
    """What a look after the bundle was written says.

    Attributes:
        number: Of the look, from 1.
        outcome: ``still_frozen``, ``recovered``, ``ended`` or ``mixed``.
        sentence: The same for people.
        last: Whether the incident was over.
        citation: Where it stands, beside the bundle.
    """

    number: int
    outcome: str
    sentence: str
    last: bool = False
    citation: Citation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dossier:
    """All the evidence of one incident, redacted and parsed.

    Attributes:
        origin: What was read: a bundle's name or a folder.
        now: Evaluation time.
        epoch: Maps every instant in this dossier to wall time.
        instances: Every engine seen, those that stopped first.
        verdict: The strongest, with the log path's own (``log_stalled``) taken in.
        window: When the first of them stopped.
        transitions: How the verdicts changed over the evidence.
        stalls: Stalls that ended by themselves.
        stacks: Every thread in every sample.
        threads: Every thread over both samples.
        tasks: Every asyncio task over both samples.
        task_readings: What was read beside them, every sample.
        processes: As of the last sample.
        stops: When each of them changed its pattern, those that did so first before the others.
        gpus: Every row of every sample.
        gpu_problem: What the GPU tool said instead.
        health: Every answer.
        metrics: Every sample.
        kernel_log: Lines of the kernel log, with citations.
        producer: Lines in which a job says that it cannot bring work: retries, time-outs.
        aftermaths: What later looks say (bundles only).
        files: What else was collected: path to size in bytes.
        evidence: What each step left (bundles only).
        manifest: The manifest as data (bundles only).
        policy: The limits that were used.
        settings: Resolved settings with their origins (bundles only).
        profile: Name of the engine profile.
        extra: Side facts by file name: ``fs.json``, ``topology.json``, ``events.json``.
        problems: What could not be read, one sentence each, naming the file.
        notes: What had to be assumed: clock steps, lines without a stamp.
    """

    origin: str
    now: datetime
    epoch: Epoch
    instances: tuple[InstanceRecord, ...]
    verdict: Verdict
    window: StopWindow | None = None
    transitions: tuple[Transition, ...] = ()
    stalls: tuple[RecordStall, ...] = ()
    stacks: tuple[ThreadStack, ...] = ()
    threads: tuple[ThreadMotion, ...] = ()
    tasks: tuple[TaskMotion, ...] = ()
    task_readings: tuple[TaskReading, ...] = ()
    processes: tuple[ProcessRecord, ...] = ()
    stops: tuple[ProcessStop, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    gpu_problem: str = ""
    health: tuple[HealthRecord, ...] = ()
    metrics: tuple[MetricSample, ...] = ()
    kernel_log: tuple[Citation, ...] = ()
    producer: tuple[Citation, ...] = ()
    aftermaths: tuple[AftermathRecord, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    settings: Mapping[str, Any] = field(default_factory=dict)
    profile: str = "lmdeploy"
    extra: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The process, thread and frame to look at first; any may be unknown."""

    pid: int | None = None
    rank: int | None = None
    thread: str | None = None
    frame: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One explanation, with what it rests on.

    Attributes:
        rule: Name of the rule.
        sentence: What it says, one sentence.
        confidence: How sure.
        citations: The lines it rests on.
        cause: Slug it argues for, or ``""`` for a remark.
        verdict: Verdict it argues for (its word in JSON), or ``""``.
        culprit: Whom it accuses, or ``None``.
        next_step: What would confirm or refute it.
        pro: For a rival explanation: the fact for it.
        con: For a rival explanation: the fact against it.
    """

    rule: str
    sentence: str
    confidence: Confidence
    citations: tuple[Citation, ...] = ()
    cause: str = ""
    verdict: str = ""
    culprit: Culprit | None = None
    next_step: str = ""
    pro: str = ""
    con: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One explanation a file.

    Attributes:
        name: Unique, kebab-case.
        title: What it recognises, for ``hangwatch list``.
        examine: A pure function; an exception in it costs only its own findings.
    """

    name: str
    title: str
    examine: Callable[[Dossier], tuple[Finding, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What all rules make of a dossier.

    Attributes:
        dossier: It.
        verdict: Word of the verdict, as corrected by findings.
        cause: Slug of the cause.
        confidence: How sure.
        culprit: Whom to look at first.
        findings: Most certain first.
        problems: Rules that failed, one sentence each.
    """

    dossier: Dossier
    verdict: str
    cause: str
    confidence: Confidence
    culprit: Culprit
    findings: tuple[Finding, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """One form of report a file.

    Attributes:
        name: What ``report --format`` takes.
        title: For ``hangwatch list``.
        suffix: Of a file that holds it: ``.md``.
        render: A pure function; opens no file, not even a source file.
    """

    name: str
    title: str
    suffix: str
    render: Callable[[Diagnosis], str]
