"""Wakes a follower when a log grows, where the kernel can tell.

A hint and no more: nothing is missed without it, it is only seen up to a quarter of a second
later. Without inotify (no instance left, another kernel, a network filesystem) there are no hints.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

_IN_MODIFY: Final = 0x2


class Hints:
    """Watches open files for growth."""

    def __init__(self) -> None:
        self._watches: dict[tuple[int, int], int] = {}
        self._fd = -1
        with suppress(OSError, AttributeError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to wait on, -1 if there are no hints."""
        return self._fd

    def watch(self, files: Mapping[tuple[int, int], int]) -> None:
        """Watch *files* and nothing else; leave out what cannot be watched.

        Args:
            files: Device and inode to descriptor.
        """
        if self._fd < 0:
            return
        for file in self._watches.keys() - files.keys():
            self._libc.inotify_rm_watch(self._fd, self._watches.pop(file))
        for file in files.keys() - self._watches.keys():
            # By descriptor: behind the name may lie another file by now.
            path = f"/proc/self/fd/{files[file]}".encode()
            watch = self._libc.inotify_add_watch(self._fd, path, _IN_MODIFY)
            if watch >= 0:
                self._watches[file] = watch

    def cover(self, files: Mapping[tuple[int, int], int]) -> bool:
        """Whether growth of each of *files* is told."""
        return self._fd >= 0 and files.keys() <= self._watches.keys()

    def drain(self) -> None:
        """Forget the hints that have arrived."""
        with suppress(OSError):
            while self._fd >= 0 and os.read(self._fd, 4096):
                pass

    def close(self) -> None:
        """Give the kernel's instance back."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
