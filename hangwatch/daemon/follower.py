"""A child that reads the logs of one filesystem, and may hang with it.

In: ``{"kind": "follow", "request": FollowRequest, "offsets": {…}}``, the first time with what the
last ``offsets`` message of an earlier life said, later to change what is followed.

Out: ``{"kind": "events", "items": […]}``, ``{"kind": "offsets", "offsets": {source: Position}}``
when they have changed, ``{"kind": "alive"}`` when there is nothing else to say.

A parent that takes nothing stops the reading; the logs keep what is written meanwhile.
"""

from __future__ import annotations

import resource
import select
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.model.following import FollowEvent, FollowRequest, NothingMatches, Position
from hangwatch.model.heartbeat import Line
from hangwatch.model.time import Clock, Instant
from hangwatch.system.channel import Channel
from hangwatch.system.clock import SystemClock
from hangwatch.system.hints import Hints
from hangwatch.system.paths import nearest
from hangwatch.system.spawn import message_kind, serve
from hangwatch.system.tail import Tailer

LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at all names."""

READ_INTERVAL: Final = 0.25
"""Seconds between two looks at the open files when nothing hints at growth."""

REST: Final = 0.02
"""Seconds between two reads, in which growth gathers: a chatty log costs 50 of them a second."""

ALIVE_INTERVAL: Final = 0.5
OFFSETS_INTERVAL: Final = 5.0

MAX_BATCH: Final = 512 << 10
"""Bytes of lines in one message; four times as much, escaped, still fits into one."""

MAX_EVENTS: Final = 2000
MAX_PENDING: Final = 2 << 20


class Follower:
    """Drives one tailer on behalf of the parent."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._hints = Hints()
        self._tailer: Tailer | None = None
        self._offsets: dict[str, Any] = {}
        self._interval = READ_INTERVAL
        self._heard = False
        self._patterns: tuple[str, ...] = ()
        self._new: tuple[str, ...] = ()
        self._looked_at = self._read_at = self._told_at = self._kept_at = Instant(0.0)

    def run(self) -> None:
        """Serve until the channel closes.

        Raises:
            ChannelClosedError: The parent is gone.
        """
        while True:
            self._wait()
            for message in self._channel.receive() if self._heard else ():
                if message_kind(message) == "follow":
                    self._follow(message)
            if self._channel.pending:
                self._channel.flush()
            if self._tailer is not None and self._channel.pending < MAX_PENDING:
                self._read(self._tailer)
            self._keep_in_touch()

    def _wait(self) -> None:
        """Wait until there is something to do, half a second at most."""
        hints = self._hints.fileno()
        stuck = self._channel.pending >= MAX_PENDING
        wakes = [self._channel.fileno()]
        timeout = self._interval
        if self._tailer is not None and not stuck:
            wakes += [*self._tailer.pipes, hints]
            timeout = 0.0 if self._tailer.behind else timeout
        writes = [self._channel.write_fd] if self._channel.pending else []
        ready, _, _ = select.select(wakes, writes, [], timeout)
        self._heard = self._channel.fileno() in ready
        if len(ready) > self._heard and timeout > 0:
            self._clock.sleep(self._read_at + REST - self._clock.now())
        if hints in ready:
            self._hints.drain()

    def _follow(self, message: Mapping[str, Any]) -> None:
        with suppress(CodecError):
            request: FollowRequest = from_plain(FollowRequest, message.get("request"))
            self._new += tuple(p for p in request.patterns if p not in self._patterns)
            self._patterns = request.patterns
            if self._tailer is None:
                self._tailer = Tailer(
                    request, clock=self._clock, positions=_positions(message.get("offsets"))
                )
            else:
                self._tailer.follow(request)
            self._looked_at = Instant(0.0)

    def _read(self, tailer: Tailer) -> None:
        now = self._read_at = self._clock.now()
        if now - self._looked_at >= LOOK_INTERVAL:
            self._looked_at = now
            events = (*tailer.poll(), *self._missing(tailer, now))
            files = tailer.descriptors
            self._hints.watch(files)
            self._interval = LOOK_INTERVAL if self._hints.cover(files) else READ_INTERVAL
        else:
            events = tailer.read()
        for batch in _batches(events):
            self._send({"kind": "events", "items": to_plain(batch)})
        if now - self._kept_at >= OFFSETS_INTERVAL:
            self._kept_at = now
            offsets = {position.source: to_plain(position) for position in tailer.positions()}
            if offsets != self._offsets:
                self._offsets = offsets
                self._send({"kind": "offsets", "offsets": offsets})

    def _missing(self, tailer: Tailer, now: Instant) -> Iterable[NothingMatches]:
        """Yield what was looked for for the first time and is not there."""
        unmatched = tailer.unmatched
        for pattern in self._new:
            if pattern in unmatched:
                yield NothingMatches(pattern=pattern, nearest=nearest(pattern), at=now)
        self._new = ()

    def _keep_in_touch(self) -> None:
        if self._clock.now() - self._told_at >= ALIVE_INTERVAL and not self._channel.pending:
            self._send({"kind": "alive"})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._told_at = self._clock.now()
        self._channel.send(message)


def _batches(events: Iterable[FollowEvent]) -> Iterable[list[FollowEvent]]:
    batch: list[FollowEvent] = []
    size = 0
    for event in events:
        batch.append(event)
        size += len(event.text) if isinstance(event, Line) else 0
        if size >= MAX_BATCH or len(batch) >= MAX_EVENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _positions(offsets: Any) -> list[Position]:
    """Return the saved positions that can be understood; the others are begun anew."""
    positions = []
    for plain in offsets.values() if isinstance(offsets, Mapping) else ():
        with suppress(CodecError):
            position: Position = from_plain(Position, plain)
            positions.append(position)
    return positions


def _raise_limits() -> None:
    # One descriptor a log, and Ray makes a log a worker.
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _body(channel: Channel) -> None:
    _raise_limits()
    Follower(channel, SystemClock()).run()


if __name__ == "__main__":
    serve(_body)
