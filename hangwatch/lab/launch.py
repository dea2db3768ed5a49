"""Starts laboratory servers, fleets and bare processes, for the demo and for tests.

What is started dies with the thread that started it, so start it from one that lives on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

LAB = Path(__file__).resolve().parent

LIMIT = 60.0
"""Seconds until we give up on a server that should start, or on a fault that should begin."""


class LabError(Exception):
    """The laboratory did not do what was asked of it."""


class _Ended:
    """Stopped at the end of a ``with`` block."""

    def stop(self) -> None:
        """End what was started."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Server(_Ended):
    """One server process and its engine, ready to be asked.

    Attributes:
        log: Where both its streams go.
        pid: The API server.
        engine_pid: The engine, its child.
        url: Where it listens: ``http://127.0.0.1:23333``.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        interval: float = 1.0,
        python: str = sys.executable,
        name: str = "server",
        stdout: int | IO[bytes] | None = None,
    ) -> None:
        """Start it and wait until it serves.

        Args:
            folder: Where its log, ``ready`` and ``truth`` files lie.
            arguments: Further options of ``lab/server.py``.
            interval: Seconds between heartbeats.
            python: Interpreter to run it under.
            name: Of its files.
            stdout: Where its output goes instead of ``log``.

        Raises:
            LabError: It did not start.
        """
        self.log = folder / f"{name}.log"
        self._truth = folder / f"{name}.truth.json"
        ready = folder / f"{name}.ready.json"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(python, str(LAB / "server.py"), "serve", "api_server", "internlm/lab-7b"),
                    *("--interval", str(interval), "--die-with-parent"),
                    *("--ready", str(ready), "--truth", str(self._truth)),
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
            )
        self.pid = self.process.pid
        try:
            note = _read_when_there(ready, self.process)
        except BaseException:
            self.stop()
            raise
        self.engine_pid: int = note["engine_pid"]
        self.url: str = note["url"]

    def start_fault(self) -> None:
        """Let the fault begin now, in a server that has one and no ``--after``."""
        self.process.send_signal(signal.SIGUSR2)

    def truth(self) -> dict[str, Any]:
        """Return what was injected and when, as soon as it is.

        Raises:
            LabError: It has not begun in time.
        """
        return _read_when_there(self._truth, self.process)

    def stop(self) -> None:
        """End it, whatever state it is in; its engine ends with it."""
        self.process.kill()
        self.process.wait(LIMIT)


class Bare(_Ended):
    """A bare process with a fault.

    Attributes:
        pid: Of the process.
    """

    def __init__(self, fault: str, *arguments: str, python: str = sys.executable) -> None:
        """Start it; return before it works.

        Args:
            fault: Its name.
            arguments: Further options of ``lab/bare.py``.
            python: Interpreter to run it under.
        """
        self.process = subprocess.Popen(
            [python, str(LAB / "bare.py"), fault, "--die-with-parent", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self.pid = self.process.pid
        self._said = _Said(self.process)

    def truth(self) -> dict[str, Any]:
        """Return what was injected and when, as soon as it is.

        Raises:
            LabError: It has not begun in time.
        """
        self._said.next("ready", LIMIT)
        return self._said.next("truth", LIMIT)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        self.process.kill()
        self.process.wait(LIMIT)
        self._said.close()


class Fleet(_Ended):
    """A fleet process and its servers.

    Attributes:
        servers: Each with ``pid``, ``engine_pid``, ``url`` and ``log``.
        pid: The process that looks like the raylet.
        logs: Pattern of the servers' logs.
        folder: Ray's temporary directory.
    """

    program = LAB / "fleet.py"

    def __init__(self, folder: Path, *arguments: str, servers: int = 8, interval: float = 1.0):
        """Start it; return before its servers are ready.

        Args:
            folder: Becomes Ray's temporary directory.
            arguments: Further options of ``lab/fleet.py``.
            servers: How many.
            interval: Seconds between heartbeats.
        """
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(self.program), "--folder", str(folder)),
                *("--servers", str(servers), "--interval", str(interval), "--die-with-parent"),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._said = _Said(self.process)
        self.folder = folder
        self.pid = self.process.pid
        self.servers: Sequence[dict[str, Any]] = ()
        self.logs = ""

    def wait_ready(self, limit: float = LIMIT) -> None:
        """Return when every server serves.

        Raises:
            LabError: They do not in time.
        """
        note = self._said.next("ready", limit)
        self.servers, self.logs = note["servers"], note["logs"]

    def start_fault(self) -> None:
        """Let the fault begin now, in a fleet that has one and no ``--after``."""
        self.process.send_signal(signal.SIGUSR2)

    def truth(self, limit: float = LIMIT) -> dict[str, Any]:
        """Return what was injected and when, as soon as it is.

        Raises:
            LabError: It has not begun in time.
        """
        return self._said.next("truth", limit)

    def stop(self) -> None:
        """End it with its servers, whatever state they are in."""
        self.process.terminate()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its servers die with it
            self.process.wait(LIMIT)
        self._said.close()


class _Said:
    """The JSON lines that a process prints."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._unread = b""

    def next(self, kind: str, limit: float) -> dict[str, Any]:
        """Return the next line, which is to be of that kind.

        Raises:
            LabError: It is not, or it did not come within *limit* seconds.
        """
        deadline = time.monotonic() + limit
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._lines], [], [], left)[0]:
                raise LabError(f"it said nothing for {limit:.0f} s")
            block = os.read(self._lines.fileno(), 1 << 16)
            if not block:
                raise LabError("it ended")
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        note: dict[str, Any] = json.loads(line)
        if note["kind"] != kind:
            raise LabError(f"expected {kind}, it said {note['kind']}")
        return note

    def close(self) -> None:
        """Listen no more."""
        self._lines.close()


def _read_when_there(path: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        if process.poll() is not None and not path.exists():
            raise LabError(
                f"the server ended with {process.returncode} before it wrote {path.name}"
            )
        if time.monotonic() > deadline:
            raise LabError(f"the server did not write {path.name} within {LIMIT:.0f} s")
        time.sleep(0.02)
    note: dict[str, Any] = json.loads(path.read_text())
    return note
