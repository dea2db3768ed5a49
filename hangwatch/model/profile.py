"""What is known of one engine, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hangwatch.model.identity import Role


class Signal(StrEnum):
    """What a log line tells besides a heartbeat."""

    STARTING = "starting"
    """The engine loads, compiles or warms up; no beat is due."""
    READY = "ready"
    """The server accepts requests from now on."""
    SLEEP = "sleep"
    """The engine was put to sleep."""
    WAKE = "wake"
    """The engine, or a part of it, was woken."""
    UPDATED = "updated"
    """Weights were replaced; the silence before it was legitimate."""
    ABORTED = "aborted"
    """The requests in flight were given up on; no beat is due until new ones come."""
    COMPLETED = "completed"
    """A request was answered: progress."""
    BEAT_LOST = "beat_lost"
    """The task that prints heartbeats ended; from then on silence says nothing."""
    ENGINE_DEAD = "engine_dead"
    """A needed task or process ended with an error."""
    STOPPED = "stopped"
    """The server shuts down in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalPattern:
    """A line that changes what silence means.

    Attributes:
        signal: What it says.
        pattern: Searched in the peeled line (bytes, without envelope). A group ``part`` names
            the only part of the engine that a ``WAKE`` concerns; it may hold several, each of
            which is searched for in its text.
        needle: A literal that every match contains: blocks are searched for it first.
        source: Where upstream prints it.
    """

    signal: Signal
    pattern: re.Pattern[bytes]
    needle: bytes
    source: str


class HealthMeaning(StrEnum):
    """What an engine's own word about its health amounts to."""

    HEALTHY = "healthy"
    SLEEPING = "sleeping"
    STARTING = "starting"
    LOOP_BLOCKED = "loop_blocked"
    """The engine's event loop did not answer the probe (H2)."""
    NO_PROGRESS = "no_progress"
    """The loop answers, the scheduler does not advance (H1)."""
    LOST_REQUEST = "lost_request"
    """Requests were handed out that the scheduler does not know."""
    DEAD = "dead"
    """A needed process or task ended."""
    UNHEALTHY = "unhealthy"
    """Unhealthy for a reason that this profile does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPattern:
    """One answer of a health endpoint and what it means.

    Attributes:
        meaning: What it amounts to.
        pattern: Searched in ``status: message``.
        source: Where upstream writes it.
        http: Status codes of which it needs one; empty for any.
    """

    meaning: HealthMeaning
    pattern: re.Pattern[str]
    source: str
    http: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Prometheus names (before the label braces) that say how the engine fares.

    Attributes:
        tokens: Counters that grow with every token; judged for each label set, never summed.
        running: Gauges of requests in the batch.
        waiting: Gauges of requests queued in the engine or in front of it.
        routed: Gauges of requests handed to the engine and not finished, by the server's count.
        label: The label that tells engines of one server apart.
    """

    tokens: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    label: str = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePattern:
    """How to know a process's role by its title, command line or thread name."""

    role: Role
    pattern: re.Pattern[str]


class ProbeKind(StrEnum):
    """What a state probe reads of an object. ``None`` is ``None`` for all but ``IS_NONE``."""

    INT = "int"
    FLOAT = "float"
    """A float, or an int."""
    BOOL = "bool"
    LENGTH = "length"
    """Of a dict, list, tuple, set or deque."""
    LENGTHS = "lengths"
    """Of each value of a dict whose keys are enum members, by their names."""
    IS_NONE = "is_none"
    TYPE = "type"
    """The name of its type."""
    ENUM = "enum"
    """The name of an enum member: their numbers move between versions."""
    AGE = "age"
    """Seconds since a float on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateProbe:
    """One number of the engine's state. Strings are never read.

    Attributes:
        name: What it is called in reports.
        kind: What is read.
        path: Stored attributes from the table's object on, with dots between; ``""`` is the object
            itself. Nothing is called: properties and methods cannot be read.
        minus: Name of a probe before it in the table, which is subtracted; ``""`` for none.
    """

    name: str
    kind: ProbeKind = ProbeKind.INT
    path: str = ""
    minus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """Numbers of one object of the engine, or of many of a kind.

    Attributes:
        name: What it is called in reports.
        where: Where it hangs, in order of preference: the qualified name of a coroutine (anywhere
            in the chain of a task) or function (on a thread's stack), a colon, and a path whose
            first name is a local of it, and in which ``*`` stands for each value of a dict or item
            of a list. Without a colon the object is the frame: paths of probes begin with a local.
        probes: What is read of each object.
        source: Where in the engine's code it was read.
    """

    name: str
    where: tuple[str, ...]
    probes: tuple[StateProbe, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """One engine, as data.

    Attributes:
        name: ``lmdeploy``.
        title: ``LMDeploy``, for people.
        alive: Matches any heartbeat of any version in a peeled line (bytes); format drift in the
            numbers must not break it. Group ``tag``, where the line names the engine, and
            ``stamp``, where its stamp is not simply the first of the line.
        needles: Literals, one of which every heartbeat contains; blocks are searched for them.
        families: Full formats, newest first; groups named after fields of ``Heartbeat``
            (``in_tps out_tps running waiting routed api_waiting finished failed kv_cache_pct
            prefix_hit_pct draft_acceptance_pct``); numbers are best effort.
        interval: Seconds between beats while there is work.
        says_idle: Whether it prints a last line of zeros when it goes idle, so that a silence after
            any other line has another reason.
        step_driven: Whether beats come with the engine's steps and not with the clock: the
            interval is then no more than a first guess, and the gaps seen so far tell.
        prefix: Names that its processes put in front of their own lines, as ``(name pid=N)``,
            which looks as Ray's prefix does. Group ``server`` for those that print the beats; what
            any other says concerns the server of that log. ``None`` if it has no such prefix.
        parts: Parts that a ``SLEEP`` puts to sleep, each of which must be woken.
        signals: Other lines that matter.
        endpoints: The only paths that may be asked with GET, by purpose
            (``health``, ``metrics``, ``sleeping``).
        health: Health messages, first match wins.
        healthy_is_proof_after: Seconds of silence after which a ``healthy`` answer excludes a
            hang, because the engine's own monitor would have said otherwise; ``None`` if never.
        metrics: Names of metrics.
        roles: Process roles, first match wins.
        polls_gpu: Whether the engine polls for the end of a GPU kernel, so that a process with few
            context switches cannot be waiting for one.
        context: Finds the context length in a command line: group ``tokens``; ``None`` if no
            option gives it.
        producer: Lines of a job that brings work, when it cannot: retries, time-outs, refusals.
        boring_threads: Threads (by name) that tell nothing of a hang.
        state: Numbers that are read from the memory of its processes.
        source: Where in the engine's code each fact was read.
    """

    name: str
    title: str
    alive: re.Pattern[bytes]
    needles: tuple[bytes, ...]
    families: tuple[re.Pattern[bytes], ...]
    interval: float
    says_idle: bool = False
    step_driven: bool = False
    prefix: re.Pattern[str] | None = None
    parts: tuple[str, ...] = ()
    signals: tuple[SignalPattern, ...] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)
    health: tuple[HealthPattern, ...] = ()
    healthy_is_proof_after: float | None = None
    metrics: MetricNames = MetricNames()
    roles: tuple[RolePattern, ...] = ()
    polls_gpu: bool = False
    context: re.Pattern[str] | None = None
    producer: tuple[re.Pattern[bytes], ...] = ()
    boring_threads: tuple[re.Pattern[str], ...] = ()
    state: tuple[StateTable, ...] = ()
    source: str = ""
