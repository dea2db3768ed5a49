"""The daemon's side of the black box: an optional record, which blinds nobody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hangwatch.daemon.children import Keeper, Launch, OneChild, launch
from hangwatch.daemon.roster import Roster
from hangwatch.model.observation import Observation
from hangwatch.model.time import Clock
from hangwatch.system.logs import log
from hangwatch.system.spawn import message_kind

RECORDER: Final = "hangwatch.daemon.recorder"

SILENCE: Final = 20.0
"""Seconds without a word of the recorder that are too long: it speaks every five, and writes to a
disk that may be slow for a while."""


class BlackBox(OneChild):
    """The recorder, once there is somebody to record; one of the loop's parts."""

    def __init__(self, *, clock: Clock, roster: Roster, ring: Path, start: Launch = launch) -> None:
        """Record nobody yet.

        Args:
            clock: Ours.
            roster: Knows the processes.
            ring: Where the record goes.
            start: Starts the recorder.
        """
        self._roster = roster
        self._ring = ring
        self._processes: dict[int, int] = {}
        self._keeper = Keeper(
            RECORDER,
            "recorder",
            clock=clock,
            silence=SILENCE,
            greet=lambda: (self._order(),),
            start=start,
        )

    def hear(self) -> tuple[Observation, ...]:
        """Look after the recorder; it observes nothing that decides."""
        processes = dict(self._roster.everyone())
        if not processes and not self._processes:
            return ()
        if processes != self._processes:
            self._processes = processes
            self._keeper.tell(self._order())
        for message in self._keeper.hear()[0]:
            if message_kind(message) == "problem":
                log.warning(
                    "hangwatch.black_box_not_written",
                    ring=str(self._ring),
                    problem=str(message.get("problem", "")),
                )
        return ()

    def _order(self) -> Mapping[str, Any]:
        return {
            "kind": "watch",
            "ring": str(self._ring),
            "processes": [[pid, ticks] for pid, ticks in self._processes.items()],
        }
