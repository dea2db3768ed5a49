"""``hangwatch replay``: the detector over an old log, in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, tzinfo
from pathlib import Path

import click

from hangwatch import registry
from hangwatch.cli.options import config as with_config
from hangwatch.cli.options import defined_in, limits
from hangwatch.cli.times import in_zone, moment, zone_of
from hangwatch.core import contracts, loose
from hangwatch.core.layout import Kind, place
from hangwatch.core.questions import number_of
from hangwatch.core.replay import continued, heard, replay
from hangwatch.core.tuning import tune
from hangwatch.model.incident import Transition
from hangwatch.model.observation import Observation
from hangwatch.model.policy import Policy
from hangwatch.model.replay import ReplayResult
from hangwatch.model.tuning import Tuning
from hangwatch.model.verdict import ALARMS
from hangwatch.system import evidence, logmaterial

FOUND = 3
"""Exit code when the answer is an alarm."""

MAX_NAMES = 3
"""Instances that a line of the timeline names."""

MAX_STOPS = 10
"""Stops that the trade-off lists."""

CHART = 30
"""Characters of the longest bar of a chart."""

MAX_SNAPSHOT = 64 << 20


@click.command(name="replay", short_help="Run the detector over old logs.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--until",
    "--now",
    "until",
    type=moment,
    metavar="TIME",
    help="When the evaluation ends; the end of the log by default.",
)
@click.option(
    "--tune",
    "tuning",
    is_flag=True,
    help="Show what each --stall-after would have meant: false alarms against latency.",
)
@limits
@click.option(
    "--profile",
    "engine",
    metavar="NAME",
    help="The only engine to look for  [default: all that are known]",
)
@with_config
def command(
    paths: tuple[Path, ...],
    *,
    as_json: bool,
    until: datetime | None,
    tuning: bool,
    zone: tzinfo | None,
    heartbeat_interval: float | None,
    stall_after: float,
    engine: str | None,
    config: Path | None,
) -> None:
    """Run the detector over old logs.

    PATHS are logs, folders of logs, or case folders. Exit code 3 says that it ended with an alarm.
    With --tune, the exit code is 0: the question is not how it ended.
    """
    engines = registry.chosen(engine or registry.AUTO, defined_in(config))
    policy = Policy(heartbeat_interval=heartbeat_interval, stall_after=stall_after)
    naive = zone_of(until, zone)
    now = in_zone(until, naive)
    material = logmaterial.read(paths, profiles=engines.values(), zone=naive, until=now)
    end = material.ends_at if now is None else material.epoch.instant_of(now)
    if tuning:
        tuned = tune(material, profiles=engines, policy=policy, until=end)
        if as_json:
            click.echo(json.dumps(contracts.tuned(tuned), ensure_ascii=False, indent=1))
        else:
            click.echo("\n".join((*_trade_off(tuned), *map("note: {}".format, material.problems))))
        return
    files = _snapshot_files(paths)
    snapshots: tuple[Observation, ...] = ()
    if files:
        said = heard(material, profiles=engines)
        snapshots = loose.snapshots(
            files,
            profile=loose.engine(files, engines, heard=said.engine),
            at=end,
            instances=said.instances,
        )
    result = replay(material, profiles=engines, policy=policy, until=end, snapshots=snapshots)
    if as_json:
        click.echo(json.dumps(contracts.replayed(result), ensure_ascii=False, indent=1))
    else:
        then: tuple[Transition, ...] = ()
        if now is None and not result.alarmed:
            then = continued(material, profiles=engines, policy=policy, until=end)
        click.echo("\n".join(_page(result, then)))
    if result.alarmed:
        sys.exit(FOUND)


def _snapshot_files(paths: Iterable[Path]) -> dict[str, bytes]:
    """Return what lies beside the logs and tells of the end: health, metrics, processes."""
    files: dict[str, bytes] = {}
    for path in paths:
        if path.is_dir():
            files.update(evidence.read((path,)).files)
        elif place(path.name).kind is not Kind.LOG and path.stat().st_size < MAX_SNAPSHOT:
            files[path.name] = path.read_bytes()
    return {name: data for name, data in files.items() if place(name).kind is not Kind.LOG}


def _page(result: ReplayResult, then: tuple[Transition, ...]) -> Iterator[str]:
    epoch = result.epoch
    yield from _timeline(result)
    for found in result.incidents:
        stopped = contracts.window(epoch, found.window)
        yield (
            f"incident {found.id}: {found.verdict.word} ({found.verdict.cause}), "
            f"{len(found.members)} of {number_of(found.watched, 'instance')}"
            + (f", stopped between {stopped[0]} and {stopped[1]}" if stopped else "")
            + (f", over at {contracts.instant(epoch, found.closed_at)}" if found.closed_at else "")
        )
    for stall in result.stalls:
        yield (
            f"stall of {stall.instance.name} since {contracts.instant(epoch, stall.since)}: "
            f"{stall.seconds:.0f} s, ended by itself"
        )
    if result.transitions:
        yield ""
    verdict = result.verdict
    yield (
        f"{verdict.word} ({verdict.cause}), confidence {verdict.confidence},"
        f" as of {contracts.instant(epoch, result.until)}"
    )
    yield from (f"  - {sentence}" for sentence in verdict.because)
    beats = number_of(result.heartbeats, "heartbeat")
    if not result.heartbeats:
        yield (
            "note: no heartbeat was found: is this what the engine prints? "
            "`hangwatch list profiles` names the engines that are known"
        )
    yield f"{beats} of {number_of(len(result.instances), 'instance')}"
    yield from (f"note: {note}" for note in (*result.notes, *result.problems))
    if then:
        first = then[0]
        yield (
            f"note: the log ends here; if the silence went on, {first.instance.name} would be "
            f"{first.after.word} at {contracts.instant(epoch, first.at)}"
            " (say --until to evaluate at a later time)"
        )


def _timeline(result: ReplayResult) -> Iterator[str]:
    """Yield a line for each change; instances that change alike in one second share theirs."""
    alike: dict[tuple[str, str, str], list[Transition]] = {}
    for change in result.transitions:
        told = change.after.word
        told = f"{change.before.word} → {told}" if change.before else told
        at = contracts.instant(result.epoch, change.at)
        alike.setdefault((at[:19] + at[-6:], told, change.after.cause), []).append(change)
    rows = [(at, _names(changes), told, cause) for (at, told, cause), changes in alike.items()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    for row, changes in zip(rows, alike.values(), strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        alarm = isinstance(changes[0].after, ALARMS)
        yield click.style(line.rstrip(), fg="red" if alarm else None)


def _names(changes: Sequence[Transition]) -> str:
    """Return who changed: ``40211``, or ``8 instances: 40211, 40248, 40285, …``."""
    names = list(dict.fromkeys(change.instance.name for change in changes))
    if len(names) == 1:
        return names[0]
    more = ", …" if len(names) > MAX_NAMES else ""
    return f"{len(names)} instances: {', '.join(names[:MAX_NAMES])}{more}"


def _trade_off(result: Tuning) -> Iterator[str]:
    """Yield the trade-off as a table with a bar for each setting, and what to choose."""
    if not result.heartbeats:
        yield "no heartbeat was found: is this what the engine prints?"
        return
    yield (
        f"{number_of(result.heartbeats, 'heartbeat')} of {number_of(result.instances, 'instance')}"
        f" in {result.hours:.1f} engine hours; {number_of(result.gaps, 'gap')} with work"
    )
    yield ""
    yield "stall_after  stops noticed  false alarms"
    stops = max(setting.found + setting.missed for setting in result.settings)
    most = max(setting.false for setting in result.settings)
    for setting in result.settings:
        bar = "█" * -(-setting.false * CHART // most) if most else ""
        marks = [
            word
            for word, limit in (("now", result.present), ("recommended", result.recommended))
            if limit == setting.stall_after
        ]
        noticed = f"{setting.found} of {stops}"
        row = f"{setting.stall_after:>9g} s  {noticed:>13}  {setting.false:>12}  {bar}"
        yield f"{row.rstrip()}{'  ← ' + ', '.join(marks) if marks else ''}"
    yield ""
    for stop in result.stops[:MAX_STOPS]:
        began = contracts.instant(result.epoch, stop.since)
        yield f"stop of {stop.instance.name} at {began}: nothing for {stop.seconds:.0f} s"
    if result.stops:
        yield (
            "A stop is noticed as long after it began as stall_after says, sooner where /health or"
            " process states are asked. Whether it was a hang or a job that ended, the log cannot"
            " tell."
        )
    if not result.enough:
        yield "note: the logs are short: the rarest silences, which are the longest, may be missing"
    yield f"recommended: --stall-after {result.recommended:g} ({result.reason})"
    yield f"calibration would have chosen {result.calibrated:.0f} s by the end of these logs"
