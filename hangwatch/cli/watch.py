"""``hangwatch watch``: the daemon."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hangwatch.cli import options
from hangwatch.errors import UsageError
from hangwatch.system.clock import SystemClock


@click.command(
    name="watch", short_help="The daemon: follow logs and endpoints, capture each incident once."
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="PATTERN",
    help="Log to follow: a path, a quoted glob, a folder, or - for standard input, which is "
    "passed through. Repeat it for several. Without it, Ray sessions are looked for.",
)
@options.settings
@click.option(
    "--lease-file",
    metavar="PATH",
    help="File that announces a pause when it is written, on a volume shared with those who "
    "pause: 20m, or 20m REASON.",
)
@click.option(
    "--observe-only",
    is_flag=True,
    default=None,
    help="Only report incidents: capture nothing, and write down what would have been captured.",
)
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Answer GET /metrics and /healthz there; port 0 picks one  [default: nowhere]",
)
@click.option("--json", "as_json", is_flag=True, help="Print every event as a JSON line.")
def command(logs: tuple[str, ...], config: Path | None, as_json: bool, **flags: Any) -> None:
    """Follow logs, endpoints and processes; capture each incident once.

    Logs that do not exist yet are waited for. SIGTERM or Ctrl-C ends it; a capture that runs
    then is finished first.
    """
    from hangwatch.daemon import copier
    from hangwatch.daemon.settings import resolve
    from hangwatch.daemon.wiring import Watch
    from hangwatch.system.logs import LineWriter, configure

    resolved = resolve({"log": logs, **flags}, file=config)
    patterns = resolved.settings.log
    if any(not pattern for pattern in patterns):
        raise UsageError("--log needs a path or a pattern, not an empty string")
    if "-" in patterns and as_json:
        raise UsageError(
            "--json and --log - both want standard output: follow a file, or leave out --json"
        )
    streams = copier.start() if "-" in patterns else {}
    writer = configure(form=resolved.settings.log_format)
    output = LineWriter(1, confess=missing) if as_json else LineWriter(1)

    def tell(event: Mapping[str, Any]) -> None:
        if as_json:
            output.write(json.dumps(event, ensure_ascii=True))
        elif event["event"] == "bundle" and not streams:
            output.write(event["bundle"])

    try:
        Watch(resolved, streams=streams, tell=tell).run()
    finally:
        output.close()
        writer.close()


def missing(lines: int) -> str:
    """Return the event that says how many could not be printed: nobody read them in time."""
    at = SystemClock().wall().isoformat(timespec="milliseconds")
    return json.dumps(
        {"schema": "hangwatch.watch/1", "event": "missing", "at": at, "events": lines}
    )
