"""``hangwatch list``: what there is to choose from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import click

from hangwatch import registry
from hangwatch.cli.options import config as with_config
from hangwatch.cli.options import defined_in
from hangwatch.model.profile import EngineProfile


def _profiles(defined: tuple[EngineProfile, ...] = ()) -> dict[str, str]:
    return {name: profile.title for name, profile in registry.profiles(defined).items()}


def _collectors() -> dict[str, str]:
    return {
        name: f"rung {found.rung}: {found.title}"
        + (f"; needs {found.needs}" if found.needs else "")
        + ("; runs only by request: --collect " + name if found.opt_in else "")
        + "".join(f"; {option}: {text}" for option, text in found.options.items())
        for name, found in sorted(registry.collectors().items(), key=lambda item: item[1].rung)
    }


def _rules() -> dict[str, str]:
    return {name: rule.title for name, rule in registry.rules().items()}


def _renderers() -> dict[str, str]:
    return {name: renderer.title for name, renderer in registry.renderers().items()}


def _faults() -> dict[str, str]:
    from hangwatch.lab.faults import everything

    return {
        name: fault.title
        + (f"; needs {fault.needs}" if fault.needs else "")
        + (f"; not here: {reason}" if (reason := fault.unavailable()) else "")
        for name, fault in everything().items()
    }


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "profiles": _profiles,
    "collectors": _collectors,
    "rules": _rules,
    "renderers": _renderers,
    "faults": _faults,
}


@click.command(
    name="list", short_help="What there is: profiles, collectors, rules, renderers, faults."
)
@click.argument("kind", required=False, type=click.Choice(list(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@with_config
def command(kind: str | None, as_json: bool, config: Path | None) -> None:
    """List the engine profiles, collectors, rules, renderers and demo faults there are."""
    defined = defined_in(config)
    found = {
        name: _profiles(defined) if name == "profiles" else KINDS[name]()
        for name in ([kind] if kind else KINDS)
    }
    if as_json:
        click.echo(json.dumps({"schema": "hangwatch.list/1", **found}, indent=2))
        return
    width = max((len(name) for names in found.values() for name in names), default=0)
    for name, entries in found.items():
        click.echo(name)
        for entry, title in entries.items():
            start = f"  {entry:<{width}}  "
            click.echo(
                textwrap.fill(
                    title, width=100, initial_indent=start, subsequent_indent=" " * len(start)
                )
            )
