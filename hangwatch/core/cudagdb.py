"""What ``cuda-gdb`` prints: which kernels are on the GPU, and in which line of source they are.

Written by people for people and not promised to anybody, so it is read loosely: what is not
recognised is left out, and the text itself goes into the bundle beside what was read of it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from hangwatch.model.capture import FailureKind

MAX_KERNELS: Final = 8
"""Kernels that are asked about: engines have two or three at a time."""

_ASIDE: Final = "hangwatch: kernel"

QUESTIONS: Final = (
    "info cuda devices",
    "info cuda contexts",
    "info cuda kernels",
    "bt 8",
    "x/3i $pc",
    *(
        command
        for kernel in range(1, MAX_KERNELS)
        for command in (
            f"echo {_ASIDE} {kernel}\\n",
            f"cuda kernel {kernel}",
            "bt 8",
            "x/3i $pc",
        )
    ),
)
"""Commands. Where there is no such kernel, the focus stays on the one before; see ``tidy``."""

_FOCUS: Final = re.compile(r"\[[^\n]*focus[^\n]*? CUDA kernel (?P<kernel>\d+), grid \d+")
_ROW: Final = re.compile(
    r"^\*?\s+(?P<kernel>\d+)\s+(?P<parent>\S+)\s+(?P<device>\d+)\s+(?P<grid>\d+)\s+"
    r"(?P<status>[A-Za-z]+)\s+(?P<sms>0x[0-9a-fA-F]+)\s+(?P<grid_dim>\([\d,]+\))\s+"
    r"(?P<block_dim>\([\d,]+\))\s+(?P<invocation>\S.*?)\s*$"
)
_FRAME: Final = re.compile(
    r"^#0\s+(?:0x[0-9a-fA-F]+ in )?(?P<name>.+?)\s*<<<[^>]*>>>\s*\([^\n]*?\)"
    r"(?: at (?P<file>\S+):(?P<line>\d+))?"
)

_REFUSALS: Final[tuple[tuple[re.Pattern[str], FailureKind, str, str], ...]] = (
    (
        re.compile(r"coredump is not supported with late attach", re.IGNORECASE),
        FailureKind.NOT_AVAILABLE,
        "the process was started for GPU core dumps, which leaves no way to attach",
        "--collect gpu_core takes such a dump, and the engine does not survive it",
    ),
    (
        re.compile(r"ptrace: Operation not permitted|Could not attach to process"),
        FailureKind.NOT_PERMITTED,
        "cuda-gdb may not attach to the process",
        "run as root with SYS_PTRACE, and /proc/sys/kernel/yama/ptrace_scope at most 1",
    ),
    (
        re.compile(r"No CUDA devices|CUDA API to initialize|not using CUDA", re.IGNORECASE),
        FailureKind.NOT_AVAILABLE,
        "cuda-gdb found no work of the process on a GPU",
        "",
    ),
)


def tidy(text: str) -> str:
    """Return what was printed, without what it says again for kernels that are not there."""
    head, *asides = re.split(rf"^{_ASIDE} \d+\n", text, flags=re.MULTILINE)
    kept = [aside for aside in asides if _FOCUS.match(aside)]
    # Behind the last question it goes on.
    last = asides[-1] if asides else ""
    end = last.find("[Inferior") if last not in kept else -1
    return "".join((head, *kept, last[end:] if end >= 0 else ""))


def kernels(text: str) -> list[dict[str, Any]]:
    """Return each kernel that is on a GPU: number, name, dimensions, and where it stands."""
    found: dict[int, dict[str, Any]] = {}
    focus: int | None = None
    for line in text.splitlines():
        if (match := _FOCUS.search(line)) is not None:
            focus = int(match["kernel"])
        elif (match := _ROW.match(line)) is not None:
            number = int(match["kernel"])
            found.setdefault(number, {"kernel": number}).update(
                device=int(match["device"]),
                grid=int(match["grid"]),
                status=match["status"].lower(),
                grid_dim=match["grid_dim"],
                block_dim=match["block_dim"],
                name=_name(match["invocation"]),
            )
        elif focus is not None and (match := _FRAME.match(line)) is not None:
            place = found.setdefault(focus, {"kernel": focus})
            place.setdefault("name", _name(match["name"]))
            if match["file"]:
                place.update(file=match["file"], line=int(match["line"]))
            focus = None  # the frames that follow are not its innermost
    return [found[number] for number in sorted(found)]


def _name(invocation: str) -> str:
    """Return the name of a kernel without its arguments; C++ has parentheses in names, too."""
    return re.sub(r"\([^()]*\)$", "", invocation)


def refusal(text: str) -> tuple[FailureKind, str, str] | None:
    """Return why there is nothing to read, as kind, message and hint; ``None`` if unknown."""
    for pattern, kind, message, hint in _REFUSALS:
        if pattern.search(text):
            return kind, message, hint
    return None
