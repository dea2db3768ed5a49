"""Xid lines: what the NVIDIA driver reports of a GPU, or of a switch, in the kernel log.

A line names the GPU by its PCI address, then a code whose meaning stays the same over versions of
the driver, then words that do not::

    NVRM: Xid (PCI:0000:4a:00): 79, pid=1234, name=python3, GPU has fallen off the bus.
    nvidia-nvswitch1: SXid (PCI:0000:aa:00.0): 24007, Fatal, Link 12 ...

Descriptions follow NVIDIA's catalogue of Xid errors,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, in our own words; whether a
code speaks of the program, of the hardware or of the driver, and what to do, is its resolution
bucket there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Origin(StrEnum):
    """Where NVIDIA's catalogue sends those who look for the cause."""

    PROGRAM = "program"
    """The program that ran on the GPU; restarting it suffices."""
    MEMORY = "memory"
    """The GPU's memory; rows are remapped at the next reset."""
    LINK = "link"
    """NVLink or PCIe."""
    DRIVER = "driver"
    """The driver, or the firmware that runs on the GPU; it wants a reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a code means.

    Attributes:
        text: In a few words.
        origin: Where to look for the cause.
        ends_work: Whether what ran on the GPU cannot go on.
    """

    text: str
    origin: Origin
    ends_work: bool = True


MEANINGS: Final[Mapping[int, Meaning]] = {
    8: Meaning(text="the GPU stopped processing", origin=Origin.PROGRAM),
    13: Meaning(
        text="exception in the compute engine, as by an access out of bounds",
        origin=Origin.PROGRAM,
    ),
    31: Meaning(text="page fault of GPU memory, as by a bad address", origin=Origin.PROGRAM),
    32: Meaning(text="corrupted stream of commands", origin=Origin.PROGRAM),
    38: Meaning(text="error of the driver's firmware", origin=Origin.DRIVER),
    43: Meaning(
        text="work of a program was stopped after a fault of its own", origin=Origin.PROGRAM
    ),
    45: Meaning(
        text="work was cleaned up after an earlier error, or because the program was killed",
        origin=Origin.PROGRAM,
    ),
    46: Meaning(text="the GPU stopped processing", origin=Origin.DRIVER),
    48: Meaning(text="uncorrectable memory error (two bits)", origin=Origin.MEMORY),
    61: Meaning(text="breakpoint of an internal microcontroller", origin=Origin.DRIVER),
    62: Meaning(text="an internal microcontroller halted", origin=Origin.DRIVER),
    63: Meaning(text="a bad row of memory will be remapped", origin=Origin.MEMORY, ends_work=False),
    64: Meaning(text="a bad row of memory could not be remapped", origin=Origin.MEMORY),
    69: Meaning(text="error of the compute engine's class", origin=Origin.PROGRAM),
    74: Meaning(text="NVLink error", origin=Origin.LINK),
    79: Meaning(text="the GPU has fallen off the bus", origin=Origin.LINK),
    92: Meaning(text="many correctable memory errors", origin=Origin.MEMORY, ends_work=False),
    94: Meaning(text="uncorrectable memory error, contained to one program", origin=Origin.MEMORY),
    95: Meaning(text="uncorrectable memory error, not contained", origin=Origin.MEMORY),
    109: Meaning(text="a context could not be switched in time", origin=Origin.DRIVER),
    119: Meaning(text="the GPU's system processor (GSP) does not answer", origin=Origin.DRIVER),
    120: Meaning(text="error of the GPU's system processor (GSP)", origin=Origin.DRIVER),
    121: Meaning(text="error of the chip-to-chip link", origin=Origin.LINK, ends_work=False),
    140: Meaning(text="unrecovered ECC error", origin=Origin.MEMORY),
    143: Meaning(text="the GPU could not be initialised", origin=Origin.DRIVER),
    154: Meaning(
        text="what it takes to recover the GPU changed", origin=Origin.DRIVER, ends_work=False
    ),
}
"""Codes that are met on data-centre GPUs; a code that is missing here is not harmless for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One report.

    Attributes:
        code: What happened.
        address: PCI address without its function, in lower case: ``0000:4a:00``.
        switch: Whether it is of an NVSwitch, whose codes are others.
        at: Seconds since boot, or ``None`` where the line does not say.
        pid: Process that used the GPU, by the host's numbers; ``None`` if the line names none.
        process: Its name, or ``""``.
        text: What the driver says besides.
        line: Its number in the log, from 1 on.
    """

    code: int
    address: str
    switch: bool = False
    at: float | None = None
    pid: int | None = None
    process: str = ""
    text: str = ""
    line: int = 0

    @property
    def meaning(self) -> Meaning | None:
        """What the code means; ``None`` if it is not in our table, or one of a switch."""
        return None if self.switch else MEANINGS.get(self.code)


_XID: Final = re.compile(
    r"(?P<switch>S?)Xid \((?:PCI:)?(?P<address>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})"
    r"(?:\.[0-7])?\): (?P<code>\d{1,6})(?:, pid='?(?P<pid>\d+|<unknown>)'?)?"
    r"(?:, name=(?P<name>[^,]*))?,? ?(?P<text>.*)"
)
# ``dmesg`` prints seconds in brackets; /dev/kmsg has microseconds as its third field.
_SECONDS: Final = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]")
_MICROSECONDS: Final = re.compile(r"^\d+,\d+,(\d+),")


def parse(lines: Iterable[str]) -> tuple[Xid, ...]:
    """Return the reports among *lines* of a kernel log, in their order."""
    return tuple(
        _report(match, text, number)
        for number, text in enumerate(lines, start=1)
        if "Xid (" in text and (match := _XID.search(text))
    )


def gpu_index(address: str, bus_ids: Mapping[int, str]) -> int | None:
    """Return the number of the GPU at *address*, or ``None``.

    Args:
        address: As ``Xid`` has it.
        bus_ids: Number to PCI address, as ``gpu.csv`` has it: ``00000000:4A:00.0``.
    """
    wanted = _normal(address)
    found = (index for index, bus in bus_ids.items() if _normal(bus) == wanted)
    return next(found, None) if wanted else None


def _report(match: re.Match[str], text: str, number: int) -> Xid:
    at = None
    if seconds := _SECONDS.match(text):
        at = float(seconds[1])
    elif microseconds := _MICROSECONDS.match(text):
        at = int(microseconds[1]) / 1e6
    pid, name = match["pid"] or "", match["name"] or ""
    return Xid(
        code=int(match["code"]),
        address=match["address"].lower(),
        switch=bool(match["switch"]),
        at=at,
        pid=int(pid) if pid.isdigit() else None,
        process="" if name == "<unknown>" else name,
        text=match["text"].strip(),
        line=number,
    )


def _normal(address: str) -> tuple[int, ...]:
    """Return domain, bus and device as numbers: the domain has four digits here, eight there."""
    parts = address.partition(".")[0].split(":")
    try:
        return tuple(int(part, 16) for part in parts)
    except ValueError:
        return ()
