"""The command line: one verb, one file."""

from __future__ import annotations


def main() -> None:
    """Run the ``hangwatch`` command."""
    from hangwatch.cli.main import command

    command()
