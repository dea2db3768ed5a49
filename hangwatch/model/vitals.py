"""All that is known of one instance at a moment: what ``judge`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.identity import InstanceKey, Role
from hangwatch.model.lease import Lease
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.time import Instant


class Outcome(StrEnum):
    """How a request to an endpoint ended."""

    ANSWERED = "answered"
    TIMED_OUT = "timed_out"
    """TCP accepted, HTTP did not answer in time."""
    REFUSED = "refused"
    """Nobody listens."""
    FAILED = "failed"
    """Anything else, a connection that was not accepted in time among it; ``message`` says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One answer of a health endpoint, or its absence.

    Attributes:
        at: When the answer, or the time-out, was had.
        outcome: How the request ended.
        http: Status code, if answered.
        status: The engine's own word (``healthy``, ``sleeping`` …), or ``""``.
        message: The engine's own sentence, or the error.
        meaning: What the profile makes of it; ``None`` unless answered.
        since: First of the unbroken run of answers with this meaning and outcome.
        elapsed: Seconds that the request took.
    """

    at: Instant
    outcome: Outcome
    http: int | None = None
    status: str = ""
    message: str = ""
    meaning: HealthMeaning | None = None
    since: Instant | None = None
    elapsed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What ``/metrics`` said of one engine label.

    Attributes:
        at: The last time it answered.
        since: The first time it answered; flatness cannot be older.
        tokens: Sum of this engine's token counters, or ``None`` if not exported.
        tokens_moved_at: The look that last found ``tokens`` grown.
        tokens_moved_after: The look before that one; they grew somewhere in between.
        moving_since: The look before the first of the unbroken run that found them grown, or
            ``None`` if the last look did not.
        running: Requests in the batch.
        waiting: Requests queued, in the engine and in front of it.
        routed: Requests handed to the engine and not finished, by the server's count.
        risen_at: The last look that found requests in flight where the one before it found none.
    """

    at: Instant
    since: Instant
    tokens: float | None = None
    tokens_moved_at: Instant | None = None
    tokens_moved_after: Instant | None = None
    moving_since: Instant | None = None
    running: int | None = None
    waiting: int | None = None
    routed: int | None = None
    risen_at: Instant | None = None

    @property
    def in_flight(self) -> int | None:
        """Requests that were somewhere in the server, or ``None`` where no gauge says."""
        engine = [n for n in (self.running, self.waiting) if n is not None]
        if not engine and self.routed is None:
            return None
        return max(sum(max(n, 0) for n in engine), self.routed or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessVital:
    """One process of an instance.

    Attributes:
        pid: Its number.
        role: What it does.
        state: Letter of ``/proc/PID/stat``; ``""`` if the process is gone.
        since: When this state was first seen.
        at: When it was last looked at.
        tracer_pid: Who traces it, 0 for nobody, ``None`` if not read.
        wchan: Kernel function its main thread sleeps in, or ``""``.
        polled_at: The last look that saw its main thread wait for events, as an idle loop does;
            filled in by ``advance``.
        waits_since: When this ``wchan`` was first seen; filled in by ``advance``.
        cpu_pct: Share of one core since the look before, percent, or ``None``.
        vol_ctxt_per_s: Voluntary context switches a second, or ``None``.
        read_bytes_per_s: Bytes a second that it reads from storage, or ``None``.
        switches_per_s: Voluntary context switches a second of all its threads together, or
            ``None``: threads are only looked at while a beat is missing.
        busiest_cpu_pct: Share of one core of its busiest thread, percent, or ``None``.
        stdout_pipe: Whether its standard output is a pipe, which blocks it when nobody reads.
        unsent_bytes: Bytes that it wrote into connections of its clients and that nobody takes, or
            ``None`` if not looked at.
        context: Context length in tokens that its command line names, or ``None``.
        needed: Whether the instance cannot work without it.
    """

    pid: int
    role: Role
    state: str
    since: Instant
    at: Instant
    tracer_pid: int | None = None
    wchan: str = ""
    cpu_pct: float | None = None
    vol_ctxt_per_s: float | None = None
    polled_at: Instant | None = None
    waits_since: Instant | None = None
    read_bytes_per_s: float | None = None
    switches_per_s: float | None = None
    busiest_cpu_pct: float | None = None
    stdout_pipe: bool = False
    unsent_bytes: int | None = None
    context: int | None = None
    needed: bool = True

    @property
    def ended(self) -> bool:
        """Whether it is gone, or waits to be reaped."""
        return self.state in ("", "Z", "X")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVital:
    """One GPU at one look.

    Attributes:
        index: Its number.
        at: When.
        utilization_pct: Share of the last second in which a kernel ran; a kernel that spins counts.
        memory_activity_pct: Share of the last second in which its memory was read or written.
        power_w: Watts it draws.
        power_limit_w: Watts it may draw.
    """

    index: int
    at: Instant
    utilization_pct: float | None = None
    memory_activity_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class Motion(StrEnum):
    """What two samples of stacks say of an instance."""

    FROZEN = "frozen"
    """No thread outside an idle wait moved, and the loop's thread is in a call."""
    BUSY = "busy"
    """A loop's thread is on CPU, or its frames moved."""
    WAITING = "waiting"
    """Every thread sits where idle engines sit too: says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackVital:
    """What the stacks of stage A said.

    Attributes:
        at: When the second sample was taken.
        motion: What the pair amounts to.
        frame: The innermost telling frame, ``function (file:line)``, or ``""``.
        pid: Process it belongs to.
        thread: Thread it belongs to.
        suspended: The await that stood unmoved in two readings of the tasks while every thread
            waited, and nothing that was awaited could be computed meanwhile; else ``""``.
        stuck: The call that stood unmoved in two samples of the main thread of a process that runs
            no loop; else ``""``. It tells of a start that does not end, and of nothing else.
        planned: What blocks a loop as planned and ends by itself: new weights, compilation; else
            ``""``.
    """

    at: Instant
    motion: Motion
    frame: str = ""
    pid: int | None = None
    thread: str = ""
    suspended: str = ""
    stuck: str = ""
    planned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceVital:
    """One log that carries, or carried, an instance's beats.

    Attributes:
        name: The log.
        last_line_at: Any instance's last beat or line on it: proof that the path lives.
        grew_at: When its size last grew, or ``None`` if unknown.
        unreadable_since: Since when it cannot be read, or ``None``.
        unreadable_reason: Why.
        retired_at: When it ceased to be followed (link moved, file gone for good), or ``None``.
        relayed: Whether beats come here through a driver, which prints lines of its own too.
        merged: Whether de-duplication folds the beats of several engines into one line here.
        in_flight: Requests in flight by the last beat on it, whoever printed that.
    """

    name: str
    last_line_at: Instant | None = None
    grew_at: Instant | None = None
    unreadable_since: Instant | None = None
    unreadable_reason: str = ""
    retired_at: Instant | None = None
    relayed: bool = False
    merged: bool = False
    in_flight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """All that is known of one instance at a moment.

    Attributes:
        instance: Whom it concerns.
        interval: Seconds between its beats while it works.
        says_idle: See ``EngineProfile``.
        step_driven: See ``EngineProfile``.
        polls_gpu: See ``EngineProfile``.
        listening_since: Silence counts from here at the earliest.
        armed_at: First beat that arrived while we listened; silence means nothing before it.
        last: The last beat.
        last_progress: The last beat with tokens.
        recent_tps: Tokens a second of the latest beats with tokens, the last one included.
        median_tps: Their median, the last one left out; ``None`` while there are fewer than
            three.
        pace: Prompt tokens a second, generated tokens a second and requests in flight of the latest
            beats with tokens.
        slow_since: First beat of the unbroken run of those far below the usual pace, or ``None``.
        buffered: Seconds of printed time that the latest beats, arriving together, cover: more
            than an interval if the writer's output is buffered; else 0.
        recent_gaps: Seconds between the latest beats.
        peak_in_tps: Most prompt tokens a second that a beat showed: no prefill is slower for long.
        patience: Seconds of silence that are suspicious, as calibrated; ``None``: see the policy.
        warm: Beats with tokens since it was started, woken or updated: before a few of them,
            compilers and graph captures block its loop.
        started: Last ``starting`` or ``ready`` signal.
        slept: Last ``sleep`` or ``wake`` signal.
        asleep: Parts that were put to sleep and not woken yet.
        updated_at: When weights were last replaced.
        aborted_at: When the requests in flight were last given up on.
        beat_lost: The line that says that the task which prints beats ended.
        unbeaten_at: When tokens, or answers, had come for so long without a beat that the heartbeat
            is lost; ``None`` if they had not.
        completed_at: Last answered request seen in the log.
        completing_since: First request seen answered since the last beat.
        drained: Requests seen answered soon after the last beat, and since it.
        longest_pause: Longest pause that ended by itself, seconds.
        died: The line that says that a needed task or process ended.
        stopped: The line that says that the server shut down in order.
        health: Last answer of ``/health``.
        healthy_is_proof_after: See ``EngineProfile``.
        counters: Last answer of ``/metrics`` for this engine.
        processes: Its processes, where known.
        gpus: Its GPUs, where known.
        gpus_rest_since: First of the unbroken run of looks that saw none of them compute.
        stacks: What stage A said, where it ran.
        lease: The announced pause that ends last, or ``None``.
        sources: The logs that carry its beats.
        siblings_at: Last beat of any sibling on one of the same logs.
        blind_since: Since when the child that looks for us is silent.
        blind_reason: Which.
    """

    instance: InstanceKey
    interval: float
    listening_since: Instant
    says_idle: bool = False
    step_driven: bool = False
    polls_gpu: bool = False
    armed_at: Instant | None = None
    last: Heartbeat | None = None
    last_progress: Heartbeat | None = None
    recent_tps: tuple[float, ...] = ()
    median_tps: float | None = None
    pace: tuple[tuple[float, float, int], ...] = ()
    slow_since: Instant | None = None
    buffered: float = 0.0
    recent_gaps: tuple[float, ...] = ()
    peak_in_tps: float = 0.0
    patience: float | None = None
    warm: int = 0
    started: SignalSeen | None = None
    slept: SignalSeen | None = None
    asleep: tuple[str, ...] = ()
    updated_at: Instant | None = None
    aborted_at: Instant | None = None
    beat_lost: SignalSeen | None = None
    unbeaten_at: Instant | None = None
    completed_at: Instant | None = None
    completing_since: Instant | None = None
    drained: int = 0
    longest_pause: float = 0.0
    died: SignalSeen | None = None
    stopped: SignalSeen | None = None
    health: Health | None = None
    healthy_is_proof_after: float | None = None
    counters: Counters | None = None
    processes: tuple[ProcessVital, ...] = ()
    gpus: tuple[GpuVital, ...] = ()
    gpus_rest_since: Instant | None = None
    stacks: StackVital | None = None
    lease: Lease | None = None
    sources: tuple[SourceVital, ...] = ()
    siblings_at: Instant | None = None
    blind_since: Instant | None = None
    blind_reason: str = ""
