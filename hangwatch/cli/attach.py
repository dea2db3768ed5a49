"""``hangwatch attach``: watch, or capture, what one process belongs to."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hangwatch.cli import options
from hangwatch.cli.capturing import (
    capture_now,
    printable,
    request_of,
    result_as_json,
)
from hangwatch.cli.watch import missing
from hangwatch.errors import TargetNotFoundError, UsageError

if TYPE_CHECKING:
    from hangwatch.cli.news import View
    from hangwatch.core.board import Board
    from hangwatch.daemon.settings import Resolved
    from hangwatch.model.capture import (
        CapturePlan,
    )
    from hangwatch.model.discovery import Kin
    from hangwatch.system.logs import Format


@click.command(name="attach", short_help="Watch, or capture now, what one process belongs to.")
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    required=True,
    help="A process of the engine: any of them.",
)
@click.option("--now", is_flag=True, help="Capture at once, then end.")
@click.option("--dry-run", is_flag=True, help="Print what a capture would do, with its gates.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
@options.settings
def command(
    pid: int, now: bool, dry_run: bool, as_json: bool, config: Path | None, **flags: Any
) -> None:
    """Find out what a process belongs to, say what will be watched, and watch it until Ctrl-C.

    Its engine, every related process, its log (through its open files) and its address (of its
    listening socket) are found from --pid. On a terminal a table shows what is seen; elsewhere
    each thing that happens is a line on standard error, and bundles' paths go to standard output.
    With --json every event is a JSON line on standard output.
    """
    from hangwatch import registry
    from hangwatch.daemon.search import ask_kin
    from hangwatch.daemon.settings import resolve
    from hangwatch.system import procfs

    if now and dry_run:
        raise UsageError("--now captures and --dry-run does not: leave one of them out")
    procfs.identify(pid)
    resolved = resolve(flags, file=config)
    kin = ask_kin(
        pid, registry.chosen(resolved.settings.profile, resolved.settings.defined()).values()
    )
    if kin.problem:
        raise TargetNotFoundError(kin.problem)
    if kin.closed and not (now or dry_run):
        raise TargetNotFoundError(
            f"{_closed(kin)}; with --now, what can be had without is captured"
        )
    if not as_json:
        describe(kin)
    if dry_run:
        _dry_run(resolved, kin, as_json=as_json)
    elif now:
        _now(resolved, kin, as_json=as_json)
    else:
        _watch(resolved, kin, as_json=as_json)


def describe(kin: Kin) -> None:
    """Say on standard error what *kin* was found to be."""
    click.echo(f"process {kin.pid} and what belongs to it:", err=True)
    for target in kin.targets:
        addresses = " ".join(listener.url for listener in target.listeners)
        row = f"  {target.process.pid:>7}  {target.role:<14} {target.comm:<15} {target.why}"
        click.echo(printable(f"{row}  {addresses}".rstrip()), err=True)
    if kin.guessed:
        click.echo(
            f"note: none of them looks like a server that the profile knows, so {kin.servers[0]} "
            "is taken for one, and its sockets are asked nothing; give the pid of the server or of "
            "its engine, or --profile if it is one",
            err=True,
        )
    if kin.closed:
        click.echo(f"note: {_closed(kin)}", err=True)
    for owner in kin.logs:
        click.echo(printable(f"log: {owner.log}"), err=True)
    if not kin.logs and not kin.closed:
        click.echo(
            "log: none that can be read (its output goes to a terminal or into a pipe): "
            "endpoints and processes are what there is",
            err=True,
        )


def _closed(kin: Kin) -> str:
    return (
        f"process {kin.pid} belongs to somebody else and may not be looked into: run as its user "
        "or as root, or add the capability SYS_PTRACE"
    )


def _watch(resolved: Resolved, kin: Kin, *, as_json: bool) -> None:
    from hangwatch.core.board import Board, board
    from hangwatch.daemon.state import ensure_key
    from hangwatch.daemon.wiring import Watch
    from hangwatch.system.clock import SystemClock
    from hangwatch.system.logs import LineWriter

    # Beside a daemon that may be running here; what an attached watch learns, it need not keep.
    settings = resolved.settings
    own = settings.model_copy(
        update={
            "state": settings.state / f"attach-{kin.pid}",
            "listen": "",  # the daemon has it
            "run_bundle": False,
        }
    )
    with suppress(OSError):
        ensure_key(own.state, ensure_key(settings.state))
    clock = SystemClock()
    output = LineWriter(1, confess=missing) if as_json else LineWriter(1)
    held: list[str] = []

    def look() -> Board:
        loop = watch.loop
        return Board(at=clock.wall()) if loop is None else board(loop.state, clock.now())

    def tell(event: Mapping[str, Any]) -> None:
        view.event(event)
        if as_json:
            output.write(json.dumps(event, ensure_ascii=True))
        elif event["event"] == "bundle":
            print_path(event["bundle"])

    view, drawn = _view(settings.log_format, look, as_json=as_json)
    # On the same terminal a path would tear the table; it comes when the table has gone.
    print_path = held.append if drawn and sys.stdout.isatty() else output.write
    watch = Watch(replace(resolved, settings=own), pids=(kin.pid,), tell=tell)
    if not as_json:
        click.echo("watching; Ctrl-C ends it", err=True)
    try:
        with view:
            watch.run()
        shutil.rmtree(own.state, ignore_errors=True)
    finally:
        for path in held:
            output.write(path)
        output.close()


def _view(form: Format, look: Callable[[], Board], *, as_json: bool) -> tuple[View, bool]:
    """Return what shows how it goes on standard error, and whether it draws there."""
    from hangwatch.cli.news import Lines, Log

    if as_json or form != "auto":
        return Log(form), False
    if not draws():
        return Lines(2), False
    from hangwatch.cli.screen import Screen

    return Screen(2, look), True


def draws() -> bool:
    """Say whether standard error is a terminal that can be drawn on, and is ours to draw on."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return True  # it is nobody's job then


