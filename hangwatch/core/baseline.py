"""The baseline: what is kept of processes that are well, to compare a later state with."""

from __future__ import annotations

from hangwatch.model.identity import ProcessId


def known_name(process: ProcessId) -> str:
    """Return the name of the file that keeps what is known of a process."""
    return f"{process.pid}-{process.start_ticks}.known"
