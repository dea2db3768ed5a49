"""``hangwatch demo``: servers that really hang, caught and explained.

Everything but the servers is the real thing: the daemon follows their logs, asks their endpoints,
judges, captures and writes the bundle. Only the beat is faster, so that nobody waits.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hangwatch.cli.diagnose import wants_colour
from hangwatch.core.diagnosis import ALARM_WORDS
from hangwatch.core.questions import number_of
from hangwatch.errors import HangwatchError
from hangwatch.lab.faults import Fault, load, names

if TYPE_CHECKING:
    from hangwatch.daemon.wiring import Watch
    from hangwatch.lab.launch import Fleet
    from hangwatch.model.dossier import Diagnosis

INTERVAL: Final = 1.0
"""Seconds between heartbeats; ten in production."""

STALL_AFTER: Final = 12.0
"""Seconds; the default of 120 for beats of 10 s, scaled."""

BEATS_BEFORE: Final = 5
"""Beats before the fault, so that the usual throughput is known."""

PATIENCE: Final = 120.0
"""Seconds for any one part of the story on a machine that is busy with other things."""

QUIET_FOR: Final = 20.0
"""Seconds that a fault which is no hang is watched: longer than any limit of silence."""

Show = Callable[[str, bool], None]
"""Shows a line: what goes on now, or (``True``) what has happened."""


class DemoError(HangwatchError):
    """The demo could not be given."""


class Story:
    """What happens: the fault, and what the daemon says of it.

    Attributes:
        truth: What was injected, and when.
        words: The present verdict of each server by pid.
        causes: And its cause.
        incident: The daemon's first word of an incident, or ``None``.
        alarm_after: Seconds from the fault to that word, ``None`` if there was none.
        bundle: The daemon's word of the bundle, or ``None``.
        problem: Why the story broke off, or ``""``.
    """

    def __init__(self, fleet: Fleet, fault: str, show: Show) -> None:
        self.truth: Mapping[str, Any] = {}
        self.words: dict[int, str] = {}
        self.causes: dict[int, str] = {}
        self.incident: Mapping[str, Any] | None = None
        self.alarm_after: float | None = None
        self.bundle: Mapping[str, Any] | None = None
        self.problem = ""
        self._fleet = fleet
        self._name = fault
        self._fault = load(fault)
        self._show = show
        self._events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take an event of the daemon; called in its thread."""
        self._events.put(event)

    def run(self, watch: Watch) -> None:
        """Let it happen, then stop the daemon; for a thread beside the daemon's."""
        from hangwatch.lab.launch import LabError

        try:
            self._happen()
        except (HangwatchError, LabError) as error:
            self.problem = str(error)
        finally:
            watch.stop()

    def _happen(self) -> None:
        servers = {server["pid"] for server in self._fleet.servers}
        self._until(
            lambda: {pid for pid, word in self.words.items() if word == "ok"} >= servers,
            "saw no heartbeat of some server",
        )
        count = len(servers)
        doing = "prints heartbeats and has work" if count == 1 else "print heartbeats and have work"
        self._show(f"{number_of(count, 'server')} {doing}", True)
        self._show("they work for a few seconds", False)
        time.sleep(BEATS_BEFORE * INTERVAL)
        self._fleet.start_fault()
        self.truth = self._fleet.truth(PATIENCE)
        self._show(f"injected {self._name}: {self._fault.title}", True)
        self._show("hangwatch listens", False)
        if not self._fault.hangs:
            self._show(f"watching for {QUIET_FOR:.0f} s", False)
            self._follow(lambda: self.incident is not None, QUIET_FOR)
            if self.incident is None:
                return
        self._until(lambda: self.incident is not None, "raised no alarm")
        assert self.incident is not None
        self.alarm_after = time.monotonic() - self.truth["at_monotonic"]
        stopped, watched = len(self.incident["instances"]), self.incident["watched"]
        of = number_of(watched, "server")
        self._show(f"noticed: {self.incident['verdict']}, {stopped} of {of}", True)
        self._show("hangwatch captures", False)
        self._until(lambda: self.bundle is not None, "wrote no bundle")
        self._show("captured, explained and bundled", True)

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        if not self._follow(condition, PATIENCE):
            raise DemoError(
                f"the daemon {otherwise} within {PATIENCE:.0f} s: try again with --keep"
            )

    def _follow(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Take events until *condition* holds; say whether it did in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            try:
                self._take(self._events.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return False
        return True

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "transition":
                self.words[event["pid"]] = event["after"]
                self.causes[event["pid"]] = event["cause"]
            case "incident":
                self.incident = event
            case "capture" if event["total"]:
                self._show(f"{event['part']}: {event['done']} of {event['total']} steps", False)
            case "bundle":
                self.bundle = event
            case "capture_failed":
                raise DemoError(f"the capture failed: {event['error']}; {event['hint']}")
            case "stopping":
                raise DemoError("interrupted")
            case _:
                pass


@click.command(name="demo", short_help="Servers that really hang, caught and explained.")
@click.argument("fault", default="blocked-call", metavar="[FAULT]", type=click.Choice(names()))
@click.option(
    "--servers",
    type=click.IntRange(1, 64),
    metavar="N",
    default=8,
    show_default=True,
    help="How many servers start.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the bundle goes  [default: a new folder]",
)
@click.option("--keep", is_flag=True, help="Keep the servers' logs and the daemon's own log, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, with what was injected.")
def command(fault: str, servers: int, output: Path | None, keep: bool, as_json: bool) -> None:
    """Start a few servers that really hang, and watch hangwatch catch and explain it.

    FAULT is what goes wrong (`hangwatch list faults`); some of them are no hang, and no alarm must
    follow. Exit code 0: caught what was injected. Exit code 2: it cannot happen on this machine.
    """
    injected = load(fault)
    if reason := injected.unavailable():
        raise click.UsageError(f"{fault} cannot happen here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="hangwatch-demo-"))
    output = output.absolute() if output is not None else folder / "bundles"
    started_at = time.monotonic()
    try:
        with _progress(started_at) as show:
            story = _perform(folder, output, fault, servers, show)
        diagnosis = _diagnose(Path(story.bundle["bundle"])) if story.bundle is not None else None
    finally:
        if not keep:
            for leftover in ("ray", "state", "hangwatch.log"):
                _remove(folder / leftover)
            if not any(folder.iterdir()):
                folder.rmdir()
    caught = _caught(story, diagnosis, injected)
    if as_json:
        result = _as_json(story, diagnosis)
        if story.alarm_after is not None:
            result["alarm_s"] = round(story.alarm_after, 3)
        result |= {"caught": caught, "demo_s": round(time.monotonic() - started_at, 3)}
        click.echo(json.dumps(result))
    else:
        _print(story, diagnosis, fault, injected)
    if keep:
        click.echo(f"the servers' logs and the daemon's own are in {folder}", err=True)
    if not caught:
        click.echo(f"hangwatch: not caught: {fault} in {servers} servers", err=True)
        sys.exit(1)


def _perform(folder: Path, output: Path, fault: str, servers: int, show: Show) -> Story:
    """Start everything, let the story happen, end everything."""
    from hangwatch.daemon.settings import resolve
    from hangwatch.daemon.wiring import Watch, check_output
    from hangwatch.lab.launch import Fleet, LabError
    from hangwatch.system.logs import configure

    check_output(output)
    (folder / "ray").mkdir()
    show(f"{number_of(servers, 'server')} to start", False)
    with Fleet(folder / "ray", "--fault", fault, servers=servers, interval=INTERVAL) as fleet:
        try:
            fleet.wait_ready(PATIENCE)
        except LabError as error:
            raise DemoError(f"the demo's servers did not start: {error}") from error
        resolved = resolve(
            {
                "log": (fleet.logs,),
                "output": str(output),
                "state": str(folder / "state"),
                "heartbeat_interval": INTERVAL,
                "probe_interval": INTERVAL,
                "stall_after": STALL_AFTER,
                "baseline_interval": 0,
                "run_bundle": False,
            },
            environment={},
        )
        story = Story(fleet, fault, show)
        watch = Watch(resolved, tell=story.hear)
        log = os.open(folder / "hangwatch.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        writer = configure(form="json", fd=log)
        thread = threading.Thread(target=story.run, args=(watch,), name="story", daemon=True)
        thread.start()
        try:
            watch.run()
            thread.join(PATIENCE)
        finally:
            writer.close()
            os.close(log)
    if story.problem:
        raise DemoError(story.problem)
    return story


def _diagnose(bundle: Path) -> Diagnosis:
    from hangwatch.capture import reading

    return reading.explain(reading.read_bundle(bundle))


def _caught(story: Story, diagnosis: Diagnosis | None, fault: Fault) -> bool:
    """Say whether the daemon said of every server what was true of it."""
    if not fault.hangs:
        return story.incident is None and not ALARM_WORDS & set(story.words.values())
    if diagnosis is None or diagnosis.verdict not in ALARM_WORDS:
        return False
    pids = {str(pid) for pid in story.words}
    named = {
        record.instance.name
        for record in diagnosis.dossier.instances
        if record.verdict.word in ALARM_WORDS
    }
    return named >= pids


def _as_json(story: Story, diagnosis: Diagnosis | None) -> dict[str, Any]:
    result: dict[str, Any] = {"bundle": None, "truth": dict(story.truth)}
    if diagnosis is None:
        worst = story.incident["verdict"] if story.incident is not None else None
        return {
            "schema": "hangwatch.demo/1",
            "verdict": worst or next(iter(set(story.words.values())), None),
            "instances": [
                {"name": str(pid), "pid": pid, "verdict": word, "cause": story.causes[pid]}
                for pid, word in story.words.items()
            ],
            **result,
        }
    from hangwatch import registry

    assert story.bundle is not None
    report = json.loads(registry.renderers()["json"].render(diagnosis))
    result["bundle"] = story.bundle["bundle"]
    return {**report, **story.bundle.get("summary", {}), "schema": "hangwatch.demo/1", **result}


def _print(story: Story, diagnosis: Diagnosis | None, name: str, fault: Fault) -> None:
    if diagnosis is None:
        said = {f"{word} ({story.causes[pid]})" for pid, word in story.words.items()}
        click.echo(
            f"{name}: {fault.title}.\n"
            f"No alarm in {QUIET_FOR:.0f} s of it. "
            f"All {len(story.words)} servers are: {', '.join(sorted(said))}."
        )
        return
    from hangwatch.renderers import terminal

    assert story.bundle is not None
    right = diagnosis.cause in fault.causes[:1]
    best = "" if right else f" A finer answer would be {fault.causes[0]}."
    click.echo(
        f"{name}: {fault.title}.\nhangwatch says {diagnosis.verdict}: {diagnosis.cause}.{best}\n"
    )
    page = terminal.page(diagnosis, colour=wants_colour(), brief=True)
    click.echo(page.rstrip(), color=True)
    click.echo(f"\nThe rest: {_ourselves()} report {story.bundle['bundle']}")


def _ourselves() -> str:
    """Return how we were called, for a command that can be pasted."""
    called = Path(sys.argv[0])
    return "python -m hangwatch" if called.name == "__main__.py" else str(called)


@contextmanager
def _progress(started_at: float) -> Iterator[Show]:
    """Tell on standard error what has happened and, on a terminal, what goes on."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)

    def tell(line: str) -> None:
        took = time.monotonic() - started_at
        console.print(f"{took:5.1f} s  {line}", markup=False, soft_wrap=True)

    if not console.is_terminal:
        yield lambda line, happened: tell(line) if happened else None
        return
    with console.status("") as status:
        yield lambda line, happened: tell(line) if happened else status.update(line)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
