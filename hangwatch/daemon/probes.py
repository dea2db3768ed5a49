"""The daemon's side of the prober: asks it to watch the processes that are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.daemon.children import Hearing, Keeper, Launch, OneChild, launch
from hangwatch.daemon.roster import Roster
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import (
    ChildBack,
    ChildSilent,
    CountersSeen,
    HealthSeen,
    Observation,
    ProcessesSeen,
)
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Clock
from hangwatch.system.logs import log
from hangwatch.system.spawn import message_kind

PROBER: Final = "hangwatch.daemon.prober"


class Probes(OneChild):
    """The prober, once there is somebody to probe; one of the loop's parts."""

    def __init__(
        self,
        *,
        clock: Clock,
        policy: Policy,
        profiles: Mapping[str, EngineProfile],
        roster: Roster,
        key_file: str = "",
        start: Launch = launch,
    ) -> None:
        """Probe nobody yet.

        Args:
            clock: Ours.
            policy: The limits.
            profiles: Engines that may be met, by name; a sole one is assumed where nothing says.
            roster: Knows the processes and their engines; learns addresses and kin.
            key_file: File with API keys of the servers, or ``""``.
            start: Starts the prober.
        """
        self._clock = clock
        self._policy = policy
        self._profiles = profiles
        self._roster = roster
        self._key_file = key_file
        self._watched: dict[InstanceKey, tuple[int, str]] = {}
        self._closer: tuple[InstanceKey, ...] = ()
        self._keeper = Keeper(
            PROBER,
            "prober",
            clock=clock,
            silence=policy.child_silence,
            greet=lambda: (self._order(), self._attention()),
            start=start,
        )

    def hear(self) -> tuple[Observation, ...]:
        """Return what was probed; look after the prober."""
        known = {
            instance: (pid, self._roster.profile_of(instance) or self._only_profile)
            for instance, pid in self._roster.processes().items()
        }
        if not known and not self._watched:
            return ()
        if known != self._watched:
            self._watched = known
            self._keeper.tell(self._order())
        messages, hearing = self._keeper.hear()
        observations: list[Observation] = []
        for message in messages:
            observations += self._understand(message)
        if hearing is Hearing.LOST:
            since = self._keeper.heard_at
            reason = "the prober has said nothing since then"
            watched = tuple(self._watched)
            observations.append(ChildSilent(at=since, reason=reason, instances=watched))
        elif hearing is Hearing.BACK:
            now = self._clock.now()
            observations.append(ChildBack(at=now, instances=tuple(self._watched)))
        return tuple(observations)

    @property
    def _only_profile(self) -> str:
        """Return the one engine that there can be, or ``""``: then its sockets are not asked."""
        return next(iter(self._profiles)) if len(self._profiles) == 1 else ""

    def look_closer(self, instances: Collection[InstanceKey]) -> None:
        """Look closely at *instances*, and at no others, from now on."""
        closer = tuple(key for key in self._watched if key in instances)
        if closer != self._closer:
            self._closer = closer
            self._keeper.tell(self._attention())

    def _order(self) -> Mapping[str, Any]:
        return {
            "kind": "watch",
            "profiles": to_plain(tuple(self._profiles.values())),
            "interval": self._policy.heartbeat_interval,
            "period": self._policy.probe_interval,
            "key_file": self._key_file,
            "instances": [
                {"instance": to_plain(instance), "pid": pid, "profile": profile}
                for instance, (pid, profile) in self._watched.items()
            ],
        }

    def _attention(self) -> Mapping[str, Any]:
        return {"kind": "closer", "instances": to_plain(self._closer)}

    def _understand(self, message: Mapping[str, Any]) -> tuple[Observation, ...]:
        try:
            match message_kind(message):
                case "observations":
                    kind = tuple[HealthSeen | CountersSeen | ProcessesSeen, ...]
                    seen: tuple[HealthSeen | CountersSeen | ProcessesSeen, ...] = from_plain(
                        kind, message.get("items", ())
                    )
                    for observation in seen:
                        if isinstance(observation, ProcessesSeen):
                            self._roster.forget(p.pid for p in observation.processes if not p.state)
                    return seen
                case "found":
                    instance: InstanceKey = from_plain(InstanceKey, message["instance"])
                    address = str(message.get("address", ""))
                    pids = tuple(int(pid) for pid in message.get("pids", ()))
                    self._roster.find(instance, url=address, kin=pids)
                    if address:  # the processes alone are known a moment earlier
                        log.info(
                            "hangwatch.server_found", instance=instance.name, url=address, pids=pids
                        )
                case "company":
                    self._roster.accompany({int(pid): int(at) for pid, at in message["processes"]})
                case "refused":
                    refused: InstanceKey = from_plain(InstanceKey, message["instance"])
                    log.warning(
                        "hangwatch.endpoint_refused",
                        instance=refused.name,
                        path=message["path"],
                        status=message["status"],
                        hint=self._remedy(int(message["keys"])),
                    )
                case "keys_unreadable":
                    log.warning("hangwatch.api_keys_not_read", problem=message["problem"])
                case _:
                    pass
        except (CodecError, KeyError, ValueError) as error:
            log.error("hangwatch.probe_unreadable", error=str(error))
        return ()

    def _remedy(self, keys: int) -> str:
        if keys:
            return f"it accepts none of the {keys} keys in {self._key_file}"
        return "give a file with the API key of the server: --api-key-file FILE"
