"""Who is asked what, in which order: the capture plan.

Theory of operation. The ladder is ordered by volatility: what the kernel says is
gone first and costs the target nothing, so it is read first, of every process; stacks come after
it, logs and versions last. Within a rung the most suspicious process comes first, so that a
capture that is cut short has what matters. What the kernel says of a hang that will not change
soon (who holds a pipe, a lock) lets the stacks go first all the same.
Stage A is rungs 1 to 5, taken twice, with a pause that is used for what takes time; stage B is the
rest, once, behind the gates that each collector brings. Servers that nothing is wrong with are
asked in the first sample only, for their daemon asks them as well. A plan is data: ``--dry-run``
prints it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from hangwatch.model.capture import (
    CapturedInstance,
    CaptureKind,
    CapturePlan,
    Collector,
    Scope,
    Stage,
    Step,
    Target,
)
from hangwatch.model.identity import Role
from hangwatch.model.policy import Policy

MAX_URLS: Final = 4
"""Addresses of one server that are tried; a Ray worker listens on several that are not HTTP."""

LADDER: Final[Mapping[CaptureKind, tuple[frozenset[int], int]]] = {
    CaptureKind.INCIDENT: (frozenset(range(1, 11)), 2),
    CaptureKind.NOTICE: (frozenset({1, 2, 3, 4, 7, 8, 9}), 1),
    CaptureKind.RUN: (frozenset({1, 2, 3, 4, 7, 8, 9}), 2),
    CaptureKind.BASELINE: (frozenset({1, 3, 4}), 1),
    CaptureKind.AFTERMATH: (frozenset({1, 2, 3, 4}), 1),
}
"""Rungs of each kind of capture, and how many samples are taken at most.

Where nothing is wrong there is no tool that stops a process, and none that fails on a busy one.
"""

LOADED: Final = 3.0
"""How many times as long a step that computes may take where others take the cores: 30 s, not 10.

