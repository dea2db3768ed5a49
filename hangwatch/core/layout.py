"""Where things lie: in a bundle, in an unpacked one, in a folder of loose evidence.

One table of names for the writer and the reader, so that they cannot disagree. A file is known by
its own name wherever it lies; the folder ``processes/<role>-<pid>/`` says whose it is.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Final

MANIFEST: Final = "manifest.json"
INCIDENT: Final = "incident.json"
REPORT: Final = "REPORT.md"
ISSUE: Final = "issue.md"
BEATS: Final = "history/beats.csv"
AUDIT: Final = "hangwatch/audit.jsonl"
SUFFIX: Final = ".tar.gz"

AFTERMATH: Final = ".aftermath-"
"""Stands between the name of a bundle and the number of a look that was taken later."""

REPORTS: Final = frozenset((REPORT, ISSUE, "report.html"))
"""What is made from the evidence, and is never evidence itself."""


class Kind(StrEnum):
    """What a file holds."""

    MANIFEST = "manifest"
    INCIDENT = "incident"
    REPORT = "report"
    BEATS = "beats"
    THREADS = "threads"
    TASKS = "tasks"
    SAMPLES = "samples"
    PROCESSES = "processes"
    HEALTH = "health"
    METRICS = "metrics"
    GPU = "gpu"
    GPU_PROBLEM = "gpu_problem"
    KERNEL_LOG = "kernel_log"
    KERNEL_STACK = "kernel_stack"
    FACTS = "facts"
    """Side facts as JSON: ``fs.json``, ``topology.json``, ``events.json``, ``kernel.json``."""
    AFTERMATH = "aftermath"
    STOPS = "stops"
    COUNTERS = "counters"
    LOG = "log"
    REPLAY = "replay"
    """What a replay needs beside the log: ``arrival.txt``, ``replay.json``."""
    EXPECTATION = "expectation"
    OTHER = "other"


_KINDS: Final = (
    (re.compile(r"manifest\.json"), Kind.MANIFEST),
    (re.compile(r"incident\.json"), Kind.INCIDENT),
    (re.compile(r"expect\.json"), Kind.EXPECTATION),
    (re.compile(r"arrival\.txt|replay\.json"), Kind.REPLAY),
    (re.compile(r"beats\.csv"), Kind.BEATS),
    (re.compile(r"aftermath\.json"), Kind.AFTERMATH),
    (re.compile(r"stops\.json"), Kind.STOPS),
    (re.compile(r"counters\.csv"), Kind.COUNTERS),
    (re.compile(r"threads(\d?)\.json"), Kind.THREADS),
    (re.compile(r"tasks(\d?)\.json"), Kind.TASKS),
    (re.compile(r"samples\.txt"), Kind.SAMPLES),
    (re.compile(r"procs(\d?)\.json"), Kind.PROCESSES),
    (re.compile(r"health(\d?)\.json"), Kind.HEALTH),
    (re.compile(r"metrics(\d?)\.prom"), Kind.METRICS),
    (re.compile(r"gpu(\d?)\.csv"), Kind.GPU),
    (re.compile(r"gpu(\d?)\.err"), Kind.GPU_PROBLEM),
    (re.compile(r"kmsg\.txt"), Kind.KERNEL_LOG),
    (re.compile(r"stack_(\d+)\.txt"), Kind.KERNEL_STACK),
    (
        re.compile(
            r"(fs|topology|events|kernel|kernel_events|fds|connections|locks|futexes|cgroups|mounts|"
            r"environ\w*|versions|limits|launch|engine_config|machine|gpu_processes)"
            r"\d?\.json"
        ),
        Kind.FACTS,
    ),
    # What tools print for people.
    (re.compile(r"(nvidia_smi|cuda_gdb|gpu_core|nccl_ras|flight_recorder)\.txt"), Kind.OTHER),
    (re.compile(r".*\.(log|out|err|txt)(\.\d{1,4})?"), Kind.LOG),
)

_FOLDER: Final = re.compile(r"^(?P<role>[a-z_]+)-(?P<pid>\d{1,10})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a path says of its file.

    Attributes:
        path: It, relative to the root of the evidence.
        kind: What it holds.
        sample: 1 or 2.
        pid: Whose it is, where the folder or the name says so.
        role: The folder's word for that process, or ``""``.
    """

    path: str
    kind: Kind
    sample: int = 1
    pid: int | None = None
    role: str = ""


def place(path: str) -> Place:
    """Return what *path* says of its file."""
    pure = PurePosixPath(path)
    pid, role = None, ""
    for part in pure.parts[:-1]:
        if match := _FOLDER.match(part):
            pid, role = int(match["pid"]), match["role"]
    if pure.name in REPORTS:
        return Place(path=path, kind=Kind.REPORT)
    for pattern, kind in _KINDS:
        match = pattern.fullmatch(pure.name)
        if match is None:
            continue
        number = match[1] if match.groups() else ""
        if kind is Kind.KERNEL_STACK:
            return Place(path=path, kind=kind, pid=int(match[1]), role=role)
        sample = int(number) if number and number.isdigit() else 1
        return Place(path=path, kind=kind, sample=sample, pid=pid, role=role)
    return Place(path=path, kind=Kind.OTHER, pid=pid, role=role)


def bundle_number(boot_id: str, incident: str) -> str:
    """Return what tells the bundle of an incident from that of another: six letters or digits."""
    return hashlib.sha256(f"{boot_id} {incident}".encode()).hexdigest()[:6]


def bundle_name(started: datetime, number: str) -> str:
    """Return the file name of a bundle.

    Args:
        started: When the capture began, in UTC.
        number: See ``bundle_number``.
    """
    return f"hangwatch-{started:%Y%m%dT%H%M%SZ}-{number}{SUFFIX}"


def aftermath_name(bundle: str, number: int) -> str:
    """Return the file name of a later look, which lies beside its bundle."""
    return f"{bundle.removesuffix(SUFFIX)}{AFTERMATH}{number}{SUFFIX}"


def aftermath_number(bundle: str, name: str) -> int | None:
    """Return which look after *bundle* a file of this name is, ``None`` if it is none."""
    middle = name.removeprefix(f"{bundle.removesuffix(SUFFIX)}{AFTERMATH}").removesuffix(SUFFIX)
    of_it = middle.isdecimal() and name == aftermath_name(bundle, int(middle))
    return int(middle) if of_it else None


def is_bundle_name(name: str) -> bool:
    """Say whether a file of this name claims to be a whole bundle."""
    shaped = re.fullmatch(r"hangwatch-\d{8}T\d{6}Z-[\w.-]+\.tar\.gz", name) is not None
    return shaped and AFTERMATH not in name
