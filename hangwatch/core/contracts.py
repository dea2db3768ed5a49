"""The documents that programs read: values as the contracts of the command line have them.

Times are RFC 3339 with an offset. More fields may be added; those that are there stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from hangwatch.model.dossier import InstanceRecord
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.incident import Incident, Transition
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.tuning import Tuning
from hangwatch.model.verdict import StopWindow, Verdict

REPLAY: Final = "hangwatch.replay/1"
TUNE: Final = "hangwatch.tune/1"


def moment(wall: datetime) -> str:
    """Return *wall* as RFC 3339; fractions only where there are any."""
    return wall.isoformat(timespec="milliseconds" if wall.microsecond >= 500 else "seconds")


def instant(epoch: Epoch, at: Instant) -> str:
    """Return the wall time of *at* as RFC 3339."""
    return moment(epoch.wall_of(at))


def window(epoch: Epoch, found: StopWindow | None) -> list[str] | None:
    """Return a window as its two ends."""
    if found is None:
        return None
    return [instant(epoch, found.earliest), instant(epoch, found.latest)]


def last_heartbeat(epoch: Epoch, beat: Heartbeat | None) -> str | None:
    """Return the stamp that the beat carries, or else when it arrived."""
    if beat is None:
        return None
    if beat.printed is not None:
        printed = beat.printed
        return moment(printed if printed.tzinfo else printed.replace(tzinfo=epoch.wall.tzinfo))
    return instant(epoch, beat.at)


def verdict_fields(epoch: Epoch, verdict: Verdict) -> dict[str, Any]:
    """Return what every verdict carries."""
    return {
        "verdict": verdict.word,
        "cause": verdict.cause,
        "confidence": verdict.confidence.value,
        "since": instant(epoch, verdict.since),
        "because": list(verdict.because),
    }


def instances(epoch: Epoch, records: Iterable[InstanceRecord]) -> list[dict[str, Any]]:
    """Return one object an instance."""
    return [
        {
            "name": record.instance.name,
            "pid": record.instance.pid,
            "host": record.instance.host,
            "tag": record.instance.tag,
            **verdict_fields(epoch, record.verdict),
            "last_heartbeat": last_heartbeat(epoch, record.last_beat),
            "window": window(epoch, record.window),
        }
        for record in records
    ]


def transition(epoch: Epoch, change: Transition) -> dict[str, Any]:
    """Return one change of one verdict."""
    return {
        "at": instant(epoch, change.at),
        "instance": change.instance.name,
        "pid": change.instance.pid,
        "before": change.before.word if change.before is not None else None,
        "after": change.after.word,
        **verdict_fields(epoch, change.after),
    }


def incident(epoch: Epoch, found: Incident) -> dict[str, Any]:
    """Return one incident."""
    return {
        "id": found.id,
        **verdict_fields(epoch, found.verdict),
        "detected_at": instant(epoch, found.detected_at),
        "closed_at": None if found.closed_at is None else instant(epoch, found.closed_at),
        "window": window(epoch, found.window),
        "watched": found.watched,
        "confirmed": found.confirmed,
        "instances": [member.instance.name for member in found.members],
    }


def replayed(result: ReplayResult) -> dict[str, Any]:
    """Return the document of ``hangwatch replay --json``."""
    epoch = result.epoch
    return {
        "schema": REPLAY,
        "until": instant(epoch, result.until),
        **verdict_fields(epoch, result.verdict),
        "window": window(epoch, result.window),
        "heartbeats": result.heartbeats,
        "instances": instances(epoch, result.instances),
        "transitions": [transition(epoch, change) for change in result.transitions],
        "incidents": [incident(epoch, found) for found in result.incidents],
        "stalls": [
            {
                "instance": stall.instance.name,
                "since": instant(epoch, stall.since),
                "seconds": round(stall.seconds, 3),
            }
            for stall in result.stalls
        ],
        "policy": {
            "heartbeat_interval_s": result.policy.heartbeat_interval,
            "stall_after_s": result.policy.stall_after,
            "missed_beats": result.policy.missed_beats,
        },
        "notes": list(result.notes),
        "problems": list(result.problems),
    }


def tuned(result: Tuning) -> dict[str, Any]:
    """Return the document of ``hangwatch replay --tune --json``."""
    return {
        "schema": TUNE,
        "heartbeats": result.heartbeats,
        "instances": result.instances,
        "engine_hours": round(result.hours, 3),
        "gaps": result.gaps,
        "enough": result.enough,
        "settings": [
            {
                "stall_after_s": setting.stall_after,
                "false_alarms": setting.false,
                "stops_found": setting.found,
                "stops_missed": setting.missed,
            }
            for setting in result.settings
        ],
        "silences": [
            {
                "instance": silence.instance.name,
                "since": instant(result.epoch, silence.since),
                "seconds": round(silence.seconds, 3),
                "ended": silence.ended,
            }
            for silence in result.silences
        ],
        "present_s": result.present,
        "calibrated_s": round(result.calibrated, 3),
        "recommended_s": result.recommended,
        "reason": result.reason,
    }
