"""The daemon as a whole: names the real adapters and lets the loop turn.

```
watch = Watch(resolve({"log": ["server.log"]}), tell=print)
watch.run()      # until stop() is called, or SIGTERM, SIGINT or SIGHUP arrives
```

``tell`` is called in the loop's thread with one mapping an event, plain enough for JSON:
``schema``, ``event`` and ``at`` (RFC 3339) in each, and by event

- ``watching``: ``logs``, ``ray`` (what is followed so far);
- ``kin``: ``pid``, ``servers``, ``logs``, ``processes`` (answer for a pid that was named);
- ``transition``: ``instance``, ``tag``, ``pid``, ``before``, ``after``, ``cause``,
  ``confidence``, ``since``, ``because``;
- ``incident`` when it begins, ``joined`` whenever it changed while it is captured: ``incident``,
  ``verdict``, ``cause``, ``instances``, ``watched``, ``window``;
- ``capture``: ``incident``, ``part``, ``done``, ``failed``, ``total``, ``elapsed_s``;
- ``bundle``: ``incident``, ``bundle`` (path), ``verdict``, ``cause``, ``summary``;
- ``capture_failed``: ``incident``, ``error``, ``hint``;
- ``withheld`` instead of these three with ``observe_only``: ``incident``, ``verdict``, ``cause``,
  ``confidence``, ``since``, ``because``, ``instances`` (each ``instance``, ``pid``, ``verdict``,
  ``cause``), ``watched``, ``window``, ``notice``, ``processes`` (pids known to belong to them);
- ``lease_taken``, ``lease_returned``, ``lease_ended``: ``lease`` (its id), ``until``, ``reason``,
  ``holder``; a taken one has ``seconds`` and ``capped``, too;
- ``listening``: ``url`` of our own endpoint;
- ``aftermath``: ``incident``, ``bundle``, ``aftermath`` (path), ``outcome``, ``sentence``: what
  became of it;
- ``closed``: ``incident``, ``verdict``; ``stall``: ``instance``, ``since``, ``seconds``;
- ``stopping``; ``recording`` when a bundle of the run is written then: ``seconds`` (at most);
  its ``bundle`` has ``run`` for its ``incident``.
"""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hangwatch import registry
from hangwatch.capture.rooms import sweep
from hangwatch.core import aftermath, blackbox, fleet, layout
from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.core.facts import Demand
from hangwatch.daemon.baseline import Baseline, is_open
from hangwatch.daemon.blackbox import BlackBox
from hangwatch.daemon.errand import Errand
from hangwatch.daemon.followers import Followers
from hangwatch.daemon.gpuprobes import GpuProbes
from hangwatch.daemon.history import History
from hangwatch.daemon.leases import Leases
from hangwatch.daemon.loop import Ears, Loop, Part
from hangwatch.daemon.probes import Probes
from hangwatch.daemon.responder import Responder
from hangwatch.daemon.roster import Roster
from hangwatch.daemon.search import Search
from hangwatch.daemon.settings import Resolved
from hangwatch.daemon.shadow import Shadow
from hangwatch.daemon.state import StateDirectory, ensure_key
from hangwatch.errors import OutputError, TargetNotFoundError
from hangwatch.model.capture import (
    AfterBundle,
    CapturedInstance,
    CaptureKind,
    CaptureRequest,
    Means,
    Touch,
)
from hangwatch.model.discovery import Kin, RaySession
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Aftermath, Incident, IncidentState, Transition
from hangwatch.model.lease import Lease
from hangwatch.model.observation import (
    Action,
    AftermathEnded,
    BeatSeen,
    CloseIncident,
    Observation,
    RecordStall,
    Report,
    SourceRetired,
    StartCapture,
    TakeAftermath,
    UpdateCapture,
)
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import ALARMS, Dead, Gone, Idle, Paused, StopWindow
from hangwatch.system import audit, leasing
from hangwatch.system.attaching import Note
from hangwatch.system.clock import SystemClock
from hangwatch.system.keys import KeyFile, StalledError
from hangwatch.system.logs import log
from hangwatch.system.notify import Notifier

