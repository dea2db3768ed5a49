"""Files to a dossier: one parser for bundles, for unpacked ones and for loose evidence.

*Loose evidence v1* are files that anybody can make by hand: ``threads.json`` (a list as
``py-spy dump --json`` writes it; several processes behind each other), ``tasks.json`` (what
``hangwatch tasks --json`` prints; several processes behind each other), ``procs.json`` (a list of
objects with ``pid``, ``role``, ``state`` …), ``health.json`` (``http``, ``status``, ``message``
or ``error``), ``metrics.prom`` (Prometheus text, or a JSON list of its lines), ``gpu.csv``
(``nvidia-smi --query-gpu --format=csv``), ``gpu.err``, ``kmsg.txt``, ``stack_PID.txt``,
``stops.json`` (who ceased to run as before, and when), ``fs.json``, ``topology.json``,
``events.json`` and logs. A ``2`` before the dot makes it the second sample. A missing key means
*not collected*; unknown keys are kept. Collectors write the same shapes into
``processes/<role>-<pid>/``, which says whose a file is.

Nothing here raises for what a file holds: what cannot be read is a problem in the dossier.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hangwatch.core import aftermath, awaiting, blackbox, endpoints, motion
from hangwatch.core.codec import CodecError, from_plain
from hangwatch.core.hindsight import onset
from hangwatch.core.kinship import recognised
from hangwatch.core.layout import INCIDENT, MANIFEST, Kind, Place, place
from hangwatch.core.objects import integer, is_whole, number, objects, word
from hangwatch.core.redaction import Redactor, WithheldError
from hangwatch.model.capture import Evidence
from hangwatch.model.dossier import (
    AftermathRecord,
    Citation,
    Dossier,
    GpuRow,
    HealthRecord,
    MetricSample,
    ProcessRecord,
    TaskReading,
    TaskRecord,
    ThreadStack,
)
from hangwatch.model.identity import NEEDED, InstanceKey, ProcessId, Role
from hangwatch.model.observation import (
    CountersSeen,
    GpusSeen,
    HealthSeen,
    Observation,
    ProcessesSeen,
    StacksSeen,
)
from hangwatch.model.process import ProcessRow
from hangwatch.model.profile import EngineProfile
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Instant
from hangwatch.model.vitals import GpuVital, ProcessVital

# Words that people and other tools use for roles, by what they contain; first match wins.
_ROLE_WORDS: Final = (
    ("api_server", Role.API_SERVER),
    ("engine_worker", Role.ENGINE_WORKER),
    ("engine", Role.ENGINE),
    ("scheduler", Role.ENGINE),
    ("ray_worker", Role.RAY_WORKER),
    ("tp_worker", Role.ENGINE_WORKER),
    ("worker", Role.ENGINE_WORKER),
    ("session", Role.SESSION_SERVER),
    ("store", Role.STORE),
    ("driver", Role.DRIVER),
    ("helper", Role.HELPER),
    ("ray_system", Role.RAY_SYSTEM),
)

MAX_PRODUCER: Final = 3
"""Lines of one log in which a job says that it cannot bring work; the latest ones."""

MAX_QUOTE: Final = 200
"""Bytes of such a line."""

NO_LOG: Final = "no-log"
"""Cause of a verdict about an engine whose log is not there."""

GONE: Final = "X"
"""The state, in a record, of a process that ended before it could be looked at."""

_GPU_COLUMNS: Final = {
    "index": "index",
    "name": "name",
    "utilization.gpu": "utilization_pct",
    "utilization.memory": "memory_activity_pct",
    "memory.used": "memory_used_mib",
    "memory.total": "memory_total_mib",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "clocks.sm": "sm_clock_mhz",
    "clocks.current.sm": "sm_clock_mhz",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
}
_LEADING_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(slots=True)
class _Parsed:
    """What the files hold, in the order of their names."""

    stacks: list[ThreadStack] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)
    task_readings: list[TaskReading] = field(default_factory=list)
    processes: list[tuple[int, ProcessRecord]] = field(default_factory=list)
    health: list[HealthRecord] = field(default_factory=list)
    metrics: list[MetricSample] = field(default_factory=list)
    aftermaths: list[AftermathRecord] = field(default_factory=list)
    stops: list[tuple[Mapping[str, Any], Citation]] = field(default_factory=list)
    gpus: list[GpuRow] = field(default_factory=list)
    gpu_problem: str = ""
    kernel_log: list[Citation] = field(default_factory=list)
    producer: list[Citation] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def redacted(
    files: Mapping[str, bytes], redactor: Redactor
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the files as they may be shown, and what had to be withheld.

    Files that no rule reads are dropped.
    """
    kept: dict[str, bytes] = {}
    problems = []
    wanted = {
        name: data
        for name, data in files.items()
        if place(name).kind not in (Kind.OTHER, Kind.REPORT, Kind.EXPECTATION, Kind.REPLAY)
    }
    for data in wanted.values():
        redactor.learn(data)
    for name, data in wanted.items():
        try:
            kept[name] = redactor.file(name, data)
        except WithheldError as error:
            problems.append(f"{name} was withheld: {error}")
    return kept, tuple(problems)


