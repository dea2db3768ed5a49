"""Stacks that were taken many times a second: read from a profiler, told apart, written down.

The form is the one that flame graphs are made of: one stack a line, its frames from the outermost
to the innermost with semicolons between them, behind a blank how often it was seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# py-spy 0.4, ``record --threads --format raw``: the thread is the outermost frame.
_LINE: Final = re.compile(r"(?P<stack>(?P<thread>thread \([^)]*\)).*) (?P<count>\d{1,9})")
_END: Final = re.compile(r"^py-spy> .*Errors: (?P<errors>\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the threads of one process did while they were sampled.

    Attributes:
        threads: For each thread its stacks and how often each was seen.
        errors: Samples that failed, because what was read had changed meanwhile; ``None`` if it
            was not said.
    """

    threads: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    errors: int | None = None

    @property
    def samples(self) -> int:
        """How many times the process was looked at with success."""
        return max((sum(stacks.values()) for stacks in self.threads.values()), default=0)


def parse(output: bytes) -> Sampling:
    """Return what py-spy recorded; other lines, and one that is cut off, are passed over."""
    text = output.decode("utf-8", "replace")
    threads: dict[str, dict[str, int]] = {}
    for line in text.split("\n")[:-1]:
        if match := _LINE.fullmatch(line):
            stacks = threads.setdefault(match["thread"], {})
            stacks[match["stack"]] = stacks.get(match["stack"], 0) + int(match["count"])
    end = _END.search(text)
    return Sampling(threads=threads, errors=int(end["errors"]) if end else None)


def render(sampling: Sampling, *, pid: int, rate: int, seconds: float) -> bytes:
    """Return it as text: the threads that moved most come first.

    Args:
        sampling: What was seen.
        pid: The process.
        rate: Samples a second that were asked for.
        seconds: For how long.
    """
    errors = "" if sampling.errors is None else f", {sampling.errors} failed"
    head = f"# process {pid}: {sampling.samples} samples{errors}; {rate}/s for {seconds:.1f} s."
    lines = [head]
    ordered = sorted(sampling.threads.items(), key=lambda item: (-len(item[1]), item[0]))
    for _, stacks in ordered:
        lines += [
            f"{stack} {count}"
            for stack, count in sorted(stacks.items(), key=lambda item: (-item[1], item[0]))
        ]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")
