"""Independent servers that fell silent together: one cause outside them is the first suspicion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hangwatch.core import awaiting
from hangwatch.core.questions import (
    alarmed,
    beat_citation,
    calls,
    collective,
    health_of,
    in_flight,
    interval,
    number_of,
    precedence,
    present,
    processes_of,
    seconds,
    spread,
    stuck_await,
    together,
)
from hangwatch.model.dossier import Citation, Dossier, Finding, InstanceRecord, Rule
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.verdict import Confidence

NAME = "simultaneous-silence"

OWN = frozenset(("event", "lock", "condition", "semaphore", "barrier", "queue"))
"""Kinds of await that are about an object of the process itself."""

ACCUSED = frozenset(
    (HealthMeaning.LOOP_BLOCKED, HealthMeaning.NO_PROGRESS, HealthMeaning.LOST_REQUEST)
)

SILENT_NEXT = (
    "compare the worker-*.out files under the Ray session directory with the driver's log, ask GET "
    "/health of each server, and read the stacks of every server and Ray worker, the shared store "
    "among them"
)
FROZEN_NEXT = "find out what the calls that stand still wait for, in the processes that they share"


def examine(dossier: Dossier) -> tuple[Finding, ...]:
    """Return the finding and its rivals when several servers stopped together."""
    stopped = alarmed(dossier)
    if not together(dossier, stopped) or collective(dossier, stopped):
        return ()  # who computes together stops together
    apart = spread(stopped) or 0.0
    n = len(present(dossier))
    who = f"{len(stopped)} of {n} instances"
    if len(stopped) == n:
        who = "Both instances" if n == 2 else f"All {n} instances"
    within = "one interval" if apart <= interval(dossier) else seconds(apart)
    same = dossier.verdict.cause == NAME
    return (
        Finding(
            rule=NAME,
            sentence=(
                f"{who} stopped within {within}; the instances are independent of each other, so "
                "look for a shared cause before you look into one of them."
            ),
            confidence=dossier.verdict.confidence if same else Confidence.LOW,
            cause=NAME,
            verdict=dossier.verdict.word,
            citations=_citations(stopped),
            next_step=FROZEN_NEXT if _frozen_frames(dossier) else SILENT_NEXT,
        ),
        *_rivals(dossier, stopped),
    )


def _citations(stopped: Sequence[InstanceRecord]) -> tuple[Citation, ...]:
    return tuple(citation for record in stopped for citation in beat_citation(record))


def _rivals(dossier: Dossier, stopped: Sequence[InstanceRecord]) -> Iterator[Finding]:
    frames = _frozen_frames(dossier)
    work = in_flight(stopped)
    accused = [
        record
        for record in stopped
        if (answer := health_of(dossier, record)) is not None and answer.health.meaning in ACCUSED
    ]
    halted = {
        row.pid for record in stopped for row in processes_of(dossier, record) if row.state in "Tt"
    }
    engines_stand = ""
    if halted:
        engines_stand = f"{number_of(len(halted), 'process')} of theirs stopped (state T)"
    elif frames:
        count = len(set().union(*frames.values()))
        engines_stand = f"the stacks of {count} of their processes stood still in a call"
    if accused and not halted:
        said = f"/health of {len(accused)} of them says that the engine makes no progress"
        engines_stand = f"{engines_stand}; {said}" if engines_stand else said
    order = precedence(dossier)
    first = f"{order.who} stopped {order.before} before them" if order and order.shared else ""
    yield Finding(
        rule=NAME,
        sentence="Something that all of them wait for is stuck: a shared actor, a file system.",
        confidence=Confidence.LOW,
        pro=_pro_shared(frames, first),
        con=engines_stand if halted else "" if frames or first else _con_shared(dossier, stopped),
    )
    yield Finding(
        rule=NAME,
        sentence="No work arrives: what sends the requests, or a proxy before them, has stopped.",
        confidence=Confidence.LOW,
        pro="engines without work fall silent together too",
        con=(
            f"their last heartbeats had {number_of(work, 'request')} in flight"
            if work
            else engines_stand
        ),
    )
    sources = {r.last_beat.source for r in stopped if r.last_beat is not None}
    yield Finding(
        rule=NAME,
        sentence="The engines work, and the path of their log is dead.",
        confidence=Confidence.LOW,
        pro=(
            "all of them were read from one log"
            if len(sources) == 1
            else "a stalled file system would silence all logs on it"
        ),
        con=engines_stand
        or (
            "" if len(sources) == 1 else f"their heartbeats come from {len(sources)} separate logs"
        ),
    )
    yield Finding(
        rule=NAME,
        sentence="Each of them hangs by itself, for the same reason.",
        confidence=Confidence.LOW,
        pro="they run the same code on similar work",
        con="processes that share nothing do not stop within seconds of each other by chance",
    )


def _frozen_frames(dossier: Dossier) -> dict[str, set[int]]:
    frames: dict[str, set[int]] = {}
    for call in calls(dossier):
        if call.frozen and call.instance in alarmed(dossier):
            frames.setdefault(str(call.frame), set()).add(call.thread.pid)
    return frames


def _con_shared(dossier: Dossier, stopped: Sequence[InstanceRecord]) -> str:
    """Return the await that their engines stand at, if it is about something of their own."""
    awaits = [stuck_await(dossier, record) for record in stopped]
    told = {awaiting.told(stuck.task) for stuck in awaits if stuck is not None}
    kinds = {stuck.task.awaits.kind for stuck in awaits if stuck is not None}
    if len(told) == 1 and kinds <= OWN:
        return f"what their tasks await is inside of each process: {told.pop()}"
    return "no stack was captured that shows what they wait for"


def _pro_shared(frames: dict[str, set[int]], first: str) -> str:
    together = "independent servers stopped together"
    if first:
        together = f"{together}, and {first}"
    if not frames:
        return together
    frame, pids = max(frames.items(), key=lambda item: len(item[1]))
    if len(pids) < 2:
        return together
    return f"{together}, and {len(pids)} processes stand in the same frame: {frame}"


RULE = Rule(name=NAME, title="independent servers fell silent together", examine=examine)
