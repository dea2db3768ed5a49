"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hangwatch.cli.times import offset
from hangwatch.model.policy import Policy

if TYPE_CHECKING:
    from hangwatch.model.profile import EngineProfile

F = TypeVar("F", bound=Callable[..., Any])


def settings(function: F) -> F:
    """Add the options that become settings of the daemon, each named like its setting."""
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


def limits(function: F) -> F:
    """Add the options of a judgement after the fact: the zone of stamps, and how patient to be."""
    for option in reversed(_LIMITS):
        function = option(function)
    return function


def config(function: F) -> F:
    """Add ``--config`` to a verb that reads nothing but profiles in it."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="TOML file with [profiles.NAME], for engines that hangwatch does not know.",
    )(function)


def defined_in(file: Path | None) -> tuple[EngineProfile, ...]:
    """Return the engine profiles that a configuration file defines.

    Raises:
        ConfigError: It cannot be read, or holds what is no setting.
    """
    if file is None:
        return ()
    from hangwatch.daemon.settings import defined

    return defined(file)


_LIMITS = (
    click.option(
        "--tz", "zone", type=offset, metavar="±HH:MM", help="Zone of stamps that have no offset."
    ),
    click.option(
        "--heartbeat-interval",
        type=click.FloatRange(min=0.01),
        metavar="S",
        help="Seconds between two beats  [default: the profile's]",
    ),
    click.option(
        "--stall-after",
        type=click.FloatRange(min=0.01),
        metavar="S",
        default=Policy().stall_after,
        show_default=True,
        help="Seconds of silence that are suspicious without another witness.",
    ),
)

_SETTINGS = (
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="TOML file with settings; HANGWATCH_* take precedence over it, flags over both.",
    ),
    click.option("--output", metavar="DIR", help="Where bundles go  [default: STATE/bundles]"),
    click.option(
        "--state",
        metavar="DIR",
        help="Where the daemon keeps what it must remember  "
        "[default: $STATE_DIRECTORY or ~/.local/state/hangwatch]",
    ),
    click.option(
        "--profile",
        metavar="NAME",
        help="The only engine to look for  [default: all that are known]",
    ),
    click.option(
        "--heartbeat-interval",
        type=float,
        metavar="S",
        help="Seconds between two beats  [default: the profile's]",
    ),
    click.option(
        "--stall-after",
        type=float,
        metavar="S",
        help="Seconds of silence that are suspicious without another witness  "
        "[default: 120, then learned from honest silences]",
    ),
    click.option(
        "--api-key-file",
        metavar="FILE",
        help="API keys that the servers ask for at /metrics, one a line; sent to them alone",
    ),
    click.option(
        "--collect",
        metavar="NAME",
        multiple=True,
        help="A collector that runs only by request; may be given several times  "
        "(hangwatch list says which, and what they cost)",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["auto", "console", "json"]),
        help="Form of hangwatch's own log on standard error  [default: auto]",
    ),
)
