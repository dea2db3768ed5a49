"""The incidents of one turn: how alarms make them, and what is done about each.

Theory of operation
===================

An alarm opens an incident, or joins one that is open (``grouping.home`` says which), and the
capture starts with the first alarm of an incident: who alarms later is added to it. An incident
whose members were all captured a short while ago is kept and told, and captured no more. It closes
when its last member has recovered or is gone, whether its capture has ended or not.

A notice is an incident about engines that are well: nobody joins it, it cools nobody down, and who
gave it ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from hangwatch.core import grouping
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, IncidentState, Member
from hangwatch.model.observation import Action, CloseIncident, StartCapture, UpdateCapture
from hangwatch.model.policy import Policy
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import Verdict

MAX_CLOSED: Final = 200
"""Closed incidents that are remembered."""


class Incidents:
    """Copies of what is known of incidents, which one turn may change.

    Attributes:
        known: Open ones, and the latest closed.
        cooling: When each instance was last captured.
        serial: Number of the last incident.
    """

    def __init__(
        self,
        known: Iterable[Incident],
        cooling: Mapping[InstanceKey, Instant],
        serial: int,
        *,
        policy: Policy,
        epoch: Epoch,
        now: Instant,
        act: Callable[[Action], None],
    ) -> None:
        """Begin with what was known before.

        Args:
            known: As in the attribute.
            cooling: As in the attribute.
            serial: As in the attribute.
            policy: The limits.
            epoch: Maps instants to wall time.
            now: The present instant.
            act: Told what to do, in order.
        """
        self.known = list(known)
        self.cooling = dict(cooling)
        self.serial = serial
        self._policy = policy
        self._epoch = epoch
        self._now = now
        self._act = act

    def alarm(
        self, member: Member, *, interval: float, confirmed: bool, watched: Callable[[], int]
    ) -> None:
        """Take in that *member* alarms.

        Args:
            member: Who, and why.
            interval: Seconds between its beats.
            confirmed: Whether more than its log speaks of it.
            watched: Counts the instances that are watched.
        """
        reach = self._policy.together * interval
        i = grouping.home(self.known, member, reach, self._now)
        if i is None:
            i = len(self.known)
            self.known.append(
                Incident(
                    id=self._next_id(),
                    members=(member,),
                    watched=watched(),
                    verdict=member.verdict,
                    detected_at=self._now,
                    window=member.window,
                    confirmed=confirmed,
                )
            )
        else:
            self.known[i] = grouping.enroll(self.known[i], member, confirmed=confirmed)
        self._respond(i)

    def calm(
        self, instance: InstanceKey, after: Verdict, *, is_over: Callable[[Member], bool]
    ) -> None:
        """Take in that *instance* does not alarm; *is_over* says whether that ends what it had."""
        for i, incident in enumerate(self.known):
            if incident.state is IncidentState.CLOSED or incident.notice:
                continue
            mine = (m for m in incident.members if m.instance == instance)
            suffering = next((m for m in mine if m.recovered_at is None), None)
            if suffering is None or not is_over(suffering):
                continue
            self.known[i] = grouping.discharge(incident, instance, after, self._now)
            if self.known[i].state is IncidentState.CLOSED:
                self._act(CloseIncident(incident=self.known[i]))

    def captured(self, ident: str, at: Instant, bundle: str) -> None:
        """Take in that the capture of an incident ended."""
        for i, incident in enumerate(self.known):
            if incident.id != ident:
                continue
            closed = incident.state is IncidentState.CLOSED
            self.known[i] = replace(
                incident,
                state=IncidentState.CLOSED if closed else IncidentState.CAPTURED,
                bundle=bundle or incident.bundle,
            )
            for member in () if incident.notice else incident.members:
                self.cooling[member.instance] = at

    def give_notice(self, members: tuple[Member, ...], verdict: Verdict) -> None:
        """Begin one about engines that are well."""
        incident = Incident(
            id=self._next_id(),
            members=members,
            watched=len(members),
            verdict=verdict,
            detected_at=self._now,
            state=IncidentState.CAPTURING,
            confirmed=True,
            notice=True,
        )
        self.known.append(incident)
        self._act(StartCapture(incident=incident))

    def end_notices(self) -> None:
        """Close every notice."""
        for i, incident in enumerate(self.known):
            if incident.notice and incident.state is not IncidentState.CLOSED:
                self._close(i)

    def forget(self, present: Collection[InstanceKey], *, before: float) -> None:
        """Let go of what can matter no more.

        An incident of before a restart whose members were never seen again has nobody to end it.

        Args:
            present: Instances that are known.
            before: What is older may be forgotten.
        """
        for i, incident in enumerate(self.known):
            over = incident.state is IncidentState.CLOSED or incident.notice
            if over or incident.detected_at >= before:
                continue
            if all(
                m.recovered_at is not None or m.instance not in present for m in incident.members
            ):
                self._close(i)
        closed = [x for x in self.known if x.state is IncidentState.CLOSED]
        for incident in closed[: max(0, len(closed) - MAX_CLOSED)]:
            self.known.remove(incident)
        for key, captured_at in list(self.cooling.items()):
            if key not in present and captured_at < before:
                del self.cooling[key]

    def _next_id(self) -> str:
        self.serial += 1
        return grouping.incident_id(self._epoch, self._now, self.serial)

    def _respond(self, i: int) -> None:
        incident = self.known[i]
        if incident.state is IncidentState.CAPTURING:
            self._act(UpdateCapture(incident=incident))
        elif incident.state is IncidentState.OPEN and not all(
            self._is_cooling(member.instance, incident.detected_at) for member in incident.members
        ):
            self.known[i] = replace(incident, state=IncidentState.CAPTURING)
            self._act(StartCapture(incident=self.known[i]))

    def _is_cooling(self, key: InstanceKey, at: Instant) -> bool:
        """Say whether an incident that began *at* came too soon after the last capture."""
        captured_at = self.cooling.get(key)
        return captured_at is not None and at < captured_at + self._policy.cool_down

    def _close(self, i: int) -> None:
        closed = replace(self.known[i], state=IncidentState.CLOSED, closed_at=self._now)
        self.known[i] = closed
        self._act(CloseIncident(incident=closed))
