"""One capture, from the first look to the last step.

Theory of operation. First evidence within seconds: workers start while the work directory is
made, a census finds who belongs to the engines, a plan is made of it, and the first sample of
stage A runs. The second one starts a pause after the first did; what takes time runs in what is
left of that pause, and ends before it does. What the two samples say goes to
whoever judges. Stage B follows, its gates given the new verdict. Servers that keep us waiting for
an answer (LMDeploy's ``/health`` probes its engine for ten seconds) are waited for beside all this
and at its end. Steps that fail, or that time does not reach,
leave their evidence like all others; nothing that a target does can raise an exception here.
Nothing here reads anything of a target beyond ``/proc`` rows that never block; all else is the
workers' business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from hangwatch import registry
from hangwatch.capture import census
from hangwatch.capture.pool import WAITING_WIDTH, Pool, width
from hangwatch.capture.rooms import Rooms
from hangwatch.core import awaiting, baseline, blackbox, kinship, motion, planning
from hangwatch.core.codec import to_plain
from hangwatch.model.capture import (
    CapturedInstance,
    CaptureKind,
    CaptureOutcome,
    CapturePlan,
    CaptureRequest,
    Evidence,
    Failure,
    FailureKind,
    Gate,
    Means,
    Phase,
    Progress,
    Stage,
    StageA,
    Step,
    Target,
    Touch,
)
from hangwatch.model.dossier import TaskMotion, TaskReading, TaskRecord, ThreadStack
from hangwatch.model.identity import NEEDED, ProcessId
from hangwatch.model.observation import GpusSeen, HealthSeen, ProcessesSeen, StacksSeen
from hangwatch.model.process import ProcessRow
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Clock, Instant
from hangwatch.model.verdict import Hung
from hangwatch.model.vitals import ProcessVital

PAUSE_MARGIN: Final = 0.5
"""Seconds before the second sample at which what runs in the pause is asked to end."""

MIN_TURN: Final = 0.6
"""Seconds of the pause below which a step has no use for it: to start takes a tenth."""


def run(
    request: CaptureRequest,
    *,
    clock: Clock,
    progress: Callable[[Progress], None] = lambda _progress: None,
    rejudge: Callable[[StageA], str] = lambda _stage_a: "",
    stopped: Callable[[], bool] = lambda: False,
    latest: Callable[[], CaptureRequest | None] = lambda: None,
    touched: Callable[[Touch], None] = lambda _touch: None,
) -> CaptureOutcome:
    """Capture what every process of the engines is doing.

    Args:
        request: What to capture, and where to work.
        clock: The time.
        progress: Called whenever a step ended, and several times a second besides.
        rejudge: Given what stage A says, returns the word of the verdict, or ``""`` to leave it
            as the request has it.
        stopped: Whether to end early with what there is; asked several times a second.
        latest: Returns the request as it stands once it was judged again, where it has changed:
            nothing attaches to an instance that did not stop.
        touched: Called with each line of the audit trail, as it happens; see ``system.audit``.

    Returns:
        One evidence for each planned step, and the work directory with what they left.

    Raises:
        OutputError: There is nowhere to write.
        ConfigError: The profile does not exist.
    """
    profile = registry.profile(request.profile, request.profiles)
    rooms = Rooms.create(Path(request.output), request.id)
    try:
        capture = _Capture(
            request, profile, rooms, clock, progress=progress, stopped=stopped, touched=touched
        )
        return capture.run(rejudge, latest)
    except BaseException:
        rooms.remove()
        raise


def dry_run(request: CaptureRequest, *, clock: Clock) -> CapturePlan:
    """Return what ``run`` would do; looks at processes, writes nothing that stays.

    Raises:
        ConfigError: The profile does not exist.
    """
    profile = registry.profile(request.profile, request.profiles)
    with tempfile.TemporaryDirectory(prefix="hangwatch-") as folder:
        rooms = Rooms.create(Path(folder), request.id)
        capture = _Capture(request, profile, rooms, clock)
        try:
            return capture.plan()
        finally:
            capture.pool.close()


class _Capture:
    def __init__(
        self,
        request: CaptureRequest,
        profile: EngineProfile,
        rooms: Rooms,
        clock: Clock,
        *,
        progress: Callable[[Progress], None] = lambda _progress: None,
        stopped: Callable[[], bool] = lambda: False,
        touched: Callable[[Touch], None] = lambda _touch: None,
    ) -> None:
        self._request = request
        self._profile = profile
        self._rooms = rooms
        self._clock = clock
        self._progress = progress
        self._asked_to_stop = stopped
        self._touched = touched
        self._touches: list[Touch] = []
        self._started_at = clock.now()
        self._part = "looking"
        self._total = 0
        self._evidence: dict[str, Evidence] = {}
        self._first_evidence_at: Instant | None = None
        self._in_d_state: set[int] = set()
        self._steps: tuple[Step, ...] = ()
        self._planned: frozenset[str] = frozenset()
        self._second_at = Instant(0.0)
        self.pool = Pool(
            rooms,
            clock,
            until=self._started_at + request.deadline,
            tell=self._ended,
            stopped=self._stopped,
            last=self._yields,
            held=self._is_held,
            touching=self._touching,
            workers=1 if request.kind is CaptureKind.BASELINE else 0,
        )
        for note in rooms.continued:
            self._touch(note.process, note.step, Means.SIGCONT)

    def run(
        self, rejudge: Callable[[StageA], str], latest: Callable[[], CaptureRequest | None]
    ) -> CaptureOutcome:
        try:
            plan = self.plan()
            self._total = len(plan.steps)
            self._steps = plan.steps
            self._planned = frozenset(step.id for step in plan.steps)
            first, pause, second, rest = _split(plan)
            self._second_at = Instant(self._clock.now() + plan.sample_gap)
            self.pool.submit(first, phase=self._onset)
            self.pool.submit(second, phase=self._onset, not_before=self._second_at)
            self._part = "first sample"
            self.pool.wait(_computing(first))
            self.pool.submit(self._within_the_pause(pause), phase=self._onset)
            self._part = "second sample"
            self.pool.wait(_computing(second))
            self._part = "judging"
            self._report()
            stage_a = self._stage_a(plan)
            verdict = rejudge(stage_a) or self._request.verdict
            self._part = "the rest"
            spared = planning.spared((latest() or self._request).instances, plan.targets)
            self.pool.submit(self._behind_gates(rest, verdict, spared), phase=Phase.LATER)
            self.pool.wait(step for step in plan.steps if step.id not in self._evidence)
            ended_at = self._clock.now()
        finally:
            self.pool.close()
        self._rooms.finish()
        return CaptureOutcome(
            work=str(self._rooms.path),
            plan=plan,
            evidence=tuple(self._evidence[step.id] for step in plan.steps),
            started_at=self._started_at,
            ended_at=ended_at,
            stage_a=stage_a,
            verdict=verdict,
            first_evidence_at=self._first_evidence_at,
            touches=tuple(self._touches),
            stopped=self._asked_to_stop(),
            abandoned=self.pool.abandoned,
        )

    @property
    def _onset(self) -> Phase:
        return _PHASES.get(self._request.kind, Phase.ONSET)

    # Looking and planning

    def plan(self) -> CapturePlan:
        self.pool.warm()
        rows, notes = self._census()
        request = self._request
        targets = kinship.related(
            rows,
            seeds=request.seeds,
            profiles=registry.profiles_of(self._request),
            instances=request.instances,
            logs=request.logs,
        )
        if request.kind is CaptureKind.BASELINE:
            targets = _of_the_well(targets, request.instances)
        self._in_d_state = {row.pid for row in rows if row.state == "D"}
        found = {target.process.pid for target in targets}
        wanted = {*request.seeds, *(i.pid for i in request.instances if i.pid is not None)}
        notes += tuple(f"process {pid} is gone" for pid in sorted(wanted - found))
        plan = planning.plan(
            targets,
            collectors=registry.collectors().values(),
            policy=request.policy,
            kind=request.kind,
            collect=request.collect,
            paths=self._profile.endpoints if len(request.profiles) == 1 else {},
            own_paths=_own_paths(request, rows),
            urls={i.pid: i.url for i in request.instances if i.pid is not None and i.url},
            logs=request.logs,
            options=_options(request, self._profile),
            deadline=request.deadline,
            notes=notes,
            well=planning.going_on(request.instances, targets),
            load=os.getloadavg()[0] / len(os.sched_getaffinity(0)),
        )
        return replace(plan, at_once=width(), waiting_at_once=WAITING_WIDTH)

    def _census(self) -> tuple[tuple[ProcessRow, ...], tuple[str, ...]]:
        self.pool.submit((census.STEP,), phase=self._onset)
        (evidence,) = self.pool.wait((census.STEP,))
        path = self._rooms.path / census.FILE
        rows = census.read(path.read_bytes()) if path.exists() else ()
        path.unlink(missing_ok=True)  # it names every process of the machine
        if evidence.failure is None:
            return rows, ()
        return rows, (f"the search for processes was cut short: {evidence.failure.message}",)

    # Taking samples

    def _yields(self, step: Step) -> bool:
        """Say whether a step reads the memory of a process in D state: these come last."""
        target = step.target
        return step.rung >= 4 and target is not None and target.process.pid in self._in_d_state

    def _is_held(self, step: Step) -> bool:
        """Say whether a step would read memory before the states of the threads are known.

        Nobody can attach to a process that another step of ours is attached to, and a process that
        stands still answers nobody. One that leaves its target broken waits until there is nothing
        left to read.
        """
        if (step.attaches or step.asks) and self._is_attached_before(step):
            return True
        if step.harms:
            return any(other.id not in self._evidence for other in self._steps if not other.harms)
        if step.rung < 4 or step.target is None:
            return False
        look = f"kernel/{step.target.process}/{step.sample}"
        return look in self._planned and look not in self._evidence

    def _is_attached_before(self, step: Step) -> bool:
        """Say whether a step that attaches to the same process stands earlier in the plan."""
        earlier = itertools.takewhile(lambda other: other.id != step.id, self._steps)
        return any(
            other.attaches and other.target == step.target and other.id not in self._evidence
            for other in earlier
        )

    def _ended(self, step: Step, evidence: Evidence) -> None:
        if step.id == census.STEP.id:
            return  # no step of the plan
        self._evidence[step.id] = evidence
        if evidence.artifacts and self._first_evidence_at is None:
            self._first_evidence_at = self._clock.now()
        if step.collector == "kernel" and step.target is not None and evidence.artifacts:
            document = self._document(evidence.artifacts[0].path)
            threads = document.get("threads", ()) if isinstance(document, dict) else ()
            if any(thread.get("state") == "D" for thread in threads):
                self._in_d_state.add(step.target.process.pid)
        self._report()

    def _touching(self, step: Step, means: Means) -> None:
        if step.target is not None:
            self._touch(step.target.process, step.id, means)

    def _touch(self, process: ProcessId, step: str, means: Means) -> None:
        touch = Touch(
            at=self._clock.now(),
            process=process,
            step=step,
            means=means,
            incident=self._request.id,
        )
        self._touches.append(touch)
        self._touched(touch)

    def _stopped(self) -> bool:
        self._report()
        return self._asked_to_stop()

    def _report(self) -> None:
        pausing = self._part == "second sample" and self._clock.now() < self._second_at
        self._progress(
            Progress(
                part="pause" if pausing else self._part,
                done=len(self._evidence),
                failed=sum(e.failure is not None for e in self._evidence.values()),
                total=self._total,
                elapsed=self._clock.now() - self._started_at,
            )
        )

    def _within_the_pause(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Give each step a share of what is left of the pause, as many at once as there are cores.

        Each is told when to end (option ``until``, an instant) and is killed before the second
        sample begins, for which all workers are free then.
        """
        now = self._clock.now()
        end = self._second_at - PAUSE_MARGIN
        turns = planning.turns(len(steps), at_once=width(), now=now, end=end)
        if turns and turns[0] - now < MIN_TURN:
            for step in steps:
                message = f"the first sample left {max(0.0, end - now):.1f} s of the pause for it"
                self._refused(step, message, phase=self._onset)
            return ()
        return tuple(
            replace(
                step,
                timeout=self._second_at - now,
                options={**step.options, "until": repr(until)},
            )
            for step, until in zip(steps, turns, strict=True)
        )

    def _refused(self, step: Step, message: str, *, phase: Phase) -> None:
        self._ended(
            step,
            Evidence(
                step=step.id,
                collector=step.collector,
                sample=step.sample,
                phase=phase,
                target=step.target.process if step.target is not None else None,
                failure=Failure(kind=FailureKind.GATED, message=message),
            ),
        )

    def _behind_gates(
        self, steps: tuple[Step, ...], verdict: str, spared: Collection[int]
    ) -> tuple[Step, ...]:
        """Leave out the steps that the verdict forbids; the other gates are looked at later."""
        allowed = []
        for step in steps:
            whatever = Gate.HUNG not in step.gates or step.options.get("any_verdict") == "yes"
            if verdict != Hung.word and not whatever:
                message = f"only for a verdict of {Hung.word}; it is {verdict or 'not known'}"
                self._refused(step, message, phase=Phase.LATER)
            elif step.target is not None and step.target.process.pid in spared and not whatever:
                message = "only of what hangs; it serves, or may belong to a server that does"
                self._refused(step, message, phase=Phase.LATER)
            else:
                allowed.append(step)
        return tuple(allowed)

    # What stage A says

    def _stage_a(self, plan: CapturePlan) -> StageA:
        at = self._clock.now()
        return StageA(
            stacks=self._stacks(plan.targets, at),
            processes=self._processes(plan.targets, at),
            answers=self._answers(plan.targets, at),
        )

    def _answers(
        self, targets: tuple[Target, ...], at: Instant
    ) -> tuple[HealthSeen | GpusSeen, ...]:
        # It parses all kinds of evidence: not before the first of it is in.
        from hangwatch.core import loose

        folders = [PurePosixPath(), PurePosixPath("gpu"), *(target.folder for target in targets)]
        names = [
            planning.file_name(stem, suffix, sample)
            for stem, suffix in (("procs", ".json"), ("gpu", ".csv"), ("health", ".json"))
            for sample in (1, 2)
        ]
        paths = [folder / name for folder in folders for name in names]
        files = {
            str(path): place.read_bytes()
            for path in paths
            if (place := self._rooms.path / path).is_file()
        }
        instances = [each.instance for each in self._request.instances]
        seen = loose.snapshots(files, profile=self._profile, at=at, instances=instances)
        return tuple(each for each in seen if isinstance(each, HealthSeen | GpusSeen))

    def _stacks(self, targets: tuple[Target, ...], at: Instant) -> tuple[StacksSeen, ...]:
        threads = {target.process.pid: self._threads(target) for target in targets}
        # Under Ray nothing says which engine works for which server. Where every instance has as
        # good a claim, the engines speak for all of them only if they say the same.
        unclaimed = [t for t in targets if not t.instance and t.role in NEEDED]
        said = {
            (vital.motion, vital.frame.split(":")[0])
            for target in unclaimed
            for vital in (
                motion.stack_vital(threads[target.process.pid], at=at, profile=self._profile),
            )
        }
        shared = tuple(unclaimed[:1]) if len(said) == 1 else ()
        seen = []
        for instance in self._request.instances:
            own = tuple(t for t in targets if t.instance == instance.instance.name)
            stacks = [stack for t in (*own, *shared) for stack in threads[t.process.pid]]
            if stacks:
                vital = motion.stack_vital(stacks, at=at, profile=self._profile)
                asked = (*own, *shared)
                vital = awaiting.with_tasks(
                    vital,
                    self._tasks(asked),
                    motion.threads(stacks),
                    {t.process.pid: t.role for t in asked},
                )
                seen.append(StacksSeen(instance=instance.instance, stacks=vital))
        return tuple(seen)

    def _threads(self, target: Target) -> list[ThreadStack]:
        found: list[ThreadStack] = []
        for sample in (1, 2):
            name = planning.file_name("threads", ".json", sample)
            path = self._rooms.place(target.folder) / name
            if path.exists():
                with contextlib.suppress(ValueError):  # cut off before the first thread was whole
                    found += motion.parse_threads(
                        path.read_bytes(), target.process.pid, sample, f"{target.folder}/{name}"
                    )
        return found

    def _tasks(self, targets: tuple[Target, ...]) -> tuple[TaskMotion, ...]:
        records: list[TaskRecord] = []
        readings: list[TaskReading] = []
        for target in targets:
            for sample in (1, 2):
                path = self._rooms.place(target.folder) / planning.file_name(
                    "tasks", ".json", sample
                )
                if path.exists():
                    found, reading = awaiting.parse(path.read_bytes(), target.process.pid, sample)
                    records += found
                    readings.append(reading)
        return awaiting.tasks(records, readings)

    def _processes(self, targets: tuple[Target, ...], at: Instant) -> tuple[ProcessesSeen, ...]:
        rows: dict[int, Mapping[str, Any]] = {}
        for sample in (1, 2):
            table = self._document(Path(planning.file_name("procs", ".json", sample)))
            rows |= {row["pid"]: row for row in table} if isinstance(table, list) else {}
        return tuple(
            ProcessesSeen(
                instance=instance.instance,
                processes=tuple(
                    _vital(target, rows[target.process.pid], at)
                    for target in targets
                    if _works_for(target, instance) and target.process.pid in rows
                ),
                at=at,
            )
            for instance in self._request.instances
            if any(_works_for(target, instance) for target in targets)
        )

    def _document(self, path: Any) -> Any:
        """Return one of our own JSON files, or ``None`` where it is missing or was cut off."""
        try:
            return json.loads((self._rooms.path / path).read_bytes())
        except (OSError, ValueError):
            return None


