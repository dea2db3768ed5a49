"""What stands still, what still lives, and what that makes of a stall."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hangwatch.core.facts import Demand, Facts
from hangwatch.core.vitals import GRACE, computes, rests, spins
from hangwatch.model.identity import Role
from hangwatch.model.policy import Policy
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Motion, Outcome, ProcessVital, StackVital, Vitals

ONE_SILENT: Final = "one-instance-silent"
"""Cause of a stall that nothing but its silence describes; the fleet may say more."""

LOOP_BLOCKED: Final = "event-loop-blocked"
"""Cause of a stall in which a loop does not turn."""

SETTLED_WAIT: Final = 8.0
"""Seconds over which looks must agree that a GPU rests, or a thread waits for one thing."""

QUIET_CPU: Final = 20.0
"""Percent of a core: less is too little for a prefill, whichever process does it."""

BUSY_CPU: Final = 80.0
"""Percent of a core: the loop's thread computes."""

POLLING: Final = 500.0
"""Voluntary context switches a second of a loop that polls the GPU; about 900 measured, an idle
loop makes at most about 110."""

_PIPE_FULL: Final = re.compile(r"(?:anon_)?pipe_(?:write|wait_writable|wait|w)\b")
"""Wait channels of a thread that writes into a pipe which nobody empties; the first since 6.15."""

_COMPUTING: Final = (Role.ENGINE, Role.ENGINE_WORKER)
"""Who computes; a server asks, and waits."""

