"""A capture that a person asked for: made at once, here, with its progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hangwatch.capture.bundle import BundleWritten
    from hangwatch.daemon.settings import Resolved
    from hangwatch.model.capture import (
        CapturedInstance,
        CaptureKind,
        CaptureOutcome,
        CaptureRequest,
        Progress,
        StageA,
    )
    from hangwatch.model.discovery import Kin
    from hangwatch.model.observation import Observation
    from hangwatch.model.replay import ReplayResult


def printable(text: str) -> str:
    """Return *text* without anything a terminal would obey; names of processes may be hostile."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def request_of(resolved: Resolved, kin: Sequence[Kin], kind: CaptureKind) -> CaptureRequest:
    """Return the order for a capture of what was found."""
    from hangwatch import registry
    from hangwatch.model.capture import CapturedInstance, CaptureRequest
    from hangwatch.model.identity import InstanceKey
    from hangwatch.system.clock import SystemClock

    clock = SystemClock()
    settings = resolved.settings
    profiles = registry.chosen(settings.profile, settings.defined())
    servers = dict.fromkeys(server for each in kin for server in each.servers)
    known = next((each.profile for each in kin if each.profile), "")
    return CaptureRequest(
        id=f"{clock.wall():%Y%m%dT%H%M%S}-{kin[0].pid}",
        kind=kind,
        output=str(settings.output),
        profile=known or next(iter(profiles)),
        profiles=tuple(profiles.values()),
        policy=settings.policy(),
        epoch=clock.epoch(),
        instances=tuple(
            CapturedInstance(
                instance=InstanceKey(pid=server),
                pid=server,
                profile=next(each.profile for each in kin if server in each.servers),
            )
            for server in servers
        ),
        seeds=tuple(each.pid for each in kin),
        logs=tuple(dict.fromkeys(owner.log for each in kin for owner in each.logs)),
        settings=resolved.as_rows(),
        options=settings.collectors,
        collect=settings.collect,
        state=str(settings.state),
        api_key_file=str(settings.api_key_file or ""),
    )


def capture_now(
    resolved: Resolved, kin: Sequence[Kin], kind: CaptureKind
) -> tuple[CaptureOutcome, BundleWritten, float]:
    """Capture what was found; return how it went, the bundle, and the seconds that it took.

    Raises:
        OutputError: The bundle cannot be written where it should go.
        ConfigError: The API keys cannot be read.
    """
    from hangwatch import registry
    from hangwatch.capture.conductor import capture_and_bundle
    from hangwatch.core.hindsight import judgement
    from hangwatch.daemon.glance import recent_beats
    from hangwatch.daemon.state import ensure_key
    from hangwatch.daemon.wiring import check_keys, check_output
    from hangwatch.system import audit
    from hangwatch.system.clock import SystemClock
    from hangwatch.system.logs import configure

    clock = SystemClock()
    form = resolved.settings.log_format
    writer = configure(form=form) if form != "auto" else None  # people see the report
    check_output(resolved.settings.output)
    if problem := check_keys(resolved.settings.api_key_file):
        click.echo(f"note: {printable(problem)}", err=True)
    with suppress(OSError):
        ensure_key(resolved.settings.state)
    request = request_of(resolved, kin, kind)
    progress, done = _progress()
    profiles = registry.chosen(resolved.settings.profile, resolved.settings.defined())
    logs = [owner for each in kin for owner in each.logs]
    known = [request]

    def rejudge(stage_a: StageA) -> str:
        # What may be gone in a moment is in; now what the logs say.
        beats = recent_beats(logs, policy=request.policy, profiles=profiles, clock=clock)
        profile = beats[-1].profile if beats else request.profile
        known.append(replace(request, beats=beats, profile=profile))
        seen: tuple[Observation, ...] = (
            *stage_a.processes,
            *stage_a.stacks,
            *stage_a.answers,
        )
        judged = judgement(known[-1], seen, until=clock.now(), profile=profiles[profile])
        known.append(replace(known[-1], instances=_marked(known[-1].instances, judged)))
        return judged.verdict.word

    try:
        outcome, written = capture_and_bundle(
            request,
            clock=clock,
            progress=progress,
            rejudge=rejudge,
            latest=lambda: known[-1],
            touched=audit.touched,
        )
    finally:
        done()
        if writer is not None:
            writer.close()
    return outcome, written, clock.now() - outcome.started_at


def _marked(
    instances: tuple[CapturedInstance, ...], judged: ReplayResult
) -> tuple[CapturedInstance, ...]:
    """Return the instances with whether each of them is in trouble, as far as it can be told."""
    from hangwatch.model.verdict import ALARMS

    alarmed = {each.instance.pid for each in judged.instances if isinstance(each.verdict, ALARMS)}
    if None in alarmed:  # of a log that several servers share: it may be any of them
        return instances
    return tuple(replace(each, stopped=each.pid in alarmed) for each in instances)


def result_as_json(
    schema: str, outcome: CaptureOutcome, written: BundleWritten, elapsed: float
) -> dict[str, Any]:
    """Return what the contracts of the capturing verbs promise."""
    return {
        "schema": schema,
        "bundle": str(written.path),
        "verdict": written.verdict,
        "cause": written.cause,
        **outcome_as_json(outcome),
        "elapsed_s": round(elapsed, 3),
    }


def outcome_as_json(outcome: CaptureOutcome) -> dict[str, Any]:
    """Return who was captured and how each step went."""
    pauses: dict[str, float] = {str(t.process.pid): 0.0 for t in outcome.targets}
    for evidence in outcome.evidence:
        if evidence.target is not None:
            pauses[str(evidence.target.pid)] += evidence.pause_ms
    return {
        "processes": [
            {
                "pid": target.process.pid,
                "role": target.role.value,
                "instance": target.instance,
                "why": target.why,
            }
            for target in outcome.targets
        ],
        "steps": [
            {
                "step": evidence.step,
                "ok": evidence.failure is None,
                "failure": None if evidence.failure is None else evidence.failure.kind.value,
                "message": "" if evidence.failure is None else evidence.failure.message,
                "hint": "" if evidence.failure is None else evidence.failure.hint,
                "elapsed_s": round(evidence.elapsed, 3),
            }
            for evidence in outcome.evidence
        ],
        "pause_ms": pauses,
    }


def tell_failures(outcome: CaptureOutcome) -> None:
    """Say once for each way of failing what failed and what would help."""
    failures: dict[tuple[str, str, str], int] = {}
    for evidence in outcome.evidence:
        if evidence.failure is not None:
            told = (evidence.collector, evidence.failure.message, evidence.failure.hint)
            failures[told] = failures.get(told, 0) + 1
    for (collector, message, hint), count in failures.items():
        times = f" ({count} times)" if count > 1 else ""
        remedy = f"; {hint}" if hint else ""
        click.echo(printable(f"{collector}: {message.splitlines()[-1]}{remedy}{times}"), err=True)


def _progress() -> tuple[Callable[[Progress], None], Callable[[], None]]:
    """Return what shows progress on one line of a terminal, and what clears it."""
    stream = sys.stderr
    terminal = stream.isatty()

    def show(progress: Progress) -> None:
        if terminal:
            text = f"{progress.part}: {progress.done} of {progress.total} steps"
            stream.write(f"\r\x1b[K{text}, {progress.elapsed:.1f} s")
            stream.flush()

    def clear() -> None:
        if terminal:
            stream.write("\r\x1b[K")
            stream.flush()

    return show, clear
