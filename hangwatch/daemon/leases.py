"""The daemon's side of the lessor: which pauses are announced, and when they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.daemon.children import Keeper, Launch, OneChild, launch
from hangwatch.model.lease import Lease
from hangwatch.model.observation import LeaseReturned, LeaseTaken, Observation
from hangwatch.model.policy import Policy
from hangwatch.model.time import Clock, Instant
from hangwatch.system.logs import log
from hangwatch.system.spawn import message_kind

LESSOR: Final = "hangwatch.daemon.lessor"


class Listener(Protocol):
    """Whom announced pauses are told to."""

    def __call__(self, what: str, lease: Lease, **facts: Any) -> None:
        """Take note: *what* is ``taken``, ``returned`` or ``ended``."""


class Leases(OneChild):
    """The lessor, and what it granted; one of the loop's parts.

    Attributes:
        held: What was granted and has not ended, by id.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        policy: Policy,
        socket: Path,
        file: Path | None,
        known: Iterable[Lease] = (),
        tell: Listener,
        start: Launch = launch,
    ) -> None:
        """Know what an earlier daemon granted.

        Args:
            clock: Ours.
            policy: The limits.
            socket: Where the lessor listens.
            file: Where it looks for announcements, too.
            known: What was granted before.
            tell: Told what becomes of each.
            start: Starts the lessor.
        """
        self.held = {lease.id: lease for lease in known}
        self._clock = clock
        self._policy = policy
        self._socket = socket
        self._file = file
        self._tell = tell
        self._keeper = Keeper(
            LESSOR,
            "lessor",
            clock=clock,
            silence=policy.child_silence,
            greet=self._order,
            start=start,
        )

    def hear(self) -> tuple[Observation, ...]:
        """Return what was announced; look after the lessor."""
        messages, _ = self._keeper.hear()
        observations: list[Observation] = []
        for message in messages:
            try:
                observations += self._understand(message)
            except (CodecError, KeyError, TypeError, ValueError) as error:
                log.error("hangwatch.lease_unreadable", error=str(error))
        now = self._clock.now()
        for lease in [lease for lease in self.held.values() if lease.until <= now]:
            del self.held[lease.id]
            self._tell("ended", lease)
        return tuple(observations)

    def _order(self) -> Iterable[Mapping[str, Any]]:
        yield {
            "kind": "serve",
            "socket": str(self._socket),
            "file": str(self._file or ""),
            "limit": self._policy.lease_limit,
            "leases": to_plain(tuple(self.held.values())),
        }

    def _understand(self, message: Mapping[str, Any]) -> tuple[Observation, ...]:
        match message_kind(message):
            case "taken":
                lease: Lease = from_plain(Lease, message["lease"])
                self.held[lease.id] = lease
                self._tell(
                    "taken",
                    lease,
                    seconds=round(lease.until - lease.at, 3),
                    capped=float(message["asked"]) > self._policy.lease_limit,
                )
                return (LeaseTaken(lease=lease),)
            case "returned":
                at = Instant(float(message["at"]))
                returned = self.held.pop(str(message["id"]), None)
                if returned is not None:
                    self._tell("returned", returned)
                    return (LeaseReturned(id=returned.id, at=at),)
            case "problem" if message["problem"]:
                log.warning(
                    "hangwatch.leases_unheard", through=message["of"], problem=message["problem"]
                )
            case "problem":
                log.info("hangwatch.leases_heard_again", through=message["of"])
            case _:
                pass
        return ()
