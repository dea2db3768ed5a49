"""Mounts, as ``/proc/PID/mountinfo`` lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")

REMOTE: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "9p", "virtiofs", "ceph", "lustre"}
    | {"gpfs", "beegfs", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "wekafsio", "gfs2"}
    | {"ocfs2", "coda", "acfs", "vboxsf", "vmhgfs", "prl_fs", "daos", "yrfs", "quobyte", "fuse"}
    | {"fuseblk"}
)
"""File systems that somebody else answers for: another machine, the host, a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount.

    Attributes:
        device: Number of the file system, ``major:minor``; the same however often it is mounted.
        root: Which part of it is mounted.
        point: Where.
        kind: Type of the file system.
        source: What is mounted: ``server:/export``, a device.
        options: Of the file system.
    """

    device: str
    root: str
    point: str
    kind: str
    source: str = ""
    options: tuple[str, ...] = ()

    @property
    def remote(self) -> bool:
        """Whether somebody else answers for it, who may not."""
        return self.kind in REMOTE or self.kind.startswith("fuse.")


def parse(text: str) -> Iterator[Mount]:
    """Yield the mounts in *text*; lines of another form are passed over."""
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, what = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6 and len(what) >= 2:
            yield Mount(
                device=fields[2],
                root=_plain(fields[3]),
                point=_plain(fields[4]),
                kind=what[0],
                source=_plain(what[1]),
                options=tuple(what[2].split(",")) if len(what) > 2 else (),
            )


def _plain(text: str) -> str:
    """Return a path without the escapes for blanks and backslashes."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
