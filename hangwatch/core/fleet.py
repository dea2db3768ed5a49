"""What is known of all engines and their logs, and what of it survives a restart.

A log is not an instance. Several engines may print on one stream, and one engine on several (its
own file, the driver's). So sources are kept by themselves, and an instance sees them through a
view that is made when it is judged: who else printed there, since when it cannot be read, whether
it was retired. A driver's stream in which de-duplication folds the beats of several engines into
one line cannot show a single silent engine: while anyone beats there, all do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hangwatch.core import aftermath, calibration, grouping, starvation
from hangwatch.core.calibration import Calibration
from hangwatch.core.facts import Facts
from hangwatch.core.starvation import Idleness
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Aftermath, Incident, IncidentState
from hangwatch.model.lease import Lease
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import Confidence, Loading, LogStalled, Ok, Verdict
from hangwatch.model.vitals import SourceVital, Vitals


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One log.

    Attributes:
        vital: What instances see of it.
        pid: Process that writes it, if known.
        newest: Who printed the last beat on it.
        other_at: Last beat of anyone but ``newest``.
        stalled_since: Since when its engines beat elsewhere only, or ``None``.
    """

    vital: SourceVital
    pid: int | None = None
    newest: InstanceKey | None = None
    other_at: Instant | None = None
    stalled_since: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """One instance.

    Attributes:
        vitals: What is known, its sources left out.
        carried: Sources that carry it, and its own last beat on each.
        verdict: As of the last judgement.
        due: When that may change by itself.
        facts: What it rested on.
    """

    vitals: Vitals
    carried: Mapping[str, Instant | None] = field(default_factory=dict)
    verdict: Verdict | None = None
    due: Instant | None = None
    facts: Facts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooling:
    """When an instance was last captured."""

    instance: InstanceKey
    captured_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What survives a restart of the daemon on the same boot.

    Attributes:
        incidents: All that are remembered.
        cooling: Who was captured, and when.
        serial: Number of the last incident.
        leases: Announced pauses.
        calibrations: What was learned of each engine's silences, by profile.
        idleness: How long the whole fleet has been without work.
        aftermaths: What is still to be learned of incidents that were captured.
    """

    incidents: tuple[Incident, ...] = ()
    cooling: tuple[Cooling, ...] = ()
    serial: int = 0
    leases: tuple[Lease, ...] = ()
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    idleness: Idleness = field(default_factory=Idleness)
    aftermaths: tuple[Aftermath, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that is known.

    Attributes:
        policy: The limits.
        profiles: Engines that may be met, by name; the first is assumed where nothing says.
        epoch: Maps instants to wall time.
        begun_at: When we began to listen.
        instances: Every engine seen.
        sources: Every log followed.
        aliases: Names under which a driver's stream calls an instance known otherwise.
        incidents: Open ones, and the latest closed.
        cooling: When each instance was last captured.
        serial: Number of the last incident.
        leases: Announced pauses, by id.
        calibrations: What was learned of each engine's silences, by profile.
        idleness: How long the whole fleet has been without work.
        aftermaths: What is still to be learned of incidents that were captured.
    """

    policy: Policy
    profiles: Mapping[str, EngineProfile]
    epoch: Epoch
    begun_at: Instant
    instances: Mapping[InstanceKey, Tracked] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    aliases: Mapping[InstanceKey, InstanceKey] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    cooling: Mapping[InstanceKey, Instant] = field(default_factory=dict)
    serial: int = 0
    leases: Mapping[str, Lease] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    idleness: Idleness = field(default_factory=Idleness)
    aftermaths: tuple[Aftermath, ...] = ()

    @property
    def verdicts(self) -> dict[InstanceKey, Verdict]:
        """The present verdict of every instance."""
        return {key: t.verdict for key, t in self.instances.items() if t.verdict is not None}


def begin(
    policy: Policy,
    profiles: Mapping[str, EngineProfile],
    epoch: Epoch,
    now: Instant,
    *,
    memory: Memory | None = None,
) -> State:
    """Return the state of somebody who begins to listen at *now*.

    Args:
        policy: The limits.
        profiles: At least one engine, by name.
        epoch: Maps instants to wall time.
        now: The present instant.
        memory: What an earlier daemon of this boot remembered. A capture that it was in the
            middle of is started anew when its members alarm again.
    """
    memory = memory or Memory()
    return State(
        policy=policy,
        profiles=profiles,
        epoch=epoch,
        begun_at=now,
        incidents=tuple(
            replace(incident, state=IncidentState.OPEN)
            if incident.state is IncidentState.CAPTURING
            else incident
            for incident in memory.incidents
        ),
        cooling={entry.instance: entry.captured_at for entry in memory.cooling},
        serial=memory.serial,
        leases={lease.id: lease for lease in memory.leases if lease.until > now},
        calibrations=dict(memory.calibrations),
        idleness=replace(memory.idleness, whole=False),
        aftermaths=tuple(
            replace(pending, running=False, last=False) for pending in memory.aftermaths
        ),
    )


def remember(state: State) -> Memory:
    """Return what should survive a restart."""
    return Memory(
        incidents=state.incidents,
        cooling=tuple(Cooling(instance=key, captured_at=at) for key, at in state.cooling.items()),
        serial=state.serial,
        leases=tuple(state.leases.values()),
        calibrations=state.calibrations,
        idleness=state.idleness,
        aftermaths=state.aftermaths,
    )


