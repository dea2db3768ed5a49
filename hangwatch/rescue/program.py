"""Collects what a hung engine's processes do, twice, and prints one JSON document.

It reads: the state of the named processes and of those that belong to them, their threads, Python
stacks and asyncio tasks, and the ends of the logs that they write. It never stops, signals or
writes to a process, writes no file, opens no connection and reads no environment. It ends within
its time, prints at most 8 MB, and if memory runs out, it goes first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from hangwatch import __version__
from hangwatch.rescue import aside, kernel, reading

SCHEMA: Final = "hangwatch.rescue/1"
SAMPLES_LIMIT: Final = 5_500_000
"""Bytes of all samples together; with logs and the rest it stays below 8 MB."""
LOGS_LIMIT: Final = 2_000_000
LOG_LIMIT: Final = 256 << 10
"""Bytes of one log: hours of heartbeats, or the last minutes of one that tells each request."""
MAX_LOGS: Final = 32
MAX_PROBLEMS: Final = 200
USAGE: Final = 2


@dataclass
class _Process:
    """One process of the document."""

    pid: int
    why: str
    start_ticks: int
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[bytes] = field(default_factory=list)


@dataclass
class _Rescue:
    """The time that there is, and what was found."""

    began: float
    seconds: float
    processes: list[_Process] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def until(self, share: float) -> float:
        """Return the instant at which *share* of the time is over."""
        return self.began + share * self.seconds

    def problem(self, text: str) -> None:
        """Put it into the document and tell it."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)
        tell(text)


def tell(text: str) -> None:
    """Talk to the person, who may not listen."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hangwatch-rescue: {text}\n")
        sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 for a document, 1 for none, 2 for a wrong command line."""
    options = _options().parse_args(arguments)
    began, started = time.monotonic(), _local(time.time())
    # Our children are ours to reap: the number of one that ended could soon be anybody's.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Whatever happens, we are gone soon after our time.
    signal.alarm(int(options.seconds) + 15)
    _go_first()
    if not options.pid:
        _name_pythons(began + options.seconds)
        return USAGE
    rows = kernel.table()
    named = list(dict.fromkeys(options.pid))
    missing = [pid for pid in named if pid not in rows]
    if missing:
        tell(
            f"there is no process {missing[0]} here: without --pid I list what there is; "
            "processes of other containers are visible only with a shared process namespace"
        )
        return 1
    rescue = _Rescue(began=began, seconds=options.seconds)
    _find(rescue, named, rows)
    tell(f"reading {len(rescue.processes)} processes twice, {options.gap:g} s apart")
    first = time.monotonic()
    _sample(rescue, until=rescue.until(0.5))
    if options.logs:
        _read_logs(rescue)
    second = min(first + options.gap, rescue.until(0.6))
    time.sleep(max(0.0, second - time.monotonic()))
    _sample(rescue, until=rescue.until(0.9))
    size = _print(rescue, started, options)
    tell(f"done: {size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s")
    tell(
        "the document holds command lines and log lines as they are: do not publish it; publish "
        "what `hangwatch diagnose` makes of it, which is redacted"
    )
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hangwatch-rescue.py",
        description=(
            "Print what a hung Python engine and its processes do, as one JSON document for "
            "`hangwatch diagnose`. Nothing is stopped, signalled or written."
        ),
    )
    parser.add_argument(
        "--pid", type=int, action="append", metavar="N", help="the engine; may be repeated"
    )
    parser.add_argument(
        "--gap", type=float, default=3.0, metavar="S", help="seconds between samples (3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="seconds for all of it (30)"
    )
    parser.add_argument(
        "--no-logs", dest="logs", action="store_false", help="leave out the ends of logs"
    )
    return parser


def _local(seconds: float) -> str:
    """Return a moment with the offset that naive stamps of the logs have, too."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _go_first() -> None:
    """Ask the kernel to end us, and not the engine, if the container's memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _name_pythons(until: float) -> None:
    rows = kernel.table()
    found = sorted(pid for pid in rows if pid != os.getpid() and kernel.is_python(pid))
    jobs = {pid: partial(_look, pid) for pid in found}
    tell("which process? Name one with --pid; these are Python:")
    for pid, look in aside.run(jobs, limit=2.0, until=until).items():
        title = json.loads(look.lines[0])["title"] if look.lines else ""
        tell(f"  --pid {pid}  {title[:100] or rows[pid].comm}")


def _find(rescue: _Rescue, named: list[int], rows: Mapping[int, kernel.Stat]) -> None:
    """Fill in the processes, with what is said of them once."""
    found = kernel.kin(named, rows, os.getpid())
    kept = list(found)[: 2 * kernel.MAX_PROCESSES]

    jobs = {pid: partial(_look, pid) for pid in kept}
    looks = aside.run(jobs, limit=2.0, until=rescue.until(0.2))
    for pid in kept:
        look = looks[pid]
        facts = json.loads(look.lines[0]) if look.lines else {}
        title = facts.get("title", "")
        if pid not in named and (kernel.is_dull(title) or kernel.is_dull(rows[pid].comm)):
            continue
        if look.problem:
            rescue.problem(f"the command line and files of process {pid}: {look.problem}")
        rescue.processes.append(_Process(pid, found[pid], rows[pid].start_ticks, facts))
    left_out = len(found) - len(kept) + max(0, len(rescue.processes) - kernel.MAX_PROCESSES)
    del rescue.processes[kernel.MAX_PROCESSES :]
    if left_out:
        rescue.problem(f"{left_out} more processes belong to them and were left out")


