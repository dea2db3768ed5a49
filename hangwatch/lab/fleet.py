"""Several laboratory servers under one parent that looks like a raylet.

Run it by path::

    python hangwatch/lab/fleet.py --folder /tmp/lab --interval 1 --fault blocked-call --after 6

The folder becomes Ray's temporary directory: ``session_<time>_<pid>/logs/worker-*.out`` and the
link ``session_latest``. Every server is a child of this process, as Ray workers are children of
the raylet. On standard output stand two JSON lines: ``ready`` when all servers serve, and
``truth`` when the fault has begun everywhere. SIGUSR2 starts the fault, like ``--after``; SIGTERM
ends the fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

if __package__:
    from hangwatch.lab import faults
    from hangwatch.lab.faults._process import die_with_parent, set_title
else:  # run by path
    import faults  # type: ignore[import-not-found,no-redef]
    from faults._process import (  # type: ignore[import-not-found,no-redef]
        die_with_parent,
        set_title,
    )

SERVER = Path(__file__).resolve().parent / "server.py"

START_LIMIT = 60.0
"""Seconds; sixteen interpreters start at once on a machine that may be busy."""


def session(folder: Path) -> Path:
    """Make a session directory as Ray does, and point ``session_latest`` at it."""
    name = f"session_{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    logs = folder / name / "logs"
    logs.mkdir(parents=True)
    link = folder / f".latest.{os.getpid()}"
    link.symlink_to(name)
    link.replace(folder / "session_latest")
    return folder / name


class Fleet:
    """The servers and what they told."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(options.folder).resolve()
        self.session = session(self.folder)
        self.stopping = False
        self.due_at = float("inf")
        self.processes = [self._start(number) for number in range(options.servers)]

    def _note(self, number: int, kind: str) -> Path:
        return self.session / f"lab-{number}.{kind}.json"

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        options = self.options
        arguments = ["serve", "api_server", options.model, "--die-with-parent"]
        arguments += ["--interval", str(options.interval), "--threads", str(options.threads)]
        arguments += ["--server-name", options.server_name]
        arguments += ["--ray-logs", str(self.session / "logs")]
        arguments += ["--ready", str(self._note(number, "ready"))]
        if options.fault and number < self.faulty:
            arguments += ["--fault", options.fault, "--truth", str(self._note(number, "truth"))]
            arguments += ["--lasts", str(options.lasts)] if options.lasts else []
        return subprocess.Popen([sys.executable, str(SERVER), *arguments], stdin=subprocess.DEVNULL)

    @property
    def faulty(self) -> int:
        """How many servers get the fault: the first ones."""
        return self.options.servers if self.options.faulty is None else int(self.options.faulty)

    def _notes(self, kind: str, count: int) -> list[dict[str, Any]] | None:
        paths = [self._note(number, kind) for number in range(count)]
        if not all(path.exists() for path in paths):
            return None
        return [json.loads(path.read_text()) for path in paths]

    def wait_ready(self) -> dict[str, Any]:
        """Return who serves where, once all do.

        Raises:
            TimeoutError: One of them did not start in time.
        """
        limit = time.monotonic() + START_LIMIT
        while (notes := self._notes("ready", self.options.servers)) is None:
            if time.monotonic() > limit or any(p.poll() is not None for p in self.processes):
                raise TimeoutError("a server did not start")
            time.sleep(0.05)
        for note in notes:
            (log,) = self.session.glob(f"logs/worker-*-{note['pid']}.out")
            note["log"] = str(log)
        return {
            "kind": "ready",
            "pid": os.getpid(),
            "session": str(self.session),
            "logs": str(self.session / "logs" / "worker-*.out"),
            "servers": notes,
        }

    def truth(self) -> dict[str, Any] | None:
        """Return when the fault began, first and last; ``None`` until it has everywhere."""
        notes = self._notes("truth", self.faulty)
        if not notes:
            return None
        notes.sort(key=lambda note: float(note["at_monotonic"]))
        first, last = notes[0], notes[-1]
        return {
            "kind": "truth",
            "fault": self.options.fault,
            "frame": first["frame"],
            "at_monotonic": first["at_monotonic"],
            "at_wall": first["at_wall"],
            "last_at_monotonic": last["at_monotonic"],
            "last_at_wall": last["at_wall"],
            "servers": notes,
        }

    def start_fault(self) -> None:
        """Let it begin in every server that has one."""
        self.due_at = float("inf")
        for process in self.processes[: self.faulty]:
            process.send_signal(signal.SIGUSR2)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; a raylet outlives its workers."""
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "due_at", 0.0))
        say(self.wait_ready())
        if self.options.after is not None:
            self.due_at = time.monotonic() + self.options.after
        told = not self.options.fault
        while not self.stopping:
            if time.monotonic() >= self.due_at:
                self.start_fault()
            if not told and (truth := self.truth()):
                say(truth)
                told = True
            time.sleep(0.05)

    def stop(self) -> None:
        """End every server, also those that are stopped or blocked."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(10.0)


def say(message: dict[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps(message), flush=True)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options; a mistake ends the process with code 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--folder", required=True, help="becomes Ray's temporary directory")
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--faulty", type=int, help="how many get the fault; all by default")
    parser.add_argument("--model", default="internlm/lab-7b")
    parser.add_argument("--server-name", default="127.0.0.1", metavar="ADDRESS")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between heartbeats")
    parser.add_argument("--threads", type=int, default=2, help="idle threads in each process")
    parser.add_argument("--fault", choices=faults.names())
    parser.add_argument("--after", type=float, help="seconds from ready to the fault")
    parser.add_argument("--lasts", type=float, help="seconds until the fault ends by itself")
    parser.add_argument("--die-with-parent", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the fleet."""
    options = parse_arguments(sys.argv[1:])
    if options.fault and (reason := faults.load(options.fault).unavailable()):
        sys.exit(f"{options.fault} cannot happen here: {reason}")
    if options.die_with_parent:
        die_with_parent(os.getppid())
    fleet = Fleet(options)

    def stop(*_: object) -> None:
        fleet.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    folder, name = fleet.folder, fleet.session
    # Cut where our own command line is shorter; what may be cut stands last.
    title = f"raylet --session-dir={name} --temp-dir={folder}"
    set_title(title, "raylet")
    try:
        fleet.run()
    except TimeoutError as error:
        sys.exit(f"fleet: {error}")
    finally:
        fleet.stop()


if __name__ == "__main__":
    main()
