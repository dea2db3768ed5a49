"""``hangwatch lease``: announce a pause to the daemon of this machine."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import click

from hangwatch.cli.times import duration
from hangwatch.core.durations import spelled
from hangwatch.errors import UsageError

PATIENCE = 5.0
"""Seconds that the daemon's answer may take; a person can wait longer than a training step."""

SCHEMA = "hangwatch.lease/1"


@click.command(name="lease", short_help="Announce that the engines will stand still for a while.")
@click.option("--for", "seconds", type=duration, metavar="TIME", help="How long: 90s, 20m, 1h30m.")
@click.option("--reason", default="", metavar="TEXT", help="What for, for those who read the log.")
@click.option("--return", "ident", metavar="ID", help="End an announced pause before its time.")
@click.option(
    "--state",
    metavar="DIR",
    help="The state directory of the daemon  "
    "[default: $HANGWATCH_STATE, $STATE_DIRECTORY or ~/.local/state/hangwatch]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    seconds: float | None, reason: str, ident: str | None, state: str | None, as_json: bool
) -> None:
    """Announce a legitimate pause, so that silence raises no alarm while it lasts.

    Prints the id of the lease, which --return takes. The daemon cuts what is longer than its
    lease_limit, and the answer says so.
    """
    from hangwatch.system import leasing

    if (seconds is None) == (ident is None):
        raise UsageError("say either --for TIME, to announce a pause, or --return ID, to end one")
    folder = leasing.state_of_daemon(state)
    if ident is not None:
        leasing.give_back(ident, state=folder, timeout=PATIENCE)
        if as_json:
            click.echo(json.dumps({"schema": SCHEMA, "returned": ident}))
        return
    assert seconds is not None
    ident = leasing.new_id()
    granted = leasing.take(seconds, ident=ident, reason=reason, state=folder, timeout=PATIENCE)
    until = datetime.now().astimezone() + timedelta(seconds=granted)
    if as_json:
        result = {
            "schema": SCHEMA,
            "lease": ident,
            "seconds": granted,
            "until": until.isoformat(timespec="seconds"),
            "capped": granted < seconds,
        }
        click.echo(json.dumps(result))
        return
    cut = f", cut from {spelled(seconds)} by the daemon's lease_limit" if granted < seconds else ""
    click.echo(f"granted until {until:%H:%M:%S} ({spelled(granted)}{cut})", err=True)
    click.echo(ident)
