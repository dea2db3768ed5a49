"""Control groups of both versions: limits, use, pressure, and what was killed or throttled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

UNLIMITED: Final = 1 << 62
"""What version 1 writes for no limit is the largest multiple of a page, by machine."""

FILES: Final[Mapping[int, tuple[str, ...]]] = {
    1: (
        "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes",
        "memory.soft_limit_in_bytes", "memory.failcnt", "memory.oom_control",
        "memory.memsw.usage_in_bytes", "memory.memsw.limit_in_bytes", "cpu.cfs_quota_us",
        "cpu.cfs_period_us", "cpu.stat", "cpuacct.usage", "cpuset.cpus", "pids.current",
        "pids.max", "pids.events", "freezer.state", "freezer.self_freezing",
        "blkio.throttle.io_service_bytes",
    ),
    2: (
        "memory.current", "memory.max", "memory.high", "memory.peak", "memory.events",
        "memory.swap.current", "memory.swap.max", "cpu.max", "cpu.stat", "cpuset.cpus.effective",
        "pids.current", "pids.max", "pids.events", "cgroup.freeze", "cgroup.events", "io.stat",
        "cpu.pressure", "memory.pressure", "io.pressure",
    ),
}  # fmt: skip
"""What is read of a group; each is short, and none adds up what millions of pages say."""

_PRESSURE: Final = re.compile(r"^(some|full) (.*)$", re.MULTILINE)


def memberships(text: str) -> list[tuple[int, tuple[str, ...], str]]:
    """Return version, controllers and path of each group in ``/proc/PID/cgroup``."""
    found = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if number.isdigit() and separator:
            version = 2 if number == "0" and not controllers else 1
            found.append((version, tuple(c for c in controllers.split(",") if c), path))
    return found


def pressure(text: str) -> dict[str, dict[str, float]]:
    """Return what a file of pressure says: percent of time stalled, and microseconds in all."""
    found: dict[str, dict[str, float]] = {}
    for word, values in _PRESSURE.findall(text):
        pairs = (pair.partition("=") for pair in values.split())
        found[word] = {name: float(value) for name, _, value in pairs if _is_number(value)}
    return found


def describe(files: Mapping[str, str]) -> dict[str, Any]:
    """Return what the files of one group say, in one form for both versions.

    Sizes are bytes, times microseconds, a limit that is not set is ``None``, and what no file
    says is left out.
    """
    found = {
        part: {name: value for name, read in table if (value := read(files)) is not _ABSENT}
        for part, table in _PARTS.items()
    }
    for name in ("cpu", "memory", "io"):
        if said := pressure(files.get(f"{name}.pressure", "")):
            found.setdefault("pressure", {})[name] = said
    return {part: values for part, values in found.items() if values}


_ABSENT: Final = object()


def _number(*names: str) -> Callable[[Mapping[str, str]], Any]:
    """Return what reads the first of these files that is there as a number."""

    def read(files: Mapping[str, str]) -> Any:
        for name in names:
            text = files.get(name, "").strip()
            if text == "max":
                return None
            if _is_number(text):
                number = int(text)
                return None if number >= UNLIMITED or number < 0 else number
        return _ABSENT

    return read


def _field(*names: str) -> Callable[[Mapping[str, str]], Any]:
    """Return what reads the first ``file:key`` that is there."""

    def read(files: Mapping[str, str]) -> Any:
        for name in names:
            file, _, key = name.partition(":")
            value = keyed(files.get(file, "")).get(key)
            if value is not None:
                return value
        return _ABSENT

    return read


def keyed(text: str) -> dict[str, int]:
    """Return the numbers of a file of ``key number`` lines."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_number(pair[1])}


def _cores(files: Mapping[str, str]) -> Any:
    words = files.get("cpu.max", "").split() or [
        files.get("cpu.cfs_quota_us", "").strip(),
        files.get("cpu.cfs_period_us", "").strip(),
    ]
    if words[0] in ("max", "-1"):
        return None
    numbers = [int(word) for word in words if _is_number(word)]
    return round(numbers[0] / numbers[1], 3) if len(numbers) == 2 and numbers[1] else _ABSENT


def _throttled(files: Mapping[str, str]) -> Any:
    said = keyed(files.get("cpu.stat", ""))
    if "throttled_time" in said:  # version 1 counts nanoseconds
        return said["throttled_time"] // 1000
    return said.get("throttled_usec", _ABSENT)


def _frozen(files: Mapping[str, str]) -> Any:
    state = files.get("freezer.state", "").strip()
    if state:
        return state != "THAWED"
    frozen = keyed(files.get("cgroup.events", "")).get("frozen")
    return _ABSENT if frozen is None else frozen == 1


def _asked(files: Mapping[str, str]) -> Any:
    for name in ("freezer.self_freezing", "cgroup.freeze"):
        if text := files.get(name, "").strip():
            return text == "1"
    return _ABSENT


def _moved(what: str, word: str) -> Callable[[Mapping[str, str]], Any]:
    """Return what adds up the bytes read or written over all devices."""
    count = re.compile(rf"\b{what}=(\d+)|^\d+:\d+ {word} (\d+)", re.MULTILINE)

    def read(files: Mapping[str, str]) -> Any:
        text = files.get("io.stat", files.get("blkio.throttle.io_service_bytes"))
        if text is None:
            return _ABSENT
        return sum(int(new or old) for new, old in count.findall(text))

    return read


_PARTS: Final[Mapping[str, tuple[tuple[str, Callable[[Mapping[str, str]], Any]], ...]]] = {
    "memory": (
        ("current", _number("memory.current", "memory.usage_in_bytes")),
        ("max", _number("memory.max", "memory.limit_in_bytes")),
        ("high", _number("memory.high", "memory.soft_limit_in_bytes")),
        ("peak", _number("memory.peak", "memory.max_usage_in_bytes")),
        ("reached_max", _field("memory.events:max")),
        ("failures", _number("memory.failcnt")),
        ("oom", _field("memory.events:oom")),
        ("oom_kill", _field("memory.events:oom_kill", "memory.oom_control:oom_kill")),
        ("under_oom", _field("memory.oom_control:under_oom")),
        ("oom_kill_disabled", _field("memory.oom_control:oom_kill_disable")),
        ("swap_current", _number("memory.swap.current")),
        ("swap_max", _number("memory.swap.max")),
    ),
    "cpu": (
        ("cores", _cores),
        ("allowed", lambda files: _text(files, "cpuset.cpus.effective", "cpuset.cpus")),
        ("usage_us", _field("cpu.stat:usage_usec")),
        ("periods", _field("cpu.stat:nr_periods")),
        ("throttled", _field("cpu.stat:nr_throttled")),
        ("throttled_us", _throttled),
    ),
    "io": (("read_bytes", _moved("rbytes", "Read")), ("written_bytes", _moved("wbytes", "Write"))),
    "pids": (
        ("current", _number("pids.current")),
        ("max", _number("pids.max")),
        ("reached_max", _field("pids.events:max")),
    ),
    "freezer": (("frozen", _frozen), ("asked", _asked)),
}  # fmt: skip


def _text(files: Mapping[str, str], *names: str) -> Any:
    found = (files[name].strip() for name in names if files.get(name, "").strip())
    return next(found, _ABSENT)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None
