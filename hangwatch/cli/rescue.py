"""``hangwatch rescue``: the one file that needs no installation, for standard output."""

from __future__ import annotations

import click


@click.command(
    name="rescue", short_help="A script that collects evidence where nothing can be installed."
)
def command() -> None:
    """Print hangwatch-rescue.py, which collects evidence where nothing can be installed.

    Pipe it into the Python beside the engine (3.10 or later), and let diagnose explain what comes
    back:

    \b
    hangwatch rescue > hangwatch-rescue.py
    kubectl exec -i POD -c engine -- python3 - --pid N < hangwatch-rescue.py > d.json
    hangwatch diagnose d.json
    """  # noqa: D301  # click's mark for lines to keep
    from hangwatch.rescue.single_file import compose

    click.echo(compose(), nl=False)