def recorded(files: Mapping[str, bytes]) -> ReplayResult:
    """Return what a bundle says that the detector had said.

    Raises:
        ValueError: ``incident.json`` does not have the form that we write.
    """
    data = json.loads(files[INCIDENT])
    if not isinstance(data, dict) or "judgement" not in data:
        raise ValueError(f"{INCIDENT} has no judgement")
    result: ReplayResult = from_plain(ReplayResult, data["judgement"])
    return result


def engine(
    files: Mapping[str, bytes], profiles: Mapping[str, EngineProfile], *, heard: str = ""
) -> EngineProfile:
    """Return the profile with which *files* are to be read.

    Args:
        files: Contents by path.
        profiles: The engines there may be, by name; at least one.
        heard: Name of the engine that the logs are of, where they say so.
    """
    if heard in profiles:
        return profiles[heard]
    rows: list[ProcessRow] = []
    for name, data in files.items():
        kind = place(name).kind
        if kind is Kind.METRICS:
            for profile in profiles.values():
                if any(metric.encode() in data for metric in _metric_names(profile)):
                    return profile
        elif kind is Kind.PROCESSES:
            rows += [_titled(raw) for raw, _ in objects(data)]
    for row in rows:
        known = recognised(row, profiles.values())
        if known is not None and known[0] in NEEDED:
            return known[1]
    return next(iter(profiles.values()))


def _metric_names(profile: EngineProfile) -> Iterator[str]:
    names = profile.metrics
    yield from (*names.tokens, *names.running, *names.waiting, *names.routed)


def _titled(raw: Mapping[str, Any]) -> ProcessRow:
    return ProcessRow(
        process=ProcessId(integer(raw.get("pid")) or 0),
        ppid=0,
        comm=word(raw.get("comm")),
        state="",
        title=word(raw.get("title")) or word(raw.get("cmdline")) or word(raw.get("name")),
    )


def snapshots(
    files: Mapping[str, bytes],
    *,
    profile: EngineProfile,
    at: Instant,
    instances: Iterable[InstanceKey],
) -> tuple[Observation, ...]:
    """Return what health, metrics, process and stack files say, as observed at *at*.

    A file that does not say whose it is belongs to the only instance there is; where there are
    several, it is nobody's and says nothing here.
    """
    keys = tuple(instances)
    parsed = _parse(files, profile, at)
    return (
        *_health_seen(parsed, keys),
        *_counters_seen(parsed, profile, at, keys),
        *_processes_seen(parsed, at, keys),
        *_gpus_seen(parsed, at, keys),
        *_stacks_seen(parsed, profile, at, keys),
    )


