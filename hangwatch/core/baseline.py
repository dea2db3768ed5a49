"""The baseline: what processes looked like while they were well, to compare a later state with.

Theory of operation. Every ten minutes each process of an engine that is ``ok`` or ``idle`` is
looked at once, cheaply: what the kernel says of its threads, their stacks and its tasks from
memory, and the GPUs. Of each process the last six looks are kept that were taken while its
instance was ``ok``, and the last one while it was ``idle``, because the stacks of an idle engine
are those that a hung one is most easily taken for. A process is known by its pid and its start;
numbers are used again.

What is kept is condensed: stacks share their frames, tasks that stand at the same place are counted
rather than listed, and names of tasks, which may hold anything, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hangwatch.model.identity import ProcessId
from hangwatch.model.time import Instant

SCHEMA: Final = "hangwatch.baseline/1"

FOLDER: Final = "baseline"
"""In the state directory, and in a bundle."""

KNOWN: Final = "known"
"""Folder of what readers know of processes, in the state directory."""

INDEX: Final = "baseline/index.json"

KEPT: Final[Mapping[str, int]] = {"ok": 6, "idle": 1}
"""Words of the verdicts under which a look is worth keeping, and how many looks of a process."""

FIRST_AFTER: Final = 60.0
"""Seconds that an instance must have been well before the first look: it has warmed up by then."""

RETRY_AFTER: Final = 60.0
"""Seconds until the next attempt where something stood in the way."""

CROWDED: Final = 2.0
"""Threads that want to run for each core, over the last minute: above it a host has no time to be
looked at."""

MAX_GROUPS: Final = 200
"""Groups of tasks that are kept of one look, the largest first."""

NODE: Final = ProcessId(0)
"""Stands for the machine: its GPUs."""

_NAME: Final = re.compile(r"(\d+)-(\d+)\.(\d+)\.([a-z]+)\.json\.gz")
_THREAD: Final = ("tid", "comm", "state", "wchan", "cpu_seconds", "vol_ctxt", "invol_ctxt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at one process.

    Attributes:
        process: It, or ``NODE``.
        at: When it was taken.
        word: Word of its instance's verdict then.
    """

    process: ProcessId
    at: Instant
    word: str

    @property
    def file(self) -> str:
        """The name of the file that keeps it."""
        pid, ticks = self.process.pid, self.process.start_ticks
        return f"{pid}-{ticks}.{round(self.at * 1000)}.{self.word}.json.gz"


def look_of(file: str) -> Look | None:
    """Return which look a file of that name keeps; ``None`` if it is no such name."""
    match = _NAME.fullmatch(file)
    if match is None:
        return None
    pid, ticks, at, word = match.groups()
    return Look(process=ProcessId(int(pid), int(ticks)), at=Instant(int(at) / 1000), word=word)


def known_name(process: ProcessId) -> str:
    """Return the name of the file that keeps what a reader knows of a process."""
    return f"{process.pid}-{process.start_ticks}.known"


def surplus(looks: Iterable[Look]) -> tuple[Look, ...]:
    """Return the looks that are not kept: there are enough newer ones of their kind."""
    kept: dict[tuple[ProcessId, str], int] = {}
    found = []
    for look in sorted(looks, key=lambda look: look.at, reverse=True):
        key = (look.process, look.word)
        kept[key] = kept.get(key, 0) + 1
        if kept[key] > KEPT.get(look.word, 0):
            found.append(look)
    return tuple(found)


# ---------------------------------------------------------------------- when


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """When the next look is due.

    Attributes:
        interval: Seconds between two looks; 0 for none at all.
        well_since: Since when some instance is well without a break, or ``None``.
        last_at: When the last look was begun, or ``None``.
        not_before: Until when to wait because something stood in the way.
    """

    interval: float
    well_since: Instant | None = None
    last_at: Instant | None = None
    not_before: Instant = field(default=Instant(0.0))

    def due(self, now: Instant) -> bool:
        """Say whether it is time."""
        if not self.interval or self.well_since is None or now < self.not_before:
            return False
        if self.last_at is None:
            return now >= self.well_since + min(FIRST_AFTER, self.interval)
        return now >= self.last_at + self.interval


def shared_word(words: Iterable[str]) -> str:
    """Return under which verdict a process counts that works for several instances."""
    words = set(words)
    return next((word for word in KEPT if word in words), "")


# ---------------------------------------------------------------------- what


def condense(kernel: Any, tasks: Any, stacks: Any) -> dict[str, Any]:
    """Return what is kept of one look at a process.

    Args:
        kernel: ``kernel.json``, or ``None``.
        tasks: ``tasks.json``, or ``None``.
        stacks: ``stacks.json``, or ``None``.
    """
    kernel, tasks, stacks = (
        each if isinstance(each, dict) else {} for each in (kernel, tasks, stacks)
    )
    frames = _Frames(stacks.get("frames", ()))
    threads = {thread["thread_id"]: thread for thread in stacks.get("threads", ())}
    rows: list[dict[str, Any]] = []
    for told in kernel.get("threads", ()):
        row = {key: told[key] for key in _THREAD if told.get(key) not in (None, "")}
        row |= _stack(threads.pop(told.get("tid"), {}))
        rows.append(row)
    rows += [{"tid": tid, **_stack(thread)} for tid, thread in threads.items()]
    groups = _groups(tasks.get("tasks", ()), frames)
    found: dict[str, Any] = {
        "python": tasks.get("python", ""),
        "frames": frames.found,
        "threads": rows,
        "tasks": groups[:MAX_GROUPS],
    }
    if len(groups) > MAX_GROUPS:
        found["left_out"] = sum(group["count"] for group in groups[MAX_GROUPS:])
    if tasks.get("state"):
        found["state"] = tasks["state"]
    return found


def _stack(thread: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: thread[key] for key in ("name", "frames", "holds_gil", "waits") if thread.get(key)}
    return kept if thread else {}


class _Frames:
    """Frames, each once; goes on where the stacks end."""

    def __init__(self, frames: Sequence[Mapping[str, Any]]) -> None:
        self.found: list[Mapping[str, Any]] = list(frames)
        self._places = {self._key(frame): place for place, frame in enumerate(self.found)}

    def place(self, frame: Mapping[str, Any]) -> int:
        key = self._key(frame)
        if key not in self._places:
            self._places[key] = len(self.found)
            self.found.append(frame)
        return self._places[key]

    @staticmethod
    def _key(frame: Mapping[str, Any]) -> tuple[object, ...]:
        return (frame.get("function"), frame.get("file"), frame.get("line"), frame.get("note"))


def _groups(tasks: Iterable[Mapping[str, Any]], frames: _Frames) -> list[dict[str, Any]]:
    """Return tasks that stand at the same place as one, the largest groups first."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for task in tasks:
        awaits = task.get("awaits") or {}
        chain = [frames.place(frame) for frame in task.get("chain", ())]
        key = (task.get("state"), awaits.get("kind"), *chain)
        group = found.setdefault(
            key,
            {
                "count": 0,
                "state": task.get("state"),
                "chain": chain,
                "awaits": awaits.get("kind"),
                "detail": awaits.get("detail"),
            },
        )
        group["count"] += 1
    return sorted(found.values(), key=lambda group: -group["count"])
