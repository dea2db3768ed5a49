"""Lines and the heartbeats in them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from hangwatch.model.identity import InstanceKey
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One candidate line of a log; other lines are never made into values.

    Attributes:
        source: The log as the user named it: a path, ``-`` for standard input, or
            ``PATH (fd of PID)`` for a log read through an open descriptor.
        text: The line without its end, envelope and all, at most ``MAX_LINE`` bytes.
        at: When we read it.
        offset: Byte offset of its first byte in its file, or ``None`` for a stream.
        fresh: ``False`` for what lay in the file before we listened.
        number: Line of the file, from 1, where the whole file was read; else ``None``.
    """

    source: str
    text: bytes
    at: Instant
    offset: int | None = None
    fresh: bool = True
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeled:
    """A line out of its envelopes.

    Attributes:
        body: The engine's own bytes.
        host: Address in a Ray prefix, or ``""``.
        pid: Process id in a Ray prefix, or ``None``.
        actor: Task or actor name in a Ray prefix, or ``""``.
        stamp: RFC 3339 stamp of a container runtime, if it gave one.
        repeated: ``N`` of Ray's ``[repeated Nx across cluster]``, else 1.
        complete: ``False`` for a part (CRI flag ``P``) that a later line continues.
    """

    body: bytes
    host: str = ""
    pid: int | None = None
    actor: str = ""
    stamp: datetime | None = None
    repeated: int = 1
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One periodic statistics line.

    Every number may be ``None``: formats drift, and a line whose numbers we cannot read still
    proves that the engine lives.

    Attributes:
        instance: Who printed it.
        at: When it arrived; this decides.
        printed: The stamp it carries, naive unless the envelope had an offset; evidence only.
        source: The log it came from.
        in_tps: Prompt tokens per second over the interval.
        out_tps: Generated tokens per second over the interval.
        running: Requests in the running batch.
        waiting: Requests queued in the engine.
        routed: Requests handed from the API server to the engine and not finished.
        api_waiting: Requests that wait in front of the engine; briefly negative upstream.
        finished: Requests that succeeded so far.
        failed: Requests that failed so far.
        kv_cache_pct: KV cache in use, percent.
        prefix_hit_pct: Prefix cache hits, percent.
        draft_acceptance_pct: Speculative tokens accepted, percent.
        repeated: How many lines Ray's de-duplication folded into this one.
        relayed: Whether it came through a driver's stream and not from its writer's own log.
        claimed: Whether the pid of *instance* is only what its writer calls itself, in a pid
            namespace that need not be ours.
        profile: Name of the engine profile that recognised it.
    """

    instance: InstanceKey
    at: Instant
    printed: datetime | None = None
    source: str = ""
    in_tps: float | None = None
    out_tps: float | None = None
    running: int | None = None
    waiting: int | None = None
    routed: int | None = None
    api_waiting: int | None = None
    finished: int | None = None
    failed: int | None = None
    kv_cache_pct: float | None = None
    prefix_hit_pct: float | None = None
    draft_acceptance_pct: float | None = None
    repeated: int = 1
    relayed: bool = False
    claimed: bool = False
    profile: str = ""

    @property
    def tps(self) -> float | None:
        """Tokens per second, both ways, or ``None`` where the line does not say."""
        if self.in_tps is None and self.out_tps is None:
            return None
        return (self.in_tps or 0.0) + (self.out_tps or 0.0)

    @property
    def in_flight(self) -> int | None:
        """Requests that were somewhere in the server, or ``None`` where the line does not say."""
        known = [n for n in (self.routed, self.api_waiting) if n is not None]
        engine = [n for n in (self.running, self.waiting) if n is not None]
        if not known and not engine:
            return None
        return max(sum(max(n, 0) for n in known), sum(max(n, 0) for n in engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSeen:
    """A line that changes what silence means.

    Attributes:
        instance: Whom it concerns; ``tag`` is ``""`` where the line names no engine.
        signal: What it says.
        at: When it arrived.
        printed: The stamp it carries, if any.
        source: The log it came from.
        text: The line, decoded, cut to 300 characters.
        parts: Parts of the engine that it concerns; empty for the whole.
        profile: Name of the engine profile that recognised it; ``""`` for a line that several
            engines print alike.
    """

    instance: InstanceKey
    signal: Signal
    at: Instant
    printed: datetime | None = None
    source: str = ""
    text: str = ""
    parts: tuple[str, ...] = ()
    profile: str = ""
