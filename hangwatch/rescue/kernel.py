"""What ``/proc`` says, without anything but the standard library.

``stat``, ``status``, ``wchan``, ``schedstat``, ``syscall`` and links never wait for the process.
``cmdline`` and the content of logs can, so ``look`` and ``tail`` belong into a child (``aside``).
The environment of a process is never read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hangwatch.remote.procfs import open_regular

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
KERNEL_THREAD: Final = 0x00200000
"""``PF_KTHREAD`` in ``include/linux/sched.h``."""
MAX_TITLE: Final = 1000
MAX_PROCESSES: Final = 48
"""A node with eight servers of three processes each, and as many again."""
MAX_THREADS: Final = 1000
MAX_LINKS: Final = 4096

GONE: Final = (FileNotFoundError, ProcessLookupError)

_GPU: Final = re.compile(r"/dev/nvidia(\d+)$")
_LOG: Final = re.compile(r".*\.(log|out|err|txt)(\.\d{1,4})?$")
_NOT_LOGS: Final = ("/dev/", "/proc/", "/sys/", "/memfd:")
_DULL: Final = re.compile(
    r"multiprocessing\.(resource_tracker|forkserver)|ray::IDLE|/ray/dashboard|ray::DashboardAgent"
    r"|/ray/_private/(log_monitor|runtime_env)"
)


@dataclass(frozen=True)
class Stat:
    """One process by its ``stat``.

    Attributes:
        pid: Its number.
        comm: Name of its main thread.
        fields: From the state on: field N of proc(5) is ``fields[N - 3]``.
    """

    pid: int
    comm: str
    fields: tuple[str, ...]

    @property
    def state(self) -> str:
        """Letter of its state."""
        return self.fields[0]

    @property
    def ppid(self) -> int:
        """Its parent."""
        return int(self.fields[1])

    @property
    def kernel(self) -> bool:
        """Whether it is a thread of the kernel."""
        return bool(int(self.fields[6]) & KERNEL_THREAD)

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its threads."""
        return (int(self.fields[11]) + int(self.fields[12])) / TICKS_PER_SECOND

    @property
    def start_ticks(self) -> int:
        """When it started, in clock ticks after boot."""
        return int(self.fields[19])


def read_stat(pid: int, tid: int = 0) -> Stat:
    """Return a process, or one of its threads.

    Raises:
        FileNotFoundError, ProcessLookupError: There is none.
    """
    where = f"/proc/{pid}/task/{tid}/stat" if tid else f"/proc/{pid}/stat"
    head, _, tail = Path(where).read_text(encoding="utf-8", errors="replace").rpartition(")")
    return Stat(pid=tid or pid, comm=head.partition("(")[2], fields=tuple(tail.split()))


def table() -> dict[int, Stat]:
    """Return all processes, those of the kernel left out."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(*GONE):
                row = read_stat(int(name))
                if not row.kernel:
                    found[row.pid] = row
    return found


def is_python(pid: int) -> bool:
    """Say whether the program of a process is a Python interpreter, by its name."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python")
    except OSError:
        return False


def kin(named: list[int], rows: Mapping[int, Stat], ours: int) -> dict[int, str]:
    """Return who belongs to the named processes, and why; the nearest first.

    Their descendants; the Python processes that they descend from, with all that descends from
    those (workers of one launcher); under Ray the raylet, and whatever runs beneath it. Ours are
    left out.
    """
    children: dict[int, list[int]] = {}
    for row in rows.values():
        children.setdefault(row.ppid, []).append(row.pid)
    found: dict[int, str] = {}

    def descend(pid: int, why: str) -> None:
        stack = [pid]
        while stack:
            above = stack.pop(0)
            for child in sorted(children.get(above, ())):
                if child != ours and child in rows and child not in found:
                    found[child] = why.format(above)
                    stack.append(child)
                elif child in found and child != ours:
                    stack.append(child)

    found.update(dict.fromkeys(named, "named"))
    for pid in named:
        descend(pid, "child of {}")
    for pid in named:
        below, above = pid, rows.get(rows[pid].ppid)
        while above is not None and (above.comm == "raylet" or is_python(above.pid)):
            if above.pid in (ours, os.getppid(), below):
                break
            is_raylet = above.comm == "raylet"
            found.setdefault(above.pid, f"raylet of {pid}" if is_raylet else f"parent of {below}")
            descend(above.pid, f"same raylet as {pid}" if is_raylet else "child of {}")
            below, above = above.pid, rows.get(above.ppid)
    return found


