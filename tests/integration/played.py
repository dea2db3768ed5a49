"""Servers that answer as a test says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = Path(__file__).parent / "programs" / "played.py"

HEALTHY = {"body": '{"status": "healthy", "message": "Engine is healthy."}'}
WORDLESS = {"body": ""}
MUTE = {"mute": True}
METRICS = {"body": 'lmdeploy:generation_tokens_total{engine="0"} 5.0\n'}

Behaviour = Mapping[str, Mapping[str, Any]]


class Asked(NamedTuple):
    """One request that a server got."""

    method: str
    path: str
    key: str
    at: float


class Played:
    """Running servers.

    Attributes:
        pids: One each, in the order of their behaviours.
    """

    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.pids = pids
        self._folder = folder

    def asked(self, pid: int) -> list[Asked]:
        """Return what a server was asked so far."""
        text = (self._folder / f"{pid}.asked").read_text()
        return [Asked(*json.loads(line)) for line in text.splitlines(keepends=True) if "\n" in line]


@contextmanager
def played(folder: Path, *behaviours: Behaviour) -> Iterator[Played]:
    """Run one server for each of *behaviours*: path to what it answers."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), *map(json.dumps, behaviours)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield Played(folder, [int(pid) for pid in process.stdout.readline().split()])
        finally:
            process.kill()
