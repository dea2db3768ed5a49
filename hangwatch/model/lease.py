"""Announced pauses."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.time import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Somebody announced that the engines will stand still for a while.

    Attributes:
        id: Tells leases apart; a second one with the same id replaces the first.
        at: When it was taken.
        until: When it ends by itself, capped by the policy.
        reason: In the words of who took it, or ``""``.
        holder: Who took it, for people: ``pid 4242``, ``/shared/lease``.
    """

    id: str
    at: Instant
    until: Instant
    reason: str = ""
    holder: str = ""
