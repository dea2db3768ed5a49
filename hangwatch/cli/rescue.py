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
    click.echo(program(), nl=False)


def program() -> str:
    """Return the file, with the numbers of every engine that has a profile."""
    from hangwatch.core.codec import to_plain
    from hangwatch.registry import profiles
    from hangwatch.rescue.single_file import compose

    return compose([table for each in profiles().values() for table in to_plain(each.state)])
