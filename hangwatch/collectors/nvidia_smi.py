"""What ``nvidia-smi -q`` prints: all that the driver tells people, for people.

The program is the one of our own side, found on our own path: nothing of a watched container is
executed. It asks the driver and can block as the driver does, so it has a deadline and waits
beside the others.
"""

from __future__ import annotations

import shutil
from typing import Final

from hangwatch.model.capture import (
    CaptureKind,
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.system.spawn import run_tool

TIMEOUT: Final = 10.0

MAX_OUTPUT: Final = 2 << 20
"""Bytes; eight H200s take 120 kB."""


def _collect(step: Step, room: Room) -> None:
    program = step.options.get("program") or shutil.which("nvidia-smi")
    if program is None:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "there is no nvidia-smi here",
            "in a container: NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility",
        )
    try:
        result = run_tool([program, "-q"], timeout=step.timeout - 1.0, limit=MAX_OUTPUT)
    except OSError as error:
        raise CollectorError(
            FailureKind.TOOL_FAILED, f"nvidia-smi cannot be started: {error.strerror}"
        ) from error
    if result.output:
        room.write("gpu/nvidia_smi.txt", result.output[:MAX_OUTPUT])
    if result.ended_by_us:
        if len(result.output) + len(result.errors) > MAX_OUTPUT:
            raise CollectorError(
                FailureKind.TOO_LARGE, f"nvidia-smi wrote more than {MAX_OUTPUT >> 20} MiB"
            )
        raise CollectorError(
            FailureKind.TIMED_OUT,
            "nvidia-smi did not end in time and was killed: the driver does not answer",
        )
    if result.code != 0:
        said = (result.errors or result.output).decode("utf-8", "replace").strip()
        raise CollectorError(
            FailureKind.TOOL_FAILED,
            f"nvidia-smi ended with {result.code}: {said.splitlines()[-1][:300] if said else ''}",
        )


COLLECTOR: Final = Collector(
    name="nvidia_smi",
    title="What nvidia-smi -q prints",
    scope=Scope.NODE,
    rung=3,
    stage=Stage.A,
    timeout=TIMEOUT,
    needs="nvidia-smi on hangwatch's own path",
    options={"program": "path of another nvidia-smi than the one on the path"},
    kinds=frozenset(CaptureKind) - {CaptureKind.BASELINE},
    collect=_collect,
    waits=True,
)
