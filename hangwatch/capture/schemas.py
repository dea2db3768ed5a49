"""The contracts as JSON Schemas, from the types that describe them.

``python -m hangwatch.capture.schemas`` writes them into ``hangwatch/schemas/``. Every document
may have more keys than its schema names, and a key of *loose evidence* that is missing means *not
collected*.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, RootModel

from hangwatch.capture.manifest import Manifest

Word = Literal[
    "ok", "loading", "idle", "paused", "slow", "log_stalled", "suspected_hang", "blocked", "hung",
    "dead", "gone", "blind",
]  # fmt: skip
Sure = Literal["low", "medium", "high"]
Window = tuple[AwareDatetime, AwareDatetime]


class _Document(BaseModel):
    model_config = ConfigDict(extra="allow")


class Judged(_Document):
    """What every verdict carries."""

    verdict: Word
    cause: str
    confidence: Sure
    since: AwareDatetime
    because: list[str]


class Instance(Judged):
    """One engine."""

    name: str
    pid: int | None
    last_heartbeat: AwareDatetime | None
    window: Window | None


class TransitionRecord(Judged):
    """One verdict changed."""

    at: AwareDatetime
    instance: str
    pid: int | None
    before: Word | None
    after: Word


class IncidentRecord(Judged):
    """Instances that stopped together."""

    id: str
    detected_at: AwareDatetime
    closed_at: AwareDatetime | None
    window: Window | None
    watched: int
    confirmed: bool
    instances: list[str]


class Stall(_Document):
    """A stall that ended by itself."""

    instance: str
    since: AwareDatetime
    seconds: float


class CulpritRecord(_Document):
    """Whom to look at first; what is not known is null."""

    pid: int | None
    rank: int | None
    thread: str | None
    frame: str | None


class CitationRecord(_Document):
    """A place in the evidence."""

    path: str
    line: int | None
    text: str


class FindingRecord(_Document):
    """One explanation, rival (with ``pro`` and ``con``) or remark."""

    rule: str
    sentence: str
    confidence: Sure
    citations: list[CitationRecord]
    cause: str | None
    verdict: Word | None
    next_step: str | None
    pro: str = ""
    con: str = ""


class Diagnose(Judged):
    """``hangwatch diagnose --json`` and ``hangwatch report --format json``."""

    schema_: Literal["hangwatch.diagnose/1"] = Field(alias="schema")
    origin: str
    now: AwareDatetime
    headline: str
    window: Window | None
    instances: list[Instance]
    culprit: CulpritRecord
    findings: list[FindingRecord]
    stalls: list[Stall]
    notes: list[str]
    problems: list[str]


class Replay(Judged):
    """``hangwatch replay --json``."""

    schema_: Literal["hangwatch.replay/1"] = Field(alias="schema")
    until: AwareDatetime
    window: Window | None
    heartbeats: int
    instances: list[Instance]
    transitions: list[TransitionRecord]
    incidents: list[IncidentRecord]
    stalls: list[Stall]
    notes: list[str]
    problems: list[str]


class TuneSetting(_Document):
    """What one limit would have done."""

    stall_after_s: float
    false_alarms: int
    stops_found: int
    stops_missed: int


class TuneSilence(Stall):
    """Time without progress with work."""

    ended: bool


class Tune(_Document):
    """``hangwatch replay --tune --json``."""

    schema_: Literal["hangwatch.tune/1"] = Field(alias="schema")
    heartbeats: int
    instances: int
    engine_hours: float
    gaps: int
    enough: bool
    settings: list[TuneSetting]
    silences: list[TuneSilence]
    present_s: float
    calibrated_s: float
    recommended_s: float
    reason: str


class Attach(_Document):
    """``hangwatch attach --now --json``."""

    schema_: Literal["hangwatch.attach/1"] = Field(alias="schema")
    bundle: str
    verdict: Word
    processes: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    elapsed_s: float
    pause_ms: dict[str, float]


class Snapshot(_Document):
    """``hangwatch snapshot --json``."""

    schema_: Literal["hangwatch.snapshot/1"] = Field(alias="schema")
    bundle: str
    verdict: Word
    processes: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    elapsed_s: float
    pause_ms: dict[str, float]


class _Event(_Document):
    schema_: Literal["hangwatch.watch/1"] = Field(alias="schema")
    at: AwareDatetime = Field(description="When it was told.")


class Watching(_Event):
    """It begins, or found a Ray session."""

    event: Literal["watching"]
    logs: list[str]
    ray: bool


class KinProcess(_Document):
    """One process of what a named pid belongs to."""

    pid: int
    role: str
    comm: str
    why: str
    addresses: list[str]


class KinFound(_Event):
    """What a named pid belongs to."""

    event: Literal["kin"]
    pid: int
    servers: list[int]
    logs: list[str]
    processes: list[KinProcess]


class VerdictChanged(_Event):
    """One instance's verdict changed; a log that stands still is an instance by its own name."""

    event: Literal["transition"]
    instance: str
    tag: str = Field(description="The engine's own label, which tells ranks of one process apart.")
    pid: int | None
    before: Word | None
    after: Word
    cause: str
    confidence: Sure
    since: AwareDatetime
    because: list[str]


