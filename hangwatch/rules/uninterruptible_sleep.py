"""A process waits in the kernel and cannot be interrupted: storage, a network file system."""

from __future__ import annotations

import re

from hangwatch.core.questions import alarmed_by, processes_of
from hangwatch.model.dossier import Citation, Culprit, Dossier, Finding, ProcessRecord, Rule
from hangwatch.model.verdict import Confidence

NAME = "uninterruptible-sleep"
CAUSE = "storage-d-state"

_NETWORK = re.compile(r"nfs|rpc_wait|rpc_|ceph|lustre|ll_|gpfs|cifs|fuse|beegfs")


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the processes in D state that stopped engines need."""
    return tuple(
        _finding(dossier, row)
        for record in alarmed_by(dossier, CAUSE)
        for row in processes_of(dossier, record)
        if row.state == "D"
    )


def _finding(dossier: Dossier, row: ProcessRecord) -> Finding:
    path = next((name for name in dossier.extra if name.endswith(f"stack_{row.pid}.txt")), "")
    lines = [str(line) for line in dossier.extra.get(path) or ()]
    text = " ".join((row.wchan, *lines))
    where = f" in {row.wchan}" if row.wchan else ""
    network = bool(_NETWORK.search(text))
    kind = " of a network file system (NFS and its like)" if network else ""
    citations = [row.citation] if row.citation is not None else []
    if lines:
        citations.append(Citation(path=path, line=1, text=lines[0][:200]))
    return Finding(
        rule=NAME,
        sentence=(
            f"Process {row.pid} is in uninterruptible sleep{where}: it waits for an answer{kind} "
            "that does not come, and cannot be interrupted meanwhile."
        ),
        confidence=Confidence.HIGH,
        cause=CAUSE,
        verdict="hung",
        culprit=Culprit(pid=row.pid, rank=row.rank, frame=row.wchan or None),
        citations=tuple(citations),
        next_step=(
            "look at the mounts it uses and at the kernel log of this node; attach nothing to it"
        ),
    )


RULE = Rule(name=NAME, title="a process is in uninterruptible sleep (state D)", examine=examine)