Steps that wait for others have been given the time that those may take.
"""

MAX_LOGS: Final = 256
"""40 processes under Ray write three logs each."""

_LOG: Final = re.compile(r"\.(?:log|out|err|txt)(?:\.\d{1,4})?(?: \(deleted\))?$")


def plan(
    targets: Iterable[Target],
    *,
    collectors: Iterable[Collector],
    policy: Policy,
    paths: Mapping[str, str],
    own_paths: Mapping[int, Mapping[str, str]] | None = None,
    urls: Mapping[int, str] | None = None,
    logs: Iterable[str] = (),
    options: Mapping[str, Mapping[str, str]] | None = None,
    deadline: float = 60.0,
    notes: tuple[str, ...] = (),
    kind: CaptureKind = CaptureKind.INCIDENT,
    collect: Collection[str] = (),
    well: Collection[int] = (),
    load: float = 0.0,
) -> CapturePlan:
    """Return what to do, in order.

    Args:
        targets: Every process, the most suspicious first.
        collectors: Those to use.
        policy: Brings the pause between samples.
        paths: The only paths that may be asked, by purpose (``EngineProfile.endpoints``).
        own_paths: The same of servers whose engine is known, by pid: one engine's harmless path
            makes another one generate tokens.
        urls: Base URLs already known to answer, by pid.
        logs: Logs to take the tails of, besides those that the targets write.
        options: Settings of collectors, by name.
        deadline: Seconds for everything.
        notes: What is known to be missing.
        kind: Why the capture is made; says which rungs it has.
        collect: Names of the collectors, of those that run only by request, that are asked for.
        well: Servers that are captured for comparison only.
        load: Threads that want to run, for each core; from two on the machine is loaded.
    """
    targets = tuple(targets)
    slow = LOADED if load >= 2.0 else 1.0
    if slow > 1.0:
        notes = (*notes, f"{load:.1f} threads want each core: steps get {slow:g} times as long")
    rungs, samples = LADDER[kind]
    known = tuple(collectors)
    collectors = (
        replace(
            each,
            samples=min(samples, each.samples),
            timeout=each.timeout * (1.0 if each.waits else slow),
        )
        for each in known
        if each.rung in rungs
        and (not each.kinds or kind in each.kinds)
        and (not each.opt_in or each.name in collect)
        and (kind is not CaptureKind.BASELINE or _is_cheap(each, targets))
    )
    collectors = sorted(collectors, key=lambda each: (each.unhurried, each.rung, each.name))
    draft = _Draft(
        targets=targets,
        endpoints=_endpoints(targets, paths, own_paths or {}, urls or {}),
        logs=tuple(logs),
        options=options or {},
        well=well,
        gap=policy.sample_gap,
    )
    first, second = (
        [
            step
            for collector in collectors
            if collector.stage is Stage.A and sample <= collector.samples
            for step in draft.steps(collector, sample)
        ]
        for sample in (1, 2)
    )
    pause, rest = (
        [
            step
            for collector in collectors
            if collector.stage is stage
            for sample in range(1, collector.samples + 1)
            for step in draft.steps(collector, sample)
        ]
        for stage in (Stage.PAUSE, Stage.B)
    )
    steps = [*first, *(pause if second else ()), *second, *rest]
    foreign = [str(target.process) for target in targets if not target.python]
    if foreign:
        notes = (*notes, f"no Python stacks of {', '.join(foreign)}: no Python there")
    planned = {step.collector for step in steps}
    idle = [each for each in known if each.name in collect and each.name not in planned]
    notes = (*notes, *(f"{each.name} has nothing to do: {_why_not(each, rungs)}" for each in idle))
    return CapturePlan(
        targets=targets,
        steps=tuple(steps),
        sample_gap=policy.sample_gap,
        deadline=deadline,
        notes=notes,
    )


def going_on(instances: Iterable[CapturedInstance], targets: Iterable[Target]) -> frozenset[int]:
    """Return the processes of instances that did not stop."""
    instances = tuple(instances)
    stopped = {each.instance.name for each in instances if each.stopped}
    pids = {each.pid for each in instances if each.stopped}
    return frozenset(
        target.process.pid
        for target in targets
        if target.instance not in {"", *stopped} and target.process.pid not in pids
    )


def spared(instances: Iterable[CapturedInstance], targets: Iterable[Target]) -> frozenset[int]:
    """Return the processes that go on, or that may work for an instance that does."""
    instances, targets = tuple(instances), tuple(targets)
    if all(each.stopped for each in instances):
        return frozenset()
    unknown = {target.process.pid for target in targets if not target.instance}
    pids = {each.pid for each in instances if each.stopped}
    return (going_on(instances, targets) | unknown) - pids


class _Draft:
    """What every collector's steps are made of."""

    def __init__(
        self,
        *,
        targets: tuple[Target, ...],
        endpoints: Mapping[str, str],
        logs: tuple[str, ...],
        options: Mapping[str, Mapping[str, str]],
        well: Collection[int],
        gap: float,
    ) -> None:
        self._gap = gap
        self._well = well
        self._targets = targets
        self._endpoints = endpoints
        self._logs = _names(targets, logs)
        self._named = frozenset(logs)
        self._options = options

    def steps(self, collector: Collector, sample: int) -> Iterator[Step]:
        match collector.scope:
            case Scope.PROCESS:
                about = [target for target in self._targets if _is_about(collector, target)]
                for target in about[: collector.most or None]:
                    yield self._step(
                        collector,
                        sample,
                        subject=str(target.process),
                        folder=target.folder,
                        target=target,
                    )
            case Scope.ENDPOINT:
                # One step asks every server, each in a thread: a server that answers late or
                # never must not use up a worker of its own.
                asked = tuple(
                    target
                    for target in self._targets
                    if f"url.{target.process.pid}.0" in self._endpoints
                    and (sample == 1 or target.process.pid not in self._well)
                )
                if asked:
                    yield self._step(
                        collector,
                        sample,
                        folder=PurePosixPath("processes"),
                        targets=asked,
                        options=self._endpoints,
                    )
            case Scope.LOG:
                for log, name in self._logs.items():
                    yield self._step(
                        collector,
                        sample,
                        subject=name,
                        log=log,
                        folder=PurePosixPath("logs"),
                        targets=tuple(t for t in self._targets if log in t.logs),
                        options={"name": name, "named": "yes" if log in self._named else ""},
                    )
            case Scope.NODE:
                if _concerns(collector, self._targets):
                    yield self._step(
                        collector,
                        sample,
                        folder=PurePosixPath(),
                        targets=self._targets,
                        options={"gap": f"{self._gap:g}"} if collector.samples > 1 else {},
                    )

    def _step(
        self,
        collector: Collector,
        sample: int,
        *,
        folder: PurePosixPath,
        subject: str = "",
        log: str = "",
        target: Target | None = None,
        targets: tuple[Target, ...] = (),
        options: Mapping[str, str] | None = None,
    ) -> Step:
        parts = [collector.name, subject, str(sample) if collector.samples > 1 else ""]
        return Step(
            id="/".join(part for part in parts if part),
            collector=collector.name,
            scope=collector.scope,
            stage=collector.stage,
            sample=sample,
            rung=collector.rung,
            folder=folder,
            timeout=collector.timeout,
            target=target,
            targets=targets,
            subject=log,
            gates=collector.gates,
            attaches=collector.attaches,
            budget_ms=_budget_ms(collector, self._options.get(collector.name, {})),
            reads_memory=collector.reads_memory,
            asks=collector.asks,
            memory=collector.memory,
            waits=collector.waits,
            harms=collector.harms,
            options={**(options or {}), **self._options.get(collector.name, {})},
        )


