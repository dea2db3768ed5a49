"""A fleet without work, while a job lives that should bring some.

Theory of operation
===================

Idle engines are nothing to worry about, and a whole fleet of them may be as planned: disaggregated
reinforcement learning leaves every engine without work for a training step. But a producer that
hangs looks the same from the engines, and burns the same GPUs.

So it is a notice and no alarm, given once an episode, and only where a job is known to run: its
driver is seen, or the policy says so. It is given when the fleet has been idle for three times as
long as it ever was before, and not before ``starved_after`` seconds. A sleeping engine is not idle;
its limit is another one.

An episode ends with the next progress of any engine, with an alarm, or with a sleep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from hangwatch.model.identity import Role
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import ALARMS, Gone, Idle, Paused, Verdict
from hangwatch.model.vitals import ProcessVital

IDLE: Final = "not-a-hang:idle"

STARVED: Final = "starved-upstream"
"""Cause of the notice; the verdict stays ``idle``."""

TIMES: Final = 3.0
"""Times the longest idleness of the fleet so far that is worth a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """How long the whole fleet has been without work.

    Attributes:
        since: Since when, or ``None`` while any engine has some.
        whole: Whether every engine is idle now, as far as it can be seen.
        longest: Longest such time that ended, seconds.
        told: Whether a notice was given of this one.
    """

    since: Instant | None = None
    whole: bool = False
    longest: float = 0.0
    told: bool = False


def observe(
    known: Idleness,
    verdicts: Iterable[Verdict],
    *,
    progress_at: Instant | None,
    now: Instant,
) -> Idleness:
    """Return what is known after a look at every engine.

    An engine of which nothing is known yet (loading, or not heard since we were restarted) neither
    begins nor ends an idleness.

    Args:
        known: What was known before.
        verdicts: Of every engine.
        progress_at: Last progress of any engine.
        now: The present instant.
    """
    present = [verdict for verdict in verdicts if not isinstance(verdict, Gone)]
    if known.since is not None:
        worked = progress_at is not None and progress_at > known.since
        if worked or any(isinstance(verdict, (Paused, *ALARMS)) for verdict in present):
            ended_at = progress_at if worked and progress_at is not None else now
            known = Idleness(longest=max(known.longest, ended_at - known.since))
    whole = bool(present) and all(_is_idle(verdict) for verdict in present)
    since = known.since
    if whole and since is None:
        since = Instant(max(verdict.since for verdict in present))
    return replace(known, since=since, whole=whole)


def _is_idle(verdict: Verdict) -> bool:
    return isinstance(verdict, Idle) and verdict.cause in (IDLE, STARVED)


def due(known: Idleness, policy: Policy) -> Instant | None:
    """Return when a notice is due, if a job lives; ``None`` while there is work, or once told."""
    if known.since is None or not known.whole or known.told:
        return None
    return Instant(known.since + max(policy.starved_after, TIMES * known.longest))


def job_lives(processes: Iterable[ProcessVital], policy: Policy) -> bool:
    """Say whether a job runs that should bring work."""
    return policy.job_running or any(
        process.role is Role.DRIVER and not process.ended for process in processes
    )