def dossier(
    files: Mapping[str, bytes],
    *,
    origin: str,
    result: ReplayResult,
    profile: EngineProfile,
    redactor: Redactor | None = None,
    sizes: Mapping[str, int] | None = None,
    problems: Iterable[str] = (),
) -> Dossier:
    """Return all the evidence, parsed.

    Args:
        files: Contents by path, already redacted (``redacted``).
        origin: What was read.
        result: What the detector says of the logs; brings evaluation time, epoch and policy.
        profile: The engine.
        redactor: For what *result* quotes; ``None`` if it comes out of a bundle.
        sizes: Bytes of every file that there is; ``None`` takes *files*.
        problems: What was not read or withheld.
    """
    if redactor is not None:
        result = redactor.value(result)
    parsed = _parse(files, profile, result.until)
    last = max((sample for sample, _ in parsed.processes), default=1)
    manifest = _object(files, MANIFEST, parsed.problems)
    return Dossier(
        origin=origin,
        now=result.now,
        epoch=result.epoch,
        instances=result.instances,
        verdict=result.verdict,
        window=onset(result.instances) or result.window,
        transitions=result.transitions,
        stalls=result.stalls,
        stacks=tuple(parsed.stacks),
        threads=motion.threads(parsed.stacks),
        tasks=awaiting.tasks(parsed.tasks, parsed.task_readings),
        task_readings=tuple(parsed.task_readings),
        processes=tuple(row for sample, row in parsed.processes if sample == last),
        stops=blackbox.recorded(parsed.stops, result.epoch),
        aftermaths=tuple(parsed.aftermaths),
        gpus=tuple(parsed.gpus),
        gpu_problem=parsed.gpu_problem,
        health=tuple(parsed.health),
        metrics=tuple(parsed.metrics),
        kernel_log=tuple(parsed.kernel_log),
        producer=tuple(parsed.producer),
        files=dict(sizes) if sizes is not None else {k: len(v) for k, v in files.items()},
        evidence=_evidence(manifest, parsed.problems),
        manifest=manifest,
        policy=replace(
            result.policy,
            heartbeat_interval=result.policy.heartbeat_interval or profile.interval,
        ),
        settings=manifest.get("settings") or {},
        profile=profile.name,
        extra=parsed.facts,
        problems=(*result.problems, *problems, *parsed.problems),
        notes=result.notes,
    )


# ---------------------------------------------------------------------- parsing


def _parse(files: Mapping[str, bytes], profile: EngineProfile, at: Instant) -> _Parsed:
    parsed = _Parsed()
    for name in sorted(files):
        where = place(name)
        reader = _READERS.get(where.kind)
        if reader is None:
            continue
        data = files[name]
        if where.kind in _JSON_KINDS and data.strip() and not is_whole(data):
            parsed.problems.append(f"{name} is cut short or not JSON; what is whole was read")
        try:
            reader(parsed, where, data, profile, at)
        except ValueError as error:
            parsed.problems.append(f"{name} was not understood: {error}")
    return parsed


