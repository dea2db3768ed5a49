"""The daemon's side of discovery: asks whom to watch, and passes on what is found.

The child lives only while there is a question: a daemon that follows named logs of known
processes does without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.daemon.children import Keeper, Launch, Wire, launch
from hangwatch.daemon.roster import Roster
from hangwatch.model.discovery import Kin, LogOwner, RaySession
from hangwatch.model.observation import Observation
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Clock
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.logs import log
from hangwatch.system.spawn import Child, message_kind

DISCOVERY: Final = "hangwatch.daemon.discovery"

LOOK_EVERY: Final = 5.0
"""Seconds between two looks for a raylet; reads one short file of each process."""

ASK_EVERY: Final = 10.0
"""Seconds between two questions for the owners of logs: reads a lot of each process."""


def ask_kin(pid: int, profiles: Iterable[EngineProfile], *, timeout: float = 20.0) -> Kin:
    """Return what *pid* belongs to, asked of a child that may block; ``problem`` says why not."""
    try:
        answer = _ask("kin", profiles, timeout, pid=pid)
    except ChannelClosedError as error:
        return Kin(pid=pid, problem=f"looking at the processes around {pid} failed: {error}")
    if answer is None:
        return Kin(
            pid=pid,
            problem=f"looking at the processes around {pid} took more than {timeout:g} s: "
            "a process whose command line cannot be read holds it up; try again",
        )
    found: Kin = from_plain(Kin, answer["kin"])
    return found


def ask_servers(profiles: Iterable[EngineProfile], *, timeout: float = 20.0) -> tuple[int, ...]:
    """Return the servers of all engines that run here, asked of a child that may block.

    None where looking takes longer than *timeout*.
    """
    try:
        answer = _ask("servers", profiles, timeout)
    except ChannelClosedError:
        return ()
    return () if answer is None else tuple(map(int, answer["servers"]))


def _ask(
    kind: str, profiles: Iterable[EngineProfile], timeout: float, **more: Any
) -> Mapping[str, Any] | None:
    """Return a child's answer to a question of that kind, ``None`` if it takes too long."""
    with Child(DISCOVERY, name="discovery") as child:
        deadline = time.monotonic() + timeout
        child.channel.send({"kind": kind, "profiles": to_plain(tuple(profiles)), **more})
        while (left := deadline - time.monotonic()) > 0:
            for message in child.channel.wait(left):
                if message_kind(message) == kind:
                    return message
    return None


class Search:
    """Discovery, while something is to be found out; one of the loop's parts."""

    def __init__(
        self,
        *,
        clock: Clock,
        policy: Policy,
        profiles: Mapping[str, EngineProfile],
        roster: Roster,
        found: Callable[[RaySession | Kin], None],
        start: Launch = launch,
    ) -> None:
        """Search for nothing yet.

        Args:
            clock: Ours.
            policy: The limits.
            profiles: Engines that may be met, by name.
            roster: Says which logs' owners are asked for; learns them.
            found: Told each Ray session, again when its logs change, and each answer about kin.
            start: Starts the child.
        """
        self._clock = clock
        self._policy = policy
        self._profiles = to_plain(tuple(profiles.values()))
        self._roster = roster
        self._found = found
        self._start = start
        self._sessions = False
        self._kin: dict[int, None] = {}
        self._owners: tuple[str, ...] = ()
        self._seen: dict[str, RaySession] = {}
        self._ask_at = clock.now()
        self._keeper: Keeper | None = None
        self._lost = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The child, for whoever measures or kills it."""
        pid = None if self._keeper is None else self._keeper.pid
        return () if pid is None else (pid,)

    @property
    def losses(self) -> int:
        """How often the child was lost."""
        return self._lost + (0 if self._keeper is None else self._keeper.losses)

    def sessions(self) -> None:
        """Look for Ray sessions from now on."""
        self._sessions = True

    def kin(self, pid: int) -> None:
        """Find out what *pid* belongs to."""
        self._kin[pid] = None

    def wires(self) -> Iterable[Wire]:
        """Return the channel of the child."""
        wire = None if self._keeper is None else self._keeper.wire
        return () if wire is None else (wire,)

    def hear(self) -> tuple[Observation, ...]:
        """Take in what was found; look after the child, or send it home."""
        now = self._clock.now()
        if self._roster.asked and not self._owners and now >= self._ask_at:
            self._owners = tuple(sorted(self._roster.asked))
            self._ask_at = type(now)(now + ASK_EVERY)
            if self._keeper is not None:
                self._keeper.tell(self._owners_question())
        if not (self._sessions or self._kin or self._owners):
            self.close()
            return ()
        if self._keeper is None:
            self._keeper = Keeper(
                DISCOVERY,
                "discovery",
                clock=self._clock,
                silence=self._policy.child_silence,
                greet=self._questions,
                start=self._start,
            )
        messages, _ = self._keeper.hear()
        for message in messages:
            try:
                self._understand(message)
            except (CodecError, KeyError) as error:
                log.error("hangwatch.discovery_unreadable", error=str(error))
        return ()

    def close(self) -> None:
        """End the child."""
        if self._keeper is not None:
            self._keeper.close(0.2)
            self._lost += self._keeper.losses
            self._keeper = None

    def _questions(self) -> Iterable[Mapping[str, Any]]:
        if self._sessions:
            yield {"kind": "sessions", "every": LOOK_EVERY}
        for pid in self._kin:
            yield {"kind": "kin", "pid": pid, "profiles": self._profiles}
        if self._owners:
            yield self._owners_question()

    def _owners_question(self) -> Mapping[str, Any]:
        return {"kind": "owners", "logs": self._owners, "profiles": self._profiles}

    def _understand(self, message: Mapping[str, Any]) -> None:
        match message_kind(message):
            case "sessions":
                sessions: tuple[RaySession, ...] = from_plain(
                    tuple[RaySession, ...], message["sessions"]
                )
                for session in sessions:
                    if self._seen.get(session.folder) != session:
                        self._found(session)
                self._seen = {session.folder: session for session in sessions}
            case "kin":
                kin: Kin = from_plain(Kin, message["kin"])
                self._kin.pop(kin.pid, None)
                self._found(kin)
            case "owners":
                owners: tuple[LogOwner, ...] = from_plain(tuple[LogOwner, ...], message["owners"])
                self._owners = ()
                self._roster.own(owners)
            case _:
                pass
