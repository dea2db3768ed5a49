"""Wakes a follower when a log grows, where the kernel can tell.

A hint and no more: nothing is missed without it, it is only seen up to a quarter of a second
later. Where inotify has no instance or watch left, and on network filesystems, there are no hints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from watchdog.events import FileModifiedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch

IDLE_TIMEOUT: Final = 5.0
"""Seconds after which its threads look whether they should end; growth wakes them at once."""

MAX_DIRECTORIES: Final = 16
"""Each costs a thread; logs in more of them are looked at by the clock alone."""


class _Bell(FileSystemEventHandler):
    """Writes a byte when one of *files* was written to; its thread does nothing else."""

    def __init__(self, write_fd: int) -> None:
        self._write_fd = write_fd
        self.files: frozenset[str] = frozenset()

    def on_modified(self, event: FileSystemEvent) -> None:
        if os.fsdecode(event.src_path) in self.files:
            with suppress(OSError):  # full: the follower is about to wake already
                os.write(self._write_fd, b".")


class Hints:
    """Watches open files for growth."""

    def __init__(self) -> None:
        self._read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._write_fd = write_fd
        self._bell = _Bell(write_fd)
        self._watches: dict[str, ObservedWatch] = {}
        self._observer = Observer(timeout=IDLE_TIMEOUT)
        self._observer.daemon = True
        with suppress(OSError):  # no inotify instance left
            self._observer.start()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._read_fd

    def watch(self, files: Mapping[tuple[int, int], int]) -> None:
        """Watch *files* and nothing else; leave out what cannot be watched.

        Args:
            files: Device and inode to descriptor.
        """
        self._bell.files = _names(files)
        wanted = {_directory(name) for name in self._bell.files}
        for directory in self._watches.keys() - wanted:
            with suppress(KeyError, OSError):
                self._observer.unschedule(self._watches.pop(directory))
        for directory in sorted(wanted - self._watches.keys()):
            if len(self._watches) >= MAX_DIRECTORIES:
                break
            with suppress(OSError):  # no watch left, or the directory is gone
                self._watches[directory] = self._observer.schedule(
                    self._bell, directory, recursive=False, event_filter=[FileModifiedEvent]
                )

    def cover(self, files: Mapping[tuple[int, int], int]) -> bool:
        """Whether growth of each of *files* is told."""
        names = _names(files)
        return len(names) == len(files) and all(_directory(name) in self._watches for name in names)

    def drain(self) -> None:
        """Forget the hints that have arrived."""
        with suppress(OSError):
            while os.read(self._read_fd, 4096):
                pass

    def close(self) -> None:
        """Stop watching."""
        if self._observer.is_alive():
            self._observer.stop()
            self._observer.join(1.0)
        os.close(self._read_fd)
        os.close(self._write_fd)


def _directory(name: str) -> str:
    return str(Path(name).parent)


def _names(files: Mapping[tuple[int, int], int]) -> frozenset[str]:
    """Return where the open *files* lie now; a deleted one has no name, nor has a pipe."""
    names = set()
    for fd in files.values():
        with suppress(OSError):
            names.add(str(Path(f"/proc/self/fd/{fd}").readlink()))
    return frozenset(
        name for name in names if name.startswith("/") and not name.endswith(" (deleted)")
    )
