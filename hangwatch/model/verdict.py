"""What the vitals support, one type for each way to be.

Every verdict carries the same five things, so that a report can print any of them; the type says
which of the twelve it is, and ``match`` makes the type checker count them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeAlias

from hangwatch.model.time import Instant


class Confidence(StrEnum):
    """How sure we may be."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """The common part.

    Attributes:
        since: When this way of being began.
        cause: Slug of the reason: a class of the case catalogue, ``starved-upstream`` …
        confidence: How sure we may be.
        because: Sentences it rests on, strongest first; what was not available stands last.
    """

    word: ClassVar[str] = ""
    since: Instant
    cause: str
    confidence: Confidence
    because: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok(_Verdict):
    """Tokens flow, or flowed a moment ago."""

    word: ClassVar[str] = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(_Verdict):
    """Before the first beat."""

    word: ClassVar[str] = "loading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle(_Verdict):
    """There is no work."""

    word: ClassVar[str] = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(_Verdict):
    """Asleep, in a weight update, or under a lease."""

    word: ClassVar[str] = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(_Verdict):
    """Tokens move, below calibration."""

    word: ClassVar[str] = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStalled(_Verdict):
    """The engine moves, the path of its log does not."""

    word: ClassVar[str] = "log_stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedHang(_Verdict):
    """There is work and no progress; nothing else confirms it yet."""

    word: ClassVar[str] = "suspected_hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked(_Verdict):
    """A loop's thread is on CPU or its frames move: it may end by itself."""

    word: ClassVar[str] = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung(_Verdict):
    """There is work, and nothing moves."""

    word: ClassVar[str] = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead(_Verdict):
    """A needed process or task ended."""

    word: ClassVar[str] = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(_Verdict):
    """The instance was retired: its process ended and its log is no longer followed."""

    word: ClassVar[str] = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind(_Verdict):
    """We cannot see it."""

    word: ClassVar[str] = "blind"


Verdict: TypeAlias = (
    Ok
    | Loading
    | Idle
    | Paused
    | Slow
    | LogStalled
    | SuspectedHang
    | Blocked
    | Hung
    | Dead
    | Gone
    | Blind
)

ALARMS: tuple[type[Verdict], ...] = (SuspectedHang, Blocked, Hung, Dead)
"""The verdicts that start a capture and make a command exit with 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWindow:
    """Between which two instants the progress stopped.

    Attributes:
        earliest: The last moment known to be good.
        latest: The first moment known to be bad.
        residual: Whether the last beat counted the tokens of an interval that was cut short.
    """

    earliest: Instant
    latest: Instant
    residual: bool = False
