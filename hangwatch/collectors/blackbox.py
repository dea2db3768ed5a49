"""What the black box recorded: how often each process ran, four times a second, up to now.

It reads a file of ours and nothing of a target: the daemon's recorder has written it since long
before the hang. Who stopped first stands in it, and in no log. It is read late, for the silence
after a stop is part of the record; ten minutes are not over by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hangwatch.core import blackbox
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.model.time import Instant
from hangwatch.system import ring
from hangwatch.system.clock import SystemClock, boot_id


def _collect(step: Step, room: Room) -> None:
    path = step.options.get("ring", "")
    hint = "hangwatch watch keeps one, from before the hang"
    if not path:
        raise CollectorError(FailureKind.NOT_AVAILABLE, "there is no black box here", hint)
    try:
        recording = ring.read(Path(path), boot_id())
    except FileNotFoundError:
        recording = None
    except ValueError as error:
        raise CollectorError(FailureKind.NOT_AVAILABLE, str(error), hint) from error
    if recording is None:
        raise CollectorError(FailureKind.NOT_AVAILABLE, "no black box was kept", hint)
    targets = {target.process: target for target in step.targets}
    recording = blackbox.only(recording, targets)
    if not recording.tracks:
        message = "the black box has not recorded these processes"
        raise CollectorError(FailureKind.NOT_AVAILABLE, message, hint)
    progress = step.options.get("progress_at", "")
    found = blackbox.stops(recording, progress_at=Instant(float(progress)) if progress else None)
    epoch = SystemClock().epoch()
    room.write(
        f"blackbox/{blackbox.STOPS}",
        blackbox.stops_document(found, targets=targets, epoch=epoch),
    )
    room.write(f"blackbox/{blackbox.COUNTERS}", blackbox.counters_document(recording, epoch))


COLLECTOR: Final = Collector(
    name="blackbox",
    title="How often each process ran in the last ten minutes, and who stopped first",
    scope=Scope.NODE,
    rung=8,
    stage=Stage.B,
    timeout=10.0,
    needs="a daemon that watched before the hang",
    collect=_collect,
)
