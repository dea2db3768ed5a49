"""What this evidence cannot tell, and what would."""

from __future__ import annotations

from hangwatch.core.questions import alarmed, calls, health_of, stuck_await
from hangwatch.model.capture import Evidence, FailureKind
from hangwatch.model.dossier import Dossier, Finding, Rule
from hangwatch.model.verdict import Confidence, Dead

NAME = "cannot-tell"

# Causes that a rule of its own explains, with what would tell more.
EXPLAINED = frozenset(
    ("await-never-completes", "stopped-by-tracer", "storage-d-state", "event-loop-blocked-by-cpu")
)


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return what is missing to say why a stopped engine stopped."""
    stopped = alarmed(dossier)
    if not stopped or all(isinstance(record.verdict, Dead) for record in stopped):
        return ()
    if dossier.verdict.cause in EXPLAINED or any(call.frozen for call in calls(dossier)):
        return ()
    if any(task.deadlocked and task.moved is False for task in dossier.tasks):
        return ()
    if any(stuck_await(dossier, record) is not None for record in stopped):
        return ()
    pid = stopped[0].instance.pid
    missing: list[str] = []
    steps: list[str] = []
    if not dossier.stacks:
        missing.append("what their threads are doing")
        steps.append(_stacks_step(dossier, pid))
    elif all(thread.moved is None for thread in dossier.threads):
        missing.append("whether their stacks move")
        steps.append("take a second dump a few seconds later")
    if not any(health_of(dossier, record) is not None for record in stopped):
        missing.append("what their own monitors say")
        steps.append("GET /health of each server")
    if not dossier.processes:
        missing.append("the state of their processes")
        steps.append("ps -eo pid,ppid,stat,wchan:30,args")
    if not missing and dossier.tasks:
        missing.append("what should have completed the awaits that their tasks stand at")
        steps.append("hangwatch tasks --pid PID --watch")
    elif not missing:
        missing.append("which suspended task waits for what: a thread dump does not show it")
        steps.append("hangwatch tasks --pid PID")
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"Why they stopped cannot be told from this evidence: it does not say "
                f"{' or '.join(missing)}."
            ),
            confidence=Confidence.HIGH,
            next_step="; ".join(steps),
        ),
    )


def _stacks_step(dossier: Dossier, pid: int | None) -> str:
    refused = next((e for e in dossier.evidence if _refused(e)), None)
    if refused is not None and refused.failure is not None and refused.failure.hint:
        return refused.failure.hint
    return f"hangwatch attach --pid {pid or 'PID'} --now"


def _refused(evidence: Evidence) -> bool:
    return (
        evidence.collector == "stacks"
        and evidence.failure is not None
        and evidence.failure.kind in (FailureKind.NOT_PERMITTED, FailureKind.NOT_INSTALLED)
    )


RULE = Rule(name=NAME, title="what this evidence cannot tell, and what would", examine=examine)