def look(pid: int) -> dict[str, Any]:
    """Return title, GPUs and open logs of a process; can block for as long as the process does.

    A log is what descriptor 1 or 2 leads to, and any file open for writing that is named like
    one. What may not be read stays empty.
    """
    links = {}
    with contextlib.suppress(PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd")[:MAX_LINKS]:
            with contextlib.suppress(*GONE):
                links[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    title = ""
    with contextlib.suppress(PermissionError):
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()[: 16 * MAX_TITLE]
        title = " ".join(raw.replace(b"\0", b" ").decode("utf-8", "replace").split())[:MAX_TITLE]
    gpus = {int(match[1]) for each in links.values() if (match := _GPU.match(each))}
    logs: dict[str, int] = {}
    for fd, path in sorted(links.items()):
        if path.startswith("/") and not path.startswith(_NOT_LOGS):
            name = path.removesuffix(" (deleted)")
            if path not in logs and (fd in (1, 2) or _LOG.match(name)) and _written(pid, fd):
                logs[path] = fd
    return {"title": title, "gpus": sorted(gpus), "logs": [[fd, p] for p, fd in logs.items()]}


def is_dull(title: str) -> bool:
    """Say whether a process tells nothing of a hang."""
    return _DULL.search(title) is not None


def _written(pid: int, fd: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii").splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def tail(pid: int, fd: int, limit: int) -> tuple[os.stat_result, bytes]:
    """Return the facts and the last whole lines of a file that a process has open.

    It is opened through the descriptor, so it is the very file, wherever its path leads from
    here. Can block for as long as its file system does.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    with open_regular(f"/proc/{pid}/fd/{fd}") as file:
        facts = os.fstat(file.fileno())
        file.seek(max(0, facts.st_size - limit))
        data = file.read(limit)
    if facts.st_size > limit:
        data = data.partition(b"\n")[2] or data
    return facts, data


def process_now(pid: int) -> dict[str, Any]:
    """Return the state of a process; ``{"state": "gone"}`` if it has ended."""
    try:
        row = read_stat(pid)
        status = _status(f"/proc/{pid}/status")
        found: dict[str, Any] = {
            "ppid": row.ppid,
            "state": row.state,
            "comm": row.comm,
            "wchan": _wchan(f"/proc/{pid}"),
            "tracer_pid": int(status.get("TracerPid", "0")),
            "uid": int(status.get("Uid", "0 0").split()[1]),
            "rss_mib": round(int(status.get("VmRSS", "0 kB").split()[0]) / 1024, 1),
            "thread_count": int(row.fields[17]),
            "cpu_seconds": row.cpu_seconds,
        }
    except GONE:
        return {"state": "gone"}
    return found


def threads_now(pid: int) -> Iterator[dict[str, Any]]:
    """Yield what the kernel says of each thread; those that end meanwhile are left out."""
    try:
        names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except GONE:
        return
    for name in names[:MAX_THREADS]:
        with contextlib.suppress(*GONE):
            yield _thread_now(pid, int(name))


def _thread_now(pid: int, tid: int) -> dict[str, Any]:
    at = f"/proc/{pid}/task/{tid}"
    row = read_stat(pid, tid)
    status = _status(f"{at}/status")
    run_ns, wait_ns, slices = (*_text(f"{at}/schedstat").split(), "", "", "")[:3]
    found: dict[str, Any] = {
        "tid": tid,
        "comm": row.comm,
        "state": row.state,
        "cpu_seconds": row.cpu_seconds,
        "run_ns": int(run_ns) if run_ns else None,
        "wait_ns": int(wait_ns) if wait_ns else None,
        "slices": int(slices) if slices else None,
        "vol_ctxt": int(status.get("voluntary_ctxt_switches", "0")),
        "invol_ctxt": int(status.get("nonvoluntary_ctxt_switches", "0")),
        "wchan": _wchan(at),
        "syscall": _text(f"{at}/syscall"),
    }
    if row.state == "D" and (stack := _text(f"{at}/stack")):
        found["stack"] = stack  # needs root; the one who sleeps in the kernel is where it hangs
    return found


def _wchan(at: str) -> str:
    name = _text(f"{at}/wchan")
    return "" if name == "0" else name


def _text(path: str) -> str:
    """Return a small file, ``""`` where it may not be read or is not there."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _status(path: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}
