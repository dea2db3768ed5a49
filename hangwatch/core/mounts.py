"""Which file systems of the processes are asked whether they answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hangwatch.core.mountinfo import Mount

MAX_ASKED: Final = 64

_HOST: Final = re.compile(r"(?://)?(?P<host>[^/:@\s][^/:@\s]*)(?::/|/).*")


@dataclass(slots=True)
class Asked:
    """A file system that somebody else answers for, once however often it is mounted.

    Attributes:
        mount: Where it was seen first.
        path: Where we reach it.
        processes: Those of the capture that have it.
    """

    mount: Mount
    path: str
    processes: list[int] = field(default_factory=list)


def chosen(
    ours: Iterable[Mount], theirs: Mapping[int, Iterable[Mount]], root: str
) -> tuple[list[Asked], int]:
    """Return what to ask, and how many more there are.

    Args:
        ours: The mounts that we see ourselves: there a file system is asked if it can be.
        theirs: The mounts that each process sees.
        root: Where the root of a process is to be found; ``{pid}`` stands for its number.
    """
    here = {mount.device: mount.point for mount in ours}
    found: dict[str, Asked] = {}
    for pid, mounts in theirs.items():
        for mount in mounts:
            if not mount.remote:
                continue
            path = here.get(mount.device) or root.format(pid=pid) + mount.point
            asked = found.setdefault(mount.device, Asked(mount=mount, path=path))
            if pid not in asked.processes:
                asked.processes.append(pid)
    every = list(found.values())
    return every[:MAX_ASKED], len(every[MAX_ASKED:])


def record(asked: Asked) -> dict[str, Any]:
    """Return what is known of a file system before it answers.

    The name of its server stands by itself, too: that makes it known as one to the redaction.
    """
    mount = asked.mount
    match = _HOST.fullmatch(mount.source)
    return {
        "point": mount.point,
        "kind": mount.kind,
        "device": mount.device,
        "source": mount.source,
        **({"hostname": match["host"]} if match and not mount.source.startswith("/dev/") else {}),
        "processes": asked.processes,
    }
