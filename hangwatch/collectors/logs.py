"""The end of every log: those that are followed, and those that the processes write.

The driver's stream does not show what each engine printed, and what Ray's core worker says of a
stuck call stands only in its own file. A log is read through the descriptor of the process that
writes it, because that leads to the very file wherever its path leads from here: nowhere (another
mount namespace, deleted), or to a file that was never meant. Only a log that the user named is
also opened by its path.
"""

from __future__ import annotations

import errno
import os
import re
from typing import BinaryIO, Final

from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.system import paths, procfs

TAIL: Final = 256 << 10
"""Bytes: hours of heartbeats, or the last minutes of a server that logs each request."""

_DESCRIPTOR: Final = re.compile(r"^(?P<path>.*) \(fd of (?P<pid>\d+)\)$")


def _collect(step: Step, room: Room) -> None:
    with _open(step) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL))
        tail = file.read(TAIL)
    if size > TAIL:
        tail = tail.partition(b"\n")[2] or tail  # begin with a whole line, if there is one
    room.write(step.options["name"], tail)


def _open(step: Step) -> BinaryIO:
    known = _DESCRIPTOR.match(step.subject)
    path = known["path"] if known else step.subject
    writers = [target.process.pid for target in step.targets]
    if known:
        writers.append(int(known["pid"]))
    candidates = [
        f"{procfs.PROC}/{pid}/fd/{fd}"
        for pid in writers
        for fd, target in procfs.links(pid).items()
        if target == path
    ]
    if step.options.get("named") and not known:
        candidates.append(path)
    error: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    for candidate in candidates:
        try:
            return os.fdopen(paths.open_regular(candidate), "rb")
        except OSError as caught:
            error = caught
    if isinstance(error, PermissionError):
        raise error
    raise CollectorError(
        FailureKind.NOT_AVAILABLE, f"{path} cannot be read: {(error.strerror or '').lower()}"
    )


COLLECTOR: Final = Collector(
    name="logs",
    title="The end of every log that is followed or written by the processes",
    scope=Scope.LOG,
    rung=8,
    stage=Stage.B,
    timeout=5.0,
    needs="the files, or the right to read the descriptors of who writes them",
    collect=_collect,
)
