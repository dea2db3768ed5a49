"""Rows of ``procs.json``: who a process is, and what it did since the sample before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hangwatch.core.objects import number
from hangwatch.model.capture import Target


def who(target: Target, why: str) -> dict[str, Any]:
    """Return what is known of a process before it is looked at; what is not is left out.

    Args:
        target: It.
        why: What ties it to the hang.
    """
    known = {
        "pid": target.process.pid,
        "start_ticks": target.process.start_ticks,
        "ppid": target.ppid,
        "role": str(target.role),
        "rank": target.rank,
        "gpu": target.gpu,
        "instance": target.instance,
        "why": why,
        "title": target.title,
        "comm": target.comm,
    }
    return {key: value for key, value in known.items() if value not in (None, "")}


def rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """Return what a process did a second between two rows of it, as far as both say.

    ``vol_ctxt_per_s`` and ``switches_per_s`` both count all its threads. A thread that ended takes
    its context switches with it, so that the sum may shrink: that is 0 for the first, and the
    second, which is a witness, is left out where there are fewer threads than before.
    """
    elapsed = _grown("monotonic", before, now)
    if elapsed is None or elapsed <= 0:
        return {}
    grown = {
        "cpu_pct": (100, _grown("cpu_seconds", before, now)),
        "vol_ctxt_per_s": (1, _grown("vol_ctxt", before, now)),
    }
    threads = _grown("threads", before, now)
    if threads is not None and threads >= 0:
        grown["switches_per_s"] = grown["vol_ctxt_per_s"]
    return {
        name: round(max(0.0, factor * much / elapsed), 1)
        for name, (factor, much) in grown.items()
        if much is not None
    }


def _grown(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    earlier, later = number(before.get(name)), number(now.get(name))
    return None if earlier is None or later is None else later - earlier
