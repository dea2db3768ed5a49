"""The end of every log: those that are followed, and those that the processes write.

The driver's stream does not show what each engine printed, and what Ray's core worker says of a
stuck call stands only in its own file. A log is read through the descriptor of the process that
writes it; only a log that the user named is also opened by its path.
"""

from __future__ import annotations

import re
from datetime import datetime
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
from hangwatch.system import logfiles

_RAY: Final = re.compile(r"(?:\d+-)?(?:python-core-|raylet\.|gcs_server\.)")
_DESCRIPTOR: Final = re.compile(r"^(?P<path>.*) \(fd of (?P<pid>\d+)\)$")


def _collect(step: Step, room: Room) -> None:
    with _open(step) as file:
        room.write(step.options["name"], logfiles.excerpt(file, around=_around(step)))


def _around(step: Step) -> datetime | None:
    """Return when the incident began, for logs that say when what they tell of happened.

    A part that is missing from the log of an engine could be taken for silence: of these the end
    is kept and nothing else.
    """
    onset = step.options.get("onset", "")
    if not onset or not _RAY.match(step.options["name"]):
        return None
    return datetime.fromisoformat(onset).astimezone()


def _open(step: Step) -> BinaryIO:
    known = _DESCRIPTOR.match(step.subject)
    path = known["path"] if known else step.subject
    writers = [target.process.pid for target in step.targets]
    if known:
        writers.append(int(known["pid"]))
    named = bool(step.options.get("named")) and not known
    try:
        return logfiles.open_written(writers, path, by_path=named)
    except PermissionError:
        raise
    except OSError as error:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, f"{path} cannot be read: {(error.strerror or '').lower()}"
        ) from error


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
