"""``cuda-gdb``: where it is, and how it is told to leave everything alone.

It is the one of our own side, found on our own path or where NVIDIA installs it. Nothing that a
watched process brings along is executed in it: no initialisation file, no script that a library
names (``auto-load``), no ``libthread_db`` from beside the process's own C library; nothing is
fetched (``debuginfod``).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from typing import Final

from hangwatch.model.capture import CollectorError, FailureKind

MEMORY: Final = 32 << 30
"""Bytes of address space: it takes 1.8 GB of its own for a target that has PyTorch."""

MAX_OUTPUT: Final = 4 << 20

_INSTALLED: Final = "/usr/local/cuda/bin"

_HARMLESS: Final = (
    "set auto-load off",
    "set debuginfod enabled off",
    "set libthread-db-search-path $sdir",
    "set pagination off",
    "set confirm off",
    "set width 0",
)


def find(options: Mapping[str, str]) -> str:
    """Return the program, or the one that the settings name.

    Raises:
        CollectorError: There is none.
    """
    program = options.get("program") or shutil.which("cuda-gdb")
    program = program or shutil.which("cuda-gdb", path=_INSTALLED)
    if program is None:
        raise CollectorError(
            FailureKind.NOT_INSTALLED,
            "there is no cuda-gdb here",
            "install NVIDIA's package cuda-gdb-<version> beside hangwatch",
        )
    return program


def arguments(program: str, commands: Iterable[str], pid: int | None = None) -> list[str]:
    """Return the command line that attaches to *pid*, or to nobody, and runs *commands*."""
    line = [program, "-nx", "-batch"]
    for setting in _HARMLESS:
        line += ["-iex", setting]
    if pid is not None:
        line += ["-p", str(pid)]
    for command in commands:
        line += ["-ex", command]
    return line