def _look(pid: int) -> Iterator[bytes]:
    yield _json(kernel.look(pid))


def _sample(rescue: _Rescue, *, until: float) -> None:
    """Read every process once."""
    limit = min(8.0, rescue.seconds / 3)
    share = SAMPLES_LIMIT // (2 * len(rescue.processes))

    heads = {}
    for process in rescue.processes:
        # The states of all at one moment, before anything is done that takes time.
        heads[process.pid] = {"monotonic": time.monotonic(), **kernel.process_now(process.pid)}
    jobs = {
        it.pid: partial(reading.parts, it.pid, it.start_ticks, seconds=limit / 2, limit=share)
        for it in rescue.processes
        if heads[it.pid]["state"] not in ("Z", "X", "gone")
    }
    results = aside.run(jobs, limit=limit, until=until)
    for process in rescue.processes:
        result = results.get(process.pid, aside.Result())
        pieces = [_json(heads[process.pid])[:-1]]
        for line in result.lines:
            name, _, value = line.partition(b" ")
            if name == b"problem":
                result.problem = value.decode("utf-8", "replace")
            else:
                pieces.append(b'"%b":%b' % (name, value))
        if result.problem and (process.why == "named" or kernel.is_python(process.pid)):
            problem = f"process {process.pid}: {result.problem}"
            if problem not in rescue.problems:
                rescue.problem(problem)
        process.samples.append(b",".join(pieces) + b"}")


def _read_logs(rescue: _Rescue) -> None:
    """Fill in the ends of logs, the nearest process's first, each log once."""
    wanted = {each.pid: each.facts["logs"] for each in rescue.processes if each.facts.get("logs")}
    count = min(MAX_LOGS, sum(map(len, wanted.values())))
    share = min(LOG_LIMIT, LOGS_LIMIT // max(1, count))
    jobs = {pid: partial(_tails, pid, logs, share) for pid, logs in wanted.items()}
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    for pid, result in aside.run(jobs, limit=3.0, until=rescue.until(0.55)).items():
        if result.problem:
            rescue.problem(f"the logs of process {pid}: {result.problem}")
        for log in map(json.loads, result.lines):
            if "error" in log:
                rescue.problem(f"{log['path']} cannot be read: {log['error']}")
                continue
            identity = tuple(log.pop("identity"))
            if identity in known:
                known[identity]["pids"].append(pid)
            elif len(known) < MAX_LOGS:
                known[identity] = {**log, "pids": [pid]}
    rescue.logs = list(known.values())
    if not rescue.logs:
        rescue.problem(
            "no log was found: the processes write into pipes or terminals; save what they wrote "
            "(`kubectl logs`) and give it to `hangwatch diagnose` beside this document"
        )


def _tails(pid: int, logs: Sequence[tuple[int, str]], limit: int) -> Iterator[bytes]:
    """Yield the end of each log as a line of JSON; its text takes at most *limit* bytes."""
    for fd, path in logs:
        try:
            facts, data = kernel.tail(pid, fd, limit)
        except OSError as error:
            yield _json({"path": path, "error": error.strerror or str(error)})
            continue
        text = data.decode("utf-8", "surrogateescape")
        while len(_json(text)) > limit:
            text = text[len(text) // 4 :].partition("\n")[2]
        yield _json(
            {
                "path": path,
                "size": facts.st_size,
                "written": _local(facts.st_mtime),
                "identity": [facts.st_dev, facts.st_ino],
                "text": text,
            }
        )


def _print(rescue: _Rescue, started: str, options: argparse.Namespace) -> int:
    """Write the document to standard output; return its size in bytes."""
    system = os.uname()
    head = {
        "schema": SCHEMA,
        "began": started,
        "ended": _local(time.time()),
        "asked": {"pids": options.pid, "gap": options.gap, "seconds": options.seconds},
        "host": {
            "kernel": system.release,
            "machine": system.machine,
            "cores": os.cpu_count(),
            "cores_allowed": len(os.sched_getaffinity(0)),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "hangwatch": __version__,
        },
    }
    processes = [
        _json({"pid": it.pid, "start_ticks": it.start_ticks, "why": it.why, **_shown(it)})[:-1]
        + b',"samples":[\n'
        + b",\n".join(it.samples)
        + b"]}"
        for it in rescue.processes
    ]
    pieces = [
        _json(head)[:-1] + b',\n"processes":[',
        b",\n".join(processes),
        b'],\n"logs":[',
        b",\n".join(map(_json, rescue.logs)),
        b'],\n"problems":' + _json(rescue.problems) + b"}\n",
    ]
    for piece in pieces:
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    return sum(map(len, pieces))


def _shown(process: _Process) -> dict[str, Any]:
    known = {name: process.facts.get(name) for name in ("title", "gpus")}
    known["logs"] = [path for _, path in process.facts.get("logs", ())]
    return {name: value for name, value in known.items() if value}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
