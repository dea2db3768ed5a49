"""The end of the kernel log, and the lines in it that explain a process that stands still or ended.

Kills for want of memory, tasks that hang, crashes, GPU errors (Xid), storage that does not answer.
"""

from __future__ import annotations

from typing import Final

from hangwatch.core import kernel_log
from hangwatch.core.objects import page
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
from hangwatch.system import klog


def _collect(_step: Step, room: Room) -> None:
    try:
        text = klog.read()
    except PermissionError as error:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            "the kernel log may not be read",
            "sysctl kernel.dmesg_restrict=0, or give hangwatch SYSLOG "
            "(Kubernetes: securityContext.capabilities.add: [SYSLOG])",
        ) from error
    except OSError as error:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, f"there is no kernel log here: {error.strerror}"
        ) from error
    lines = kernel_log.kept(text)
    room.write("kmsg.txt", "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    found = [event.document() for event in kernel_log.events(lines)]
    head = {"schema": "hangwatch.kernel_events/1", "file": "kmsg.txt", "lines": len(lines)}
    room.write("kernel_events.json", page(head, {"events": found}))


COLLECTOR: Final = Collector(
    name="kernel_log",
    title="The end of the kernel log: kills, hung tasks, crashes, GPU and storage errors",
    scope=Scope.NODE,
    rung=1,
    stage=Stage.A,
    timeout=5.0,
    needs="SYSLOG, where kernel.dmesg_restrict is set",
    waits=True,
    kinds=frozenset(
        {CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN, CaptureKind.AFTERMATH}
    ),
    collect=_collect,
)
