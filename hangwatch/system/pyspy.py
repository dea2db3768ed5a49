"""py-spy, a program that is called: where it is, what it promises to write, what its texts mean.

It exits with 1 whatever happened, so its text is read, and that only after our own look at the
process: for want of a right it says, among other things, that the process does not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any, Final

from hangwatch.model.capture import CollectorError, FailureKind
from hangwatch.system import procfs
from hangwatch.system.spawn import ToolResult

MAX_OUTPUT: Final = 24 << 20
"""Bytes: 2,000 threads with 40 frames each."""

PT_INTERP: Final = 3

TORN: Final = re.compile(
    r"Bad address|Failed to copy|Failed to get stack traces|Invalid argument \(os error 22\)"
)
"""It read a process in the middle of a change; the next attempt may do."""

_NOT_PYTHON: Final = re.compile(r"Failed to find python version|Failed to find a python")
_NOT_PERMITTED: Final = re.compile(
    r"Permission [Dd]enied|Operation not permitted|os error (?:1|13)\)"
)
_ENDED: Final = re.compile(r"No such process|Check that the process is running")
_NO_LIBRARY: Final = re.compile(r"No such file or directory")
_CAUSE: Final = re.compile(r"^(?:Error|Caused by)?:?\s*(?:\d+: )?(?P<text>\S.*)$", re.MULTILINE)


def find(chosen: str = "") -> str:
    """Return the path of py-spy: *chosen*, the one installed with us, or the one on the path.

    Raises:
        CollectorError: There is none.
    """
    beside = Path(sys.executable).with_name("py-spy")
    found = chosen or (str(beside) if beside.exists() else shutil.which("py-spy"))
    if not found:
        raise CollectorError(
            FailureKind.NOT_INSTALLED, "py-spy is not installed", "pip install py-spy"
        )
    return found


def not_started(program: str, error: OSError) -> CollectorError:
    """Return what to say when the system cannot run it."""
    if isinstance(error, FileNotFoundError):
        return CollectorError(
            FailureKind.NOT_INSTALLED, f"there is no {program}", "pip install py-spy"
        )
    return CollectorError(
        FailureKind.NOT_INSTALLED,
        f"{program} cannot be started: {error.strerror}",
        "pip install --force-reinstall py-spy",
    )


def is_static(program: int) -> bool:
    """Say whether a program, by its descriptor, runs without any file besides itself.

    A script needs its interpreter, a program that is linked dynamically the loader that it names.
    """
    head = os.pread(program, 64, 0)
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        return False
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    kinds = {
        struct.unpack("<I", kind)[0]
        for number in range(count)
        if len(kind := os.pread(program, 4, offset + number * size)) == 4
    }
    return bool(kinds) and PT_INTERP not in kinds


def threads(output: bytes) -> list[dict[str, Any]]:
    """Return the threads of a dump.

    Raises:
        CollectorError: It is not what py-spy promises.
    """
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(
        isinstance(thread, dict) and isinstance(thread.get("frames"), list) for thread in found
    ):
        raise CollectorError(
            FailureKind.TOOL_FAILED,
            "py-spy wrote something that is not a list of threads",
            "pip install --upgrade py-spy",
        )
    return found


def lines(threads: list[dict[str, Any]]) -> bytes:
    """Return threads as a dump has them, one a line, so that each can be cited."""
    return ("[\n" + ",\n".join(map(json.dumps, threads)) + "\n]\n").encode("ascii")


def failure(result: ToolResult, attempts: int = 1) -> CollectorError:
    """Return what a run that did not succeed amounts to."""
    text = result.errors.decode("utf-8", "replace")
    if result.ended_by_us:
        if len(result.output) + len(result.errors) > MAX_OUTPUT:
            return CollectorError(
                FailureKind.TOO_LARGE, f"py-spy wrote more than {MAX_OUTPUT >> 20} MiB"
            )
        return CollectorError(FailureKind.TIMED_OUT, "py-spy did not end in time and was killed")
    if result.code is not None and result.code < 0:
        return CollectorError(FailureKind.TOOL_FAILED, f"py-spy died of signal {-result.code}")
    for pattern, kind, message, hint in _KNOWN:
        if pattern.search(text):
            return CollectorError(kind, message, hint)
    said = "; ".join(match["text"] for match in _CAUSE.finditer(text.split("\nStack backtrace")[0]))
    tried = f" ({attempts} attempts)" if attempts > 1 else ""
    return CollectorError(
        FailureKind.TOOL_FAILED, f"py-spy failed{tried}: {said[:500] or f'exit code {result.code}'}"
    )


# The first that matches; our own look at the process, before and after, goes before any of them.
_KNOWN: Final = (
    (_NOT_PYTHON, FailureKind.NOT_PYTHON, "there is no Python in this process", ""),
    (
        _NOT_PERMITTED,
        FailureKind.NOT_PERMITTED,
        "its memory may not be read",
        procfs.PERMISSION_HINT,
    ),
    (_ENDED, FailureKind.TARGET_GONE, "the process ended meanwhile", ""),
    (
        _NO_LIBRARY,
        FailureKind.TOOL_FAILED,
        "py-spy cannot open the target's interpreter: its files were deleted or replaced",
        "",
    ),
)
