"""Opens the logs of other processes, and takes out of them what is worth keeping."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from datetime import datetime
from typing import BinaryIO, Final

from hangwatch.core import excerpts
from hangwatch.system import paths, procfs

LIMIT: Final = 256 << 10
"""Bytes of one log: hours of heartbeats, or the last minutes of a server that logs each request."""


def open_written(pids: Iterable[int], path: str, *, by_path: bool = False) -> BinaryIO:
    """Open a log through the descriptor of a process that writes it.

    That leads to the very file wherever its path leads from here: nowhere (another mount
    namespace, deleted), or to a file that was never meant. Regular files only.

    Args:
        pids: Processes that may have it open.
        path: What their descriptors lead to.
        by_path: Whether to open it by its path where no process has it open.

    Raises:
        OSError: It cannot be opened.
    """
    candidates = [
        f"{procfs.PROC}/{pid}/fd/{fd}"
        for pid in pids
        for fd, target in _links(pid).items()
        if target == path
    ]
    if by_path:
        candidates.append(path)
    error: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    for candidate in candidates:
        try:
            return os.fdopen(paths.open_regular(candidate), "rb")
        except OSError as caught:
            error = caught
    raise error


def _links(pid: int) -> dict[int, str]:
    try:
        return procfs.links(pid)
    except (FileNotFoundError, ProcessLookupError):
        return {}


def excerpt(file: BinaryIO, *, around: datetime | None = None, limit: int = LIMIT) -> bytes:
    """Return the end of a log, and what surrounds a moment before that; whole lines.

    Args:
        file: The log.
        around: See ``excerpts.parts``.
        limit: Bytes.
    """
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    kept = b""
    last = 0
    for begin, end in excerpts.parts(
        lambda offset, length: os.pread(descriptor, length, offset),
        size,
        limit=limit,
        around=around,
    ):
        if begin > last > 0:
            kept += b"[hangwatch left out %d bytes here]\n" % (begin - last)
        piece = os.pread(descriptor, end - begin, begin)
        if end < size:
            piece = piece[: piece.rfind(b"\n") + 1]
        kept += excerpts.whole_lines(piece, first=begin == 0)
        last = end
    return kept
