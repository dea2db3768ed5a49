"""Virtual time, and what stands between a server and the detector."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeAlias

from hangwatch.model.heartbeat import Heartbeat, SignalSeen
from hangwatch.model.observation import (
    BeatSeen,
    ChildBack,
    ChildSilent,
    LoopPaused,
    Observation,
    SignalArrived,
    SourceFound,
    SourceGrew,
    SourceRetired,
)
from hangwatch.model.time import Instant

Script: TypeAlias = Generator[float, None, None]
"""Something that happens over time: it yields the seconds to wait."""

PACE = 1.0
"""Seconds of what was seen that the daemon takes in at once."""

START = datetime.fromisoformat("2026-03-04T10:00:00")
"""What the servers' clocks show at instant 0; printed stamps have no offset."""

BLOCK = 36
"""Beats in a block of standard output: 8 KiB of about 230 bytes each."""

WINDOW = 5.0
"""Seconds for which Ray's de-duplication holds repetitions back."""


class World:
    """Everything that is going to happen, in order, and what was seen of it."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.clock_offset = 0.0  # of the printed stamps
        self.deaf_until = 0.0  # the follower is silent
        self.paused_until = 0.0  # our own loop stands still
        self._paused_at = 0.0
        self.heard_of: set[int | None] = set()  # whose beats have arrived
        self._serial = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._seen: list[Observation] = []
        self._ended = False

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heappush(self._heap, (when, self._serial, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def spawn(self, script: Script, after: float = 0.0) -> None:
        self.after(after, self._continue, script)

    def _continue(self, script: Script) -> None:
        try:
            pause = next(script)
        except StopIteration:
            return
        self.after(pause, self._continue, script)

    def end(self) -> None:
        """Let the history end now."""
        self._ended = True

    def see(self, observation: Observation) -> None:
        self._seen.append(observation)

    def printed(self) -> datetime:
        """Return the stamp that a line printed now carries."""
        return START + timedelta(seconds=int(self.now + self.clock_offset))

    def pause_us(self, seconds: float) -> None:
        """Let our own daemon stand still; its children go on."""
        self._paused_at, self.paused_until = self.now, self.now + seconds

    def run(self, until: float) -> Iterator[tuple[float, list[Observation]]]:
        """Yield what our daemon takes in, turn by turn."""
        heap = self._heap
        while heap and not self._ended and heap[0][0] <= until:
            turn = heap[0][0] + PACE
            while heap and heap[0][0] <= turn:
                self.now, _, call, arguments = heappop(heap)
                call(*arguments)
            self.now = turn
            if self._seen and turn >= self.paused_until:
                seen, self._seen = self._seen, []
                if self.paused_until:
                    pause = LoopPaused(at=Instant(turn), seconds=turn - self._paused_at)
                    seen.insert(0, pause)
                    self.paused_until = 0.0
                yield turn, seen
        self.now = min(max(self.now, until), until) if not self._ended else self.now


class Log:
    """One log that is followed: a worker's own file, or a driver's stream.

    Attributes:
        merges: Whether Ray's de-duplication is at work.
        dead: Whether what is written no longer arrives.
        block: Whether the writer's output is block-buffered.
        clump: Seconds between two moments at which a slow disk shows what was written, or 0.
    """

    def __init__(self, world: World, name: str, *, pid: int | None, merges: bool = False) -> None:
        self.world = world
        self.name = name
        self.merges = merges
        self.dead = self.retired = self.block = False
        self.clump = 0.0
        self._last_at = 0.0
        self._buffer: list[Heartbeat] = []
        self._window: list[Heartbeat] | None = None
        world.see(SourceFound(source=name, at=Instant(world.now), pid=pid))

    def beat(self, beat: Heartbeat) -> None:
        if self.merges:
            self._merge(replace(beat, relayed=True, source=self.name))
        elif self.block:
            self._buffer.append(beat)
            if len(self._buffer) >= BLOCK:
                for kept in self._buffer:
                    self._write(BeatSeen, kept)
                self._buffer.clear()
        else:
            self._write(BeatSeen, beat)

    def signal(self, signal: SignalSeen) -> None:
        self._write(SignalArrived, replace(signal, source=self.name))

    def grow(self) -> None:
        """Write a line that is neither a beat nor a signal."""
        self._write(SourceGrew, None)

    def retire(self, reason: str) -> None:
        if not self.retired:
            self.retired = True
            at = Instant(self.world.now)
            self.world.see(SourceRetired(source=self.name, at=at, reason=reason))

    def _merge(self, beat: Heartbeat) -> None:
        if self._window is None:
            self._window = []
            self.world.after(WINDOW, self._flush)
            self._write(BeatSeen, beat)
        else:
            self._window.append(beat)

    def _flush(self) -> None:
        held, self._window = self._window, None
        if held:
            self._write(BeatSeen, replace(held[-1], repeated=len(held)))

    def _write(self, kind: type, payload: Heartbeat | SignalSeen | None) -> None:
        if self.dead or self.retired:
            return
        world = self.world
        at = world.now + world.rng.uniform(0.01, 0.3)
        if self.clump:
            at = (at // self.clump + 1) * self.clump
        self._last_at = at = max(at, world.deaf_until, self._last_at)
        world.at(at, self._arrive, kind, payload)

    def _arrive(self, kind: type, payload: Heartbeat | SignalSeen | None) -> None:
        if self.retired:
            return
        world = self.world
        at = Instant(world.now)
        if world.now < world.deaf_until:
            world.at(world.deaf_until, self._arrive, kind, payload)
        elif isinstance(payload, Heartbeat):
            world.heard_of.add(payload.instance.pid)
            world.see(BeatSeen(beat=replace(payload, at=at)))
        elif payload is not None:
            world.see(SignalArrived(signal=replace(payload, at=at)))
        else:
            world.see(SourceGrew(source=self.name, at=at))


def deafen(world: World, logs: list[Log], seconds: float) -> Script:
    """Silence the child that follows *logs*; it is missed after five seconds."""
    world.deaf_until = world.now + seconds
    names = tuple(log.name for log in logs if not log.retired)
    at = Instant(world.now)
    if seconds > 5.0:
        yield 5.0
        world.see(ChildSilent(at=at, reason="follower: no answer for 5 s", sources=names))
        yield seconds - 5.0
        world.see(ChildBack(at=Instant(world.now), sources=names))