class IncidentTold(_Event):
    """An incident began, or changed while it was captured."""

    event: Literal["incident", "joined"]
    incident: str
    verdict: Word
    cause: str
    instances: list[str]
    watched: int
    window: Window | None


class CaptureProgress(_Event):
    """A capture came further."""

    event: Literal["capture"]
    incident: str
    part: str
    done: int
    failed: int
    total: int = Field(description="0 before the plan.")
    elapsed_s: float


class BundleWritten(_Event):
    """A bundle is safe on disk."""

    event: Literal["bundle"]
    incident: str
    bundle: str
    verdict: str
    cause: str
    summary: dict[str, Any]


class AftermathTold(_Event):
    """Somebody looked again at what a bundle is about."""

    event: Literal["aftermath"]
    incident: str
    bundle: str
    aftermath: str = Field(description="Path of the file, beside the bundle.")
    outcome: Literal["still_frozen", "recovered", "ended", "mixed"]
    sentence: str


class CaptureFailed(_Event):
    """There will be no bundle."""

    event: Literal["capture_failed"]
    incident: str
    error: str
    hint: str


class WithheldMember(_Document):
    """One instance of an incident."""

    instance: str
    pid: int | None
    verdict: Word
    cause: str


class CaptureWithheld(_Event):
    """What would have been captured, were it not only observed; a line of ``shadow.jsonl``."""

    event: Literal["withheld"]
    incident: str
    verdict: Word
    cause: str
    confidence: Sure
    since: AwareDatetime
    because: list[str]
    instances: list[WithheldMember]
    watched: int
    window: Window | None
    notice: bool
    processes: list[int] = Field(description="What is known to belong to them.")


class Listening(_Event):
    """Our own endpoint listens."""

    event: Literal["listening"]
    url: str


class IncidentClosed(_Event):
    """Every instance of an incident recovered or went."""

    event: Literal["closed"]
    incident: str
    verdict: Word


class StallEnded(_Event):
    """A silence ended before it became an incident."""

    event: Literal["stall"]
    instance: str
    since: AwareDatetime
    seconds: float


class LeaseTaken(_Event):
    """A pause was announced, or one that was announced before was renewed."""

    event: Literal["lease_taken"]
    lease: str
    until: AwareDatetime
    reason: str
    holder: str
    seconds: float
    capped: bool = Field(description="Whether more was asked for than is granted.")


class LeaseOver(_Event):
    """An announced pause was given back, or its time was over."""

    event: Literal["lease_returned", "lease_ended"]
    lease: str
    until: AwareDatetime
    reason: str
    holder: str


class Stopping(_Event):
    """It was told to end."""

    event: Literal["stopping"]


class Recording(_Event):
    """A bundle of the run is being written before it ends."""

    event: Literal["recording"]
    seconds: float = Field(description="How long that may take at most.")


class Missing(_Event):
    """Nobody read the lines in time."""

    event: Literal["missing"]
    events: int


