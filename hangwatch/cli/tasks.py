"""``hangwatch tasks``: the suspended asyncio tasks of any Python process."""

from __future__ import annotations

import json
import time
from itertools import islice
from typing import Final, Literal

import click

from hangwatch import registry
from hangwatch.core.codec import to_plain
from hangwatch.errors import HangwatchError, TargetNotFoundError
from hangwatch.model.capture import Means, Touch
from hangwatch.model.identity import ProcessId
from hangwatch.model.time import Instant
from hangwatch.remote import (
    ProcessGoneError,
    RemoteError,
    RemotePython,
    Snapshot,
    Thread,
    attach,
    document,
    grouping,
    probes,
    procfs,
    text,
)
from hangwatch.system import audit
from hangwatch.system.logs import configure

PIECES: Final = 50_000
"""Pieces of JSON written together: some 700 tasks."""


@click.command(
    name="tasks", short_help="The asyncio tasks of a running process, and what they await."
)
@click.option("--pid", type=click.IntRange(min=1), required=True, help="The process to read.")
@click.option("--tree", "form", flag_value="tree", help="Show each task below those that await it.")
@click.option("--graph", "form", flag_value="graph", help="Show only who waits for whom.")
@click.option("--json", "form", flag_value="json", help="Print JSON (hangwatch.tasks/1).")
@click.option("--all-threads", is_flag=True, help="Show the stacks of all threads, too.")
@click.option("--watch", is_flag=True, help="Read again and again, and show what moves.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two readings of --watch.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Readings of --watch  [default: until Ctrl-C]",
)
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    help="Log each reading of the process on standard error, in this form  [default: no log]",
)
def command(
    *,
    pid: int,
    form: str | None,
    all_threads: bool,
    watch: bool,
    interval: float,
    count: int | None,
    log_format: Literal["console", "json"] | None,
) -> None:
    """Show the asyncio tasks of a running Python process, and what they wait for.

    Reads the memory of process PID from outside; the process is not stopped and need not be
    prepared. CPython 3.10 to 3.15, with the GIL. A chain is shown from the outermost coroutine to
    the await itself.
    """
    writer = configure(form=log_format) if log_format is not None else None
    try:
        process = attach(pid)
        if watch:
            _watch(process, form, all_threads, interval, count)
        else:
            snapshot = _read(process)
            threads = _threads(process, form, all_threads)
            _print(snapshot, threads, form, all_threads)
    except ProcessGoneError as error:
        raise TargetNotFoundError(str(error)) from None
    except RemoteError as error:
        raise HangwatchError(str(error)) from None
    finally:
        if writer is not None:
            writer.close()


def _read(process: RemotePython) -> Snapshot:
    """Read all tasks, and say so in the log before."""
    touch = Touch(
        at=Instant(time.monotonic()),
        process=ProcessId(process.pid, process.start_ticks),
        step="tasks",
        means=Means.MEMORY,
    )
    audit.touched(touch)
    return process.tasks(state=_state())


def _state() -> tuple[probes.Table, ...]:
    """Return the state probes of all engines: those of others find nothing to hang on."""
    return probes.tables(
        to_plain([table for profile in registry.profiles().values() for table in profile.state])
    )


def _threads(process: RemotePython, form: str | None, wanted: bool) -> tuple[Thread, ...]:
    """Read the threads where they are shown, or where their names are."""
    return process.threads(locks=wanted) if wanted or form is None else ()


def _print(
    snapshot: Snapshot, threads: tuple[Thread, ...], form: str | None, all_threads: bool
) -> None:
    if form == "json":
        shown = threads if all_threads else None
        # In parts: the text of 50,000 tasks is larger than the tasks.
        pieces = json.JSONEncoder(indent=2).iterencode(document.document(snapshot, shown))
        while part := "".join(islice(pieces, PIECES)):
            click.echo(part, nl=False)
        click.echo()
        return
    lines = [*text.summary(snapshot)]
    if form == "tree":
        lines += text.tree(snapshot)
    elif form == "graph":
        lines += text.graph(snapshot)
    else:
        lines += text.grouped(snapshot, threads)
        lines += text.state(snapshot)
    if all_threads:
        lines += text.stacks(threads)
    click.echo("\n".join(lines))
    for line in (*text.problems(snapshot), *(f"note: {note}" for note in snapshot.notes)):
        click.echo(f"hangwatch: {line}", err=True)


def _watch(
    process: RemotePython, form: str | None, all_threads: bool, interval: float, count: int | None
) -> None:
    """Read every *interval* seconds; the first reading in full, then the differences."""
    before: Snapshot | None = None
    ticks: dict[int, int] = {}
    done = 0
    try:
        while count is None or done < count:
            if before is not None:
                time.sleep(interval)
            now = procfs.switches(process.pid)
            snapshot = _read(process)
            moved = grouping.motion(before, snapshot, ticks, now) if before else None
            if form == "json":
                shown = _threads(process, form, all_threads) if all_threads else None
                click.echo(json.dumps(document.document(snapshot, shown, moved)))
            elif moved is None or before is None:
                _print(snapshot, _threads(process, form, all_threads), form, all_threads)
                click.echo("")
            else:
                lines = [*text.difference(snapshot, moved)]
                lines += text.state_difference(before, snapshot)
                click.echo("\n".join(lines))
            before, ticks = snapshot, now
            done += 1
    except KeyboardInterrupt:
        click.echo("", err=True)
