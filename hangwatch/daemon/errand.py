"""A capture that nothing depends on: one conductor, heard until it is done.

Unlike the capture of an incident it is not begun again: a conductor that dies, falls silent or does
not end is given up, and that is all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.daemon.children import Launch, Running, Wire, launch, unlistened
from hangwatch.daemon.responder import CONDUCTOR, PATIENCE
from hangwatch.model.capture import CaptureRequest, Touch
from hangwatch.model.observation import Observation
from hangwatch.model.time import Clock, Instant
from hangwatch.system import audit
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.logs import log
from hangwatch.system.spawn import message_kind

RESULTS: Final = ("bundle", "baseline", "failed")
"""Kinds of what a conductor says at its end."""


class Errand:
    """One conductor at work, or none; one of the loop's parts.

    Attributes:
        losses: How often one was lost.
    """

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        tell: Callable[[Mapping[str, Any]], None],
        start: Launch = launch,
    ) -> None:
        """Have nothing to do yet.

        Args:
            name: For people and logs.
            clock: Ours.
            tell: Told what a conductor said at its end, or why it was given up.
            start: Starts a conductor.
        """
        self.losses = 0
        self._name = name
        self._clock = clock
        self._tell = tell
        self._start = start
        self._child: Running | None = None
        self._heard_at = self._started_at = self._looked_at = clock.now()
        self._deadline = 0.0

    @property
    def running(self) -> bool:
        """Whether a conductor is at work."""
        return self._child is not None

    def begin(self, request: CaptureRequest) -> bool:
        """Start a conductor; say whether that succeeded."""
        now = self._clock.now()
        try:
            self._child = self._start(CONDUCTOR, self._name)
        except OSError as error:
            self._tell({"kind": "failed", "error": str(error), "hint": ""})
            return False
        self._heard_at = self._started_at = self._looked_at = now
        self._deadline = request.deadline
        self._say({"kind": "capture", "request": to_plain(request)})
        return self.running

    def stop(self) -> None:
        """Have it finish with what there is."""
        self._say({"kind": "stop"})

    def close(self) -> None:
        """End it at once; what it has not finished is lost."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.close(0.0)

    def wires(self) -> Iterable[Wire]:
        """Return its channel, to wait on."""
        return () if self._child is None else (self._child.channel,)

    def hear(self) -> tuple[Observation, ...]:
        """Take in what it said; a capture of what is well is no observation."""
        child = self._child
        if child is None:
            return ()
        now = self._clock.now()
        unheard = unlistened(now, self._looked_at, PATIENCE)
        self._looked_at = now
        self._heard_at = Instant(self._heard_at + unheard)
        self._started_at = Instant(self._started_at + unheard)
        messages: tuple[Mapping[str, Any], ...] = ()
        try:
            if child.channel.pending:
                child.channel.flush()
            messages = child.channel.receive()
        except ChannelClosedError as error:
            self._lose(str(error))
            return ()
        self._heard_at = now if messages else self._heard_at
        for message in messages:
            if message_kind(message) in RESULTS:
                self._child = None
                child.close(0.5)
                self._tell(message)
                return ()
            self._understand(message)
        if now - self._heard_at > PATIENCE:
            self._lose("silent")
        elif now - self._started_at > 2 * self._deadline + PATIENCE:
            self._lose("does not end")
        return ()

    def _understand(self, message: Mapping[str, Any]) -> None:
        kind = message_kind(message)
        if kind == "touched":
            try:
                audit.touched(from_plain(Touch, {**message, "type": "Touch"}))
            except CodecError as error:
                log.error("hangwatch.touch_unreadable", errand=self._name, error=str(error))
        elif kind == "crash":
            trace = str(message.get("traceback", ""))
            log.error("hangwatch.conductor_crashed", errand=self._name, traceback=trace)

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._child is not None:
            try:
                self._child.channel.send(message)
            except ChannelClosedError as error:
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.losses += 1
        self.close()
        self._tell({"kind": "failed", "error": reason, "hint": ""})