class WatchEvent(
    RootModel[
        Annotated[
            Watching
            | KinFound
            | VerdictChanged
            | IncidentTold
            | CaptureProgress
            | BundleWritten
            | AftermathTold
            | CaptureFailed
            | CaptureWithheld
            | Listening
            | IncidentClosed
            | StallEnded
            | LeaseTaken
            | LeaseOver
            | Stopping
            | Recording
            | Missing,
            Field(discriminator="event"),
        ]
    ]
):
    """One line of ``hangwatch watch --json`` and ``hangwatch attach --json``."""


class Incident(_Document):
    """``incident.json`` of a bundle."""

    schema_: Literal["hangwatch.incident/1"] = Field(alias="schema")
    id: str
    kind: Literal["incident", "run"]
    profile: str
    headline: str
    verdict: Word
    cause: str
    confidence: Sure
    since: AwareDatetime
    window: Window | None
    instances: list[Instance]
    judgement: dict[str, Any]


class LooseFrame(_Document):
    """One frame, as ``py-spy dump --json`` writes it."""

    name: str
    filename: str = ""
    line: int = 0
    module: str | None = None


class LooseThread(_Document):
    """One thread, as ``py-spy dump --json`` writes it; innermost frame first."""

    pid: int | None = None
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[LooseFrame]


class LooseThreads(RootModel[list[LooseThread]]):
    """``threads.json``, and ``threads2.json`` for the second sample."""


class LooseTaskFrame(_Document):
    """One frame of an await chain."""

    function: str
    file: str = ""
    line: int | None = None


class LooseTaskReference(_Document):
    """Another task of the same process."""

    id: int


class LooseAwaits(_Document):
    """What the innermost await of a task is about."""

    kind: str = ""
    detail: str = ""
    tasks: list[LooseTaskReference] = Field([], description="Those that it waits for.")
    object: int | None = None
    due_in_s: float | None = None


class LooseTask(_Document):
    """One asyncio task."""

    id: int
    name: str
    state: Literal["pending", "running", "done", "cancelled"]
    loop: int = 0
    chain: list[LooseTaskFrame] = Field(description="Outermost coroutine first.")
    awaits: LooseAwaits
    waiter: int | None = None
    torn: str | None = None


class LooseLoop(_Document):
    """One event loop."""

    id: int
    thread_id: int | None = Field(None, description="Kernel id of the thread that runs it.")


class LooseTasks(_Document):
    """``tasks.json``, and ``tasks2.json``: ``hangwatch.tasks/1``, of which this much is read."""

    pid: int | None = None
    loops: list[LooseLoop] = []
    tasks: list[LooseTask]
    cycle_ids: list[list[int]] = Field([], description="Deadlocks, as ids in waiting order.")


class LooseThreadWait(_Document):
    """The lock that a thread waits for."""

    type: str = Field(description="GIL, Lock or RLock.")
    object: int
    owner_ident: int | None = Field(None, description="Thread that holds it, by thread_ident.")


class LooseStackThread(_Document):
    """One thread, as our reader sees it."""

    thread_id: int = Field(description="Of the kernel.")
    thread_ident: int = Field(description="Of Python.")
    name: str = ""
    interpreter: int = 0
    loop: int | None = Field(None, description="The event loop that it runs.")
    frames: list[int] = Field(description="Places in the list of frames, innermost first.")
    torn: str | None = Field(None, description="Why its stack is not certain.")
    holds_gil: bool = False
    waits: LooseThreadWait | None = None


class LooseStacks(_Document):
    """``stacks.json``, and ``stacks2.json``: ``hangwatch.stacks/1``."""

    pid: int
    python: str = ""
    frames: list[LooseTaskFrame] = Field(description="Each frame once.")
    threads: list[LooseStackThread]


