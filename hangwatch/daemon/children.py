"""Keeps a child running: starts it again when it ends, and says when it falls silent.

A child that dies is started again at once, then after pauses that double up to ``MAX_BACK_OFF``.
One that lives but says nothing for three times the limit is killed and replaced. One that does not
even die (D state: a stalled filesystem) is left alone until the kernel lets it go: a second one
would only be stuck beside it.

Silence counts only while we listen. Where we stood still ourselves, the child may have, too, with
the whole machine, and what it says next needs a moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, Protocol

from hangwatch.model.time import Clock, Instant
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.logs import log
from hangwatch.system.spawn import Child, message_kind

MAX_BACK_OFF: Final = 30.0
"""Seconds."""

SETTLED: Final = 30.0
"""Seconds that a child lives until its earlier deaths are forgotten."""


class Wire(Protocol):
    """Our end of a child's channel."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""

    @property
    def write_fd(self) -> int:
        """The descriptor to wait on while something is pending."""

    @property
    def pending(self) -> int:
        """Bytes that the child has not taken."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue *message*."""

    def flush(self) -> None:
        """Write what the pipe takes."""

    def receive(self) -> tuple[dict[str, Any], ...]:
        """Return what has arrived."""


class Running(Protocol):
    """A started child."""

    @property
    def channel(self) -> Wire:
        """Our end of its channel."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""

    def kill(self) -> None:
        """Kill its group."""

    def close(self, timeout: float = 1.0) -> bool:
        """End it; say whether it is gone."""


Launch = Callable[[str, str], Running]
"""Module and name in, started child out; ``OSError`` if it cannot be started."""


def launch(module: str, name: str) -> Running:
    """Start a real child."""
    return Child(module, name=name)


class Hearing(Enum):
    """How it stands with a child's voice."""

    UNCHANGED = "unchanged"
    LOST = "lost"
    BACK = "back"


def unlistened(now: Instant, looked_at: Instant, silence: float) -> float:
    """Return how much of the time since the last look is no silence of a child, in seconds.

    Half of what would be too long counts, so that a loop that is always late still finds out.
    """
    return max(0.0, now - looked_at - silence / 2)