_PHASES: Final = {
    CaptureKind.RUN: Phase.BASELINE,
    CaptureKind.BASELINE: Phase.BASELINE,
    CaptureKind.AFTERMATH: Phase.AFTERMATH,
}


def _own_paths(request: CaptureRequest, rows: Iterable[ProcessRow]) -> dict[int, Mapping[str, str]]:
    """Return the paths of the servers whose engine is known, by what they print or are called."""
    profiles = {profile.name: profile for profile in registry.profiles_of(request)}
    found = {
        row.process.pid: known[1].endpoints
        for row in rows
        if (known := kinship.recognised(row, profiles.values())) and known[0] in NEEDED
    }
    return found | {
        each.pid: profiles[each.profile].endpoints
        for each in request.instances
        if each.pid is not None and each.profile in profiles
    }


def _of_the_well(
    targets: Iterable[Target], instances: Iterable[CapturedInstance]
) -> tuple[Target, ...]:
    """Return the processes of instances that are well, and those that work for no single one."""
    ill = {each.instance.name for each in instances if each.verdict not in baseline.KEPT}
    return tuple(target for target in targets if target.instance not in ill)


def _options(request: CaptureRequest, profile: EngineProfile) -> dict[str, Mapping[str, str]]:
    """Return the settings of collectors; the profile says which numbers of the engine to read."""
    ours: dict[str, Mapping[str, str]] = {"tasks": {"state": json.dumps(to_plain(profile.state))}}
    if request.state:
        ours["tasks"] = {
            **ours["tasks"],
            "known": str(Path(request.state, baseline.KNOWN)),
            "learn": "yes" if request.kind is CaptureKind.BASELINE else "",
        }
        ours["baseline"] = {"state": request.state}
    if request.api_key_file:
        ours["endpoints"] = {"api_key_file": request.api_key_file}
    if request.incident is not None and request.incident.window is not None:
        onset = request.epoch.wall_of(request.incident.window.latest).isoformat()
        ours |= {"logs": {"onset": onset}, "ray_logs": {"onset": onset}}
    if request.after is not None:
        ours["ends"] = {"bundle": request.after.bundle}
    if request.state:
        window = request.incident.window if request.incident is not None else None
        ours["blackbox"] = {
            "ring": str(Path(request.state, blackbox.RING)),
            "progress_at": "" if window is None else str(window.earliest),
        }
    given = request.options
    return {
        name: {**ours.get(name, {}), **given.get(name, {})} for name in ours.keys() | given.keys()
    }


