"""The descriptors of one process: what each is, how it was opened, where it stands.

Nothing is opened and no file system is asked: the links of ``/proc/PID/fd`` and what the kernel
says of them in ``fdinfo``. How large a file is, and how full a pipe, is not among that.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Final

from hangwatch.core import descriptors
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
from hangwatch.system import procfs


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    pid = step.target.process.pid
    links = procfs.links(pid)
    if not links and procfs.has_hidden_links(pid):
        raise CollectorError(
            FailureKind.NOT_PERMITTED, "its descriptors may not be read", procfs.PERMISSION_HINT
        )
    kinds = Counter(map(descriptors.kind, links.values()))
    head = {
        "schema": "hangwatch.fds/1",
        "pid": pid,
        "start_ticks": step.target.process.start_ticks,
        "kinds": dict(kinds.most_common()),
        "more": len(links) >= procfs.MAX_LINKS,
        "fds": [],
    }
    ordered = sorted(links.items(), key=lambda item: (_may_block(item), item))
    with room.create("fds.json") as out:
        out.write(json.dumps(head).removesuffix("]}").encode())
        for number, (fd, link) in enumerate(ordered):
            info = ""
            with contextlib.suppress(OSError):
                info = procfs.read_descriptor(pid, fd)
            line = json.dumps(descriptors.describe(fd, link, info), ensure_ascii=False)
            out.write(f"{',' if number else ''}\n {line}".encode("utf-8", "replace"))
        out.write(b"\n]}\n")


def _may_block(item: tuple[int, str]) -> bool:
    """Say whether its ``fdinfo`` asks somebody: it comes last, so that a kill keeps the rest."""
    return descriptors.kind(item[1]) in ("eventpoll", "device")


COLLECTOR: Final = Collector(
    name="fds",
    title="Every descriptor: what it leads to, how it was opened, where it stands",
    scope=Scope.PROCESS,
    rung=1,
    stage=Stage.A,
    timeout=5.0,
    needs="the right to read the process: same user, or SYS_PTRACE",
    unhurried=True,
    kinds=frozenset({CaptureKind.INCIDENT, CaptureKind.NOTICE, CaptureKind.RUN}),
    collect=_collect,
)
