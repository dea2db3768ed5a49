"""Lines of the kernel log, and which of them say why a process stands still or is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

MAX_LINES: Final = 2000

MAX_EARLIER: Final = 500
"""Lines that matter and stand before the last ``MAX_LINES``."""

_LEVEL: Final = re.compile(r"^<\d+>")
_TIME: Final = re.compile(r"^\[ *(\d+\.\d+)\]")
# Kind, words of which a line must have one, pattern. A log has tens of thousands of lines, and
# words are found several times faster. The pattern names the process, where it does, by ``pid``
# and ``name``.
_KINDS: Final[tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...]] = (
    (
        "oom_kill",
        ("illed process",),
        re.compile(
            r"(?:[Oo]ut of memory.*|oom_reaper: reaped |)[Kk]illed process (?P<pid>\d+)"
            r"(?: \((?P<name>[^)]*)\))?"
        ),
    ),
    (
        "oom",
        ("oom-kill",),
        re.compile(r"(?P<name>\S+) invoked oom-killer|oom-kill:constraint=.*pid=(?P<pid>\d+)"),
    ),
    (
        "hung_task",
        ("blocked",),
        re.compile(r"task (?P<name>.{1,40}):(?P<pid>\d+) (?:is )?blocked .*for more than \d+ sec"),
    ),
    (
        "crash",
        ("segfault at", "general protection", "trap ", "traps: "),
        re.compile(
            r"(?P<name>\S+)\[(?P<pid>\d+)\]:? (?:segfault at|general protection|trap )"
            r"|traps: (?P<name2>\S+)\[(?P<pid2>\d+)\]"
        ),
    ),
    (
        "gpu",
        ("NVRM: ", "nvidia-nvswitch", "nvidia-modeset", "amdgpu "),
        re.compile(r"NVRM: |\bnvidia-nvswitch|\bnvidia-modeset: ERROR|\bamdgpu .*(?:error|hang)"),
    ),
    (
        "lockup",
        ("lockup", "LOCKUP", "rcu"),
        re.compile(r"soft lockup|hard LOCKUP|rcu\S* (?:self-)?detected .*stall|workqueue lockup"),
    ),
    (
        "storage",
        (
            "nfs: server",
            "ceph: ",
            "LustreError",
            "CIFS: ",
            "I/O error",
            "EXT4",
            "XFS",
            "BTRFS",
            "nvme",
            "blk_update_request",
            "read-only",
        ),
        re.compile(
            r"nfs: server \S+ (?:not responding|OK)|ceph: .*(?:hung|lost|stall)|LustreError|"
            r"CIFS: .*(?:not responded|error)|I/O error|(?:EXT4|XFS|BTRFS)\S* .*error|"
            r"nvme\S* .*timeout|blk_update_request|Remounting filesystem read-only"
        ),
    ),
    (
        "hardware",
        ("mce: [", "Hardware Error", "EDAC ", "AER: ", "Uncorrected"),
        re.compile(r"mce: \[|Hardware Error|EDAC .*(?:UE|CE) |AER: .*error|Uncorrected"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line that matters.

    Attributes:
        line: Its number in the file that is kept, from 1.
        kind: ``oom_kill``, ``oom``, ``hung_task``, ``crash``, ``gpu``, ``lockup``, ``storage`` or
            ``hardware``.
        at: Seconds since the machine started; ``None`` if the line does not say.
        pid: The process that it names, as the machine's first pid namespace numbers it.
        name: Its name, or ``""``.
        text: The line.
    """

    line: int
    kind: str
    at: float | None
    pid: int | None
    name: str
    text: str

    def document(self) -> dict[str, Any]:
        """Return it for a file."""
        return {
            "line": self.line,
            "kind": self.kind,
            "at_s": self.at,
            "pid": self.pid,
            "name": self.name,
            "text": self.text,
        }


def kept(text: str) -> list[str]:
    """Return the last lines of a kernel log, after the earlier ones that matter.

    Args:
        text: As ``syslog(2)`` gives it, with levels or without.
    """
    lines = [_LEVEL.sub("", line) for line in text.splitlines()]
    earlier = [line for line in lines[:-MAX_LINES] if _kind(line) is not None]
    return earlier[-MAX_EARLIER:] + lines[-MAX_LINES:]


def events(lines: list[str]) -> Iterator[Event]:
    """Yield the lines that matter."""
    for number, line in enumerate(lines, start=1):
        found = _kind(line)
        if found is None:
            continue
        kind, match = found
        named = {key.rstrip("2"): value for key, value in match.groupdict().items() if value}
        at = _TIME.match(line)
        yield Event(
            line=number,
            kind=kind,
            at=float(at[1]) if at else None,
            pid=int(named["pid"]) if "pid" in named else None,
            name=named.get("name", ""),
            text=line[:500],
        )


def _kind(line: str) -> tuple[str, re.Match[str]] | None:
    for kind, words, pattern in _KINDS:
        if any(word in line for word in words) and (match := pattern.search(line)):
            return kind, match
    return None