def _budget_ms(collector: Collector, options: Mapping[str, str]) -> float | None:
    """Return how long a collector may stop its target; what is no number, it refuses itself."""
    try:
        return float(options["budget_ms"])
    except (KeyError, ValueError):
        return collector.budget_ms


def _is_about(collector: Collector, target: Target) -> bool:
    if collector.roles and target.role not in collector.roles:
        return False
    if collector.gpu_only and not target.gpus:
        return False
    return target.python or not collector.python_only


def _why_not(collector: Collector, rungs: Collection[int]) -> str:
    """Return why a collector that was asked for has no step."""
    if collector.rung not in rungs:
        return "this kind of capture touches no process"
    if collector.gpu_only:
        return "none of the processes is seen to have a GPU open"
    return "none of the processes is one that it is about"


def _is_cheap(collector: Collector, targets: tuple[Target, ...]) -> bool:
    """Say whether it is worth its price every few minutes: no driver is loaded for nobody."""
    return collector.rung != 3 or any(target.gpus for target in targets)


def _concerns(collector: Collector, targets: tuple[Target, ...]) -> bool:
    """Say whether there is any process that a collector for a whole node is made for."""
    return not collector.roles or any(target.role in collector.roles for target in targets)


def _endpoints(
    targets: tuple[Target, ...],
    paths: Mapping[str, str],
    own_paths: Mapping[int, Mapping[str, str]],
    urls: Mapping[int, str],
) -> dict[str, str]:
    """Return ``path.PID.PURPOSE`` and ``url.PID.N`` for every server that listens.

    Who has no paths is asked nothing: it listens, but nobody knows that it talks HTTP.
    """
    found: dict[str, str] = {}
    for target in targets:
        if target.role is not Role.API_SERVER:
            continue
        pid = target.process.pid
        asked = own_paths.get(pid, paths)
        if not asked:
            continue
        known = urls.get(pid, "")
        listening = [listener.url for listener in target.listeners]
        candidates = [known] if known in listening else listening[:MAX_URLS]
        found |= {f"url.{pid}.{number}": url for number, url in enumerate(candidates)}
        if candidates:
            found |= {f"path.{pid}.{purpose}": path for purpose, path in asked.items()}
    return found


def _names(targets: tuple[Target, ...], logs: Iterable[str]) -> dict[str, str]:
    """Return each log with a name of its own: those that are followed, then those of targets.

    Standard input (``-``) is no file that could be read again.
    """
    followed = [log for log in logs if log != "-"]
    every = [*followed, *(log for t in targets for log in t.logs if _LOG.search(log))]
    named: dict[str, str] = {}
    for log in list(dict.fromkeys(every))[:MAX_LOGS]:
        path = PurePosixPath(log.split(" (")[0])
        name = re.sub(r"[^\w.-]", "_", path.name).lstrip(".-") or "log"
        number = 1
        unique = name
        while unique in named.values():
            number += 1
            unique = f"{number}-{name}"
        named[log] = unique
    return named


def turns(number: int, *, at_once: int, now: float, end: float) -> tuple[float, ...]:
    """Return until when each of *number* steps may take, so that the last ends at *end*.

    Args:
        number: How many there are.
        at_once: How many of them run at the same time.
        now: When the first begin.
        end: When the last ends.
    """
    rounds = -(-number // at_once)
    return tuple(now + (end - now) * (place // at_once + 1) / rounds for place in range(number))


def file_name(stem: str, suffix: str, sample: int) -> str:
    """Return the name of a file of loose evidence: ``threads.json``, ``threads2.json``."""
    return f"{stem}{'' if sample == 1 else sample}{suffix}"