class LooseProcess(_Document):
    """One process."""

    pid: int
    ppid: int | None = None
    role: str = ""
    state: str = Field("", description="Letter of /proc/PID/stat, or gone.")
    rank: int | None = None
    gpu: int | None = None
    title: str = ""
    comm: str = ""
    wchan: str = ""
    cpu_pct: float | None = Field(None, description="Share of one core, percent.")
    vol_ctxt_per_s: float | None = Field(
        None, description="Voluntary context switches a second; ours count all its threads."
    )
    switches_per_s: float | None = Field(
        None, description="Voluntary context switches a second, of all its threads together."
    )
    busiest_cpu_pct: float | None = Field(
        None, description="Share of one core of its busiest thread, percent."
    )
    read_bytes_per_s: float | None = Field(
        None, description="Bytes a second that it reads from storage."
    )
    stdout_pipe: bool | None = Field(None, description="Whether its standard output is a pipe.")
    unsent_bytes: int | None = Field(
        None, description="Bytes that it wrote into connections and that nobody takes."
    )
    tracer_pid: int | None = None
    actor_id: str = Field("", description="Of the Ray actor that lives in it.")


class LooseProcesses(RootModel[list[LooseProcess]]):
    """``procs.json``, and ``procs2.json`` for the second sample."""


class AftermathInstance(Judged):
    """What became of one engine."""

    name: str
    pid: int | None
    outcome: Literal["still_frozen", "recovered", "ended"]


class EndedProcess(_Document):
    """What is known of the end of one process."""

    pid: int
    role: str | None
    instance: str | None
    reaped: bool = Field(description="Whether its exit code is gone with it.")
    by: str = Field(description="What killed it; empty where nothing says.")
    kernel: list[str] = Field(description="Lines of the kernel log that name it.")
    parent: dict[str, Any] | None


class AftermathSaid(_Document):
    """``aftermath.json``, beside a bundle."""

    schema_: Literal["hangwatch.aftermath/1"] = Field(alias="schema")
    incident: str
    number: int
    last: bool = Field(description="Whether the incident was over.")
    at: AwareDatetime
    after_s: float = Field(description="Seconds since the bundle was written.")
    outcome: Literal["still_frozen", "recovered", "ended", "mixed"]
    sentence: str
    instances: list[AftermathInstance]
    ended: list[EndedProcess]


class LooseStop(_Document):
    """When the pattern changed in which one process runs."""

    pid: int
    start_ticks: int | None = None
    role: str = ""
    instance: str = Field("", description="Name of the instance that it works for.")
    change: Literal["quiet", "spinning", "ended", "unchanged", "inactive", "unknown"]
    earliest: AwareDatetime | None = Field(None, description="The change came no earlier.")
    latest: AwareDatetime | None = Field(None, description="The change came no later.")
    tid: int | None = Field(None, description="The thread that this is about.")
    name: str = Field("", description="Its name by the kernel.")
    slices_per_s: float | None = Field(
        None, description="How often it was put on a CPU before, a second."
    )
    slices_per_s_after: float | None = None
    cpu_pct: float | None = Field(None, description="Share of a core before, percent.")
    cpu_pct_after: float | None = None


class LooseStops(RootModel[list[LooseStop]]):
    """``stops.json``: what the black box says of each process."""


class LooseHealth(_Document):
    """``health.json``: one answer of a health endpoint, or why there was none."""

    http: int | None = Field(None, description="Status code; null if there was no answer.")
    status: str = ""
    message: str = ""
    error: str = ""
    pid: int | None = None
    url: str = ""


class LooseMetrics(RootModel[Annotated[list[str], Field(description="Lines of Prometheus text.")]]):
    """``metrics.prom`` where it is a JSON list; Prometheus text is as good."""


class LooseCall(_Document):
    """A system call that a thread is in."""

    name: str = Field(description="page_fault for a sleep in the kernel without a call.")
    fds: list[int] = Field([], description="Descriptors that it is about.")
    on: list[str] = Field([], description="What those lead to.")
    timeout_ms: int | None = Field(
        None, description="null waits for ever; missing is not known, or no wait."
    )
    operation: str = ""
    address: str = Field("", description="Of a futex.")
    shared: bool | None = Field(None, description="Whether other processes may use that futex.")


class LooseKernelThread(_Document):
    """What the kernel says of one thread; counters count since it began."""

    tid: int
    comm: str = ""
    state: str = ""
    cpu_seconds: float | None = None
    run_ns: int | None = None
    wait_ns: int | None = None
    slices: int | None = None
    vol_ctxt: int | None = None
    invol_ctxt: int | None = None
    wchan: str = ""
    syscall: str = Field("", description="As the kernel writes it.")
    call: LooseCall | None = Field(None, description="The same, decoded.")
    grew: dict[str, int] = Field({}, description="Growth since the first sample.")
    pace: Literal["frozen", "ticking", "busy", "spinning", "blocked", "stopped"] | None = None


