"""The manifest of a bundle: types from which it is written, checked, and its schema made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = "hangwatch.manifest/1"


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Clocks(_Part):
    """How instants in the bundle map to wall time."""

    boot_id: str
    monotonic: float = Field(description="Instant of the reading, seconds of CLOCK_MONOTONIC.")
    wall: str = Field(description="Wall time of the same moment, RFC 3339.")


class Capture(_Part):
    """How the capture went; seconds."""

    started: str
    ended: str
    elapsed_s: float
    first_evidence_s: float | None
    sample_gap_s: float
    deadline_s: float
    stopped: bool = Field(description="Whether it was ended early, by request.")
    abandoned: int = Field(description="Workers that did not end even when killed.")
    skew_s: dict[str, float] = Field(
        description="By rung and sample: seconds between its first and its last step."
    )


class Process(_Part):
    """One process of the capture."""

    pid: int
    start_ticks: int
    role: str
    instance: str = ""
    rank: int | None = None
    gpu: int | None = None
    why: str = ""
    python: bool = True
    pause_ms: float = Field(0.0, description="How long it stood still for the capture, in all.")


class StepRecord(_Part):
    """What one step left."""

    step: str
    collector: str
    sample: int
    phase: str
    elapsed: float
    artifacts: list[dict[str, Any]]
    failure: dict[str, Any] | None
    pause_ms: float = Field(0.0, description="How long the process stood still for it.")
    settled: str | None = Field(
        None, description="How the process was found after an attaching step that failed."
    )


class FileRecord(_Part):
    """One file of the bundle."""

    size: int
    sha256: str
    complete: bool = True


class Cut(_Part):
    """A file that is not in the bundle."""

    path: str
    size: int
    reason: str


class Redaction(_Part):
    """What was taken out, by kind."""

    counts: dict[str, int]
    key_id: str = Field(description="Tells keys of pseudonyms apart; says nothing of the key.")


class Look(_Part):
    """When a look of the baseline was taken."""

    at: str
    verdict: str = Field(description="What the instance of the process was then.")


class Baseline(_Part):
    """What there is of one process from before."""

    path: str
    pid: int | None = None
    start_ticks: int | None = None
    gone: bool = Field(False, description="Whether it had ended when the bundle was made.")
    samples: list[Look] = Field(description="Newest first.")


class Manifest(_Part):
    """``manifest.json``."""

    schema_: Literal["hangwatch.manifest/1"] = Field("hangwatch.manifest/1", alias="schema")
    kind: Literal["incident", "notice", "run", "aftermath"]
    id: str
    created: str
    hangwatch: str
    python: str
    profile: str
    clocks: Clocks
    policy: dict[str, Any]
    settings: dict[str, Any] = Field(description="Name to value and origin.")
    capture: Capture
    processes: list[Process]
    steps: list[StepRecord]
    files: dict[str, FileRecord]
    cut: list[Cut]
    redaction: Redaction
    notes: list[str]
    baseline: list[Baseline] = Field([], description="Looks from while all was well.")

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)