QUICK: Final = frozenset(
    {HealthMeaning.LOOP_BLOCKED, HealthMeaning.NO_PROGRESS, HealthMeaning.LOST_REQUEST}
)
"""Words of a monitor that exclude a long prefill: it ticks for each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Still:
    """What stands still in an engine that has work, in words.

    ``""`` where it does not, or is not known to.

    Attributes:
        stacks: Two samples of stacks, in a call.
        tasks: Two readings of tasks, and nothing computes.
        gpus: No GPU computes.
        gpus_settled: Whether looks at the GPUs agreed on that for long enough.
        switches: No process computes or polls a GPU.
        pipe: A full pipe holds its server.
    """

    stacks: str = ""
    tasks: str = ""
    gpus: str = ""
    gpus_settled: bool = False
    switches: str = ""
    pipe: str = ""

    @property
    def excludes_prefill(self) -> bool:
        """Whether nothing can be computed."""
        gpus = bool(self.gpus) and self.gpus_settled
        return gpus or bool(self.stacks or self.tasks or self.switches or self.pipe)

    @property
    def words(self) -> tuple[str, ...]:
        """What is known, strongest first."""
        every = (self.pipe, self.stacks, self.tasks, self.gpus, self.switches)
        return tuple(word for word in every if word)


def still_of(vitals: Vitals, known: Facts) -> Still:
    """Return what stands still."""
    stacks = stacks_of(vitals, known)
    frozen = stacks is not None and stacks.motion is Motion.FROZEN
    suspended = _suspended(vitals, known, stacks)
    words = settled = ""
    if stacks is not None and frozen:
        words = f"two samples of its stacks did not move: {stacks.frame or stacks.thread}"
    if suspended:
        settled = f"two readings of its tasks did not move, and nothing computes: {suspended}"
    rest_since, newest = vitals.gpus_rest_since, max((gpu.at for gpu in vitals.gpus), default=None)
    return Still(
        stacks=words,
        tasks=settled,
        gpus=_gpus_rest(vitals, known),
        gpus_settled=rest_since is not None
        and newest is not None
        and newest - rest_since >= SETTLED_WAIT,
        switches=_nothing_polls(vitals, known),
        pipe=_pipe_full(vitals, known),
    )


def stacks_of(vitals: Vitals, known: Facts) -> StackVital | None:
    """Return what the stacks say, unless they are older than the last progress."""
    stacks = vitals.stacks
    if stacks is None or (known.progress_at is not None and stacks.at <= known.progress_at):
        return None
    return stacks


def unanswered(vitals: Vitals, known: Facts) -> bool:
    """Say whether HTTP did not answer the last time, although TCP did."""
    health = vitals.health
    return (
        health is not None
        and health.outcome is Outcome.TIMED_OUT
        and (known.progress_at is None or health.at > known.progress_at)
    )


def is_lost(vitals: Vitals, known: Facts) -> bool:
    """Say whether requests were handed out that the engine does not know (any more)."""
    if known.unhealthy is not None:
        return known.unhealthy.meaning is HealthMeaning.LOST_REQUEST
    counters = vitals.counters
    return (
        counters is not None
        and known.firm
        and counters.running == 0
        and not counters.waiting
        and bool(counters.routed)
    )


def unseen(vitals: Vitals, policy: Policy, now: Instant) -> bool:
    """Say whether nobody can look at any of its logs."""
    followed = [source for source in vitals.sources if source.retired_at is None]
    unreadable = [
        source
        for source in followed
        if source.unreadable_since is not None
        and now >= source.unreadable_since + policy.child_silence
    ]
    if followed:
        return len(unreadable) == len(followed)
    return vitals.blind_since is not None


def work(vitals: Vitals, known: Facts) -> tuple[str, ...]:
    """Return what is known of the work in flight, in words."""
    last, counters = vitals.last, vitals.counters
    if known.demand is Demand.UNKNOWN:
        return ("whether there is work is not known: no number says so",)
    if last is not None and last.in_flight:
        numbers = f"running {_number(last.running)}, waiting {_number(last.waiting)}"
        if last.routed is not None:
            numbers += f"; {last.routed} in its server"
        return (f"its last heartbeat had {last.in_flight} requests in flight ({numbers})",)
    if counters is not None and counters.in_flight:
        return (f"its gauges show {counters.in_flight} requests in flight",)
    return ()


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def no_progress(vitals: Vitals, policy: Policy, known: Facts, *, excluded: bool) -> tuple[str, ...]:
    """Return what shows that there is none, in words; *excluded* says that no prefill can be."""
    said = []
    if known.unhealthy is not None:
        said.append(f"/health says “{known.unhealthy.message or known.unhealthy.status}”")
    if known.flat:
        said.append(f"its token counters stood still for {known.patience:g} s")
    if known.log_speaks:
        limit = policy.missed_beats * known.interval if excluded else known.patience
        if vitals.last is not None and vitals.last.tps == 0:
            said.append("its heartbeats go on and show 0 tokens/s with requests in flight")
        else:
            said.append(
                f"no heartbeat for {limit:g} s, one was due every {known.interval:g} s"
                " while there is work"
            )
    return tuple(said)


def path_lives(vitals: Vitals, known: Facts) -> list[str]:
    """Return why the silence cannot be the log's fault."""
    last = vitals.last
    found = []
    if last is not None and vitals.last_progress is not None and last.at > vitals.last_progress.at:
        found.append("its own later lines arrive, so the path of its log lives")
    if last is not None:
        proof_at = last.at + GRACE * known.interval
        if vitals.siblings_at is not None and vitals.siblings_at >= proof_at:
            found.append(
                "other engines still print on its log or beside it, so the path of its log lives"
            )
        else:
            # A driver prints lines of its own; they prove nothing of the way from its workers.
            found += [
                f"{source.name} still grows, so its path lives"
                for source in vitals.sources
                if not source.relayed and source.grew_at is not None and source.grew_at >= proof_at
            ]
    if known.unhealthy is not None:
        found.append("the engine's own monitor was reached, so the path of the log does not matter")
    if unanswered(vitals, known):
        found.append("its port accepts connections, and HTTP does not answer on them")
    return found


def busy_loop(vitals: Vitals, known: Facts) -> str:
    """Return which loop is blocked by work, in words; ``""`` if none is known to be."""
    stacks = stacks_of(vitals, known)
    spinning = bool(vitals.gpus) and all(spins(gpu) for gpu in vitals.gpus)
    frozen = stacks is not None and stacks.motion is Motion.FROZEN
    if frozen or (spinning and not vitals.polls_gpu):
        return ""  # what is on CPU waits for them
    if stacks is not None and stacks.motion is Motion.BUSY:
        return f"the loop's thread runs: {stacks.frame or stacks.thread}"
    blocked = known.unhealthy is not None and known.unhealthy.meaning is HealthMeaning.LOOP_BLOCKED
    resting = bool(vitals.gpus) and all(rests(gpu) for gpu in vitals.gpus)
    for process in vitals.processes:
        if not process.needed or not _is_busy(process):
            continue
        who = f"process {process.pid} computes without a pause"
        if process.role not in _COMPUTING:
            if unanswered(vitals, known):
                return f"HTTP does not answer while {who}"
        elif blocked and vitals.polls_gpu:  # others spin while they wait for their GPU
            return f"its loop does not answer while {who}"
        elif resting and known.firm:
            return f"its GPUs do nothing while {who}"
    return ""


