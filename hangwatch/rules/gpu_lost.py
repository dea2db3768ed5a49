"""The driver lost a GPU: a fault of the node."""

from __future__ import annotations

import re

from hangwatch.core.questions import alarmed
from hangwatch.model.dossier import Citation, Culprit, Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence

NAME = "gpu-lost"
CAUSE = "node-fault"

_LOST = re.compile(r"fallen off the bus|GPU is lost|Xid \(PCI:[0-9A-Fa-f:.]+\): 79\b")
_ADDRESS = re.compile(r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_INDEX = re.compile(r"GPU\s?(\d+)\b")


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the GPU that the kernel log or the GPU tool says is lost."""
    citations = [line for line in dossier.kernel_log if _LOST.search(line.text)]
    if _LOST.search(dossier.gpu_problem):
        citations.append(Citation(path="gpu.err", line=1, text=dossier.gpu_problem[:200]))
    if not citations or not alarmed(dossier):
        return ()
    around = " ".join((dossier.gpu_problem, *(line.text for line in dossier.kernel_log)))
    address = _ADDRESS.search(around)
    index = _INDEX.search(dossier.gpu_problem)
    holder = next(
        (row for row in dossier.processes if index and row.gpu == int(index[1])),
        None,
    )
    name = f"GPU {address[0].lower()}" if address else "A GPU"
    whose = f"; process {holder.pid} holds it" if holder is not None else ""
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"{name} has fallen off the bus{whose}: a fault of the node and not of the engine."
            ),
            confidence=Confidence.HIGH,
            cause=CAUSE,
            verdict="hung",
            culprit=Culprit(
                pid=holder.pid if holder else None, rank=holder.rank if holder else None
            ),
            citations=tuple(citations),
            next_step="take the node out of service and reboot it; a restart does not help",
        ),
    )


RULE = Rule(name=NAME, title="the driver lost a GPU", examine=examine)