def _split(plan: CapturePlan) -> tuple[tuple[Step, ...], ...]:
    """Return the first sample, what runs in the pause, the second sample, and the rest."""
    stage_a = [step for step in plan.steps if step.stage is Stage.A]
    return (
        tuple(step for step in stage_a if step.sample == 1),
        tuple(step for step in plan.steps if step.stage is Stage.PAUSE),
        tuple(step for step in stage_a if step.sample > 1),
        tuple(step for step in plan.steps if step.stage is Stage.B),
    )


def _computing(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps that judging waits for: not those that a mute server holds up."""
    return tuple(step for step in steps if not step.waits)


def _works_for(target: Target, instance: CapturedInstance) -> bool:
    return target.instance == instance.instance.name


def _vital(target: Target, row: Mapping[str, Any], at: Instant) -> ProcessVital:
    state = str(row.get("state", ""))
    return ProcessVital(
        pid=target.process.pid,
        role=target.role,
        state="" if state == "gone" else state,
        since=at,
        at=at,
        tracer_pid=row.get("tracer_pid"),
        wchan=str(row.get("wchan", "")),
        cpu_pct=row.get("cpu_pct"),
        vol_ctxt_per_s=row.get("vol_ctxt_per_s"),
        switches_per_s=row.get("switches_per_s"),
        needed=target.role in NEEDED,
    )