def _is_busy(process: ProcessVital) -> bool:
    """Say whether a process computes without a pause."""
    cpu = max(process.cpu_pct or 0.0, process.busiest_cpu_pct or 0.0)
    running = process.state == "R" or process.busiest_cpu_pct is not None
    # On a crowded machine what never rests gets less than a core.
    crowded = process.state == "R" and process.at - process.since >= SETTLED_WAIT
    return (cpu >= BUSY_CPU and running) or (cpu >= QUIET_CPU and crowded)


def _awaits_its_gpu(vitals: Vitals) -> bool:
    """Say whether an engine may be waiting for a kernel that spins.

    A rank that waits for its next input spins as well, while the one that should send it compiles,
    say. Who waits for a kernel polls for its end, if its engine does that at all.
    """
    engines = [p for p in vitals.processes if p.needed and p.role in _COMPUTING]
    if not vitals.polls_gpu or not engines:
        return True
    rates = [p.switches_per_s for p in engines if p.switches_per_s is not None]
    return max(rates) >= POLLING if rates else not any(map(_is_busy, engines))


def _suspended(vitals: Vitals, known: Facts, stacks: StackVital | None) -> str:
    """Return the await that never completes, where nothing else explains the silence."""
    if stacks is None or not stacks.suspended or known.demand is not Demand.SOME:
        return ""
    needed = [process for process in vitals.processes if process.needed]
    quiet = all(
        process.cpu_pct is not None
        and process.vol_ctxt_per_s is not None
        and process.cpu_pct < QUIET_CPU
        and process.vol_ctxt_per_s < POLLING
        for process in needed
    )
    return stacks.suspended if needed and quiet else ""


def _gpus_rest(vitals: Vitals, known: Facts) -> str:
    """Say that no GPU computes although there is work; ``""`` if that is not known."""
    gpus = vitals.gpus
    newest = max((gpu.at for gpu in gpus), default=None)
    # A loop that is caught in a call has work, whatever else is known of it.
    stacks = stacks_of(vitals, known)
    called = stacks is not None and stacks.motion is not Motion.WAITING
    if not (known.firm or called) or not all(computes(gpu) is False for gpu in gpus):
        return ""
    if newest is None:
        return ""
    if known.progress_at is not None and newest <= known.progress_at:
        return ""
    spinning = [gpu for gpu in gpus if spins(gpu)]
    if spinning and len(spinning) < len(gpus) and not _awaits_its_gpu(vitals):
        return ""
    if spinning:
        one = spinning[0]
        power = "" if one.power_w is None else f", {one.power_w:.0f} W"
        limit = "" if one.power_limit_w is None else f" of {one.power_limit_w:.0f} W"
        return (
            f"GPU {one.index} runs a kernel that computes nothing: {one.utilization_pct:.0f} %"
            f" utilisation, memory activity {one.memory_activity_pct or 0:.0f} %{power}{limit}"
        )
    most = max(gpu.utilization_pct or 0.0 for gpu in gpus)
    return f"its GPUs do nothing: {most:.0f} % utilisation at most"


def _nothing_polls(vitals: Vitals, known: Facts) -> str:
    """Say that no process computes, or waits for a GPU; ``""`` if that is not known."""
    needed = [process for process in vitals.processes if process.needed]
    if not known.firm or not vitals.polls_gpu or not needed:
        return ""
    for process in needed:
        switches, cpu = process.switches_per_s, process.cpu_pct
        if switches is None or cpu is None or switches >= POLLING or cpu >= QUIET_CPU:
            return ""
        if known.progress_at is not None and process.at <= known.progress_at:
            return ""
    most = max(process.switches_per_s or 0.0 for process in needed)
    return (
        "no process of it computes or polls its GPU: the busiest switches its threads"
        f" {most:.0f} times a second, a polling one about 900 times"
    )


