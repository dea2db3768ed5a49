"""Runs ``hangwatch`` as a user does, and reads what it says while it runs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import jsonschema

EVENTS = jsonschema.Draft202012Validator(
    json.loads((files("hangwatch") / "schemas" / "hangwatch.watch.1.schema.json").read_text()),
    format_checker=jsonschema.FormatChecker(),
)
"""What each line keeps to."""

LIMIT = 60.0
"""Seconds until a test gives up on something that should happen."""


def wait_for(condition: Callable[[], Any], what: str = "it", seconds: float = LIMIT) -> Any:
    """Return what *condition* returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.02)
    return found


def state_of(pid: int) -> str:
    """Return the letter of a process's state, ``""`` if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def runs(pid: int) -> bool:
    return state_of(pid) not in {"", "Z", "X"}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Hangwatch:
    """A running ``hangwatch`` whose standard output is JSON lines; it asks servers every second.

    Its end writes no bundle, unless a test wants one.

    Attributes:
        events: What it said so far.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """Start it, as an argument of the command *under* where one is given."""
        quick = {"HANGWATCH_PROBE_INTERVAL": "1", "HANGWATCH_RUN_BUNDLE": "false"}
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HANGWATCH_")}
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", "hangwatch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean | quick | (environment or {}),
        )
        self.events: list[dict[str, Any]] = []
        self._unread = b""
        self.errors = b""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for stream in (self.process.stdout, self.process.stderr):
            os.set_blocking(stream.fileno(), False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self, timeout: float = 0.0) -> bool:
        """Take in what it said; say whether it may say more."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out, err = self.process.stdout.fileno(), self.process.stderr.fileno()
        ready, _, _ = select.select([out, err], [], [], timeout)
        if err in ready:
            self.errors += os.read(err, 1 << 16)
        if out not in ready:
            return True
        block = os.read(out, 1 << 16)
        self._unread += block
        *lines, self._unread = self._unread.split(b"\n")
        said = [json.loads(line) for line in lines if line]
        for event in said:
            EVENTS.validate(event)
        self.events += said
        return bool(block)

    def wait(self, event: str, *, skip: int = 0, seconds: float = LIMIT, **facts: Any) -> Any:
        """Return the first such event that is not among the first *skip* ones."""
        deadline = time.monotonic() + seconds
        while True:
            for said in self.events[skip:]:
                if said["event"] == event and facts.items() <= said.items():
                    return said
            failed = [said for said in self.events if said["event"] == "capture_failed"]
            assert not failed or event == "capture_failed", self.errors.decode()
            told = f"no {event} {facts}: {self.events[-5:]} {self.errors[-2000:].decode()}"
            assert time.monotonic() < deadline, told
            open_still = self.read(0.2)
            assert open_still or self.process.poll() is None, told

    def of(self, event: str) -> list[dict[str, Any]]:
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.read()
        return [said for said in self.events if said["event"] == event]

    def children(self, module: str = "hangwatch.") -> dict[int, str]:
        """Return its children (and theirs) whose command line names *module*."""
        found = {}
        pending = [self.pid]
        while pending:
            pid = pending.pop()
            try:
                task = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                for child in map(int, task):
                    pending.append(child)
                    words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
                    if any(word.startswith(module) for word in words):
                        found[child] = " ".join(words)
            except OSError:
                continue
        return found

    def child(self, module: str) -> int:
        """Return the one child that runs *module*, as soon as there is one."""
        return wait_for(lambda: next(iter(self.children(module)), None), module)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(number)
        return self.finish()

    def finish(self) -> int:
        """Return its exit code when it has ended."""
        deadline = time.monotonic() + LIMIT
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it did not end"
            self.read(0.1)
        while self.read(0.1):
            pass
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
