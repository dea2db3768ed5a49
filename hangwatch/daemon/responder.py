"""Answers an incident with a capture, in a conductor of its own.

The daemon never waits for a capture: it asks a conductor for one, hears how it goes, judges again
when stage A is in, and learns where the bundle lies. A conductor that dies is replaced and begins
again, ``ATTEMPTS`` times in all; one that reports a failure is not, because it would fail again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.daemon.children import Launch, Running, Wire, launch, unlistened
from hangwatch.model.capture import CaptureRequest, Touch
from hangwatch.model.incident import Incident
from hangwatch.model.observation import CaptureEnded, Observation, ProcessesSeen, StacksSeen
from hangwatch.model.time import Clock, Instant
from hangwatch.system import audit
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.logs import log
from hangwatch.system.spawn import message_kind

CONDUCTOR: Final = "hangwatch.capture.conductor"

ATTEMPTS: Final = 3

MAX_RUNNING: Final = 2
"""Captures at a time; the tools of a third would only slow all three."""

PATIENCE: Final = 30.0
"""Seconds of a conductor's silence, and beyond its deadline, until it counts as lost."""


SETTLING: Final = 8.0
"""Seconds that an answer may wait; less than a conductor waits for it."""


class Listener(Protocol):
    """Whom the responder tells how captures go."""

    def __call__(self, kind: str, incident: str, facts: Mapping[str, Any]) -> None:
        """Take note: ``started``, ``progress``, ``bundle``, ``aftermath`` or ``failed``."""


@dataclass(slots=True)
class _Capture:
    incident: Incident
    attempts: int = 0
    child: Running | None = None
    begin_at: Instant = field(default=Instant(0.0))
    started_at: Instant = field(default=Instant(0.0))
    heard_at: Instant = field(default=Instant(0.0))
    deadline: float = 0.0
    asked_at: Instant | None = None