def _pipe_full(vitals: Vitals, known: Facts) -> str:
    """Say that its server is held by a pipe that nobody reads; ``""`` if that is not known.

    An idle server may be seen in the middle of a line that it writes: it counts if it stood there
    for some time, or answers nothing, or has work and has been silent for long.
    """
    for process in vitals.processes:
        since = process.waits_since or process.at
        if process.role is not Role.API_SERVER or not process.needed:
            continue
        if not _PIPE_FULL.match(process.wchan):
            continue
        stood = process.at - since >= SETTLED_WAIT
        silent = process.at >= known.limit_at and known.demand is not Demand.NONE
        # Nor has a server that answers nothing only been seen in passing.
        if stood or silent or unanswered(vitals, known):
            what = "its standard output is one that" if process.stdout_pipe else "it is one that"
            return (
                f"{process.role} {process.pid} waits in {process.wchan} for room in a pipe: {what}"
                " nobody empties"
            )
    return ""


def _loop_turns(vitals: Vitals) -> bool | None:
    """Return whether the server's loop turns although HTTP is not answered; ``None`` if unknown.

    It does if its main thread was seen to wait for events after HTTP had fallen silent. A loop
    that turns is caught at work now and then, so it takes some looks to say that it does not.
    """
    servers = [p for p in vitals.processes if p.role is Role.API_SERVER and p.needed]
    mute_since = vitals.health.since if vitals.health is not None else None
    if not servers or mute_since is None:
        return None
    if all(p.polled_at is not None and p.polled_at >= mute_since for p in servers):
        return True
    return False if min(p.at for p in servers) - mute_since >= SETTLED_WAIT else None


def cause_of(vitals: Vitals, known: Facts, still: Still) -> str:  # noqa: PLR0911  # one a cause
    """Return the cause of a stall, as far as it shows from outside."""
    meaning = known.unhealthy.meaning if known.unhealthy else None
    stacks = stacks_of(vitals, known)
    if still.pipe:
        return "stdout-pipe-full"
    if still.gpus and all(spins(gpu) for gpu in vitals.gpus):
        return "gpu-kernel-stuck"
    if still.stacks or meaning is HealthMeaning.LOOP_BLOCKED:
        return LOOP_BLOCKED
    if is_lost(vitals, known):
        return "lost-request"
    if unanswered(vitals, known) and (turns := _loop_turns(vitals)) is not None:
        return "concurrency-limit" if turns else LOOP_BLOCKED
    waiting = stacks is not None and stacks.motion is Motion.WAITING
    if still.tasks or still.switches or (waiting and still.gpus):
        return "await-never-completes"
    if meaning is HealthMeaning.NO_PROGRESS and (polls := _polls(vitals, idle=waiting)) is not None:
        return "gpu-kernel-stuck" if polls else "await-never-completes"
    last = vitals.last
    if last is not None and last.tps == 0 and not last.running and last.in_flight:
        return "scheduler-stuck"
    return ONE_SILENT


def _polls(vitals: Vitals, *, idle: bool) -> bool | None:
    """Return whether an engine whose loop turns polls its GPU; ``None`` if that is not known.

    Args:
        vitals: All that is known.
        idle: Whether every thread of it waits: its main threads' switches are then all there are.
    """
    rates = [
        p.vol_ctxt_per_s if p.switches_per_s is None else p.switches_per_s
        for p in vitals.processes
        if p.switches_per_s is not None or idle
    ]
    known = [rate for rate in rates if rate is not None]
    return max(known) >= POLLING if known and (idle or vitals.polls_gpu) else None


def not_asked(vitals: Vitals) -> tuple[str, ...]:
    """Return which witnesses there were none of, in words."""
    missing = [
        name
        for name, value in (
            ("/health", vitals.health),
            ("/metrics", vitals.counters),
            ("process states", vitals.processes),
            ("GPUs", vitals.gpus),
            ("stacks", vitals.stacks),
        )
        if not value
    ]
    return (f"not available: {', '.join(missing)}",) if missing else ()
