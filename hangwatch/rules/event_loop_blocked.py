"""A loop's thread is in a call: nothing else on that loop can run."""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.core import motion
from hangwatch.core.loose import role_of
from hangwatch.core.questions import CAUSE_FIRST, Call, alarmed, calls, health_of, listed
from hangwatch.model.dossier import Culprit, Dossier, Finding, Frame, Rule
from hangwatch.model.identity import Role
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.verdict import Confidence

NAME = "event-loop-blocked"
BY_CPU = "event-loop-blocked-by-cpu"
BY_GPU = "gpu-kernel-stuck"

CALL_NEXT = "find out what that call waits for: the process at its other end is the next to look at"
KERNEL_NEXT = "have the kernel named, with cuda-gdb or a GPU core dump, before anything restarts it"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return one finding for each distinct call that loops of stopped engines stand in."""
    stopped = alarmed(dossier)
    groups: dict[tuple[bool, str], list[Call]] = {}
    for call in calls(dossier):
        if call.process is not None and call.process.state in ("T", "t"):
            continue  # whoever is stopped from outside stands still wherever it was
        moving = (call.thread.moved or call.thread.active) and not call.thread.rested
        # A thread that waits for its GPU may burn its core, and does nothing all the same.
        frozen = call.frozen or (_waits_for_gpu(call) and not call.thread.moved)
        if call.instance in stopped and (frozen or moving):
            groups.setdefault((frozen, str(call.frame)), []).append(call)
    found = [
        _frozen(dossier, group, len(stopped)) if frozen else _moving(group, len(stopped))
        for (frozen, _), group in groups.items()
    ]
    return tuple(found)


def _waits_for_gpu(call: Call) -> bool:
    return call.instance is not None and call.instance.verdict.cause == BY_GPU


def _by_role(call: Call) -> int:
    role = role_of(call.process.role) if call.process is not None else Role.OTHER
    return CAUSE_FIRST.index(role) if role in CAUSE_FIRST else len(CAUSE_FIRST)


def _who(group: Sequence[Call], stopped: int) -> str:
    names = list(dict.fromkeys(c.instance.instance.name for c in group if c.instance is not None))
    if len(names) == 1:
        return f"the event loop of {names[0]} (pid {group[0].thread.pid})"
    if len(names) == stopped:
        return f"the event loops of {'both' if stopped == 2 else f'all {stopped}'} stopped engines"
    return f"the event loops of {len(names)} of {stopped} stopped engines ({listed(names)})"


def _culprit(group: Sequence[Call]) -> Culprit:
    call = min(group, key=_by_role)
    return Culprit(
        pid=call.thread.pid,
        rank=call.process.rank if call.process is not None else None,
        thread=call.thread.name or None,
        frame=_at_fault(call).function,
    )


def _at_fault(call: Call) -> Frame:
    """Return the driver's own call where that is what a thread waits in, else the telling frame."""
    waits = (frame for frame in call.thread.frames if motion.SPINS.match(frame.name))
    return next(waits, call.frame) if _waits_for_gpu(call) else call.frame


def _frozen(dossier: Dossier, group: Sequence[Call], stopped: int) -> Finding:
    confirmed = any(
        answer.health.meaning is HealthMeaning.LOOP_BLOCKED
        for call in group
        if call.instance is not None and (answer := health_of(dossier, call.instance)) is not None
    )
    many = len({call.thread.pid for call in group}) > 1
    said = "; /health says so too: its probe of that loop timed out" if confirmed else ""
    gpu = all(_waits_for_gpu(call) for call in group)
    if gpu:
        said = "; its GPU runs a kernel that computes nothing, and the call waits for that"
    return Finding(
        rule=NAME,
        sentence=(
            f"{_capital(_who(group, stopped))} {'are' if many else 'is'} blocked in "
            f"{'the same' if many else 'one'} call, {_told(group[0])}: the thread stood there "
            f"unmoved in both samples, and nothing else can run on that loop{said}."
        ),
        confidence=Confidence.HIGH,
        cause=BY_GPU if gpu else NAME,
        verdict="hung",
        culprit=_culprit(group),
        citations=tuple(c.thread.citation for c in group if c.thread.citation is not None)[:8],
        next_step=KERNEL_NEXT if gpu else CALL_NEXT,
    )


def _moving(group: Sequence[Call], stopped: int) -> Finding:
    thread = group[0].thread
    gil = "owns the GIL and is running" if thread.owns_gil else "is running"
    how = "its frames move" if thread.moved else "on CPU in both samples"
    return Finding(
        rule=NAME,
        sentence=(
            f"{_capital(_who(group, stopped))} {'is' if len(group) == 1 else 'are'} blocked by "
            f"work that was called on it, {_told(group[0])}: the thread {gil} ({how}), so it may "
            "end by itself."
        ),
        confidence=Confidence.HIGH,
        cause=BY_CPU,
        verdict="blocked",
        culprit=_culprit(group),
        citations=tuple(c.thread.citation for c in group if c.thread.citation is not None)[:8],
        next_step="look again in a minute; move this work off the event loop if it recurs",
    )


def _told(call: Call) -> str:
    """Return the frame and who called it."""
    caller = motion.caller(motion.call_in_loop(call.thread), call.frame)
    alias = motion.alias(call.frame)
    frame = f"{alias} in {call.frame}" if alias else str(call.frame)
    return frame + (f", called from {caller}" if caller is not None else "")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


RULE = Rule(name=NAME, title="an event loop is blocked in a call", examine=examine)
