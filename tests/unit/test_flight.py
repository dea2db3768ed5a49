"""Dumps of PyTorch's flight recorder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from hangwatch.core.flight import MAX_ENDED, MAX_FRAMES, summary
from hangwatch.core.pickles import NotPlainDataError

# Of PyTorch 2.11 on an H200: three collectives that ended, and one behind a kernel that does not.
REAL = Path(__file__).parents[1].joinpath("fixtures", "gpu", "nccl-trace-rank-0.pickle")


def dump(*entries: dict[str, Any]) -> bytes:
    return pickle.dumps({"version": "2.10", "entries": list(entries)}, protocol=2)


def test_the_collective_that_does_not_end_is_named_with_the_line_that_asked_for_it():
    found = summary(REAL.read_bytes(), 0)

    last = found["entries"][-1]
    assert (1, "nccl:all_reduce", 4, "scheduled") == (
        found["not_ended"],
        last["profiling_name"],
        last["collective_seq_id"],
        last["state"],
    )
    assert "/srv/train/jobs/ncclstuck.py:12 forward" in last["frames"]
    assert {"last_enqueued_collective": 4, "last_started_collective": -1} == {
        name: number
        for name, number in found["pg_status"]["0"].items()
        if name != "last_completed_collective"
    }


def test_what_it_says_can_be_written_down():
    assert json.loads(json.dumps(summary(REAL.read_bytes())))["entries"]


def test_all_that_has_not_ended_is_kept_and_the_last_that_ended():
    ended = [{"record_id": n, "state": "completed"} for n in range(MAX_ENDED + 10)]
    opened = [{"record_id": 1000 + n, "state": "started"} for n in range(3)]

    found = summary(dump(*opened, *ended))

    kept = [entry["record_id"] for entry in found["entries"]]
    assert [1000, 1001, 1002, *range(10, MAX_ENDED + 10)] == kept
    assert (3, 10) == (found["not_ended"], found["left_out"])


def test_of_a_stack_its_inner_end_is_kept():
    frames = [{"filename": "a.py", "line": n, "name": "f"} for n in range(100)]

    (entry,) = summary(dump({"state": "started", "frames": frames}))["entries"]

    assert ["a.py:0 f", MAX_FRAMES] == [entry["frames"][0], len(entry["frames"])]


def test_things_that_nobody_knows_are_left_out():
    (entry,) = summary(dump({"state": "started", "secret": "s"}))["entries"]

    assert {"state": "started"} == entry


@pytest.mark.parametrize("value", [[], {"entries": 3}, {}, None])
def test_another_pickle_is_no_dump(value):
    with pytest.raises(NotPlainDataError):
        summary(pickle.dumps(value, protocol=2))
