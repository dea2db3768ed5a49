"""Times and zones as options of the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo

import click

from hangwatch.core.durations import seconds_of


def moment(text: str) -> datetime:
    """Return the time that an option says: ``2026-03-04T14:02:00+08:00``; naive without an offset.

    Raises:
        click.BadParameter: It is none.
    """
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no time: write 2026-03-04T14:02:00+08:00") from None


def offset(text: str) -> tzinfo:
    """Return the zone that an option says: ``+08:00`` or ``Z``.

    Raises:
        click.BadParameter: It is none.
    """
    match = re.fullmatch(r"(?P<sign>[+-])(?P<hours>[01]\d|2[0-3]):?(?P<minutes>[0-5]\d)", text)
    if text.upper() in ("Z", "UTC"):
        return UTC
    if match is None:
        raise click.BadParameter(f"{text!r} is no offset: write +08:00")
    difference = timedelta(hours=int(match["hours"]), minutes=int(match["minutes"]))
    return timezone(-difference if match["sign"] == "-" else difference)


def duration(text: str) -> float:
    """Return the seconds that an option says: ``90``, ``90s``, ``20m``, ``1h30m``.

    Raises:
        click.BadParameter: It says none.
    """
    try:
        return seconds_of(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def zone_of(now: datetime | None, zone: tzinfo | None) -> tzinfo:
    """Return the zone of naive stamps: that of the evaluation time, else the given, else ours."""
    if now is not None and now.tzinfo is not None:
        return now.tzinfo
    local = datetime.now().astimezone().tzinfo
    assert local is not None
    return zone or local


def in_zone(now: datetime | None, zone: tzinfo) -> datetime | None:
    """Return the evaluation time with its offset."""
    return now if now is None or now.tzinfo is not None else now.replace(tzinfo=zone)
