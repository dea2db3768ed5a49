"""False alarms per instance-day and latency of detection, by what could be asked; and of silence.

Days of fleets that never hang, and hours of fleets in which a hang of known kind is planted, are
generated from seeds (`benchmarks/_histories`) and given to the detector in virtual time, once for
each set of witnesses; to the rule that alarms after so many seconds without a heartbeat as well.
A false alarm is any alarm, a suspicion included, of an engine in which nothing is planted. Latency
counts from the instant of the stop, which lies up to ten seconds before the first missed beat.
A median or percentile is over histories, each with its first alarm; a hang that was never found
counts as infinitely late. An alarm that stood already when the hang began is false and finds none.
`HANGWATCH_PROOF_ALL_DAYS` adds days, up to that number, for the set that can ask everything.
`HANGWATCH_PROOF_DAYS` says how many instance-days are run, `HANGWATCH_PROOF_HANGS` how many
histories for each kind of hang; `just proof-verdicts` runs as many as the docs publish.
`python -m benchmarks.verdicts DAYS HANGS FILE.svg` draws the trade-off over `stall_after`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from benchmarks._histories.fleet import ALIKE, DAY, HANGS, Plan
from benchmarks._histories.picture import Point, svg
from benchmarks._histories.trial import (
    WITNESSES,
    Detector,
    Outcome,
    Result,
    SilenceOnly,
    begins,
    outcome,
    run,
)
from benchmarks._histories.world import World
from hangwatch.model.policy import Policy

Rows: TypeAlias = list[dict[str, Any]]

DAYS = float(os.environ.get("HANGWATCH_PROOF_DAYS", "60"))
ALL_DAYS = float(os.environ.get("HANGWATCH_PROOF_ALL_DAYS", "0"))
EACH = int(os.environ.get("HANGWATCH_PROOF_HANGS", "4"))
SIZES = (1, 1, 2, 4, 8, 16, 32, 64)
"""Servers of a fleet."""

SLICE = 4.0
"""Instance-days of one history, about, so that small fleets live for days and large ones for hours:
a process takes half a minute."""

PLANTED_SEEDS = 1_000_000


def measure() -> Mapping[str, Rows]:
    """Return the tables: everything by witnesses; latency by kind of hang; what looks alike."""
    with Pool(len(os.sched_getaffinity(0))) as pool:
        plans = list(honest_plans(DAYS))
        honest = list(pool.imap_unordered(run, plans))
        more = list(honest_plans(ALL_DAYS))[len(plans) :]
        honest += pool.imap_unordered(run_with_everything, more)
        planted = [
            result
            for result in pool.imap_unordered(run, planted_plans(EACH))
            if result.planted is not None
        ]
    honest.sort(key=lambda result: result.plan.seed)
    planted.sort(key=lambda result: result.plan.seed)
    return {
        "By what could be asked": by_witness(honest, planted),
        "Seconds from the stop to the first alarm, by kind of hang: median (99th percentile)": (
            by_kind(planted, HANGS, "hang", latency)
        ),
        "Share of histories with an alarm about what only looks like a hang": (
            by_kind(planted, ALIKE, "what", share)
        ),
    }


def run_with_everything(plan: Plan) -> Result:
    """Run one history for those who can ask everything, and for them alone."""
    return run(plan, {"all": WITNESSES["all"]})


def honest_plans(days: float) -> Iterator[Plan]:
    """Yield plans of honest histories that amount to *days* instance-days."""
    seed, total = 1, 0.0
    while total < days:
        servers = SIZES[seed % len(SIZES)]
        length = min(max(SLICE / servers, 0.125), 3.0)
        yield Plan(seed=seed, servers=servers, days=length)
        total += servers * length
        seed += 1


def planted_plans(each: int) -> Iterator[Plan]:
    """Yield plans of histories with a hang, or with what looks like one."""
    seed = PLANTED_SEEDS
    for kind in (*HANGS, *ALIKE):
        for number in range(each):
            seed += 1
            together = number % 4 == 3
            # One of several cannot be seen in a driver's stream that merges them.
            layout = "" if together else Random(seed).choice(("files", "files", "both"))
            if kind == "path-dead":
                layout = "both"
            # A trainer that gives up what is left and lets the engine sleep ends a loss by itself.
            lasting = ("serving", "agentic", "batch", "disaggregated")
            regime = Random(seed).choice(lasting) if kind == "lost-request" else ""
            yield Plan(
                seed=seed,
                servers=(1, 2, 4, 8)[number % 4] if not together else 8,
                days=0.12,
                regime=regime,
                plant=kind,
                together=together,
                layout=layout,
            )


def by_witness(honest: Sequence[Result], planted: Sequence[Result]) -> Rows:
    """Return one row for each set of witnesses and each baseline."""
    rows = []
    for name in honest[0].outcomes:
        heard = [result for result in honest if name in result.outcomes]
        days = sum(result.instance_days for result in heard)
        false = [len(result.outcomes[name].false) for result in heard]
        hangs = [r.outcomes[name] for r in planted if r.plan.plant in HANGS]
        found = [late for o in hangs for late in o.found]
        rows.append(
            {
                "witnesses": name,
                "instance-days": round(days),
                "false alarms": sum(false),
                "per instance-day": f"{sum(false) / days:.3f}",
                "histories without any": f"{false.count(0)} of {len(false)}",
                "hangs found": f"{sum(x is not None for x in found)} of {len(found)}",
                "first alarm, s": latency(hangs),
                "confirmed, s": spread([first(o.sure) for o in hangs]),
            }
        )
    return rows


def by_kind(
    planted: Sequence[Result],
    kinds: Iterable[str],
    head: str,
    cell: Callable[[Sequence[Outcome]], str],
) -> Rows:
    """Return one row for each kind of what was planted, under *head*; a cell for each witness."""
    rows = []
    for kind in kinds:
        results = [result for result in planted if result.plan.plant == kind]
        if results:
            names = results[0].outcomes
            cells = {name: cell([r.outcomes[name] for r in results]) for name in names}
            rows.append({head: kind} | cells)
    return rows


def latency(outcomes: Sequence[Outcome]) -> str:
    """Return how late the first alarm of each history was."""
    return spread([first(o.found) for o in outcomes])


def share(outcomes: Sequence[Outcome]) -> str:
    """Return in what share of *outcomes* anybody alarmed about what was planted."""
    found = [any(late is not None for late in o.found) for o in outcomes]
    return f"{sum(found) / len(found):.0%}"


def first(lates: Iterable[float | None]) -> float | None:
    """Return how late the first of several was found."""
    return min((late for late in lates if late is not None), default=None)


def spread(lates: Sequence[float | None]) -> str:
    """Return median and 99th percentile; what was missed is infinitely late."""
    if not lates:
        return "-"
    known = sorted(math.inf if late is None else late for late in lates)
    values = (known[len(known) // 2], known[min(len(known) - 1, int(0.99 * len(known)))])
    words = ["never" if value == math.inf else f"{value:.0f}" for value in values]
    return f"{words[0]} ({words[1]})"


# --- the trade-off -------------------------------------------------------------------------------

LIMITS = (30.0, 60.0, 120.0, 240.0, 600.0)
CURVES = ("log", "log, /proc, GPU", "all")


def trade_off(days: float, each: int) -> tuple[float, dict[str, list[Point]]]:
    """Return over how many honest instance-days each curve was had, and the curves."""
    plans = [*honest_plans(days), *(p for p in planted_plans(each) if p.plant in HANGS)]
    false: dict[tuple[str, float], int] = defaultdict(int)
    late: dict[tuple[str, float], list[float | None]] = defaultdict(list)
    total = 0.0
    with Pool(len(os.sched_getaffinity(0))) as pool:
        for planted, instance_days, found in pool.imap_unordered(tried, plans):
            total += 0.0 if planted else instance_days
            for key, (alarms, lates) in found.items():
                if planted:
                    late[key].append(first(lates))
                else:
                    false[key] += alarms
    curves: dict[str, list[Point]] = {}
    for name in ("silence only", *CURVES):
        for limit in LIMITS:
            known = sorted(math.inf if x is None else x for x in late[name, limit])
            if known and known[len(known) // 2] < math.inf:
                point = (limit, false[name, limit] / total, known[len(known) // 2])
                curves.setdefault(name, []).append(point)
    return total, curves


def tried(
    plan: Plan,
) -> tuple[bool, float, dict[tuple[str, float], tuple[int, Sequence[float | None]]]]:
    """Run one history with every limit at once."""
    world = World(plan.seed)
    fleet = begins(world, plan)
    fixed = Policy(calibrate=False)
    detectors = {
        (name, limit): Detector(WITNESSES[name], replace(fixed, stall_after=limit))
        for name in CURVES
        for limit in LIMITS
    }
    rules = {("silence only", limit): SilenceOnly(limit) for limit in LIMITS}
    for at, seen in world.run(plan.until):
        for detector in detectors.values():
            detector.feed(at, seen)
        for rule in rules.values():
            rule.feed(seen)
    found = {}
    for key, detector in detectors.items():
        detector.wait(world.now)
        made = outcome(detector.alarms, detector.confirmed, fleet.planted, [])
        found[key] = (len(made.false), made.found)
    for key, rule in rules.items():
        rule.end(world.now)
        made = outcome(rule.alarms, rule.alarms, fleet.planted, [])
        found[key] = (len(made.false), made.found)
    return bool(plan.plant), plan.servers * world.now / DAY, found


if __name__ == "__main__":
    # python -m benchmarks.verdicts DAYS HANGS PICTURE.svg
    measured, drawn = trade_off(float(sys.argv[1]), int(sys.argv[2]))
    Path(sys.argv[3]).write_text(svg(drawn, days=measured), encoding="utf-8")
    print(json.dumps(drawn))
