"""What became of a hang after its bundle was written: when to look again, and what is said of it.

Theory of operation
===================

A bundle tells of one minute. Whether the engines stood there for ever, went on by themselves, or
were killed, and by whom, is known only later, and often to nobody. So they are looked at again, a
light sample each time: at the times that the policy names, and once more at the end, which is when
the last member of the incident has recovered, died or is gone; at once, because who died may not
have been reaped yet, and can still say of what. What was dead when it was captured has its end
when it is gone. Notices are about engines that are well, and are not followed up.

A sample whose end nobody saw (the daemon was killed) is taken anew. Times that passed while nobody
was there are made up for by one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hangwatch.core import contracts
from hangwatch.core.objects import integer, page, word
from hangwatch.model.capture import CaptureOutcome, CaptureRequest
from hangwatch.model.dossier import AftermathRecord, Citation
from hangwatch.model.identity import NEEDED, Role
from hangwatch.model.incident import Aftermath, Incident, IncidentState, Member
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Dead, Gone

SCHEMA: Final = "hangwatch.aftermath/1"
FILE: Final = "aftermath.json"
ENDS: Final = "ends.json"
"""What became of each process of the bundle, by the collector of that name."""

FROZEN: Final = "still_frozen"
RECOVERED: Final = "recovered"
ENDED: Final = "ended"
MIXED: Final = "mixed"


def begin(incident: Incident, bundle: str, at: Instant, policy: Policy) -> Aftermath | None:
    """Return what is to be followed up of a capture that has ended, ``None`` for nothing."""
    if not bundle or incident.notice or not policy.aftermath:
        return None
    return Aftermath(
        incident=incident.id,
        bundle=bundle,
        captured_at=at,
        looked_at=at,
        dead=_nobody_lives(incident),
    )


def due(pending: Aftermath, incident: Incident | None, policy: Policy) -> Instant | None:
    """Return when to look again; ``None`` while a look is under way, or until the end."""
    if pending.running:
        return None
    if is_over(pending, incident):
        return pending.captured_at
    times = (Instant(pending.captured_at + after) for after in policy.aftermath)
    return min((at for at in times if at > pending.looked_at), default=None)


def is_over(pending: Aftermath, incident: Incident | None) -> bool:
    """Say whether nothing more can come of an incident; of one that was forgotten nothing can."""
    if incident is None or incident.state is IncidentState.CLOSED:
        return True
    return _nobody_lives(incident) and not pending.dead


def _nobody_lives(incident: Incident) -> bool:
    return all(
        isinstance(member.verdict, Dead | Gone)
        for member in incident.members
        if member.recovered_at is None
    )


def looked(pending: Aftermath, at: Instant) -> Aftermath | None:
    """Return what is left to follow up after a look that ended *at*, ``None`` for nothing."""
    if pending.last:
        return None
    return replace(pending, running=False, taken=pending.taken + 1, looked_at=at)


# ---------------------------------------------------------------------- what is said


def document(
    request: CaptureRequest,
    outcome: CaptureOutcome,
    *,
    ends: Sequence[Mapping[str, Any]],
    kernel: Sequence[Mapping[str, Any]],
) -> bytes:
    """Return ``aftermath.json``.

    Args:
        request: What was asked for, after a bundle.
        outcome: What was captured.
        ends: The rows of ``ends.json``.
        kernel: The events of ``kernel_events.json``.
    """
    assert request.after is not None
    after = outcome.started_at - request.after.captured_at
    members = request.incident.members if request.incident is not None else ()
    gone = [row for row in ends if row.get("state") in ("gone", "Z")]
    instances = [_instance(request, member, gone) for member in members]
    said = {str(row["outcome"]) for row in instances}
    result = said.pop() if len(said) == 1 else MIXED
    ended = [_ended(row, kernel) for row in gone]
    head = {
        "schema": SCHEMA,
        "incident": request.id,
        "number": request.after.number,
        "last": request.after.last,
        "at": contracts.instant(request.epoch, outcome.started_at),
        "after_s": round(after, 1),
        "outcome": result,
        "sentence": _sentence(after, instances, ended),
    }
    return page(head, {"instances": instances, "ended": ended})


def _instance(
    request: CaptureRequest, member: Member, gone: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    name = member.instance.name
    lost = [
        row
        for row in gone
        if row.get("pid") == member.instance.pid
        or (row.get("instance") == name and row.get("role") in set(map(str, NEEDED)))
    ]
    over = member.recovered_at is not None
    ended = bool(lost) or (over and member.verdict.word in ("gone", "dead"))
    return {
        "name": name,
        "pid": member.instance.pid,
        "outcome": ENDED if ended else RECOVERED if over else FROZEN,
        **contracts.verdict_fields(request.epoch, member.verdict),
    }


def _ended(row: Mapping[str, Any], kernel: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is known of the end of one process."""
    pid = row.get("pid")
    told = [event for event in kernel if event.get("pid") == pid and pid is not None]
    oom = any(event.get("kind") == "oom_kill" for event in told)
    signal = integer(row.get("exit_signal"))
    by = "the kernel, for want of memory" if oom else f"signal {signal}" if signal else ""
    return {
        "pid": pid,
        "role": row.get("role"),
        "instance": row.get("instance"),
        "reaped": row.get("state") == "gone",
        "by": by,
        "kernel": [str(event.get("text")) for event in told],
        "parent": row.get("parent"),
    }


def _sentence(
    after: float, instances: Sequence[Mapping[str, Any]], ended: Sequence[Mapping[str, Any]]
) -> str:
    counts = {
        word: sum(row["outcome"] == word for row in instances)
        for word in (FROZEN, RECOVERED, ENDED)
    }
    of = len(instances)
    does = {FROZEN: "still stopped", RECOVERED: "working again", ENDED: "ended"}
    parts = [f"{count} of {of} {does[word]}" for word, count in counts.items() if count]
    how = next((row for row in ended if row["by"]), None)
    killed = f"; {_who(how)} was killed by {how['by']}" if how is not None else ""
    lost = f"; {_who(ended[0])} is gone" if ended and how is None else ""
    many = f" and {len(ended) - 1} more" if len(ended) > 1 and how is None else ""
    return f"{_time(after)} after the capture: {', '.join(parts) or 'unknown'}{killed}{lost}{many}"


def _who(row: Mapping[str, Any]) -> str:
    return f"{(word(row.get('role')) or str(Role.OTHER)).replace('_', ' ')} {row.get('pid')}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def record(raw: Mapping[str, Any], path: str) -> AftermathRecord | None:
    """Return what ``aftermath.json`` says, ``None`` if it is none."""
    sentence, result = word(raw.get("sentence")), word(raw.get("outcome"))
    if not sentence or not result:
        return None
    return AftermathRecord(
        number=integer(raw.get("number")) or 0,
        outcome=result,
        sentence=sentence,
        last=raw.get("last") is True,
        citation=Citation(path=path, line=1, text=sentence[:200]),
    )
