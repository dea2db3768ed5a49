"""Takes the baseline: a look at every process that is well, every ten minutes.

Nothing is looked at while an incident is open or a capture runs, whose evidence must not wait for
it; nor while more threads want to run than the host has time for. A look that an incident overtakes
is dropped on the spot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hangwatch.core import baseline, fleet
from hangwatch.core.baseline import CROWDED, Turn
from hangwatch.daemon.children import Launch, Wire, launch
from hangwatch.daemon.errand import Errand
from hangwatch.model.capture import CaptureRequest
from hangwatch.model.incident import Incident, IncidentState
from hangwatch.model.observation import Observation
from hangwatch.model.time import Clock, Instant
from hangwatch.system.logs import log


class Baseline:
    """Has looks taken; one of the loop's parts."""

    def __init__(
        self,
        *,
        clock: Clock,
        interval: float,
        request: Callable[[], CaptureRequest],
        start: Launch = launch,
        most: float = CROWDED,
        load: Callable[[], float] = lambda: os.getloadavg()[0] / (os.cpu_count() or 1),
    ) -> None:
        """Have taken no look yet.

        Args:
            clock: Ours.
            interval: Seconds between two looks, 0 for none.
            request: Makes the order for a look.
            start: Starts a conductor.
            most: Threads that want to run, for each core, above which no look is taken.
            load: Returns how many there are.
        """
        self._clock = clock
        self._request = request
        self._most, self._load = most, load
        self._errand = Errand("baseline", clock=clock, tell=self._told, start=start)
        self._turn = Turn(interval=interval)

    @property
    def losses(self) -> int:
        """How often a conductor was lost."""
        return self._errand.losses

    def consider(self, state: fleet.State, *, capturing: bool) -> None:
        """Take a look if it is time for one and nothing stands in the way; never wait.

        Args:
            state: As it stands.
            capturing: Whether a capture runs, or the daemon ends.
        """
        now = self._clock.now()
        if capturing or any(is_open(incident) for incident in state.incidents):
            if self._errand.running:
                self._errand.close()
                log.info("hangwatch.baseline_dropped")
            self._turn = replace(self._turn, well_since=None)
            return
        well = any(verdict.word in baseline.KEPT for verdict in state.verdicts.values())
        since = (self._turn.well_since or now) if well else None
        self._turn = replace(self._turn, well_since=since)
        if self._errand.running or not self._turn.due(now):
            return
        load = self._load()
        if load > self._most:
            log.info("hangwatch.baseline_postponed", load_a_core=round(load, 1))
            self._turn = replace(self._turn, not_before=Instant(now + baseline.RETRY_AFTER))
        elif self._errand.begin(self._request()):
            self._turn = replace(self._turn, last_at=now)
        else:
            self._turn = replace(self._turn, not_before=Instant(now + baseline.RETRY_AFTER))

    def wires(self) -> Iterable[Wire]:
        """Return the channel of the conductor."""
        return self._errand.wires()

    def hear(self) -> tuple[Observation, ...]:
        """Take in what the conductor said; a look is no observation."""
        return self._errand.hear()

    def _told(self, said: Mapping[str, Any]) -> None:
        if said.get("kind") == "baseline":
            facts = ("processes", "failed", "dropped", "elapsed_s")
            log.info("hangwatch.baseline_taken", **{fact: said.get(fact) for fact in facts})
        else:
            log.warning("hangwatch.baseline_failed", error=str(said.get("error", "")))

    def close(self) -> None:
        """End the conductor."""
        self._errand.close()


def is_open(incident: Incident) -> bool:
    """Say whether something is wrong that goes on; a notice says only that nothing is done."""
    return incident.state is not IncidentState.CLOSED and not incident.notice
