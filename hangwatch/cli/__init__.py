"""The command line: one verb, one file."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the ``hangwatch`` command."""
    if os.name == "posix":
        _settle(sys.argv[1:])
    from hangwatch.cli.main import command

    command()


def _settle(arguments: list[str]) -> None:
    """Do what comes before anything that can go wrong, a misspelt option included."""
    from hangwatch.daemon import copier
    from hangwatch.system import spawn

    spawn.reap_children_ourselves()
    if copier.wanted(arguments):
        copier.start()  # a server writes into us, and must go on