if TYPE_CHECKING:
    from hangwatch.daemon.metrics import Metrics
    from hangwatch.system.endpoint import Endpoint

SCHEMA: Final = "hangwatch.watch/1"

SAVE_EVERY: Final = 10.0
"""Seconds between two writes of what must survive us."""

PUBLISH_EVERY: Final = 0.5
"""Seconds between two snapshots of our metrics."""

MIN_RECORD: Final = 5.0
"""Seconds of the grace period below which no bundle of the run is begun."""

MAX_TOLD_BEATS: Final = 6000
"""Beats that a capture is told of: 3 MB of a message."""

Tell = Callable[[Mapping[str, Any]], None]


class Watch:
    """One run of the daemon.

    Attributes:
        loop: The loop, once ``run`` was called.
    """

    def __init__(
        self,
        resolved: Resolved,
        *,
        pids: Sequence[int] = (),
        streams: Mapping[str, str] | None = None,
        tell: Tell = lambda _: None,
        clock: SystemClock | None = None,
    ) -> None:
        """Check what can be checked before anything starts.

        Args:
            resolved: The settings, with their origins.
            pids: Processes whose engines are watched besides the logs named in the settings.
            streams: Pipes to read as logs, by name; see ``FollowRequest``.
            tell: Called with each event, see the module; must not block.
            clock: The time.

        Raises:
            ConfigError: There is no such profile, or the API keys cannot be read.
        """
        if problem := check_keys(resolved.settings.api_key_file):
            log.warning("hangwatch.api_keys_checked", problem=problem)
        self.loop: Loop | None = None
        self._resolved = resolved
        self._settings = resolved.settings
        self._policy = self._settings.policy()
        self._profiles = registry.chosen(self._settings.profile, self._settings.defined())
        self._pids = tuple(pids)
        self._streams = dict(streams or {})
        self._streams_left = set(self._streams)
        self._patterns = tuple(p for p in self._settings.log if p != "-")
        self._looks_for_ray = not (self._settings.log or self._pids or self._streams)
        self._tell = tell
        self._clock = clock or SystemClock()
        self._stopping_since: Instant | None = None
        self._roster = Roster()
        self._history = History()
        self._told: dict[str, dict[str, Any]] = {}
        self._lost: str = ""
        self._save_soon = False
        self._withheld = 0
        self._looks: dict[str, TakeAftermath] = {}
        self._record_asked = False
        self._bundled_at = Instant(float("-inf"))
        self._metrics: Metrics | None = None

    @property
    def _ending(self) -> bool:
        return self._stopping_since is not None

    @property
    def children(self) -> tuple[int, ...]:
        """The children that look outside, for whoever measures them."""
        return (
            *self._followers.pids,
            *self._probes.pids,
            *self._gpus.pids,
            *self._black_box.pids,
            *self._search.pids,
            *self._leases.pids,
        )

    def stop(self) -> None:
        """End soon: a running capture may finish within the grace period. Any thread may call."""
        if self._stopping_since is None:
            self._stopping_since = self._clock.now()

    def run(self) -> None:
        """Watch until told to stop.

        Raises:
            ConfigError: The state directory cannot be used.
            StateLockedError: Another daemon uses it.
            OutputError: Bundles cannot be written where they should go.
            TargetNotFoundError: A named process cannot be watched.
        """
        check_output(self._settings.output)
        sweep(self._settings.output, self._continued)
        with ExitStack() as stack:
            state = stack.enter_context(StateDirectory(self._settings.state))
            notifier = Notifier.from_environment()
            stack.callback(notifier.close)
            self._state = state
            with suppress(OSError):  # a bundle without it has pseudonyms of its own
                ensure_key(self._settings.state)
            self._build(state)
            if self._settings.listen:
                stack.callback(self._listen(self._settings.listen).close)
            for part in self._parts:
                stack.callback(part.close)
            stack.enter_context(self._signals())
            self._begin()
            notifier.ready()
            self._turn(notifier)
            notifier.stopping()
            self._save()
            if self._settings.observe_only:
                log.info(
                    "hangwatch.observation_ended",
                    captures_withheld=self._withheld,
                    record=str(state.path / "shadow.jsonl"),
                )
        if self._lost:
            raise TargetNotFoundError(self._lost)

    def _continued(self, note: Note) -> None:
        """A capture that died had left a process stopped."""
        audit.touched(
            Touch(at=self._clock.now(), process=note.process, step=note.step, means=Means.SIGCONT)
        )

    # Building

    def _build(self, state: StateDirectory) -> None:
        epoch = self._clock.epoch()
        known = fleet.begin(
            self._policy,
            self._profiles,
            epoch,
            self._clock.now(),
            memory=recall(
                state,
                epoch,
                output=self._settings.output,
                observe_only=self._settings.observe_only,
            ),
        )
        common: dict[str, Any] = {
            "clock": self._clock,
            "policy": self._policy,
            "profiles": self._profiles,
        }
        self._followers = Followers(
            **common, offsets=state.load("offsets"), zone=lambda: self._clock.wall().tzinfo
        )
        self._probes = Probes(
            **common, roster=self._roster, key_file=str(self._settings.api_key_file or "")
        )
        self._gpus = GpuProbes(clock=self._clock, roster=self._roster)
        self._black_box = BlackBox(
            clock=self._clock, roster=self._roster, ring=state.path / blackbox.RING
        )
        self._search = Search(**common, roster=self._roster, found=self._take_in)
        self._responder = self._make_responder()
        self._aftermaths = Responder(
            clock=self._clock,
            request=self._request_of_look,
            tell=self._looked,
            most=1,
            ended=lambda ended: AftermathEnded(incident=ended.incident, at=ended.at),
        )
        self._baseline = Baseline(
            clock=self._clock,
            interval=0.0 if self._settings.observe_only else self._settings.baseline_interval,
            most=self._settings.baseline_load,
            request=self._baseline_request,
        )
        self._record = Errand("record of the run", clock=self._clock, tell=self._recorded)
        self._leases = Leases(
            clock=self._clock,
            policy=self._policy,
            socket=state.path / leasing.SOCKET,
            file=self._settings.lease_file,
            known=known.leases.values(),
            tell=self._leased,
        )
        self._parts: tuple[Part, ...] = (
            self._followers,
            self._probes,
            self._gpus,
            self._black_box,
            self._search,
            self._leases,
            self._responder,
            self._aftermaths,
            self._baseline,
            self._record,
        )
        self._ears = Ears(
            self._parts,
            clock=self._clock,
            pace=self._policy.poll_interval,
            urgent=lambda: self._responder.busy or self._record.running or bool(self._search.pids),
        )
        self.loop = Loop(
            known,
            clock=self._clock,
            policy=self._policy,
            senses=self,
            act=self._act,
            settled=self._settled,
        )

    def _make_responder(self) -> Responder | Shadow:
        if self._settings.observe_only:
            gap = self._policy.sample_gap
            return Shadow(clock=self._clock, stage_a=gap, withhold=self._withhold)
        return Responder(clock=self._clock, request=self._request, tell=self._captured)

    def _listen(self, address: str) -> Endpoint:
        """Let our own metrics be asked for."""
        from hangwatch.daemon.metrics import Metrics  # 10 MB that only this needs
        from hangwatch.system.endpoint import Endpoint

        self._metrics = Metrics(self._clock)
        endpoint = Endpoint(address, self._metrics.routes())
        endpoint.start()
        log.info("hangwatch.listening", url=endpoint.url)
        self._say("listening", url=endpoint.url)
        return endpoint

    def _publish(self, metrics: Metrics) -> None:
        assert self.loop is not None
        metrics.publish(
            self.loop.state,
            children_lost=sum(part.losses for part in self._parts),
            loop_pauses=self.loop.pauses,
            leases=len(self._leases.held),
        )

    def _begin(self) -> None:
        self._saved_at = self._told_alive_at = self._published_at = self._clock.now()
        patterns = self._patterns
        self._followers.follow(patterns, self._streams)
        for pid in self._pids:
            self._search.kin(pid)
        if self._looks_for_ray:
            self._search.sessions()
        log.info(
            "hangwatch.watching",
            logs=(*self._streams, *patterns),
            ray=self._looks_for_ray,
            output=str(self._settings.output),
            settings={k: self._resolved.origins[k] for k in self._resolved.changed_from_default},
        )
        self._say("watching", logs=patterns, ray=self._looks_for_ray)

    # Turning

    def listen(self, timeout: float) -> tuple[Observation, ...]:
        """Return what the children saw; called by the loop."""
        observations = self._ears.listen(timeout)
        self._history.note(observations)
        for seen in observations:
            if isinstance(seen, BeatSeen):
                self._roster.see(seen.beat, fresh=seen.fresh)
            elif isinstance(seen, SourceRetired) and seen.source in self._streams:
                self._streams_left.discard(seen.source)
                if not self._streams_left and not self._patterns and not self._pids:
                    log.info("hangwatch.input_ended", log=seen.source)
                    self.stop()
        return observations

    def _turn(self, notifier: Notifier) -> None:
        assert self.loop is not None
        alive_every = (notifier.watchdog_interval or 60.0) / 3
        while not self._ended():
            self.loop.turn()
            now = self._clock.now()
            if self._metrics is not None and now - self._published_at >= PUBLISH_EVERY:
                self._published_at = now
                self._publish(self._metrics)
            if now - self._told_alive_at >= alive_every:
                self._told_alive_at = now
                notifier.alive()
                notifier.status(f"watching {len(self._followers.sources)} logs")
            if self._save_soon or now - self._saved_at >= SAVE_EVERY:
                self._save()

    def _ended(self) -> bool:
        if self._lost:
            return True
        if self._stopping_since is None:
            return False
        if self._clock.now() - self._stopping_since > self._settings.grace:
            return True
        if not self._responder.stopping:
            log.info("hangwatch.stopping", capture_running=self._responder.busy)
            self._say("stopping")
            self._responder.stop()
            self._aftermaths.stop()
        if self._responder.busy or self._aftermaths.busy:
            return False
        if not self._record_asked:
            self._record_asked = True
            self._ask_for_record()
        return not self._record.running

    def _ask_for_record(self) -> None:
        """Have a bundle of the run written, where one is wanted and there is time for it."""
        assert self.loop is not None
        assert self._stopping_since is not None
        now, state = self._clock.now(), self.loop.state
        left = self._stopping_since + self._settings.grace - now
        if (
            not self._settings.run_bundle
            or self._settings.observe_only
            or not state.instances
            or left < MIN_RECORD
            or any(is_open(incident) for incident in state.incidents)
            or now - self._bundled_at < self._settings.cool_down
        ):
            return
        # Half of the time is for the evidence, the rest for what becomes of it.
        deadline = left / 2
        gap = min(self._policy.sample_gap, deadline / 3)
        request = replace(
            self._general_request(self._roster.processes()),
            id=f"run-{self._clock.wall():%Y%m%dT%H%M%S}",
            policy=replace(self._policy, sample_gap=gap),
            deadline=deadline,
        )
        if self._record.begin(request):
            log.info("hangwatch.record_begun", seconds=round(left, 1))
            self._say("recording", seconds=round(left, 1))

    def _recorded(self, said: Mapping[str, Any]) -> None:
        if said.get("kind") == "bundle":
            self._bundle_written("run", said)
        else:
            log.error("hangwatch.record_failed", error=str(said.get("error", "")))

    def _settled(self, state: fleet.State) -> None:
        now = self._clock.now()
        closer = {key for key, of in state.instances.items() if deserves_a_closer_look(of, now)}
        self._probes.look_closer(closer)
        self._gpus.look_closer(closer)
        if self._responder.busy:
            unsettled = {x.id for x in state.incidents if may_grow(x, state, now)}
            self._responder.answer(state.incidents, unsettled=unsettled)
        busy = self._responder.busy or self._aftermaths.busy or self._ending
        self._baseline.consider(state, capturing=busy)

    def _save(self) -> None:
        assert self.loop is not None
        self._saved_at, self._save_soon = self._clock.now(), False
        memory = fleet.remember(self.loop.state)
        try:
            self._state.save("offsets", self._followers.offsets)
            self._state.save(
                "memory",
                {
                    "epoch": to_plain(self._clock.epoch()),
                    "observed_only": self._settings.observe_only,
                    "memory": to_plain(memory),
                },
            )
        except OSError as error:
            log.error("hangwatch.state_not_saved", error=str(error))

    # Acting

    def _act(self, action: Action) -> None:
        match action:
            case Report(transition=transition):
                self._history.turn(transition)
                if self._metrics is not None:
                    self._metrics.changed(transition.after)
                self._report(transition)
            case StartCapture(incident=incident):
                self._announce(incident)
                if self._metrics is not None:
                    self._metrics.began(incident)
                self._responder.begin(incident)
                self._save_soon = True
            case UpdateCapture(incident=incident):
                self._responder.update(incident)
                facts = self._facts(incident)
                if facts != self._told.get(incident.id):
                    self._told[incident.id] = facts
                    self._say("joined", **facts)
            case TakeAftermath(incident=incident):
                self._looks[incident.id] = action
                self._aftermaths.begin(incident)
            case CloseIncident(incident=incident):
                self._told.pop(incident.id, None)
                log.info(
                    "hangwatch.incident_closed",
                    incident=incident.id,
                    verdict=incident.verdict.word,
                )
                self._say("closed", incident=incident.id, verdict=incident.verdict.word)
            case RecordStall(instance=instance, since=since, seconds=seconds):
                log.info("hangwatch.stall_ended", instance=instance.name, seconds=seconds)
                self._say("stall", instance=instance.name, since=self._wall(since), seconds=seconds)

    def _report(self, transition: Transition) -> None:
        after = transition.after
        before = transition.before.word if transition.before is not None else None
        facts = {
            "instance": transition.instance.name,
            "tag": transition.instance.tag,
            "pid": self._roster.pid_of(transition.instance) or transition.instance.pid,
            "before": before,
            "after": after.word,
            "cause": after.cause,
            "confidence": after.confidence.value,
            "since": self._wall(after.since),
            "because": list(after.because),
        }
        write = log.warning if isinstance(after, ALARMS) else log.info
        write("hangwatch.verdict_changed", **facts)
        self._say("transition", **facts)
        if isinstance(after, Gone):
            self._roster.drop(transition.instance)

    def _announce(self, incident: Incident) -> None:
        facts = self._told[incident.id] = self._facts(incident)
        log.warning("hangwatch.incident_began", **facts)
        self._say("incident", **facts)

    def _facts(self, incident: Incident) -> dict[str, Any]:
        return {
            "incident": incident.id,
            "verdict": incident.verdict.word,
            "cause": incident.verdict.cause,
            "instances": [member.instance.name for member in incident.members],
            "watched": incident.watched,
            "window": self._window(incident.window),
        }

    def _count(self, result: str) -> None:
        if self._metrics is not None:
            self._metrics.captured(result)

    def _captured(self, kind: str, incident: str, facts: Mapping[str, Any]) -> None:
        match kind:
            case "progress":
                self._say(
                    "capture",
                    incident=incident,
                    part=facts.get("part", ""),
                    done=facts.get("done", 0),
                    failed=facts.get("failed", 0),
                    total=facts.get("total", 0),
                    elapsed_s=facts.get("elapsed", 0.0),
                )
            case "started":
                log.info("hangwatch.capture_started", incident=incident, **facts)
            case "bundle":
                self._count("written")
                self._bundle_written(incident, facts)
            case _:
                told = {"error": facts.get("error", ""), "hint": facts.get("hint", "")}
                log.error("hangwatch.capture_failed", incident=incident, **told)
                self._count("failed")
                self._say("capture_failed", incident=incident, **told)

    def _looked(self, kind: str, incident: str, facts: Mapping[str, Any]) -> None:
        """Tell what a look after a bundle brought."""
        look = self._looks[incident]
        match kind:
            case "aftermath":
                told = {
                    "incident": incident,
                    "bundle": look.bundle,
                    "aftermath": facts["path"],
                    "outcome": facts.get("outcome", ""),
                    "sentence": facts.get("sentence", ""),
                }
                log.info("hangwatch.aftermath_written", **told)
                self._save_soon = True
                self._say("aftermath", **told)
            case "failed":
                log.warning(
                    "hangwatch.aftermath_failed",
                    incident=incident,
                    bundle=look.bundle,
                    error=facts.get("error", ""),
                )
                self._save_soon = True
            case _:
                pass

    def _bundle_written(self, incident: str, facts: Mapping[str, Any]) -> None:
        told = {
            "incident": incident,
            "bundle": facts["path"],
            "verdict": facts.get("verdict", ""),
            "cause": facts.get("cause", ""),
        }
        tell = log.info if incident == "run" else log.warning
        tell("hangwatch.bundle_written", **told)
        self._bundled_at = self._clock.now()
        self._save_soon = True
        try:
            self._state.add_bundle({**told, "at": self._wall(self._bundled_at)})
        except OSError as error:
            log.error("hangwatch.state_not_saved", error=str(error))
        self._say("bundle", **told, summary=facts.get("summary", {}))

    def _withhold(self, incident: Incident) -> None:
        """Write down what would have been captured."""
        self._count("withheld")
        self._withheld += 1
        request = self._request(incident)
        stopped = {i.pid for i in request.instances if i.stopped and i.pid is not None}
        verdict = incident.verdict
        facts = {
            **self._facts(incident),
            "confidence": verdict.confidence.value,
            "since": self._wall(verdict.since),
            "because": list(verdict.because),
            "instances": [
                {
                    "instance": member.instance.name,
                    "pid": self._roster.pid_of(member.instance) or member.instance.pid,
                    "verdict": member.verdict.word,
                    "cause": member.verdict.cause,
                }
                for member in incident.members
            ],
            "notice": incident.notice,
            "processes": sorted(stopped.union(request.seeds)),
        }
        log.warning(
            "hangwatch.capture_withheld",
            incident=incident.id,
            verdict=verdict.word,
            cause=verdict.cause,
            instances=[member.instance.name for member in incident.members],
        )
        event = self._say("withheld", **facts)
        self._save_soon = True
        try:
            self._state.add_withheld(event)
        except OSError as error:
            log.error("hangwatch.state_not_saved", error=str(error))

    def _leased(self, what: str, lease: Lease, **facts: Any) -> None:
        facts = {
            "lease": lease.id,
            "until": self._wall(lease.until),
            "reason": lease.reason,
            "holder": lease.holder,
            **facts,
        }
        log.info(f"hangwatch.lease_{what}", **facts)
        self._say(f"lease_{what}", **facts)
        self._save_soon = True

    def _request(self, incident: Incident) -> CaptureRequest:
        members = tuple(member.instance for member in incident.members)
        others = tuple(k for k in self._roster.processes() if k not in members)
        return replace(
            self._general_request((*members, *others), stopped=members),
            id=incident.id,
            kind=CaptureKind.NOTICE if incident.notice else CaptureKind.INCIDENT,
            incident=incident,
            verdict=incident.verdict.word,
            seeds=tuple(dict.fromkeys((*self._roster.kin_of(members), *self._pids))),
            collect=self._settings.collect,
        )

    def _baseline_request(self) -> CaptureRequest:
        """Return the order for a look at what is well."""
        instances = tuple(self._roster.processes())
        return replace(
            self._general_request(instances),
            id="baseline",
            kind=CaptureKind.BASELINE,
            # It leaves no bundle: it works where the ring lies.
            output=str(self._settings.state),
            beats=(),
            transitions=(),
            settings={},
        )

    def _general_request(
        self, instances: Iterable[InstanceKey], stopped: Collection[InstanceKey] = ()
    ) -> CaptureRequest:
        """Return an order for a capture, with all that is known by now."""
        assert self.loop is not None
        instances = tuple(instances)
        retired = self._retired()
        verdicts = self.loop.state.verdicts
        logs, beats = self._followers.sources, self._history.beats
        return CaptureRequest(
            id="",
            kind=CaptureKind.RUN,
            output=str(self._settings.output),
            profile=self._profile_of(instances),
            profiles=tuple(self._profiles.values()),
            policy=self._policy,
            epoch=self._clock.epoch(),
            instances=tuple(
                CapturedInstance(
                    instance=key,
                    pid=self._roster.pid_of(key),
                    stopped=key in stopped,
                    url=self._roster.url_of(key),
                    profile=self._roster.profile_of(key),
                    verdict=verdicts[key].word if key in verdicts else "",
                )
                for key in instances
            ),
            seeds=tuple(dict.fromkeys((*self._roster.kin_of(instances), *self._pids))),
            logs=tuple(log for log in logs if self._followers.pid_of(log) not in retired.values()),
            beats=tuple(b for b in beats if b.instance not in retired)[-MAX_TOLD_BEATS:],
            transitions=self._history.transitions,
            settings=self._resolved.as_rows(),
            options=self._settings.collectors,
            state=str(self._settings.state),
            api_key_file=str(self._settings.api_key_file or ""),
        )

    def _request_of_look(self, incident: Incident) -> CaptureRequest:
        look = self._looks[incident.id]
        return replace(
            self._request(incident),
            kind=CaptureKind.AFTERMATH,
            output=str(Path(look.bundle).parent),
            collect=(),
            after=AfterBundle(
                bundle=look.bundle,
                number=look.number,
                captured_at=look.captured_at,
                last=look.last,
            ),
        )

    def _profile_of(self, instances: Iterable[InstanceKey]) -> str:
        """Return the profile of the first of *instances* whose engine is known."""
        known = (self._roster.profile_of(instance) for instance in instances)
        return next(filter(None, known), "") or next(iter(self._profiles))

    def _retired(self) -> Mapping[InstanceKey, int]:
        """Return the instances that are gone, with their pids; a bundle is not about them."""
        assert self.loop is not None
        tracked = self.loop.state.instances
        alive = {key.pid for key, of in tracked.items() if not isinstance(of.verdict, Gone)}
        return {
            key: key.pid or 0
            for key, of in tracked.items()
            if isinstance(of.verdict, Gone) and key.pid not in alive
        }

    # Finding

    def _take_in(self, found: RaySession | Kin) -> None:
        match found:
            case RaySession():
                log.info(
                    "hangwatch.ray_session_found",
                    folder=found.folder,
                    raylet=found.raylet,
                    reachable=found.reachable,
                )
                # A Ray that has just begun has no worker yet.
                self._followers.follow(found.logs, expected=False)
                self._say("watching", logs=found.logs, ray=True)
            case Kin(problem=problem) if problem:
                self._lost = problem
            case Kin():
                for server in found.servers:
                    self._roster.attach(server, found.profile)
                for owner in found.logs:
                    if owner.pid is not None:
                        self._followers.writers[owner.log] = owner.pid
                logs = tuple(owner.log for owner in found.logs)
                self._followers.follow(logs)
                if not logs:
                    log.warning("hangwatch.no_log_found", pid=found.pid)
                self._say(
                    "kin",
                    pid=found.pid,
                    servers=found.servers,
                    logs=logs,
                    processes=[
                        {
                            "pid": target.process.pid,
                            "role": target.role.value,
                            "comm": target.comm,
                            "why": target.why,
                            "addresses": [listener.url for listener in target.listeners],
                        }
                        for target in found.targets
                    ],
                )

    # Small things

    def _wall(self, instant: Instant) -> str:
        return self._clock.epoch().wall_of(instant).isoformat(timespec="milliseconds")

    def _window(self, window: StopWindow | None) -> list[str] | None:
        if window is None:
            return None
        return [self._wall(window.earliest), self._wall(window.latest)]

    def _say(self, event: str, **facts: Any) -> Mapping[str, Any]:
        at = self._clock.wall().isoformat(timespec="milliseconds")
        said = {"schema": SCHEMA, "event": event, "at": at, **facts}
        self._tell(said)
        return said

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals stop us, where we are the main thread; leave ignored ones ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._stopping_since is not None and number == signal.SIGINT:
            # The second Ctrl-C means: at once.
            self._stopping_since = Instant(float("-inf"))
        self.stop()


