"""The child that makes one capture, from the first look to the bundle, and tells how it goes.

In: ``{"kind": "capture", "request": …}``, once; ``{"kind": "verdict", "word": …, "request": …}``,
the answer to ``stage_a``, with all that is known of the incident by then; ``{"kind": "stop"}``:
finish with what there is.

Out: ``progress``; ``touched``, each line of the audit trail; ``{"kind": "stage_a", "stacks": […],
"processes": […]}``, upon which it waits for a verdict, ``VERDICT_TIMEOUT`` at most; at the end
``{"kind": "bundle", "path": …, "verdict": …, "cause": …, "summary": {…}}`` or ``{"kind": "failed",
"error": …, "hint": …}``; ``alive`` every second all the while. A look after a bundle asks for no
verdict, and ends with ``{"kind": "aftermath", "path": …, "outcome": …, "sentence": …}``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hangwatch.capture import baseline
from hangwatch.capture import run as capture
from hangwatch.capture.rooms import Rooms
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.errors import HangwatchError
from hangwatch.model.capture import (
    CaptureKind,
    CaptureOutcome,
    CaptureRequest,
    Progress,
    StageA,
    Touch,
)
from hangwatch.model.time import Clock
from hangwatch.system.channel import Channel, ChannelClosedError
from hangwatch.system.clock import SystemClock
from hangwatch.system.looks import Ring
from hangwatch.system.spawn import message_kind, serve

if TYPE_CHECKING:
    from hangwatch.capture.bundle import AftermathWritten, BundleWritten

VERDICT_TIMEOUT: Final = 10.0
"""Seconds; the daemon judges within one poll of its loop."""

ALIVE_INTERVAL: Final = 1.0

BASELINE_NICE: Final = 10


def capture_and_bundle(
    request: CaptureRequest,
    *,
    clock: Clock,
    progress: Callable[[Progress], None] = lambda _progress: None,
    rejudge: Callable[[StageA], str] = lambda _stage_a: "",
    stopped: Callable[[], bool] = lambda: False,
    latest: Callable[[], CaptureRequest | None] = lambda: None,
    touched: Callable[[Touch], None] = lambda _touch: None,
) -> tuple[CaptureOutcome, BundleWritten]:
    """Capture, write the bundle, and leave nothing else behind; for callers see ``capture.run``.

    *latest* returns the request as it stands after it was judged again, where it has changed:
    instances that fall silent together are not all noticed at once.

    Raises:
        OutputError: The bundle cannot be written where it should go; nothing of it is left.
        ConfigError: The profile does not exist.
    """
    outcome = capture.run(
        request,
        clock=clock,
        progress=progress,
        rejudge=rejudge,
        stopped=stopped,
        latest=latest,
        touched=touched,
    )
    try:
        # It brings the libraries of the manifest and the report: not before the evidence is in.
        from hangwatch.capture import bundle

        progress(
            Progress(
                part="bundling",
                done=len(outcome.evidence),
                failed=sum(evidence.failure is not None for evidence in outcome.evidence),
                total=len(outcome.evidence),
                elapsed=clock.now() - outcome.started_at,
            )
        )
        return outcome, bundle.write(outcome, latest() or request, clock=clock)
    finally:
        Rooms(Path(outcome.work)).remove()


class _Line:
    """Our end of the channel to the daemon; a thread says ``alive`` on it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._last = Progress(part="")
        self.stopped = False
        self.verdict: str | None = None
        self.request: CaptureRequest | None = None
        threading.Thread(target=self._live, name="alive", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        with self._lock:
            self._channel.send({"kind": kind, **facts})

    def listen(self, timeout: float = 0.0) -> None:
        """Take in what the daemon said."""
        with self._lock:
            if self._channel.pending:
                self._channel.flush()
        for message in self._channel.wait(timeout):
            match message_kind(message):
                case "capture":
                    self.request = from_plain(CaptureRequest, message["request"])
                case "verdict":
                    self.verdict = str(message.get("word", ""))
                    if "request" in message:
                        self.request = from_plain(CaptureRequest, message["request"])
                case "stop":
                    self.stopped = True
                case _:
                    pass

    def progress(self, progress: Progress) -> None:
        """Tell how far we are, unless nothing changed but the time."""
        told = (self._last.part, self._last.done, self._last.total)
        if told != (progress.part, progress.done, progress.total):
            self._last = progress
            self.send("progress", **_plain(progress))

    def is_stopped(self) -> bool:
        self.listen()
        return self.stopped

    def rejudge(self, stage_a: StageA, clock: Clock) -> str:
        """Say what stage A saw, and return what the daemon makes of it."""
        self.send("stage_a", **_plain(stage_a))
        deadline = clock.now() + VERDICT_TIMEOUT
        while self.verdict is None and not self.stopped and clock.now() < deadline:
            self.listen(0.2)
        return self.verdict or ""

    def _live(self) -> None:
        while True:
            threading.Event().wait(ALIVE_INTERVAL)
            try:
                self.send("alive")
            except ChannelClosedError:
                return  # the main thread learns of it, too


def _plain(value: object) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(value)
    del plain["type"]
    return plain


def look_again(
    request: CaptureRequest,
    *,
    clock: Clock,
    stopped: Callable[[], bool],
    touched: Callable[[Touch], None],
) -> AftermathWritten:
    """Take a light sample of what a bundle is about, and write it beside that.

    Raises:
        OutputError: It cannot be written where the bundle lies.
        ConfigError: The profile does not exist.
    """
    outcome = capture.run(request, clock=clock, stopped=stopped, touched=touched)
    try:
        from hangwatch.capture import bundle

        return bundle.write_aftermath(outcome, request, clock=clock)
    finally:
        Rooms(Path(outcome.work)).remove()


def _conduct(channel: Channel) -> None:
    clock = SystemClock()
    line = _Line(channel)
    while line.request is None:
        line.listen(1.0)
    if line.request.kind is CaptureKind.BASELINE:
        _look(line, line.request, clock)
        return
    record = line.request.kind is CaptureKind.RUN
    try:
        if line.request.kind is CaptureKind.AFTERMATH:
            looked = look_again(
                line.request,
                clock=clock,
                stopped=line.is_stopped,
                touched=lambda touch: line.send("touched", **_plain(touch)),
            )
            line.send(
                "aftermath",
                path=str(looked.path),
                outcome=looked.outcome,
                sentence=looked.sentence,
            )
            return
        outcome, written = capture_and_bundle(
            line.request,
            clock=clock,
            progress=line.progress,
            rejudge=unjudged if record else lambda stage_a: line.rejudge(stage_a, clock),
            stopped=line.is_stopped,
            latest=lambda: line.request,
            touched=lambda touch: line.send("touched", **_plain(touch)),
        )
    except HangwatchError as error:
        line.send("failed", error=str(error), hint="")
        return
    line.send(
        "bundle",
        path=str(written.path),
        verdict=written.verdict,
        cause=written.cause,
        summary=summary(outcome),
    )


def _look(line: _Line, request: CaptureRequest, clock: Clock) -> None:
    """Take one look of the baseline; whatever else runs on the machine goes first."""
    os.nice(BASELINE_NICE)
    try:
        Ring(Path(request.state)).open(request.epoch.boot_id)
        outcome = capture.run(
            request,
            clock=clock,
            stopped=line.is_stopped,
            touched=lambda touch: line.send("touched", **_plain(touch)),
        )
        try:
            kept = baseline.keep(outcome, request)
        finally:
            Rooms(Path(outcome.work)).remove()
    except (HangwatchError, OSError) as error:
        line.send("failed", error=str(error), hint="")
        return
    line.send("baseline", **_plain(kept), elapsed_s=round(clock.now() - outcome.started_at, 3))


def unjudged(_stage_a: StageA) -> str:
    """Leave the verdict as the request has it: nobody is there who could judge anew."""
    return ""


def summary(outcome: CaptureOutcome) -> dict[str, Any]:
    """Return how the capture went, in numbers."""
    return {
        "processes": len(outcome.targets),
        "steps": len(outcome.evidence),
        "failed": sum(evidence.failure is not None for evidence in outcome.evidence),
        "elapsed_s": round(outcome.ended_at - outcome.started_at, 3),
        "stopped": outcome.stopped,
        "abandoned": outcome.abandoned,
        "pause_ms": {
            str(evidence.target): evidence.pause_ms
            for evidence in outcome.evidence
            if evidence.target is not None and evidence.pause_ms
        },
    }


if __name__ == "__main__":
    serve(_conduct)