class LooseKernel(_Document):
    """``kernel.json``, and ``kernel2.json`` for the second sample."""

    schema_: Literal["hangwatch.kernel/1"] = Field(alias="schema")
    pid: int
    threads: list[LooseKernelThread]
    paces: dict[str, int] = Field({}, description="How many threads did what.")
    ended: list[int] = Field([], description="Threads of the first sample that are gone.")
    missing: list[str] = Field([], description="What may not be read, and what to do about it.")


class LooseDescriptor(_Document):
    """One descriptor."""

    fd: int
    kind: str = Field(description="pipe, socket, file, device, eventfd, eventpoll, …")
    link: str
    mode: str = Field("", description="r, w or rw.")
    flags: list[str] = []
    position: int | None = None
    deleted: bool = False
    locks: list[str] = Field([], description="As /proc/locks has them.")


class LooseDescriptors(_Document):
    """``fds.json``."""

    schema_: Literal["hangwatch.fds/1"] = Field(alias="schema")
    pid: int
    kinds: dict[str, int]
    more: bool = Field(description="Whether there are more than are listed.")
    fds: list[LooseDescriptor]


class LooseHolder(_Document):
    """A descriptor of a process."""

    pid: int
    fd: int


class LooseEnd(_Document):
    """One end of a connection."""

    holders: list[LooseHolder]
    inode: int | None = Field(None, description="Missing for an end on another machine.")
    mode: str = Field("", description="w or r: which side of a pipe.")
    address: str = ""
    unread: int | None = Field(None, description="Bytes that came and were not read.")
    unsent: int | None = Field(None, description="Bytes that the other end has not taken.")
    room: int | None = Field(None, description="Bytes that may be unsent before it blocks.")
    callers: int | None = Field(None, description="Of a listener: who was not accepted yet.")


class LooseConnection(_Document):
    """A pipe, a socket with its other end, or a listener."""

    kind: Literal["pipe", "unix", "tcp"]
    state: str = Field("", description="Of TCP; full or empty for a pipe that a thread waits at.")
    ends: list[LooseEnd]


class LooseWait(_Document):
    """A thread that waits for somebody to read, write or accept."""

    pid: int
    tid: int
    call: str
    fd: int
    kind: str
    inode: int
    for_: list[LooseHolder] = Field(alias="for", description="Who holds the other end.")


class LooseConnections(_Document):
    """``connections.json``, and ``connections2.json`` for the second sample."""

    schema_: Literal["hangwatch.connections/1"] = Field(alias="schema")
    waits: list[LooseWait]
    connections: list[LooseConnection]
    others: dict[str, str] = Field(description="Names of holders that were not captured.")
    searched_all: bool
    not_readable: list[int]


class LooseLockWaiter(LooseHolder):
    """A thread that waits for a lock."""

    tid: int
    operation: str


class LooseLock(_Document):
    """A lock on a file."""

    kind: str = Field(description="flock, posix, ofd, …")
    mode: str = ""
    path: str = ""
    device: str = ""
    inode: int
    span: list[int | None] = Field([], description="First and last byte; null is the end.")
    taken_by: dict[str, Any] = Field({}, description="pid, alive, comm.")
    holders: list[LooseHolder] = Field(description="Who has the locked file open.")
    waiters: list[LooseLockWaiter]


class LooseLocks(_Document):
    """``locks.json``."""

    schema_: Literal["hangwatch.locks/1"] = Field(alias="schema")
    locks: list[LooseLock]
    searched_all: bool
    not_readable: list[int]


class LooseFutexWaiter(_Document):
    """A thread that waits for a futex."""

    pid: int
    tid: int
    comm: str
    address: str
    operation: str
    limited: bool


