"""The whole decision: what is known, what was seen, what to do about it.

Theory of operation
===================

``advance(state, observations, now)`` folds the observations into the vitals of the instances that
they concern, judges those again, and those whose verdict was due to change, and turns changes of
verdicts into incidents and actions. It is pure: the daemon's loop, ``replay`` and the tests run the
same function, under their own clocks.

A driver's stream that stands still while its engines go on beating in files of their own is a dead
log path, and no hang.

Lines without an engine's label (access lines, errors) concern the engine of the process that wrote
them. Where one stream carries several engines and no process ids, a request that was answered or
a task that died cannot be assigned, and is left out; sleep and restarts concern all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from hangwatch.core import aftermath, calibration, grouping, judge, starvation, vitals, witnesses
from hangwatch.core.calibration import Calibration
from hangwatch.core.facts import Demand, Facts
from hangwatch.core.fleet import (
    Source,
    State,
    Tracked,
    Views,
    aftermaths_due,
    log_stalled,
    starves_at,
)
from hangwatch.core.incidents import Incidents
from hangwatch.core.naming import is_named_after
from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Member, Transition
from hangwatch.model.observation import (
    Action,
    AftermathEnded,
    BeatSeen,
    CaptureEnded,
    ChildBack,
    ChildSilent,
    CountersSeen,
    GpusSeen,
    HealthSeen,
    LeaseReturned,
    LeaseTaken,
    LoopPaused,
    Observation,
    ProcessesSeen,
    RecordStall,
    Report,
    SignalArrived,
    SourceEvent,
    SourceFound,
    SourceGrew,
    SourceReadable,
    SourceRetired,
    SourceUnreadable,
    StacksSeen,
    TakeAftermath,
)
from hangwatch.model.profile import EngineProfile, Signal
from hangwatch.model.time import Instant
from hangwatch.model.verdict import (
    Blind,
    Confidence,
    Dead,
    Gone,
    Idle,
    Ok,
    Verdict,
)
from hangwatch.model.vitals import SourceVital, Vitals

FORGET_AFTER: Final = 86_400.0
"""Seconds after which what is gone is forgotten: instances, logs, captures."""

_FOR_ONE: Final = frozenset({Signal.COMPLETED, Signal.ENGINE_DEAD, Signal.BEAT_LOST})
_COMMON: Final = frozenset({witnesses.ONE_SILENT, witnesses.LOOP_BLOCKED})
"""Causes that say only how it looks from outside; that others share it says more."""
_INTRODUCING: Final = frozenset({Signal.STARTING, Signal.READY, Signal.SLEEP, Signal.COMPLETED})


def advance(
    state: State, observations: Iterable[Observation], now: Instant
) -> tuple[State, tuple[Action, ...]]:
    """Return the state after *observations*, judged at *now*, and what to do.

    Observations come in the order in which they were made, none later than *now*.
    """
    turn = _Turn(state, now)
    for observation in observations:
        turn.take(observation)
    turn.conclude()
    turn.follow_up()
    return turn.state(), tuple(turn.actions)


def _prints_on(key: InstanceKey, writer: int | None) -> bool:
    """Say whether an engine prints on a log of that writer, as far as pids tell.

    A nameless engine is the only one there is: all logs are its own.
    """
    return key == InstanceKey() or (writer is not None and (key.host, key.pid) == ("", writer))


class _Turn:
    """One call of ``advance``, with copies that may be changed."""

    def __init__(self, state: State, now: Instant) -> None:
        self._state = state
        self._now = now
        self._instances = dict(state.instances)
        self._sources = dict(state.sources)
        self._aliases = dict(state.aliases)
        self._leases = dict(state.leases)
        self._calibrations = dict(state.calibrations)
        self._idleness = state.idleness
        self._aftermaths = list(state.aftermaths)
        self._touched: set[InstanceKey] = set()
        self._seen_anything = False
        self._printers: dict[tuple[str, int | None], list[InstanceKey]] | None = None
        self.actions: list[Action] = []
        self._incidents = Incidents(
            state.incidents,
            state.cooling,
            state.serial,
            policy=state.policy,
            epoch=state.epoch,
            now=now,
            act=self.actions.append,
        )

    def state(self) -> State:
        """Return the state as it is now."""
        return replace(
            self._state,
            instances=self._instances,
            sources=self._sources,
            aliases=self._aliases,
            incidents=tuple(self._incidents.known),
            cooling=self._incidents.cooling,
            serial=self._incidents.serial,
            leases=self._leases,
            calibrations=self._calibrations,
            idleness=self._idleness,
            aftermaths=tuple(self._aftermaths),
        )

    # --- observations ---

    def take(self, observation: Observation) -> None:
        """Fold one observation in."""
        self._seen_anything = True
        match observation:
            case BeatSeen(beat=beat, fresh=fresh):
                self._beat(beat, fresh=fresh)
            case SignalArrived(signal=signal):
                self._signal(signal)
            case HealthSeen() | CountersSeen() | ProcessesSeen() | GpusSeen() | StacksSeen():
                for key in self._resolve(observation.instance, observation.at):
                    self._update(key, vitals.look(self._instances[key].vitals, observation))
            case ChildSilent():
                self._deaf(observation)
            case ChildBack():
                self._hears_again(observation)
            case LeaseTaken(lease=lease):
                self._leases[lease.id] = lease
                self._touch_all()
            case LeaseReturned(id=ident, at=at):
                self._return(ident, at)
            case LoopPaused(at=at):
                for key, tracked in self._instances.items():
                    self._update(key, vitals.relisten(tracked.vitals, at))
            case CaptureEnded() | AftermathEnded():
                self._ended(observation)
            case _:
                self._take_of_source(observation)

    def _ended(self, seen: CaptureEnded | AftermathEnded) -> None:
        """Take in what a capture left, or that a look at what became of it is over."""
        if isinstance(seen, AftermathEnded):
            left = (
                aftermath.looked(each, seen.at) if each.incident == seen.incident else each
                for each in self._aftermaths
            )
            self._aftermaths = [each for each in left if each is not None]
            return
        self._incidents.captured(seen.incident, seen.at, seen.bundle)
        for incident in self._incidents.known:
            if incident.id == seen.incident:
                expected = aftermath.begin(incident, seen.bundle, seen.at, self._state.policy)
                self._aftermaths += [expected] if expected is not None else []

    def follow_up(self) -> None:
        """Look again at what was captured, where it is time."""
        pending = tuple(self._aftermaths)
        for each, incident, at in aftermaths_due(
            pending, self._incidents.known, self._state.policy
        ):
            i = self._aftermaths.index(each)
            if incident is None:
                del self._aftermaths[i]  # it was forgotten, and with it who was in it
            elif self._now >= at:
                last = aftermath.is_over(each, incident)
                self._aftermaths[i] = replace(each, running=True, last=last)
                self.actions.append(
                    TakeAftermath(
                        incident=incident,
                        bundle=each.bundle,
                        number=each.taken + 1,
                        captured_at=each.captured_at,
                        last=last,
                    )
                )

    def _touch_all(self) -> None:
        self._touched.update(self._instances)

    def _return(self, ident: str, at: Instant) -> None:
        """End a lease now: what it covered counts as not having been expected to move."""
        lease = self._leases.get(ident)
        if lease is not None:
            self._leases[ident] = replace(lease, until=Instant(min(lease.until, at)))
            self._touch_all()

    def _take_of_source(self, seen: SourceEvent) -> None:
        name = seen.source
        match seen:
            case SourceGrew(at=at):
                self._source(name, grew_at=at)
                self._touch_carried(name, waiting_only=True)
            case SourceFound(pid=pid):
                self._found(name, pid)
            case SourceRetired(at=at):
                self._source(name, retired_at=at)
                self._sources[name] = replace(self._sources[name], stalled_since=None)
                self._touch_carried(name)
            case SourceUnreadable(at=at, reason=reason):
                if self._source(name).vital.unreadable_since is None:
                    self._source(name, unreadable_since=at, unreadable_reason=reason)
                self._touch_carried(name)
            case SourceReadable(at=at):
                self._readable(name, at)

    def _deaf(self, seen: ChildSilent) -> None:
        for name in seen.sources:
            self._take_of_source(SourceUnreadable(source=name, at=seen.at, reason=seen.reason))
        for key in seen.instances:
            self._blind(key, seen.at, seen.reason)

    def _hears_again(self, seen: ChildBack) -> None:
        for name in seen.sources:
            self._readable(name, seen.at)
        for key in seen.instances:
            self._blind(key, None, "")

    def _update(self, key: InstanceKey, value: Vitals) -> None:
        self._instances[key] = replace(self._instances[key], vitals=value)
        self._touched.add(key)

    def _profile(self, name: str) -> EngineProfile:
        profiles = self._state.profiles
        return profiles[name] if name in profiles else next(iter(profiles.values()))

    def _create(self, key: InstanceKey, at: Instant, profile: str = "") -> None:
        self._printers = None
        self._instances[key] = Tracked(
            vitals=Vitals(instance=key, listening_since=at, **self._known_of(profile)),
            carried={
                name: None for name, source in self._sources.items() if _prints_on(key, source.pid)
            },
        )
        self._touched.add(key)

    def _known_of(self, profile: str) -> dict[str, Any]:
        """Return what the vitals of an instance take from the profile of its engine."""
        engine = self._profile(profile)
        return {
            "interval": self._state.policy.heartbeat_interval or engine.interval,
            "says_idle": engine.says_idle,
            "step_driven": engine.step_driven,
            "polls_gpu": engine.polls_gpu,
            "healthy_is_proof_after": engine.healthy_is_proof_after,
        }

    def _source(self, name: str, **changes: Any) -> Source:
        source = self._sources.get(name) or Source(vital=SourceVital(name=name))
        if changes:
            source = replace(source, vital=replace(source.vital, **changes))
        self._sources[name] = source
        return source

    def _found(self, name: str, pid: int | None) -> None:
        source = self._source(name, retired_at=None, unreadable_since=None)
        self._sources[name] = replace(source, pid=pid if pid is not None else source.pid)
        for key, tracked in self._instances.items():
            if _prints_on(key, pid) and name not in tracked.carried:
                self._instances[key] = replace(tracked, carried={**tracked.carried, name: None})
                self._touched.add(key)

    def _readable(self, name: str, at: Instant) -> None:
        was = self._source(name).vital.unreadable_since
        self._source(name, unreadable_since=None, unreadable_reason="")
        for key, tracked in self._instances.items():
            if was is not None and name in tracked.carried:
                self._update(key, vitals.relisten(tracked.vitals, at))

    def _blind(self, key: InstanceKey, since: Instant | None, reason: str) -> None:
        if key in self._instances:
            value = self._instances[key].vitals
            self._update(key, replace(value, blind_since=since, blind_reason=reason))

    def _touch_carried(self, name: str, *, waiting_only: bool = False) -> None:
        for key, tracked in self._instances.items():
            if name in tracked.carried and not (waiting_only and isinstance(tracked.verdict, Ok)):
                self._touched.add(key)

    def _beat(self, beat: Heartbeat, *, fresh: bool) -> None:
        key = self._identity(beat)
        if key != beat.instance:
            beat = replace(beat, instance=key)
        if key not in self._instances:
            self._introduce(beat)
        tracked = self._instances[key]
        if tracked.vitals.last is None:  # what came before may be of any engine
            known = self._known_of(beat.profile)
            tracked = replace(tracked, vitals=replace(tracked.vitals, **known))
        if fresh:
            self._learn(tracked, beat)
            self._record_stall(key, tracked, beat)
        name = beat.source
        source = self._source(name)
        vital = source.vital
        other_at = source.other_at if source.newest == key else vital.last_line_at
        stalled = source.stalled_since
        self._sources[name] = replace(
            source,
            vital=replace(
                vital,
                last_line_at=beat.at,
                relayed=vital.relayed or beat.relayed,
                merged=vital.merged or (beat.repeated > 1 and beat.relayed),
                in_flight=beat.in_flight,
            ),
            newest=key,
            other_at=other_at,
            stalled_since=None,
        )
        if stalled is not None:
            self._report_source(name, log_stalled(name, stalled), _ok_again(beat.at))
        carried = tracked.carried
        if carried.get(name) != beat.at:
            carried = {**carried, name: beat.at}
        self._instances[key] = replace(
            tracked, vitals=vitals.beat(tracked.vitals, beat, fresh=fresh), carried=carried
        )
        self._touched.add(key)
        if len(carried) > 1:
            self._compare_paths(name, beat, carried)
        if vital.merged:
            self._touch_carried(name)

    def _identity(self, beat: Heartbeat) -> InstanceKey:
        """Return under which name the engine is known.

        A driver names the node of a worker, the worker's own file does not.
        """
        key = self._aliases.get(beat.instance, beat.instance)
        if key in self._instances or key.pid is None:
            return key
        known = [
            other
            for other, tracked in self._instances.items()
            if (other.pid, other.tag) == (key.pid, key.tag)
            and "" in (other.host, key.host)
            and all(
                self._sources[name].vital.relayed != beat.relayed
                for name, beaten_at in tracked.carried.items()
                if beaten_at is not None
            )
        ]
        if len(known) != 1:
            return key
        self._aliases[key] = known[0]
        return known[0]

    def _introduce(self, beat: Heartbeat) -> None:
        """Begin to track who printed *beat*; what was known of its process becomes its own."""
        key = beat.instance
        for other, tracked in self._instances.items():
            if is_named_after(key, other):
                carried = {n: at for n, at in tracked.carried.items() if n != beat.source}
                self._instances[other] = replace(tracked, carried=carried)
        before = self._nameless(beat)
        self._create(key, beat.at, beat.profile)
        if before is None:
            return
        tracked = self._instances.pop(before)
        self._printers = None
        self._touched.discard(before)
        fresh = self._instances[key]
        self._instances[key] = replace(
            tracked,
            vitals=replace(tracked.vitals, instance=key),
            carried={**fresh.carried, **tracked.carried},
        )

    def _nameless(self, beat: Heartbeat) -> InstanceKey | None:
        """Return under which name the engine was known by its first lines, if by another one."""
        key = beat.instance
        for nameless in (InstanceKey(host=key.host, pid=key.pid), InstanceKey(host=key.host)):
            tracked = self._instances.get(nameless)
            if nameless == key or tracked is None or tracked.vitals.last is not None:
                continue
            if nameless.pid == key.pid or beat.source in tracked.carried:
                return nameless
        return None

    def _learn(self, tracked: Tracked, beat: Heartbeat) -> None:
        """Take in a silence that ended by itself, whatever it was taken for."""
        known = tracked.facts
        if known is None or known.progress_at is None or not known.log_speaks or known.excused:
            return
        gap = beat.at - known.clock
        if known.demand is Demand.NONE or gap < known.interval / 2 or not beat.tps:
            return
        before = self._calibrations.get(beat.profile, Calibration())
        self._calibrations[beat.profile] = calibration.observe(before, gap)

    def _record_stall(self, key: InstanceKey, tracked: Tracked, beat: Heartbeat) -> None:
        known = tracked.facts
        if known is None or known.progress_at is None or not known.log_speaks:
            return
        if known.demand is Demand.NONE or grouping.is_alarm(tracked.verdict):
            return
        if beat.at > known.quick_at:
            silence = beat.at - known.clock
            self.actions.append(RecordStall(instance=key, since=known.clock, seconds=silence))

    def _compare_paths(
        self, name: str, beat: Heartbeat, carried: Mapping[str, Instant | None]
    ) -> None:
        """Find streams that stand still although one of their engines beats here."""
        policy = self._state.policy
        interval = policy.heartbeat_interval or self._instances[beat.instance].vitals.interval
        for other, beaten_at in carried.items():
            source = self._sources.get(other)
            if source is None or other == name or beaten_at is None:
                continue
            vital = source.vital
            if source.stalled_since is not None or vital.retired_at is not None:
                continue
            shared = vital.relayed or source.other_at is not None
            last = vital.last_line_at
            if shared and last is not None and beat.at >= last + policy.missed_beats * interval:
                self._sources[other] = replace(source, stalled_since=last)
                self._report_source(other, None, log_stalled(other, last))

    def _report_source(self, name: str, before: Verdict | None, after: Verdict) -> None:
        """A log speaks for itself: its transition carries its name as the label."""
        self.actions.append(
            Report(
                transition=Transition(
                    instance=InstanceKey(tag=name), before=before, after=after, at=self._now
                )
            )
        )

    def _signal(self, signal: SignalSeen) -> None:
        keys = self._resolve_signal(signal)
        if len(keys) > 1 and signal.signal in _FOR_ONE:
            return
        parts = self._profile(signal.profile).parts
        for key in keys:
            self._update(key, vitals.signal(self._instances[key].vitals, signal, parts))

    def _resolve_signal(self, signal: SignalSeen) -> list[InstanceKey]:
        wanted = signal.instance
        printed = self._printed_by(wanted)
        same = [key for key in printed if signal.source in self._instances[key].carried]
        if same or (printed and wanted.pid is not None):
            return same or printed
        here = [k for k, t in self._instances.items() if signal.source in t.carried]
        if wanted.pid is None and here:
            return here
        if signal.signal in _INTRODUCING:
            self._create(wanted, signal.at, signal.profile)
            tracked = self._instances[wanted]
            self._instances[wanted] = replace(
                tracked, carried={**tracked.carried, signal.source: None}
            )
            self._source(signal.source)
            return [wanted]
        return []

    def _resolve(self, wanted: InstanceKey, at: Instant) -> list[InstanceKey]:
        """Return the instances that an observation from outside the log concerns."""
        if wanted in self._instances:
            return [wanted]
        if not wanted.tag and (printed := self._printed_by(wanted)):
            return printed
        self._create(wanted, at)
        return [wanted]

    def _printed_by(self, wanted: InstanceKey) -> list[InstanceKey]:
        """Return the instances whose beats the process of *wanted* prints."""
        if self._printers is None:
            self._printers = {}
            for key in self._instances:
                self._printers.setdefault((key.host, key.pid), []).append(key)
        return self._printers.get((wanted.host, wanted.pid), [])

    # --- judgements ---

    def conclude(self) -> None:
        """Judge who was touched, who was due, and whoever alarms while anything is seen."""
        now = self._now
        keys = [
            key
            for key, tracked in self._instances.items()
            if key in self._touched
            or (tracked.due is not None and tracked.due <= now)
            or (self._seen_anything and grouping.is_alarm(tracked.verdict))
        ]
        examined = {
            key: judge.examine(self._views.of(self._instances[key], now), self._state.policy, now)
            for key in keys
        }
        for key, result in examined.items():
            tracked = self._instances[key]
            self._instances[key] = replace(tracked, due=result.due, facts=result.facts)
        for key, result in examined.items():
            self._settle(key, self._in_company(key, result))
        if self.actions or self._idleness.since is not None:
            self._look_at_the_whole()
        self._forget()

    def _look_at_the_whole(self) -> None:
        """Notice that every engine is without work although a job lives, and that it is over."""
        before = self._idleness
        moments = [t.facts.progress_at for t in self._instances.values() if t.facts is not None]
        self._idleness = starvation.observe(
            before,
            [t.verdict for t in self._instances.values() if t.verdict is not None],
            progress_at=max((moment for moment in moments if moment is not None), default=None),
            now=self._now,
        )
        if before.told and not self._idleness.told:
            self._incidents.end_notices()
        due_at = starves_at(self._idleness, self._instances, self._state.policy)
        if due_at is not None and self._now >= due_at:
            self._idleness = replace(self._idleness, told=True)
            self._give_notice(due_at)

    def _give_notice(self, due_at: Instant) -> None:
        present = {
            key: tracked.verdict
            for key, tracked in self._instances.items()
            if isinstance(tracked.verdict, Idle)
        }
        since = self._idleness.since
        assert since is not None
        for key, verdict in present.items():
            self._settle(key, self._starved(verdict))
        self._incidents.give_notice(
            tuple(
                Member(
                    instance=key,
                    verdict=self._starved(verdict),
                    last_beat_at=last.at if (last := self._instances[key].vitals.last) else None,
                )
                for key, verdict in present.items()
            ),
            Idle(
                since=since,
                cause=starvation.STARVED,
                confidence=Confidence.MEDIUM,
                because=(
                    f"no engine has had work for {due_at - since:.0f} s: {len(present)} idle",
                    "the job that should bring some lives",
                ),
            ),
        )

    def _starved(self, verdict: Idle) -> Idle:
        told = "every engine is without work, while the job that should bring some lives"
        return replace(verdict, cause=starvation.STARVED, because=(*verdict.because, told))

    # Once every observation is folded in, these stand.

    @cached_property
    def _views(self) -> Views:
        return Views(self.state())

    @cached_property
    def _stopped(self) -> Mapping[InstanceKey, Instant]:
        """The last progress of everyone who has work and misses a beat, oldest first."""
        found = {
            key: facts.progress_at
            for key, tracked in self._instances.items()
            if (facts := tracked.facts) is not None
            and not isinstance(tracked.verdict, Gone)
            and facts.progress_at is not None
            and facts.missing_at is not None
            and self._now >= facts.missing_at
            and facts.demand is not Demand.NONE
            and not facts.excused
        }
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _in_company(self, key: InstanceKey, result: judge.Examined) -> Verdict:
        """Return the verdict; a stall, or an idleness, that all share is named after that."""
        verdict = result.verdict
        if self._idleness.told and isinstance(verdict, Idle) and verdict.cause == starvation.IDLE:
            return self._starved(verdict)
        if not grouping.is_alarm(verdict) or verdict.cause not in _COMMON:
            return verdict
        if (
            verdict.cause == witnesses.LOOP_BLOCKED
            and self._instances[key].vitals.stacks is not None
        ):
            return verdict  # the stacks say where each of them stands
        others = self._company(key, result.facts)
        if not others:
            return verdict
        return replace(
            verdict,
            cause=grouping.TOGETHER,
            because=(
                *verdict.because,
                f"{others + 1} of {len(self._instances)} instances stopped together",
            ),
        )

    def _company(self, key: InstanceKey, known: Facts) -> int:
        """Return how many others' progress stopped with this one's, although they have work."""
        if known.progress_at is None:
            return 0
        reach = self._state.policy.together * known.interval
        moments = list(self._stopped.values())
        first = bisect_left(moments, known.progress_at - reach)
        near = bisect_right(moments, known.progress_at + reach) - first
        return near - (key in self._stopped)

    def _settle(self, key: InstanceKey, after: Verdict) -> None:
        tracked = self._instances[key]
        before = tracked.verdict
        changed = before is None or type(before) is not type(after) or before.cause != after.cause
        if self._only_waits(key, before, after) or _is_retired(before, after):
            assert before is not None
            after, changed = before, False
        if before is not None and not changed:
            same = before.because == after.because and before.confidence is after.confidence
            after = before if same else replace(after, since=before.since)
        if after is not before:
            self._instances[key] = replace(tracked, verdict=after)
        if changed:
            self.actions.append(
                Report(
                    transition=Transition(instance=key, before=before, after=after, at=self._now)
                )
            )
        if grouping.is_alarm(after):
            if changed:
                self._alarm(key, after)
        else:
            self._incidents.calm(key, after, is_over=lambda m: self._is_over(key, m, after))

    def _only_waits(self, key: InstanceKey, before: Verdict | None, after: Verdict) -> bool:
        """Say whether nothing but a missing witness would take an alarm back."""
        known = self._instances[key].facts
        if before is None or known is None or not grouping.is_alarm(before):
            return False
        if not isinstance(after, Ok) or after.confidence is not Confidence.LOW:
            return False
        return known.progress_at is None or known.progress_at <= before.since

    def _alarm(self, key: InstanceKey, verdict: Verdict) -> None:
        value = self._instances[key].vitals
        policy = self._state.policy
        member = Member(
            instance=key,
            verdict=verdict,
            window=judge.stop_window(self._views.of(self._instances[key], self._now), policy),
            last_beat_at=value.last.at if value.last else None,
        )
        self._incidents.alarm(
            member,
            interval=policy.heartbeat_interval or value.interval,
            confirmed=any((value.health, value.counters, value.processes, value.stacks)),
            watched=lambda: sum(
                not isinstance(tracked.verdict, Gone) for tracked in self._instances.values()
            ),
        )

    def _is_over(self, key: InstanceKey, member: Member, verdict: Verdict) -> bool:
        """Say whether what a member of an incident suffered from has ended.

        Not because we lost sight of it, or have only begun to listen again.
        """
        if isinstance(verdict, Gone):
            return True
        if self._instances[key].vitals.armed_at is None or isinstance(verdict, Blind):
            return False
        if not isinstance(verdict, Ok):
            return True
        known = self._instances[key].facts
        stopped_at = member.window.earliest if member.window else member.verdict.since
        return (
            known is not None and known.progress_at is not None and known.progress_at > stopped_at
        )

    def _forget(self) -> None:
        """Let go of what can matter no more, so that weeks leave no trace."""
        ended = [lease for lease in self._leases.values() if lease.until <= self._now]
        for lease in sorted(ended, key=lambda lease: lease.until)[:-1]:
            del self._leases[lease.id]  # silence counts from the end of the last one
        long_ago = self._now - FORGET_AFTER
        for key, tracked in list(self._instances.items()):
            if isinstance(tracked.verdict, Gone) and tracked.verdict.since < long_ago:
                del self._instances[key]
                self._aliases = {a: known for a, known in self._aliases.items() if known != key}
        self._incidents.forget(self._instances.keys(), before=long_ago)
        self._forget_logs(long_ago)

    def _forget_logs(self, long_ago: float) -> None:
        """Forget logs that were retired, but for those that alone say that an instance is gone."""
        old = {
            name
            for name, source in self._sources.items()
            if source.vital.retired_at is not None and source.vital.retired_at < long_ago
        }
        if not old:
            return
        for key, tracked in list(self._instances.items()):
            rest = {name: at for name, at in tracked.carried.items() if name not in old}
            if not rest:
                old -= tracked.carried.keys()
            elif len(rest) < len(tracked.carried):
                self._instances[key] = replace(tracked, carried=rest)
        for name in old:
            del self._sources[name]


def _ok_again(at: Instant) -> Ok:
    return Ok(
        since=at,
        cause="not-a-hang:log-pipeline",
        confidence=Confidence.HIGH,
        because=("beats arrive on it again",),
    )


def _is_retired(before: Verdict | None, after: Verdict) -> bool:
    """Say whether the dead is one that was retired: it ended once, and for no work."""
    return isinstance(before, Gone) and isinstance(after, Dead)