def due(state: State) -> Instant | None:
    """Return when a verdict may next change by itself, or ``None``."""
    moments = [t.due for t in state.instances.values() if t.due is not None]
    starves = starves_at(state.idleness, state.instances, state.policy)
    if starves is not None:
        moments.append(starves)
    moments += (at for _, _, at in aftermaths_due(state.aftermaths, state.incidents, state.policy))
    return min(moments, default=None)


def aftermaths_due(
    pending: Iterable[Aftermath], incidents: Iterable[Incident], policy: Policy
) -> Iterator[tuple[Aftermath, Incident | None, Instant]]:
    """Yield what is to be looked at again, with its incident and when."""
    by_id = {incident.id: incident for incident in incidents}
    for each in pending:
        incident = by_id.get(each.incident)
        at = aftermath.due(each, incident, policy)
        if at is not None:
            yield each, incident, at


def starves_at(
    idleness: Idleness, instances: Mapping[InstanceKey, Tracked], policy: Policy
) -> Instant | None:
    """Return when to notice that a job which lives brings no work, or ``None``."""
    at = starvation.due(idleness, policy)
    processes = (p for tracked in instances.values() for p in tracked.vitals.processes)
    return at if at is not None and starvation.job_lives(processes, policy) else None


def overall(state: State, now: Instant) -> Verdict:
    """Return the verdict of the whole: the strongest, with the log paths' own taken in."""
    stalled = [
        log_stalled(name, source.stalled_since)
        for name, source in state.sources.items()
        if source.stalled_since is not None
    ]
    verdicts = [
        grouping.ascribed(t.verdict, key.name) if len(state.instances) > 1 else t.verdict
        for key, t in state.instances.items()
        if t.verdict is not None
    ]
    strongest = grouping.strongest((*verdicts, *stalled))
    if strongest is not None:
        return strongest
    if any(source.vital.grew_at is not None for source in state.sources.values()):
        return Ok(
            since=state.begun_at,
            cause="not-a-hang:no-heartbeat-configured",
            confidence=Confidence.MEDIUM,
            because=("no heartbeat was ever seen in these logs: it may be switched off",),
        )
    return Loading(
        since=min(state.begun_at, now),
        cause="not-a-hang:startup",
        confidence=Confidence.LOW,
        because=("no heartbeat has come yet",),
    )


def view(state: State, key: InstanceKey, now: Instant | None = None) -> Vitals:
    """Return the vitals of an instance, its logs taken in: what ``judge`` reads.

    Args:
        state: All that is known.
        key: Whose.
        now: The present instant; without it, logs beside its own are always looked at.
    """
    return Views(state).of(state.instances[key], now)


class Views:
    """Makes views of several instances, whose logs may be the same."""

    def __init__(self, state: State) -> None:
        """Look at the logs once."""
        self._state = state
        self._newest = _newest_by_folder(state.sources)
        self._lease = max(state.leases.values(), key=lambda lease: lease.until, default=None)

    def of(self, tracked: Tracked, now: Instant | None) -> Vitals:
        """Return the vitals of an instance, its logs taken in, as ``view`` does."""
        sources = self._state.sources
        known = [sources[name] for name in tracked.carried if name in sources]
        # Its own file shows it alone; a merged stream counts only where there is nothing better.
        alone = any(not s.vital.merged and s.vital.retired_at is None for s in known)
        beaten = [
            source.other_at
            if source.newest == tracked.vitals.instance
            else source.vital.last_line_at
            for source in known
            if not source.vital.merged
        ]
        missing_at = tracked.facts.missing_at if tracked.facts is not None else None
        if now is None or missing_at is None or now >= missing_at:
            beaten += _beside(known, self._newest)
        return replace(
            tracked.vitals,
            sources=tuple(
                replace(source.vital, merged=False)
                if source.vital.merged and alone
                else source.vital
                for source in known
            ),
            siblings_at=max((at for at in beaten if at is not None), default=None),
            lease=self._lease,
            patience=self._patience(tracked.vitals),
        )

    def _patience(self, vitals: Vitals) -> float | None:
        last, policy = vitals.last, self._state.policy
        known = self._state.calibrations.get(last.profile) if last is not None else None
        if known is None or not policy.calibrate:
            return vitals.patience
        return calibration.patience(known, policy.stall_after)


def _beside(
    known: Iterable[Source], newest: Mapping[str, Sequence[tuple[Instant, str]]]
) -> list[Instant]:
    """Return the last beats on logs beside these.

    Engines write their own files by themselves: what can fail on the way is the filesystem, and
    files in one folder share it.
    """
    folders = {_folder(s.vital.name) for s in known if not s.vital.relayed}
    mine = {s.vital.name for s in known}
    beaten = (
        next((at for at, name in newest.get(folder, ()) if name not in mine), None)
        for folder in folders
    )
    return [at for at in beaten if at is not None]


def _newest_by_folder(sources: Mapping[str, Source]) -> dict[str, list[tuple[Instant, str]]]:
    """Return for each folder the last beats on the files in it, with their names, newest first."""
    found: dict[str, list[tuple[Instant, str]]] = {}
    for name, source in sources.items():
        at = source.vital.last_line_at
        if at is not None and not source.vital.relayed:
            found.setdefault(_folder(name), []).append((at, name))
    for beaten in found.values():
        beaten.sort(reverse=True)
    return found


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def log_stalled(name: str, since: Instant) -> LogStalled:
    """Return the verdict of a log that stands still while its engines beat elsewhere."""
    return LogStalled(
        since=since,
        cause="not-a-hang:log-pipeline",
        confidence=Confidence.HIGH,
        because=(
            f"{name} stands still while its engines go on beating in logs of their own",
            "the path of that log is broken; the engines are not",
        ),
    )
