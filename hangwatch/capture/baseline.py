"""What a look of the baseline left, condensed and put into the ring.

A process that works for an instance is kept under that instance's verdict; one that works for
several, or for none that is known, under the best of all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangwatch.core import baseline
from hangwatch.core.baseline import NODE, Look
from hangwatch.core.planning import file_name
from hangwatch.model.capture import CaptureOutcome, CaptureRequest, Target
from hangwatch.system.looks import Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What became of a look.

    Attributes:
        processes: How many processes it kept something of.
        failed: How many steps failed.
        dropped: Files that were dropped: of processes that are gone, or no longer wanted.
    """

    processes: int
    failed: int
    dropped: int


def keep(outcome: CaptureOutcome, request: CaptureRequest) -> Kept:
    """Keep what a look left, and drop what is no longer wanted.

    Raises:
        OSError: The state directory cannot be written.
    """
    ring = Ring(Path(request.state))
    words = {each.instance.name: each.verdict for each in request.instances}
    best = baseline.shared_word(words.values())
    at = request.epoch.wall_of(outcome.started_at).isoformat(timespec="milliseconds")
    work = Path(outcome.work)
    processes = 0
    for target in outcome.targets:
        found, word = _look(work, target), words.get(target.instance, best)
        if found and word in baseline.KEPT:
            look = Look(process=target.process, at=outcome.started_at, word=word)
            head = {
                "pid": target.process.pid,
                "start_ticks": target.process.start_ticks,
                "role": target.role.value,
                "instance": target.instance,
                "at": at,
                "verdict": word,
            }
            processes += ring.write(look, {**head, **found})
    gpus = _lines(work / "gpu" / "gpu.csv")
    if gpus and best in baseline.KEPT:
        look = Look(process=NODE, at=outcome.started_at, word=best)
        ring.write(look, {"at": at, "verdict": best, "gpus": gpus})
    return Kept(
        processes=processes,
        failed=sum(evidence.failure is not None for evidence in outcome.evidence),
        dropped=ring.prune(),
    )


def _look(work: Path, target: Target) -> dict[str, Any]:
    folder = work / target.folder
    parts = [_json(folder / file_name(stem, ".json", 1)) for stem in ("kernel", "tasks", "stacks")]
    return baseline.condense(*parts) if any(parts) else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):  # it failed, or was cut off
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
