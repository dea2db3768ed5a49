"""Stands where the responder does, and only says what that one would have done.

Nothing of a target is touched: an incident is withheld as soon as its members are known and stage
A would have been over, for what is judged by then is what a capture would have been about.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hangwatch.daemon.children import Wire
from hangwatch.daemon.responder import SETTLING
from hangwatch.model.incident import Incident
from hangwatch.model.observation import CaptureEnded, Observation
from hangwatch.model.time import Clock, Instant


@dataclass(slots=True)
class _Withheld:
    incident: Incident
    since: Instant


class Shadow:
    """Withholds the captures of incidents; one of the loop's parts."""

    def __init__(
        self, *, clock: Clock, stage_a: float, withhold: Callable[[Incident], None]
    ) -> None:
        """Have nothing to withhold yet.

        Args:
            clock: Ours.
            stage_a: Seconds that stage A would take.
            withhold: Told each incident that is not captured, once.
        """
        self.stopping = False
        self.losses = 0
        self._clock = clock
        self._stage_a = stage_a
        self._withhold = withhold
        self._waiting: dict[str, _Withheld] = {}
        self._ended: list[Observation] = []

    @property
    def busy(self) -> bool:
        """Whether an incident waits to be withheld, or for the loop to hear that it was."""
        return bool(self._waiting or self._ended)

    def begin(self, incident: Incident) -> None:
        """Take in an incident."""
        self._waiting.setdefault(incident.id, _Withheld(incident, self._clock.now()))

    def update(self, incident: Incident) -> None:
        """Take note that *incident* changed."""
        if incident.id in self._waiting:
            self._waiting[incident.id].incident = incident

    def answer(self, incidents: Iterable[Incident], *, unsettled: Collection[str] = ()) -> None:
        """Withhold what has settled; see ``Responder.answer``."""
        for incident in incidents:
            self.update(incident)
        now = self._clock.now()
        for ident, waiting in tuple(self._waiting.items()):
            waited = now - waiting.since - self._stage_a
            if waited >= (SETTLING if ident in unsettled else 0.0):
                self._end(ident)

    def stop(self) -> None:
        """Withhold at once what waits."""
        self.stopping = True
        for ident in tuple(self._waiting):
            self._end(ident)

    def close(self) -> None:
        """Have nothing to end."""

    def wires(self) -> Iterable[Wire]:
        """Return no channel: there is no child."""
        return ()

    def hear(self) -> tuple[Observation, ...]:
        """Return which incidents are done with."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _end(self, ident: str) -> None:
        self._withhold(self._waiting.pop(ident).incident)
        at = self._clock.now()
        self._ended.append(CaptureEnded(incident=ident, at=at, error="observed only"))