class Keeper:
    """One child of ours that must always run.

    Attributes:
        name: For people and logs.
        heard_at: When it last said anything; its start counts.
        silent: Whether it has been silent for too long.
        starts: How often it was started.
        losses: How often one was lost: it died, fell silent, or took nothing.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        clock: Clock,
        silence: float,
        greet: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
        start: Launch = launch,
    ) -> None:
        """Keep a child of *module*; the first one starts with the first ``hear``.

        Args:
            module: What it runs.
            name: For people and logs.
            clock: Ours.
            silence: Seconds without a word that are too long.
            greet: Makes the messages that each new child is told first.
            start: Starts it.
        """
        self.name = name
        self.heard_at = clock.now()
        self.silent = False
        self.starts = 0
        self.losses = 0
        self._module = module
        self._clock = clock
        self._silence = silence
        self._greet = greet
        self._start = start
        self._child: Running | None = None
        self._deaf = ""
        self._started_at = clock.now()
        self._looked_at = clock.now()
        self._start_at = clock.now()
        self._deaths = 0
        self._dying: list[Running] = []
        self._closed = False

    @property
    def wire(self) -> Wire | None:
        """The channel of the present child, to wait on."""
        return None if self._child is None else self._child.channel

    @property
    def pid(self) -> int | None:
        """The present child."""
        return None if self._child is None else self._child.pid

    def hear(self) -> tuple[tuple[dict[str, Any], ...], Hearing]:
        """Return what the child said, and whether its voice was lost or is back; never wait.

        Starts, kills and replaces the child as need be.
        """
        messages = self._receive()
        now = self._clock.now()
        unheard = unlistened(now, self._looked_at, self._silence)
        self._looked_at = now
        self.heard_at = Instant(self.heard_at + unheard)
        self._started_at = Instant(self._started_at + unheard)
        hearing = Hearing.UNCHANGED
        if messages:
            self.heard_at = now
            if self.silent:
                self.silent, hearing = False, Hearing.BACK
                log.info("hangwatch.child_back", child=self.name)
        elif not self.silent and now - self.heard_at > self._silence:
            self.silent, hearing = True, Hearing.LOST
            log.warning("hangwatch.child_silent", child=self.name, since=self.heard_at)
        if self._child is not None and now - self._started_at > SETTLED:
            self._deaths = 0
        since = max(self.heard_at, self._started_at)
        if self._child is not None and now - since > 3 * self._silence:
            self._lose("silent")
        self._dying = [child for child in self._dying if child.alive]
        if self._child is None and not self._dying and now >= self._start_at and not self._closed:
            self._launch(now)
        words = (m for m in messages if message_kind(m) != "alive")
        return tuple(m for m in words if not self._crashed(m)), hearing

    def tell(self, message: Mapping[str, Any]) -> None:
        """Tell the present child *message*; a later child is told by ``greet``.

        One that takes nothing may have ended for a reason that it has given: ``hear`` takes in what
        it said before it parts from it.
        """
        if self._child is None or self._deaf:
            return
        try:
            self._child.channel.send(message)
        except ChannelClosedError as error:
            self._deaf = str(error)

    def close(self, timeout: float = 1.0) -> None:
        """End the child for good."""
        self._closed = True
        if self._child is not None:
            self._child.close(timeout)
            self._child = None

    def _receive(self) -> tuple[dict[str, Any], ...]:
        if self._child is None:
            return ()
        messages: tuple[dict[str, Any], ...] = ()
        try:
            messages = self._child.channel.receive()
            if self._child.channel.pending and not self._deaf:
                self._child.channel.flush()
        except ChannelClosedError as error:
            self._deaf = self._deaf or str(error)
        if self._deaf and not any(message_kind(message) != "alive" for message in messages):
            self._lose(self._deaf)
        return messages

    def _launch(self, now: Instant) -> None:
        self._started_at = now
        self.starts += 1
        try:
            self._child = self._start(self._module, self.name)
        except OSError as error:
            log.error("hangwatch.child_not_started", child=self.name, error=str(error))
            self._postpone(now)
            return
        log.info("hangwatch.child_started", child=self.name, pid=self._child.pid)
        for message in self._greet():
            self.tell(message)

    def _lose(self, reason: str) -> None:
        """Part from the present child; a later ``hear`` starts the next one."""
        child, self._child, self._deaf = self._child, None, ""
        if child is None:
            return
        self.losses += 1
        log.warning("hangwatch.child_lost", child=self.name, pid=child.pid, reason=reason)
        child.kill()
        child.close(0.0)
        if child.alive:
            self._dying.append(child)
        self._postpone(self._clock.now())

    def _postpone(self, now: Instant) -> None:
        pause = 0.0 if self._deaths == 0 else min(MAX_BACK_OFF, 0.5 * 2 ** (self._deaths - 1))
        self._deaths += 1
        self._start_at = Instant(now + pause)

    def _crashed(self, message: Mapping[str, Any]) -> bool:
        if message_kind(message) != "crash":
            return False
        with contextlib.suppress(TypeError):
            log.error(
                "hangwatch.child_crashed", child=self.name, traceback=str(message.get("traceback"))
            )
        return True


class OneChild:
    """What every part of the loop does that has exactly one child, always kept."""

    _keeper: Keeper

    @property
    def pids(self) -> tuple[int, ...]:
        """The child, for whoever measures or kills it."""
        return () if self._keeper.pid is None else (self._keeper.pid,)

    @property
    def losses(self) -> int:
        """How often the child was lost."""
        return self._keeper.losses

    def wires(self) -> Iterable[Wire]:
        """Return the channel of the child."""
        return () if self._keeper.wire is None else (self._keeper.wire,)

    def close(self) -> None:
        """End the child for good."""
        self._keeper.close(0.2)
