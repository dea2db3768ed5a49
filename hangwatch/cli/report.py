"""``hangwatch report``: a bundle in one of the forms there are."""

from __future__ import annotations

from pathlib import Path

import click

from hangwatch.cli.diagnose import wants_colour

FORMATS = ("terminal", "markdown", "issue", "json")


@click.command(name="report", short_help="Show the report of a bundle.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="terminal",
    show_default=True,
    help="terminal: plain text; markdown: REPORT.md; issue: text for the engine's tracker; "
    "json: hangwatch.diagnose/1.",
)
def command(bundle: Path, *, form: str) -> None:
    """Show the report of a BUNDLE, packed or unpacked, by the rules of this version."""
    from hangwatch.capture import reading
    from hangwatch.registry import renderers
    from hangwatch.renderers import terminal

    diagnosis = reading.explain(reading.read_bundle(bundle))
    if form == "terminal":
        click.echo(terminal.page(diagnosis, colour=wants_colour()), nl=False, color=True)
    else:
        click.echo(renderers()[form].render(diagnosis), nl=False)
