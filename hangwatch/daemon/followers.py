"""The daemon's side of the followers: one child for each filesystem that holds logs.

A filesystem that stalls takes its own follower with it and no other. Which one a pattern begins
on is read from the mount table, never by touching it; what leads on to another filesystem is
reported by the follower as ``Foreign`` and handed to that one's own.

Lines are parsed here, in the loop that must not hang, by expressions that may be anybody's. So a
line has a budget; a log with too many lines that exceed it is not read any more, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from typing import Any, Final

from hangwatch.core import parsing
from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.core.naming import Names
from hangwatch.daemon.children import Hearing, Keeper, Launch, Wire, launch
from hangwatch.model.following import (
    FollowEvent,
    FollowRequest,
    Foreign,
    LinkRefused,
    NothingMatches,
)
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import (
    BeatSeen,
    ChildBack,
    ChildSilent,
    Observation,
    SignalArrived,
    SourceFound,
    SourceGrew,
    SourceReadable,
    SourceRetired,
    SourceUnreadable,
)
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile, Signal
from hangwatch.model.time import Clock, Instant
from hangwatch.system.budget import Allowance, OverBudgetError
from hangwatch.system.logs import log
from hangwatch.system.paths import MountTable, place_of
from hangwatch.system.spawn import message_kind

FOLLOWER: Final = "hangwatch.daemon.follower"

MAX_FOLLOWERS: Final = 16
"""Children; the patterns of any further filesystem join the last one."""

LINE_BUDGET: Final = 0.1
"""Seconds of processor time that a line may take; ordinary ones take a thousandth of it."""

LOG_BUDGET: Final = 0.5
"""Seconds that the dear lines of a log may take at once;"""
LOG_SHARE: Final = 0.05
"""and of a core, for ever. Then it is given up: no beat is worth the loop."""


@dataclass(slots=True)
class _Follower:
    place: str
    keeper: Keeper
    patterns: dict[str, None] = field(default_factory=dict)
    streams: dict[str, str] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)
    offsets: Any = field(default_factory=dict)


class Followers:
    """All followers; turns what they read into observations; one of the loop's parts.

    Attributes:
        writers: Process that is known to print a log, by its name; told by whoever found it.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        policy: Policy,
        profiles: Mapping[str, EngineProfile],
        roots: Sequence[str] = (),
        offsets: Mapping[str, Any] | None = None,
        zone: Callable[[], tzinfo | None] = lambda: None,
        start: Launch = launch,
    ) -> None:
        """Follow nothing yet.

        Args:
            clock: Ours.
            policy: The limits.
            profiles: Engines whose lines matter, by name.
            roots: Directories beneath which links may lead.
            offsets: What ``offsets`` returned in an earlier life.
            zone: Returns the zone of naive stamps.
            start: Starts a follower.
        """
        self.writers: dict[str, int] = {}
        self._clock = clock
        self._policy = policy
        self._profiles = tuple(profiles.values())
        self._roots = tuple(roots)
        self._saved = dict(offsets or {})
        self._zone = zone
        self._start = start
        self._mounts = MountTable()
        self._followers: dict[str, _Follower] = {}
        self._found: dict[str, SourceFound] = {}
        self._names = Names()
        self._engines: dict[str, str] = {}  # log -> name of the profile that it is of
        self._stamped: dict[str, Instant] = {}
        self._missed: set[str] = set()
        self._allowances: dict[str, Allowance] = {}  # log -> what its lines may take

    @property
    def sources(self) -> tuple[str, ...]:
        """The logs that are followed now."""
        return tuple(self._found)

    def pid_of(self, source: str) -> int | None:
        """Return the process that prints a log, where its name or its finder says so."""
        found = self._found.get(source)
        return found.pid if found is not None else None

    @property
    def offsets(self) -> dict[str, Any]:
        """How far each follower has read, to be kept."""
        return {place: f.offsets for place, f in self._followers.items() if f.offsets}

    @property
    def pids(self) -> tuple[int, ...]:
        """The children, for whoever measures or kills them."""
        pids = (follower.keeper.pid for follower in self._followers.values())
        return tuple(pid for pid in pids if pid is not None)

    @property
    def losses(self) -> int:
        """How often a follower was lost."""
        return sum(follower.keeper.losses for follower in self._followers.values())

    def follow(
        self,
        patterns: Iterable[str],
        streams: Mapping[str, str] | None = None,
        *,
        expected: bool = True,
    ) -> None:
        """Follow what *patterns* match, now and later, and read *streams*, besides the rest.

        Where there should be a match already, but is none, our log says so.
        """
        patterns = tuple(patterns)
        if not expected:
            self._missed.update(patterns)
        self._mounts.refresh()
        for pattern in patterns:
            self._place(place_of(pattern, self._mounts)).patterns.setdefault(pattern)
        if streams:
            self._place("").streams.update(streams)
        for follower in self._followers.values():
            follower.keeper.tell(self._order(follower))

    def wires(self) -> Iterable[Wire]:
        """Return the channels of the followers."""
        wires = (follower.keeper.wire for follower in self._followers.values())
        return [wire for wire in wires if wire is not None]

    def hear(self) -> tuple[Observation, ...]:
        """Return what was read; look after the followers."""
        observations: list[Observation] = []
        for follower in tuple(self._followers.values()):
            messages, hearing = follower.keeper.hear()
            for message in messages:
                observations += self._understand(follower, message)
            sources = tuple(follower.sources)
            if hearing is Hearing.LOST:
                since = follower.keeper.heard_at
                reason = f"the {follower.keeper.name} has said nothing since then"
                observations.append(ChildSilent(at=since, reason=reason, sources=sources))
            elif hearing is Hearing.BACK:
                observations.append(ChildBack(at=self._clock.now(), sources=sources))
        return tuple(observations)

    def close(self) -> None:
        """End all followers."""
        for follower in self._followers.values():
            follower.keeper.close(0.2)

    def _place(self, place: str) -> _Follower:
        if place not in self._followers:
            if len(self._followers) >= MAX_FOLLOWERS:
                return tuple(self._followers.values())[-1]
            name = f"follower of {place or 'standard input'}"

            def greet() -> tuple[Mapping[str, Any], ...]:
                return (self._order(follower),)

            keeper = Keeper(
                FOLLOWER,
                name,
                clock=self._clock,
                silence=self._policy.child_silence,
                greet=greet,
                start=self._start,
            )
            follower = _Follower(place, keeper, offsets=self._saved.get(place, {}))
            self._followers[place] = follower
        return self._followers[place]

    def _order(self, follower: _Follower) -> Mapping[str, Any]:
        # Our own requests leave lines in an access log; such growth proves nothing.
        paths = sorted({path for each in self._profiles for path in each.endpoints.values()})
        echoes = tuple(f'"GET {path} '.encode() for path in paths)
        request = FollowRequest(
            patterns=tuple(follower.patterns),
            needles=parsing.needles(self._profiles),
            dialects=parsing.dialects(self._profiles),
            roots=self._roots,
            streams=follower.streams,
            mount=follower.place if follower.place.startswith("/") else "",
            echoes=echoes,
        )
        return {"kind": "follow", "request": to_plain(request), "offsets": follower.offsets}

    def _understand(self, follower: _Follower, message: Mapping[str, Any]) -> list[Observation]:
        observations: list[Observation] = []
        match message_kind(message):
            case "events":
                try:
                    events: tuple[FollowEvent, ...] = from_plain(
                        tuple[FollowEvent, ...], message.get("items", ())
                    )
                except CodecError as error:
                    log.error("hangwatch.events_unreadable", error=str(error))
                    return []
                for event in events:
                    observations += self._observe(follower, event)
            case "offsets":
                follower.offsets = message.get("offsets", {})
            case _:
                pass
        return observations

    def _observe(self, follower: _Follower, event: FollowEvent) -> tuple[Observation, ...]:
        match event:
            case Line():
                return self._read(event)
            case Foreign():
                self._hand_over(event)
                return ()
            case NothingMatches():
                self._miss(event)
                return ()
            case LinkRefused():
                log.warning(
                    "hangwatch.link_refused",
                    link=event.path,
                    target=event.target,
                    hint="it leads out of the folders that were named: name its target, too",
                )
                return ()
            case SourceFound():
                if event.pid is None and event.source in self.writers:
                    event = replace(event, pid=self.writers[event.source])
                follower.sources.setdefault(event.source)
                self._found[event.source] = event
                log.info("hangwatch.log_found", log=event.source, pid=event.pid)
            case SourceRetired():
                follower.sources.pop(event.source, None)
                self._found.pop(event.source, None)
                self._engines.pop(event.source, None)
                self._stamped.pop(event.source, None)
                self._allowances.pop(event.source, None)
                self._names.forget(event.source)
                log.info("hangwatch.log_retired", log=event.source, reason=event.reason)
            case SourceUnreadable():
                log.warning("hangwatch.log_unreadable", log=event.source, reason=event.reason)
            case SourceReadable():
                log.info("hangwatch.log_readable", log=event.source)
            case SourceGrew():
                pass
        return (event,)

    def _miss(self, event: NothingMatches) -> None:
        if event.pattern not in self._missed:
            self._missed.add(event.pattern)
            log.warning(
                "hangwatch.nothing_matches",
                pattern=event.pattern,
                exists=event.nearest,
                hint="it is followed as soon as it is there; if it should be there now, check the "
                "path, and in a container the mount",
            )

    def _hand_over(self, event: Foreign) -> None:
        follower = self._place(event.mount)
        if event.pattern not in follower.patterns:
            log.info("hangwatch.filesystem_found", mount=event.mount, pattern=event.pattern)
            follower.patterns.setdefault(event.pattern)
            follower.keeper.tell(self._order(follower))

    def _read(self, line: Line) -> tuple[Observation, ...]:
        """Return what a line says, unless that takes too long to find out."""
        allowance = self._allowances.get(line.source)
        if allowance is None:
            allowance = Allowance(each=LINE_BUDGET, at_once=LOG_BUDGET, share=LOG_SHARE)
            self._allowances[line.source] = allowance
        if allowance.is_spent():
            return ()
        seen: tuple[Observation, ...] = ()
        try:
            seen = allowance.spend(lambda: self._parse(line), self._clock.now())
        except OverBudgetError:
            log.error(
                "hangwatch.line_too_slow",
                log=line.source,
                bytes=len(line.text),
                hint="an expression of its profile takes too long: give its repeats limits, "
                ".{0,200} for .*, and let none stand within another",
            )
        if not allowance.is_spent():
            return seen
        reason = "it is given up: the expressions of its profile take too long on its lines"
        log.error("hangwatch.log_given_up", log=line.source, reason=reason)
        return (*seen, SourceUnreadable(source=line.source, at=line.at, reason=reason))

    def _parse(self, line: Line) -> tuple[BeatSeen | SignalArrived, ...]:
        found = self._found.get(line.source)
        seen = parsing.parse(
            line,
            self._profiles,
            known=self._engines.get(line.source, ""),
            pid=found.pid if found is not None else None,
            actor=found.actor if found is not None else "",
            zone=self._zone(),
            near=self._clock.wall(),
        )
        self._engines[line.source] = parsing.engine_of(seen, self._engines.get(line.source, ""))
        if line.fresh:
            self._stamped.pop(line.source, None)
            return tuple(map(self._names.told, seen))
        return tuple(
            self._names.told(dated)
            for each in seen
            if (dated := self._dated(each, line.source)) is not None
        )

    def _dated(
        self, seen: BeatSeen | SignalArrived, source: str
    ) -> BeatSeen | SignalArrived | None:
        """Return what lay in a log before we listened, at the moment that its stamp says.

        When it arrived nobody knows; its stamp is the best there is, and never later than now.
        Access lines have none and take that of the beat above them. Without one they are left
        out: an answer of yesterday must not look like one of now.
        """
        printed = seen.beat.printed if isinstance(seen, BeatSeen) else seen.signal.printed
        if printed is not None and printed.tzinfo is not None:
            now = self._clock.now()
            at = Instant(now + min(0.0, (printed - self._clock.wall()).total_seconds()))
            self._stamped[source] = at
        elif source in self._stamped:
            at = self._stamped[source]
        else:
            answered = isinstance(seen, SignalArrived) and seen.signal.signal is Signal.COMPLETED
            return None if answered else seen
        if isinstance(seen, BeatSeen):
            return replace(seen, beat=replace(seen.beat, at=at))
        return replace(seen, signal=replace(seen.signal, at=at))
