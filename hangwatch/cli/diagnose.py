"""``hangwatch diagnose``: explains a bundle, or loose evidence."""

from __future__ import annotations

import os
import sys
from datetime import datetime, tzinfo
from pathlib import Path

import click

from hangwatch.cli.options import config as with_config
from hangwatch.cli.options import defined_in, limits
from hangwatch.cli.times import in_zone, moment, zone_of
from hangwatch.core.diagnosis import ALARM_WORDS
from hangwatch.model.policy import Policy

FOUND = 3
"""Exit code when the answer is an alarm."""


@click.command(name="diagnose", short_help="Explain a bundle, or loose evidence.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--now",
    type=moment,
    metavar="TIME",
    help="When to evaluate loose evidence; its end by default.",
)
@limits
@click.option(
    "--profile",
    "engine",
    metavar="NAME",
    default="",
    help="The only engine to look for  [default: all that are known]",
)
@with_config
def command(
    paths: tuple[Path, ...],
    *,
    as_json: bool,
    now: datetime | None,
    zone: tzinfo | None,
    heartbeat_interval: float | None,
    stall_after: float,
    engine: str,
    config: Path | None,
) -> None:
    """Explain what happened.

    PATHS are one bundle (packed or unpacked), one folder of loose evidence (logs, threads.json,
    procs.json, health.json …), or any number of such files; what hangwatch-rescue.py printed is
    one. Exit code 3 says that the answer is an alarm. The limits count for loose evidence; a bundle
    brings its own.
    """
    from hangwatch.capture import reading
    from hangwatch.registry import renderers
    from hangwatch.renderers import terminal

    naive = zone_of(now, zone)
    dossier = reading.read(
        paths,
        policy=Policy(heartbeat_interval=heartbeat_interval, stall_after=stall_after),
        now=in_zone(now, naive),
        # What was taken elsewhere may know its own zone.
        zone=None if now is None and zone is None else naive,
        profile=engine,
        defined=defined_in(config),
    )
    diagnosis = reading.explain(dossier)
    if as_json:
        click.echo(renderers()["json"].render(diagnosis), nl=False)
    else:
        click.echo(terminal.page(diagnosis, colour=wants_colour()), nl=False, color=True)
    if diagnosis.verdict in ALARM_WORDS:
        sys.exit(FOUND)


def wants_colour() -> bool:
    """Say whether standard output is a terminal whose user did not ask for plain text."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
