"""One look at logs: the beats that lie in them now, for a capture that no daemon prepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from hangwatch.daemon.followers import Followers
from hangwatch.daemon.loop import Ears
from hangwatch.model.discovery import LogOwner
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.observation import BeatSeen
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Clock, Instant

QUIET: Final = 0.7
"""Seconds in which nothing came: what lies there was read."""


def recent_beats(
    logs: Iterable[LogOwner],
    *,
    policy: Policy,
    profiles: Mapping[str, EngineProfile],
    clock: Clock,
    patience: float = 5.0,
) -> tuple[Heartbeat, ...]:
    """Return the beats at the end of *logs*, oldest first, each at the moment its stamp says.

    A child reads, so that a stalled filesystem costs *patience* seconds and no more.
    """
    owners = tuple(logs)
    followers = Followers(
        clock=clock, policy=policy, profiles=profiles, zone=lambda: clock.wall().tzinfo
    )
    followers.writers.update({o.log: o.pid for o in owners if o.pid is not None})
    followers.follow(owner.log for owner in owners)
    ears = Ears((followers,), clock=clock, pace=0.0)
    beats: list[Heartbeat] = []
    end = clock.now() + patience
    quiet_at: Instant | None = None
    try:
        while owners and clock.now() < end and (quiet_at is None or clock.now() < quiet_at):
            seen = ears.listen(0.1)
            beats += [observation.beat for observation in seen if isinstance(observation, BeatSeen)]
            if seen:
                quiet_at = Instant(clock.now() + QUIET)
    finally:
        followers.close()
    return tuple(sorted(beats, key=lambda beat: beat.at))
