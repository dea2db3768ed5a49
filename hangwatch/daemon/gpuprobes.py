"""The daemon's side of the child that looks at GPUs: an optional witness, which blinds nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.daemon.children import Keeper, Launch, OneChild, launch
from hangwatch.daemon.roster import Roster
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import GpusSeen, Observation
from hangwatch.model.time import Clock
from hangwatch.system.logs import log
from hangwatch.system.spawn import message_kind

CHILD: Final = "hangwatch.daemon.gpus"

INTERVAL: Final = 10.0
"""Seconds between two looks while all is well."""

CLOSER_INTERVAL: Final = 5.0
"""Seconds between two looks while a beat is missing."""

SILENCE: Final = 20.0
"""Seconds without a word of the child that are too long: drivers take their time to wake up."""


class GpuProbes(OneChild):
    """The child that looks at GPUs, once there is somebody to look at; one of the loop's parts."""

    def __init__(self, *, clock: Clock, roster: Roster, start: Launch = launch) -> None:
        """Look at nothing yet.

        Args:
            clock: Ours.
            roster: Knows the processes.
            start: Starts the child.
        """
        self._roster = roster
        self._watched: dict[InstanceKey, tuple[int, ...]] = {}
        self._interval = INTERVAL
        self._ended = False
        self._keeper = Keeper(
            CHILD, "gpus", clock=clock, silence=SILENCE, greet=lambda: (self._order(),), start=start
        )

    def hear(self) -> tuple[Observation, ...]:
        """Return what was seen; look after the child."""
        known = {key: self._roster.kin_of((key,)) for key in self._roster.processes()}
        watched = {key: pids for key, pids in known.items() if pids}
        if self._ended or not (watched or self._watched):
            return ()
        if watched != self._watched:
            self._watched = watched
            self._keeper.tell(self._order())
        observations: list[Observation] = []
        for message in self._keeper.hear()[0]:
            observations += self._understand(message)
        return tuple(observations)

    def look_closer(self, instances: Collection[InstanceKey]) -> None:
        """Look more often while there are such instances."""
        interval = CLOSER_INTERVAL if instances else INTERVAL
        if interval != self._interval:
            self._interval = interval
            self._keeper.tell(self._order())

    def _order(self) -> Mapping[str, Any]:
        return {
            "kind": "watch",
            "interval": self._interval,
            "instances": [
                {"instance": to_plain(instance), "pids": list(pids)}
                for instance, pids in self._watched.items()
            ],
        }

    def _understand(self, message: Mapping[str, Any]) -> tuple[Observation, ...]:
        try:
            match message_kind(message):
                case "observations":
                    seen: tuple[GpusSeen, ...] = from_plain(
                        tuple[GpusSeen, ...], message.get("items", ())
                    )
                    return seen
                case "none":
                    self._ended = True
                    self._keeper.close(0.2)
                    log.info(
                        "hangwatch.gpus_not_watched",
                        reason=message.get("reason", ""),
                        hint=message.get("hint", ""),
                    )
                case _:
                    pass
        except CodecError as error:
            log.error("hangwatch.probe_unreadable", error=str(error))
        return ()
