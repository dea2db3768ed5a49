"""The first look: every process there is, so that kin can be found among them.

Runs as a step in a worker, because titles and environments can block for as long as their
process does. It writes the harmless half of every row first and then row by row the rest, so that
a look that is cut short still knows who is there. What it writes names every process of the
machine: it is read and thrown away, never bundled.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.model.capture import Collector, Room, Scope, Stage, Step
from hangwatch.model.process import ProcessRow
from hangwatch.system import procfs

FILE: Final = "census.jsonl"


def _collect(_step: Step, room: Room) -> None:
    rows = sorted(procfs.read_table(), key=lambda row: (row.state == "D", row.pid))
    sockets = procfs.Sockets()
    with room.create(FILE) as out:
        for row in rows:
            out.write(_line(row))
        for row in rows:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                out.write(_line(procfs.look_closer(row, sockets)))


def _line(row: ProcessRow) -> bytes:
    return json.dumps(to_plain(row)).encode() + b"\n"


def read(data: bytes) -> tuple[ProcessRow, ...]:
    """Return the rows, each as the last line about it says; a cut line is left out."""
    return tuple({row.pid: row for row in _rows(data)}.values())


def _rows(data: bytes) -> Iterator[ProcessRow]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError, CodecError):
            row: ProcessRow = from_plain(ProcessRow, json.loads(line))
            yield row


CENSUS: Final = Collector(
    name="census",
    title="Every process, to find those that belong to the engines",
    scope=Scope.NODE,
    rung=0,
    stage=Stage.A,
    timeout=5.0,
    collect=_collect,
)

STEP: Final = Step(
    id="census",
    collector=CENSUS.name,
    scope=CENSUS.scope,
    stage=CENSUS.stage,
    sample=1,
    rung=CENSUS.rung,
    folder=PurePosixPath(),
    timeout=CENSUS.timeout,
)
