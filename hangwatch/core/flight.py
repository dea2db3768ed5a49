"""PyTorch's NCCL flight recorder: the last collectives of one rank, and which have not ended.

The recorder keeps a ring of collectives with their sequence number, state (``scheduled``,
``started``, ``completed``), sizes and Python stack, per process group
(``torch/csrc/distributed/c10d/FlightRecorder.cpp``). Of ranks that hang, the one whose last
collective differs from those of the others, or has a lower number, is the one that is missing.
What has not ended is kept whole, of what has ended the end only, each with the inner end of its
stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hangwatch.core import pickles

SCHEMA: Final = "hangwatch.flight_recorder/1"

MAX_ENDED: Final = 64
"""Collectives that have ended, and are kept: the last ones."""

MAX_OPEN: Final = 512

MAX_FRAMES: Final = 24

_KEPT: Final = (
    "record_id",
    "pg_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "state",
    "is_p2p",
    "retired",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "duration_ms",
    "timeout_ms",
)


def summary(data: bytes, rank: int | None = None) -> dict[str, Any]:
    """Return what a dump says, as plain data for a file.

    Raises:
        NotPlainDataError: It is no such dump.
    """
    dump = pickles.loads(data)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise pickles.NotPlainDataError("it has no list of collectives")
    entries = [entry for entry in dump["entries"] if isinstance(entry, dict)]
    ended = [entry for entry in entries if entry.get("state") == "completed"]
    kept = {id(entry) for entry in ended[-MAX_ENDED:]}
    opened = [entry for entry in entries if entry.get("state") != "completed"]
    kept |= {id(entry) for entry in opened[:MAX_OPEN]}
    return {
        "schema": SCHEMA,
        "rank": rank,
        "version": dump.get("version"),
        "pg_config": dump.get("pg_config"),
        "pg_status": dump.get("pg_status"),
        "nccl_comm_state": dump.get("nccl_comm_state"),
        "entries": [_entry(entry) for entry in entries if id(entry) in kept],
        "not_ended": len(opened),
        "left_out": len(entries) - len(kept),
    }


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: entry[name] for name in _KEPT if name in entry}
    frames = entry.get("frames")
    if isinstance(frames, list):
        kept["frames"] = [_frame(frame) for frame in frames[:MAX_FRAMES]]
    return kept


def _frame(frame: Any) -> str:
    if not isinstance(frame, dict):
        return ""
    return f"{frame.get('filename', '')}:{frame.get('line', '')} {frame.get('name', '')}"