def _now(resolved: Resolved, kin: Kin, *, as_json: bool) -> None:
    from hangwatch import registry
    from hangwatch.model.capture import CaptureKind
    from hangwatch.model.verdict import ALARMS

    outcome, written, elapsed = capture_now(resolved, (kin,), CaptureKind.INCIDENT)
    if as_json:
        click.echo(json.dumps(result_as_json("hangwatch.attach/1", outcome, written, elapsed)))
    else:
        click.echo(registry.renderers()["terminal"].render(written.diagnosis))
        click.echo(str(written.path))
    if written.verdict in {alarm.word for alarm in ALARMS}:
        raise SystemExit(3)


_GATES: Final = {
    "hung": "the verdict is hung",
    "no_d_state": "no thread is in D state",
    "not_stopped": "it is not stopped",
    "no_tracer": "nobody traces it",
}


def _dry_run(resolved: Resolved, kin: Kin, *, as_json: bool) -> None:
    from hangwatch.capture import run
    from hangwatch.model.capture import CaptureKind
    from hangwatch.system.clock import SystemClock

    plan = run.dry_run(request_of(resolved, (kin,), CaptureKind.INCIDENT), clock=SystemClock())
    if as_json:
        click.echo(json.dumps(plan_as_json(plan), indent=2))
        return
    width = max((len(step.id) for step in plan.steps), default=0)
    for step in plan.steps:
        gates = f"  if {', '.join(_GATES[gate] for gate in step.gates)}" if step.gates else ""
        budget = f" for {step.budget_ms:g} ms at most" if step.budget_ms is not None else ""
        stops = f"  stops the target{budget}" if step.attaches else ""
        waits = "  beside the others" if step.waits else ""
        click.echo(
            f"stage {step.stage:<5} sample {step.sample}  rung {step.rung}  {step.id:<{width}}  "
            f"at most {step.timeout:g} s{gates}{stops}{waits}"
        )
    click.echo(
        f"{len(plan.steps)} steps in this order, {plan.at_once} at a time, and beside them "
        f"{plan.waiting_at_once} of those that wait for others; {plan.sample_gap:g} s between the "
        f"samples, {plan.deadline:g} s for everything"
    )
    for note in plan.notes:
        click.echo(printable(f"note: {note}"))


def plan_as_json(plan: CapturePlan) -> dict[str, Any]:
    """Return the plan as data; titles of processes stay out, for they may hold secrets."""
    return {
        "schema": "hangwatch.plan/1",
        "targets": [
            {
                "pid": target.process.pid,
                "role": target.role.value,
                "comm": target.comm,
                "instance": target.instance,
                "why": target.why,
                "suspicion": target.suspicion,
            }
            for target in plan.targets
        ],
        "steps": [
            {
                "id": step.id,
                "collector": step.collector,
                "stage": step.stage.value,
                "sample": step.sample,
                "rung": step.rung,
                "pid": step.target.process.pid if step.target is not None else None,
                "subject": step.subject,
                "timeout_s": step.timeout,
                "gates": [gate.value for gate in step.gates],
                "attaches": step.attaches,
                "budget_ms": step.budget_ms,
                "reads_memory": step.reads_memory,
                "waits": step.waits,
            }
            for step in plan.steps
        ],
        "sample_gap_s": plan.sample_gap,
        "deadline_s": plan.deadline,
        "at_once": plan.at_once,
        "waiting_at_once": plan.waiting_at_once,
        "notes": list(plan.notes),
    }
