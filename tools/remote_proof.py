"""Sum up the figures of the task reader's tests into the table that the documentation publishes.

    remote_proof.py PROOF.jsonl

The tests append a line for each program that was read if HANGWATCH_PROOF_FILE names a file; see
``just proof-remote``. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

HEAD = (
    "Python",
    "at rest: exact / tasks",
    "at full speed: resting / exact",
    "moving: wrong and unmarked / seen (marked)",
    "locks, waits, deadlocks found, none invented",
)

Sums = Mapping[str, Counter[str]]


def add_up(lines: list[str]) -> dict[str, dict[str, Counter[str]]]:
    """Return the sums by Python and by proof."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for figures in map(json.loads, lines):
        for name, value in figures.items():
            if isinstance(value, int):
                found[figures["python"]][figures["proof"]][name] += value
    return found


def row(name: str, sums: Sums) -> list[str]:
    static, speed, dead = (
        sums.get(proof, Counter()) for proof in ("static", "full speed", "deadlock")
    )
    return [
        name,
        f"{static['exact']:,} / {static['tasks']:,}",
        f"{speed['resting']:,} / {'all' if not speed['wrong'] else 'NOT ALL'}",
        f"{speed['wrong']:,} / {speed['moving']:,} ({speed['marked']:,})",
        f"{dead['owners']:,}, {dead['waits']:,}, {dead['cycles']:,}",
    ]


def main() -> None:
    found = add_up(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    everything: dict[str, Counter[str]] = defaultdict(Counter)
    for sums in found.values():
        for proof, counts in sums.items():
            everything[proof].update(counts)
    versions = sorted(found, key=lambda each: tuple(map(int, each.split("."))))
    rows = [list(HEAD), ["---"] * len(HEAD)]
    rows += [row(version, found[version]) for version in versions]
    rows.append(row("all", everything))
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))


if __name__ == "__main__":
    main()