class Responder:
    """Runs the captures of incidents, one conductor each; one of the loop's parts.

    Attributes:
        stopping: Whether ``stop`` was called.
        losses: How often a conductor was lost.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        request: Callable[[Incident], CaptureRequest],
        tell: Listener,
        most: int = MAX_RUNNING,
        ended: Callable[[CaptureEnded], Observation] = lambda ended: ended,
        start: Launch = launch,
    ) -> None:
        """Have nothing to do yet.

        Args:
            clock: Ours.
            request: Makes the order for an incident, with all that is known by then.
            tell: Told how captures go.
            most: How many run at a time.
            ended: Makes what the loop is told when one has ended.
            start: Starts a conductor.
        """
        self._clock = clock
        self._request = request
        self._tell = tell
        self._most = most
        self._as_told = ended
        self._start = start
        self._captures: dict[str, _Capture] = {}
        self._looked_at = clock.now()
        self._ended: list[Observation] = []
        self.stopping = False
        self.losses = 0

    @property
    def busy(self) -> bool:
        """Whether a capture runs or waits."""
        return bool(self._captures)

    def begin(self, incident: Incident) -> None:
        """Capture *incident*, unless its capture is under way; starts with the next ``hear``."""
        if incident.id not in self._captures:
            self._captures[incident.id] = _Capture(incident, begin_at=self._clock.now())

    def update(self, incident: Incident) -> None:
        """Take note that *incident* changed; a replaced conductor is asked with this."""
        if incident.id in self._captures:
            self._captures[incident.id].incident = incident

    def answer(self, incidents: Iterable[Incident], *, unsettled: Collection[str] = ()) -> None:
        """Tell conductors that asked what became of their incident.

        Args:
            incidents: As they stand.
            unsettled: Ids of those that others may still join. Their conductors are answered as
                soon as that is over, ``SETTLING`` seconds later at most.
        """
        now = self._clock.now()
        for incident in incidents:
            capture = self._captures.get(incident.id)
            if capture is None or capture.asked_at is None:
                continue
            capture.incident = incident
            if incident.id in unsettled and now - capture.asked_at < SETTLING:
                continue
            capture.asked_at = None
            request = to_plain(self._request(incident))
            word = incident.verdict.word
            self._say(capture, {"kind": "verdict", "word": word, "request": request})

    def stop(self) -> None:
        """Have every running capture finish with what there is; begin no other."""
        if self.stopping:
            return
        self.stopping = True
        for capture in tuple(self._captures.values()):
            if capture.child is None:
                self._end(capture, error="stopped before its capture began")
            else:
                self._say(capture, {"kind": "stop"})

    def close(self) -> None:
        """End the conductors that still run; what they have not bundled is lost."""
        for capture in self._captures.values():
            if capture.child is not None:
                capture.child.close(0.0)
        self._captures.clear()

    def wires(self) -> Iterable[Wire]:
        """Return the channels of the conductors."""
        return [c.child.channel for c in self._captures.values() if c.child is not None]

    def hear(self) -> tuple[Observation, ...]:
        """Return what conductors reported; start and replace them."""
        now = self._clock.now()
        unheard = unlistened(now, self._looked_at, PATIENCE)
        self._looked_at = now
        observations = list[Observation]()
        for capture in tuple(self._captures.values()):
            capture.heard_at = Instant(capture.heard_at + unheard)
            capture.started_at = Instant(capture.started_at + unheard)
            if capture.child is not None:
                observations += self._hear(capture, now)
        running = sum(capture.child is not None for capture in self._captures.values())
        for capture in tuple(self._captures.values()):
            if capture.child is None and now >= capture.begin_at and running < self._most:
                self._launch(capture, now)
                running += 1
        ended, self._ended = self._ended, []
        return (*observations, *ended)

    def _hear(self, capture: _Capture, now: Instant) -> list[Observation]:
        assert capture.child is not None
        observations = list[Observation]()
        try:
            if capture.child.channel.pending:
                capture.child.channel.flush()
            messages = capture.child.channel.receive()
        except ChannelClosedError as error:
            self._lose(capture, now, str(error))
            return []
        if messages:
            capture.heard_at = now
        for message in messages:
            observations += self._understand(capture, message)
            if capture.incident.id not in self._captures:
                return observations
        if now - capture.heard_at > PATIENCE:
            self._lose(capture, now, "silent")
        elif now - capture.started_at > 2 * capture.deadline + PATIENCE:
            self._lose(capture, now, "does not end")
        return observations

    def _understand(self, capture: _Capture, message: Mapping[str, Any]) -> tuple[Observation, ...]:
        incident = capture.incident.id
        match message_kind(message):
            case "progress":
                self._tell("progress", incident, message)
            case "touched":
                try:
                    audit.touched(from_plain(Touch, {**message, "type": "Touch"}))
                except CodecError as error:
                    log.error("hangwatch.touch_unreadable", incident=incident, error=str(error))
            case "stage_a":
                capture.asked_at = self._clock.now()
                try:
                    return (
                        *from_plain(tuple[StacksSeen, ...], message.get("stacks", ())),
                        *from_plain(tuple[ProcessesSeen, ...], message.get("processes", ())),
                    )
                except CodecError as error:
                    log.error("hangwatch.stage_a_unreadable", incident=incident, error=str(error))
            case "bundle" | "aftermath" as kind:
                self._tell(kind, incident, message)
                self._end(capture, bundle=str(message["path"]))
            case "failed":
                self._tell("failed", incident, message)
                self._end(capture, error=str(message.get("error", "unknown")))
            case "crash":
                trace = str(message.get("traceback", ""))
                log.error("hangwatch.conductor_crashed", incident=incident, traceback=trace)
            case _:
                pass  # alive
        return ()

    def _launch(self, capture: _Capture, now: Instant) -> None:
        capture.attempts += 1
        capture.started_at = capture.heard_at = now
        request = self._request(capture.incident)
        capture.deadline = request.deadline
        try:
            capture.child = self._start(CONDUCTOR, f"conductor of {capture.incident.id}")
        except OSError as error:
            self._retry(capture, now, str(error))
            return
        self._tell("started", capture.incident.id, {"attempt": capture.attempts})
        self._say(capture, {"kind": "capture", "request": to_plain(request)})

    def _say(self, capture: _Capture, message: Mapping[str, Any]) -> None:
        if capture.child is None:
            return
        try:
            capture.child.channel.send(message)
        except ChannelClosedError as error:
            self._lose(capture, self._clock.now(), str(error))

    def _lose(self, capture: _Capture, now: Instant, reason: str) -> None:
        """Part from a conductor; its workers die with it."""
        child, capture.child = capture.child, None
        if child is not None:
            self.losses += 1
            child.kill()
            child.close(0.0)
        capture.asked_at = None
        self._retry(capture, now, reason)

    def _retry(self, capture: _Capture, now: Instant, reason: str) -> None:
        log.warning("hangwatch.conductor_lost", incident=capture.incident.id, reason=reason)
        if self.stopping or capture.attempts >= ATTEMPTS:
            error = f"the capture was lost {capture.attempts} times: {reason}"
            self._tell("failed", capture.incident.id, {"error": error, "hint": ""})
            self._end(capture, error=error)
        else:
            capture.begin_at = Instant(now + capture.attempts - 1)

    def _end(self, capture: _Capture, *, bundle: str = "", error: str = "") -> None:
        if capture.child is not None:
            capture.child.close(0.5)
            capture.child = None
        del self._captures[capture.incident.id]
        now = self._clock.now()
        told = CaptureEnded(incident=capture.incident.id, at=now, bundle=bundle, error=error)
        self._ended.append(self._as_told(told))
