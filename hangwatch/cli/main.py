"""The root of the command line: which verbs there are, and how errors are told."""

from __future__ import annotations

import sys
from typing import Any

import click

from hangwatch import __version__
from hangwatch.errors import HangwatchError

VERBS = {
    "watch": "hangwatch.cli.watch",
    "attach": "hangwatch.cli.attach",
    "tasks": "hangwatch.cli.tasks",
    "snapshot": "hangwatch.cli.snapshot",
    "rescue": "hangwatch.cli.rescue",
    "replay": "hangwatch.cli.replay",
    "diagnose": "hangwatch.cli.diagnose",
    "report": "hangwatch.cli.report",
    "list": "hangwatch.cli.list",
    "env": "hangwatch.cli.env",
    "lease": "hangwatch.cli.lease",
    "demo": "hangwatch.cli.demo",
}
"""Verb to module; each holds a click command named ``command``. Loaded when asked for."""


class Verbs(click.Group):
    """Loads a verb's module only when that verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the verbs in the order of the documentation."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the command of a verb."""
        import importlib

        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; tell an error that a user can mend in one sentence."""
        try:
            return super().invoke(ctx)
        except HangwatchError as error:
            click.echo(f"hangwatch: {error}", err=True)
            sys.exit(error.exit_code)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hangwatch")
def command() -> None:
    """Notices when an LLM inference engine hangs, captures why, and explains it."""
