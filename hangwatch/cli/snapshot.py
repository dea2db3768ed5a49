"""``hangwatch snapshot``: a bundle of processes that nothing is wrong with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hangwatch.cli import options
from hangwatch.cli.capturing import capture_now, printable, result_as_json, tell_failures
from hangwatch.errors import TargetNotFoundError

if TYPE_CHECKING:
    from hangwatch.model.discovery import Kin
    from hangwatch.model.profile import EngineProfile


@click.command(name="snapshot", short_help="Bundle the record of a healthy process or fleet, now.")
@click.option(
    "--pid",
    "pids",
    type=click.IntRange(min=1),
    multiple=True,
    help="A process of an engine, any of them; repeat it for several. Without it, every engine "
    "that is found here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@options.settings
def command(pids: tuple[int, ...], config: Path | None, as_json: bool, **flags: Any) -> None:
    """Write down what engines look like while nothing is wrong with them.

    Their heartbeats, versions, arguments, threads and tasks go into a bundle like that of an
    incident, with the baseline that a daemon with the same --state has taken. No process is
    stopped, and no tool attaches. It is what a later hang is compared with.
    """
    from hangwatch import registry
    from hangwatch.daemon.settings import resolve
    from hangwatch.model.capture import CaptureKind
    from hangwatch.system import procfs

    for pid in pids:
        procfs.identify(pid)
    resolved = resolve(flags, file=config)
    profiles = tuple(
        registry.chosen(resolved.settings.profile, resolved.settings.defined()).values()
    )
    kin = _kin(pids, profiles)
    outcome, written, elapsed = capture_now(resolved, kin, CaptureKind.RUN)
    if as_json:
        click.echo(json.dumps(result_as_json("hangwatch.snapshot/1", outcome, written, elapsed)))
    else:
        for target in outcome.targets:
            row = f"  {target.process.pid:>7}  {target.role:<14} {target.comm:<15} {target.why}"
            click.echo(printable(row), err=True)
        click.echo(f"verdict: {written.verdict} ({written.cause})", err=True)
        tell_failures(outcome)
        click.echo(str(written.path))


def _kin(pids: tuple[int, ...], profiles: tuple[EngineProfile, ...]) -> tuple[Kin, ...]:
    """Return what the processes belong to, each engine once.

    Raises:
        TargetNotFoundError: A named one cannot be looked at, or none was named and none is found.
    """
    from hangwatch.daemon.search import ask_kin, ask_servers

    found: list[Kin] = []
    for pid in pids or ask_servers(profiles):
        if any(pid in (target.process.pid for target in kin.targets) for kin in found):
            continue
        kin = ask_kin(pid, profiles)
        if kin.problem and pids:
            raise TargetNotFoundError(kin.problem)
        if not kin.problem:
            found.append(kin)
    if not found:
        raise TargetNotFoundError(
            "no engine that a profile knows runs here; name a process of one with --pid"
        )
    return tuple(found)
