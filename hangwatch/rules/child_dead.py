"""A process that the engine needs ended."""

from __future__ import annotations

import re

from hangwatch.core.loose import GONE
from hangwatch.core.questions import alarmed_by, processes_of
from hangwatch.model.dossier import Culprit, Dossier, Finding, InstanceRecord, Rule
from hangwatch.model.verdict import Dead

NAME = "child-dead"

_PID = re.compile(r"\b(?:\w+ )(\d{1,10}) is (?:gone|a zombie)")
_OOM = re.compile(r"(?i)out of memory|oom-kill|oom_reaper|Killed process")


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the processes whose end made an instance dead."""
    return tuple(
        _finding(dossier, record)
        for record in alarmed_by(dossier, NAME)
        if isinstance(record.verdict, Dead)
    )


def _finding(dossier: Dossier, record: InstanceRecord) -> Finding:
    rows = [row for row in processes_of(dossier, record) if row.state in ("Z", GONE)]
    told = " ".join(record.verdict.because)
    pid = rows[0].pid if rows else int(match[1]) if (match := _PID.search(told)) else None
    oom = [line for line in dossier.kernel_log if _OOM.search(line.text) and str(pid) in line.text]
    row = rows[0] if rows else None
    who = f"process {pid}" if pid is not None else "a process"
    if row is not None and row.role:
        who += f" ({row.role}{'' if row.rank is None else f', rank {row.rank}'})"
    signal = row.extra.get("exit_signal") if row is not None else None
    how = "is a zombie" if row is not None and row.state == "Z" else "is gone"
    by = (
        ", killed by the kernel for want of memory (OOM)"
        if oom
        else f", ended by signal {signal}"
        if isinstance(signal, int) and signal
        else ""
    )
    citations = [*([row.citation] if row is not None and row.citation else []), *oom]
    return Finding(
        rule=NAME,
        sentence=(
            f"Server {record.instance.name} is dead, {who} {how}{by}: what waits for its answers "
            "does not notice."
        ),
        confidence=record.verdict.confidence,
        cause=NAME,
        verdict=Dead.word,
        culprit=Culprit(pid=pid, rank=row.rank if row is not None else None),
        citations=tuple(citations),
        next_step="look at the end of that process's log and at the kernel log for its signal",
    )


RULE = Rule(name=NAME, title="a needed process ended", examine=examine)