def deserves_a_closer_look(tracked: fleet.Tracked, now: Instant) -> bool:
    """Say whether a beat of an instance is missing that may have work."""
    known = tracked.facts
    return (
        known is not None
        and not isinstance(tracked.verdict, (Gone, Dead))
        and known.missing_at is not None
        and now >= known.missing_at
        and known.demand is not Demand.NONE
        and not known.excused
    )


def may_grow(incident: Incident, state: fleet.State, now: Instant) -> bool:
    """Say whether an instance misses a beat that is not a member yet.

    Beats of instances that stop together are spread over an interval, and so are their alarms.
    """
    members = {member.instance for member in incident.members}
    return any(
        not isinstance(tracked.verdict, (Gone, Idle, Paused, *ALARMS))
        and tracked.facts is not None
        and tracked.facts.missing_at is not None
        and now >= tracked.facts.missing_at
        for key, tracked in state.instances.items()
        if key not in members
    )


def recall(
    state: StateDirectory, epoch: Epoch, *, output: Path, observe_only: bool
) -> fleet.Memory | None:
    """Return what an earlier daemon of this boot remembered, or ``None``.

    A bundle may lie there of which it never heard, because it was killed in that moment: that
    incident is captured. What an observer withheld is not.
    """
    saved = state.load("memory")
    try:
        then: Epoch = from_plain(Epoch, saved.get("epoch"))
        memory: fleet.Memory = from_plain(fleet.Memory, saved.get("memory"))
    except CodecError:
        return None
    if then.boot_id != epoch.boot_id:
        return None  # instants of another boot mean nothing here
    withheld = bool(saved.get("observed_only")) and not observe_only
    incidents = tuple(
        _recalled(incident, output=output, boot_id=epoch.boot_id, withheld=withheld)
        for incident in memory.incidents
    )
    return replace(
        memory,
        incidents=incidents,
        cooling=() if withheld else memory.cooling,
        aftermaths=() if observe_only else tuple(_recalled_looks(memory.aftermaths, epoch.at)),
    )