def _read_threads(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    parsed.stacks += motion.parse_threads(data, where.pid, where.sample, where.path)


def _read_tasks(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    for piece, line in awaiting.documents(data):
        records, reading = awaiting.parse(piece, where.pid, where.sample, where.path, line)
        parsed.tasks += records
        parsed.task_readings.append(reading)
        parsed.problems += [f"{where.path}: {problem}" for problem in reading.problems[:3]]


def _read_processes(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    for raw, line in objects(data):
        pid = integer(raw.get("pid"))
        if pid is None:
            parsed.problems.append(f"{where.path}:{line} is a process without a pid")
            continue
        parsed.processes.append((where.sample, _process(raw, pid, where, line)))


def _process(raw: Mapping[str, Any], pid: int, where: Place, line: int) -> ProcessRecord:
    known = {
        "pid", "ppid", "role", "state", "rank", "gpu", "title", "comm", "wchan", "cpu_pct",
        "vol_ctxt_per_s", "tracer_pid",
    }  # fmt: skip
    title = word(raw.get("title")) or word(raw.get("cmdline")) or word(raw.get("name"))
    state = word(raw.get("state"))
    state = GONE if state == "gone" else state[:1]
    role = word(raw.get("role"))
    told = ", ".join(
        part for part in (f"pid {pid}", role, f"state {state}" if state else "") if part
    )
    return ProcessRecord(
        pid=pid,
        ppid=integer(raw.get("ppid")),
        role=role,
        state=state,
        rank=integer(raw.get("rank")),
        gpu=integer(raw.get("gpu")),
        title=title,
        comm=word(raw.get("comm")),
        wchan=word(raw.get("wchan")),
        cpu_pct=number(raw.get("cpu_pct")),
        vol_ctxt_per_s=number(raw.get("vol_ctxt_per_s")),
        tracer_pid=integer(raw.get("tracer_pid")),
        citation=Citation(path=where.path, line=line, text=told),
        extra={key: value for key, value in raw.items() if key not in known},
    )


def _read_aftermath(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    found = [aftermath.record(raw, where.path) for raw, _ in objects(data)]
    parsed.aftermaths += [each for each in found if each is not None]


def _read_stops(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    lines = data.decode("utf-8", "replace").split("\n")
    for raw, line in objects(data):
        text = lines[line - 1].strip().rstrip(",")[:MAX_QUOTE]
        parsed.stops.append((raw, Citation(path=where.path, line=line, text=text)))


def _read_health(
    parsed: _Parsed, where: Place, data: bytes, profile: EngineProfile, at: Instant
) -> None:
    for raw, line in objects(data):
        health = endpoints.health_of_words(
            profile,
            at=at,
            http=integer(raw.get("http")),
            status=word(raw.get("status")),
            message=word(raw.get("message")),
            error=word(raw.get("error")),
            elapsed=number(raw.get("elapsed")) or 0.0,
        )
        pid = integer(raw.get("pid"))
        parsed.health.append(
            HealthRecord(
                health=health,
                pid=pid if pid is not None else where.pid,
                sample=where.sample,
                url=word(raw.get("url")),
                citation=Citation(path=where.path, line=line, text=health.message[:200]),
            )
        )


def _read_metrics(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    text = data.decode("utf-8", "replace")
    listed = text.lstrip().startswith("[")
    if listed:
        lines = json.loads(text)
        text = "\n".join(line for line in lines if isinstance(line, str))
    rows = text.split("\n")
    for line, sample in endpoints.samples(text):
        parsed.metrics.append(
            replace(
                sample,
                pid=where.pid,
                sample=where.sample,
                citation=Citation(
                    path=where.path, line=None if listed else line, text=rows[line - 1][:200]
                ),
            )
        )


def _read_gpu(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    rows = list(csv.reader(data.decode("utf-8", "replace").splitlines(), skipinitialspace=True))
    if not rows:
        return
    columns = [_GPU_COLUMNS.get(title.split("[")[0].strip(), "") for title in rows[0]]
    if "index" not in columns:
        raise ValueError("its first line names no column 'index'")
    for line, row in enumerate(rows[1:], start=2):
        values = {name: cell.strip() for name, cell in zip(columns, row, strict=False) if name}
        numbers = {
            name: float(match[0])
            for name, cell in values.items()
            if name != "name" and (match := _LEADING_NUMBER.match(cell))
        }
        if "index" not in numbers:
            continue
        ecc = numbers.pop("ecc_uncorrected", None)
        parsed.gpus.append(
            GpuRow(
                index=int(numbers.pop("index")),
                name=values.get("name", ""),
                sample=where.sample,
                ecc_uncorrected=None if ecc is None else int(ecc),
                citation=Citation(path=where.path, line=line, text=", ".join(row)[:200]),
                **numbers,
            )
        )


def _read_gpu_problem(
    parsed: _Parsed, _where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    parsed.gpu_problem = parsed.gpu_problem or data.decode("utf-8", "replace").strip()[:1000]


def _read_kernel_log(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    for line, text in enumerate(data.decode("utf-8", "replace").split("\n"), start=1):
        if text.strip():
            parsed.kernel_log.append(Citation(path=where.path, line=line, text=text[:200]))


def _read_log(
    parsed: _Parsed, where: Place, data: bytes, profile: EngineProfile, _at: Instant
) -> None:
    """Take in the latest lines in which a job says that it cannot bring work."""
    found: dict[int, bytes] = {}
    for pattern in profile.producer:
        for match in pattern.finditer(data):
            begin = data.rfind(b"\n", 0, match.start()) + 1
            found[begin] = data[begin : begin + MAX_QUOTE].split(b"\n", 1)[0]
    for begin in sorted(found)[-MAX_PRODUCER:]:
        text = found[begin].decode("utf-8", "replace").strip()
        line = data.count(b"\n", 0, begin) + 1
        parsed.producer.append(Citation(path=where.path, line=line, text=text))


def _read_kernel_stack(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    parsed.facts[where.path] = data.decode("utf-8", "replace").splitlines()


def _read_facts(
    parsed: _Parsed, where: Place, data: bytes, _profile: EngineProfile, _at: Instant
) -> None:
    parsed.facts[where.path] = json.loads(data)


_READERS: Final[Mapping[Kind, Callable[[_Parsed, Place, bytes, EngineProfile, Instant], None]]] = {
    Kind.THREADS: _read_threads,
    Kind.TASKS: _read_tasks,
    Kind.PROCESSES: _read_processes,
    Kind.AFTERMATH: _read_aftermath,
    Kind.STOPS: _read_stops,
    Kind.HEALTH: _read_health,
    Kind.METRICS: _read_metrics,
    Kind.GPU: _read_gpu,
    Kind.GPU_PROBLEM: _read_gpu_problem,
    Kind.KERNEL_LOG: _read_kernel_log,
    Kind.KERNEL_STACK: _read_kernel_stack,
    Kind.FACTS: _read_facts,
    Kind.LOG: _read_log,
}
_JSON_KINDS: Final = frozenset(
    (Kind.THREADS, Kind.TASKS, Kind.PROCESSES, Kind.STOPS, Kind.HEALTH, Kind.FACTS)
)


def _object(files: Mapping[str, bytes], name: str, problems: list[str]) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        problems.append(f"{name} was not understood: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _evidence(manifest: Mapping[str, Any], problems: list[str]) -> tuple[Evidence, ...]:
    found: list[Evidence] = []
    for step in manifest.get("steps") or ():
        try:
            found.append(from_plain(Evidence, {**step, "type": "Evidence"}))
        except (CodecError, TypeError) as error:
            problems.append(f"{MANIFEST} has a step that was not understood: {error}")
    return tuple(found)


# ---------------------------------------------------------------------- whose is what


def role_of(text: str) -> Role:
    """Return the role that a word of loose evidence means."""
    for part, role in _ROLE_WORDS:
        if part in text:
            return role
    return Role.OTHER


def family(pid: int | None, name: str, rows: Iterable[ProcessRecord]) -> tuple[ProcessRecord, ...]:
    """Return the processes of an instance: those that say so, its own, and their descendants.

    Args:
        pid: The process that prints the beats, if known.
        name: Name of the instance, as collectors write it into a row.
        rows: The process table.
    """
    rows = tuple(rows)
    members = {row.pid for row in rows if name and row.extra.get("instance") == name}
    if pid is not None:
        members.add(pid)
    growing = True
    while growing:
        more = {row.pid for row in rows if row.ppid in members and not row.extra.get("instance")}
        growing = not more <= members
        members |= more
    return tuple(row for row in rows if row.pid in members)


class _Owners:
    """Knows the instance that a process belongs to; the only one where nothing says whose."""

    def __init__(self, keys: tuple[InstanceKey, ...], parsed: _Parsed) -> None:
        rows = [row for _, row in parsed.processes]
        self._only = keys[0] if len(keys) == 1 else None
        self._owners: dict[int, InstanceKey] = {}
        for key in keys:
            if key.pid is not None:
                self._owners.setdefault(key.pid, key)
            for row in family(key.pid, key.name, rows):
                self._owners.setdefault(row.pid, key)

    def of(self, pid: int | None) -> InstanceKey | None:
        return self._only or (None if pid is None else self._owners.get(pid))


def _health_seen(parsed: _Parsed, keys: tuple[InstanceKey, ...]) -> Iterator[HealthSeen]:
    owners = _Owners(keys, parsed)
    for record in parsed.health:
        owner = owners.of(record.pid)
        if owner is not None:
            yield HealthSeen(instance=owner, health=record.health)
        elif record.pid is None and len({key.pid for key in keys}) == 1:
            # Several engines behind one server share its answer.
            for key in keys:
                yield HealthSeen(instance=key, health=record.health)


def _counters_seen(
    parsed: _Parsed, profile: EngineProfile, at: Instant, keys: tuple[InstanceKey, ...]
) -> Iterator[CountersSeen]:
    groups: dict[tuple[int, int | None], list[MetricSample]] = {}
    for sample in parsed.metrics:
        groups.setdefault((sample.sample, sample.pid), []).append(sample)
    for (_, pid), found in sorted(groups.items(), key=lambda item: item[0][0]):
        engines = endpoints.counters(found, profile, at=at)
        for label, counters in engines.items():
            owners = [key for key in keys if pid is None or key.pid == pid]
            if len(owners) > 1:
                owners = [key for key in owners if _same_engine(key.tag, label)]
            if not owners and len(keys) == 1:
                owners = list(keys)
            if len(owners) == 1:
                yield CountersSeen(instance=owners[0], counters=counters)


def _same_engine(tag: str, label: str) -> bool:
    """Say whether ``DP3`` or ``Engine 003`` is the engine labelled ``3``."""
    digits = re.search(r"\d+$", tag)
    return digits is not None and label.isdigit() and int(digits[0]) == int(label)


def _processes_seen(
    parsed: _Parsed, at: Instant, keys: tuple[InstanceKey, ...]
) -> Iterator[ProcessesSeen]:
    last = max((sample for sample, _ in parsed.processes), default=1)
    rows = [row for sample, row in parsed.processes if sample == last]
    if not rows:
        return
    listed = {row.pid for row in rows} | {row.ppid for row in rows}
    servers_listed = any(key.pid in listed for key in keys if key.pid is not None)
    for key in keys:
        members = family(key.pid, key.name, rows)
        if not members and len(keys) == 1 and key.pid is None:
            members = tuple(rows)
        vitals = [_vital(row, at) for row in members]
        if key.pid is not None and key.pid not in listed and servers_listed:
            # The table lists servers, and this one is not among them.
            vitals.append(
                ProcessVital(pid=key.pid, role=Role.API_SERVER, state="", since=at, at=at)
            )
        if vitals:
            yield ProcessesSeen(instance=key, processes=tuple(vitals), at=at)


def _gpus_seen(parsed: _Parsed, at: Instant, keys: tuple[InstanceKey, ...]) -> Iterator[GpusSeen]:
    """Give each instance the GPUs that its processes name; the only instance has them all."""
    last = max((row.sample for row in parsed.gpus), default=1)
    rows = [row for row in parsed.gpus if row.sample == last]
    processes = [row for _, row in parsed.processes]
    for key in keys:
        named = {row.gpu for row in family(key.pid, key.name, processes) if row.gpu is not None}
        own = [row for row in rows if row.index in named]
        if not own and len(keys) == 1:
            own = rows
        if own:
            yield GpusSeen(instance=key, gpus=tuple(_gpu(row, at) for row in own), at=at)


def _gpu(row: GpuRow, at: Instant) -> GpuVital:
    return GpuVital(
        index=row.index,
        at=at,
        utilization_pct=row.utilization_pct,
        memory_activity_pct=row.memory_activity_pct,
        power_w=row.power_w,
        power_limit_w=row.power_limit_w,
    )


def _vital(row: ProcessRecord, at: Instant) -> ProcessVital:
    role = role_of(row.role)
    unsent = integer(row.extra.get("unsent_bytes"))
    return ProcessVital(
        pid=row.pid,
        role=role,
        state="" if row.state == GONE else row.state or "S",
        since=at,
        at=at,
        tracer_pid=row.tracer_pid,
        wchan=row.wchan,
        cpu_pct=row.cpu_pct,
        vol_ctxt_per_s=row.vol_ctxt_per_s,
        read_bytes_per_s=number(row.extra.get("read_bytes_per_s")),
        switches_per_s=number(row.extra.get("switches_per_s")),
        busiest_cpu_pct=number(row.extra.get("busiest_cpu_pct")),
        stdout_pipe=row.extra.get("stdout_pipe") is True,
        unsent_bytes=unsent,
        needed=role in NEEDED,
    )


def _stacks_seen(
    parsed: _Parsed, profile: EngineProfile, at: Instant, keys: tuple[InstanceKey, ...]
) -> Iterator[StacksSeen]:
    owners = _Owners(keys, parsed)
    by_owner: dict[InstanceKey, list[ThreadStack]] = {}
    for stack in parsed.stacks:
        owner = owners.of(stack.pid)
        if owner is not None:
            by_owner.setdefault(owner, []).append(stack)
    tasks = awaiting.tasks(parsed.tasks, parsed.task_readings)
    roles = {row.pid: role_of(row.role) for _, row in parsed.processes}
    for owner, stacks in by_owner.items():
        vital = motion.stack_vital(stacks, at=at, profile=profile)
        own = [task for task in tasks if owners.of(task.pid) == owner]
        vital = awaiting.with_tasks(vital, own, motion.threads(stacks), roles)
        yield StacksSeen(instance=owner, stacks=vital)