class LooseFutexes(_Document):
    """``futexes.json``."""

    class Group(_Document):
        """Threads that wait at one place."""

        shared: bool
        file: dict[str, Any] = Field({}, description="path, device, inode, offset of a shared one.")
        waiters: list[LooseFutexWaiter]

    schema_: Literal["hangwatch.futexes/1"] = Field(alias="schema")
    threads: int = Field(description="How many threads wait for a futex at all.")
    groups: list[Group]
    not_readable: list[int]


class LooseCgroup(_Document):
    """One control group; a limit that is not set is null."""

    path: str
    version: Literal[1, 2]
    controllers: list[str]
    processes: list[int] = Field(description="In it, or in a group below it.")
    memory: dict[str, int | None] = {}
    cpu: dict[str, int | float | str | None] = {}
    io: dict[str, int] = {}
    pids: dict[str, int | None] = {}
    freezer: dict[str, bool] = {}
    pressure: dict[str, Any] = {}


class LooseCgroups(_Document):
    """``cgroups.json``, and ``cgroups2.json`` for the second sample."""

    schema_: Literal["hangwatch.cgroups/1"] = Field(alias="schema")
    machine: dict[str, Any] = Field(description="pressure, oom_kill.")
    unseen: dict[str, str] = Field(description="Processes whose groups cannot be read.")
    groups: list[LooseCgroup]


class LooseMount(_Document):
    """A file system that somebody else answers for."""

    point: str
    kind: str
    device: str
    source: str = ""
    processes: list[int]
    answered: bool | None = Field(description="null: it may not be asked.")
    ms: float | None = None
    after_s: float | None = Field(None, description="How long it was waited for in vain.")
    error: str = ""


class LooseMounts(_Document):
    """``mounts.json``."""

    schema_: Literal["hangwatch.mounts/1"] = Field(alias="schema")
    mounts: list[LooseMount]
    not_asked: int
    probe_ended: bool = Field(description="Whether who asked could be ended.")


class LooseKernelEvents(_Document):
    """``kernel_events.json``: the lines of ``kmsg.txt`` that matter."""

    class Event(_Document):
        """One line."""

        line: int
        kind: str
        at_s: float | None = Field(description="Seconds since the machine started.")
        pid: int | None = Field(description="By the machine's first pid namespace.")
        name: str
        text: str

    schema_: Literal["hangwatch.kernel_events/1"] = Field(alias="schema")
    events: list[Event]


DOCUMENTS: Final[dict[str, type[BaseModel]]] = {
    "hangwatch.diagnose.1": Diagnose,
    "hangwatch.replay.1": Replay,
    "hangwatch.tune.1": Tune,
    "hangwatch.attach.1": Attach,
    "hangwatch.snapshot.1": Snapshot,
    "hangwatch.watch.1": WatchEvent,
    "hangwatch.manifest.1": Manifest,
    "hangwatch.incident.1": Incident,
    "hangwatch.aftermath.1": AftermathSaid,
    "loose-evidence.threads.1": LooseThreads,
    "loose-evidence.tasks.1": LooseTasks,
    "loose-evidence.stacks.1": LooseStacks,
    "loose-evidence.procs.1": LooseProcesses,
    "loose-evidence.stops.1": LooseStops,
    "loose-evidence.health.1": LooseHealth,
    "loose-evidence.metrics.1": LooseMetrics,
    "loose-evidence.kernel.1": LooseKernel,
    "loose-evidence.fds.1": LooseDescriptors,
    "loose-evidence.connections.1": LooseConnections,
    "loose-evidence.locks.1": LooseLocks,
    "loose-evidence.futexes.1": LooseFutexes,
    "loose-evidence.cgroups.1": LooseCgroups,
    "loose-evidence.mounts.1": LooseMounts,
    "loose-evidence.kernel_events.1": LooseKernelEvents,
}


FOLDER: Final = Path(__file__).parents[1] / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by the name of its file, without the suffix."""
    return {
        name: {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **model.model_json_schema(by_alias=True),
        }
        for name, model in DOCUMENTS.items()
    }


def write(folder: Path) -> None:
    """Write every schema into *folder*."""
    for name, schema in schemas().items():
        (folder / f"{name}.schema.json").write_text(
            json.dumps(schema, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    write(FOLDER)
