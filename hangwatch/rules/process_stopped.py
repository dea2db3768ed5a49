"""A process was stopped from outside: a tracer or a signal."""

from __future__ import annotations

from hangwatch.core.questions import alarmed_by, listed, processes_of
from hangwatch.model.dossier import Citation, Culprit, Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence

NAME = "process-stopped"
CAUSE = "stopped-by-tracer"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the processes in state T that stopped engines need."""
    rows = {
        row.pid: row
        for record in alarmed_by(dossier, CAUSE)
        for row in processes_of(dossier, record)
        if row.state in ("T", "t")
    }
    if not rows:
        return ()
    first = next(iter(rows.values()))
    them = "it" if len(rows) == 1 else "them"
    traced = {row.tracer_pid for row in rows.values() if row.tracer_pid}
    tracer = (
        f"traced by {listed([str(pid) for pid in sorted(traced)])}"
        if traced
        else f"and nobody traces {them}: a signal stopped {them}, or a tracer that has ended"
    )
    one = len(rows) == 1
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"{'Process' if one else 'Processes'} {listed([str(pid) for pid in rows])} "
                f"{'is' if one else 'are'} stopped (state {first.state}) from outside, {tracer}. "
                "The engine does nothing until it gets SIGCONT."
            ),
            confidence=Confidence.HIGH,
            cause=CAUSE,
            verdict="hung",
            culprit=Culprit(pid=first.pid, rank=first.rank),
            citations=(
                *(row.citation for row in rows.values() if row.citation is not None),
                *((Citation(path="events.json"),) if "events.json" in dossier.extra else ()),
            ),
            next_step=(
                "detach the debugger or profiler that holds it"
                if traced
                else f"kill -CONT {' '.join(map(str, rows))}, once nobody needs it stopped"
            ),
        ),
    )


RULE = Rule(name=NAME, title="a process is stopped (state T)", examine=examine)