def _recalled_looks(pending: Iterable[Aftermath], now: Instant) -> Iterator[Aftermath]:
    """Yield what is to be looked at again; the look that we died in may be on disk."""
    for each in pending:
        bundle = Path(each.bundle)
        name = layout.aftermath_name(bundle.name, each.taken + 1)
        there = each.running and bundle.with_name(name).exists()
        left = aftermath.looked(each, now) if there else each
        if left is not None:
            yield left


def _recalled(incident: Incident, *, output: Path, boot_id: str, withheld: bool) -> Incident:
    match incident.state:
        case IncidentState.CAPTURING:
            number = layout.bundle_number(boot_id, incident.id)
            for bundle in output.glob(f"hangwatch-*-{number}*{layout.SUFFIX}"):
                if not layout.is_bundle_name(bundle.name):
                    continue
                return replace(incident, state=IncidentState.CAPTURED, bundle=str(bundle))
        case IncidentState.CAPTURED if withheld and not incident.bundle:
            return replace(incident, state=IncidentState.OPEN)
        case _:
            pass
    return incident


def check_output(folder: Path) -> None:
    """Make sure that bundles can be written to *folder*, which is made if need be.

    Raises:
        OutputError: They cannot.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".hangwatch-") as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room there" if full else "make it writable"
        raise OutputError(
            f"cannot write bundles to {folder}: {error.strerror}; "
            f"{remedy}, or give another folder with --output"
        ) from error


def check_keys(file: Path | None) -> str:
    """Make sure that the API keys can be read, where there is a file; say who else can read them.

    A volume that has stalled is told, and no reason to watch nothing: they are read again later.

    Raises:
        ConfigError: They cannot.
    """
    if file is None:
        return ""
    keys = KeyFile(file)
    try:
        keys.read()
        return keys.exposed()
    except StalledError as error:
        return str(error)
