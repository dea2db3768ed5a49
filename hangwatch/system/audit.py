"""The audit trail: each time that a watched process is touched is one event of our log.

Whoever reads the memory of a process that is watched, or attaches to it, says so here, before it
does: captures, and whatever else looks into processes.
"""

from __future__ import annotations

from hangwatch.model.capture import Means, Touch
from hangwatch.system.logs import log


def touched(touch: Touch) -> None:
    """Write one line of the audit trail into our log, where that is written."""
    facts = {
        "pid": touch.process.pid,
        "start_ticks": touch.process.start_ticks,
        "step": touch.step,
        "incident": touch.incident,
    }
    if touch.means is Means.SIGCONT:
        log.warning("hangwatch.target_continued", **facts)
    else:
        log.info("hangwatch.target_read", means=touch.means.value, **facts)
