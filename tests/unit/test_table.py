"""What a process did between two samples."""

from __future__ import annotations

from hangwatch.core.table import rates

BEFORE = {"monotonic": 10.0, "cpu_seconds": 3.0, "vol_ctxt": 1000, "threads": 4}


def test_what_all_threads_did_is_counted_a_second():
    now = BEFORE | {"monotonic": 15.0, "cpu_seconds": 4.0, "vol_ctxt": 5500, "threads": 5}

    assert {"cpu_pct": 20.0, "vol_ctxt_per_s": 900.0, "switches_per_s": 900.0} == rates(BEFORE, now)


def test_switches_that_an_ended_thread_took_along_are_not_taken_for_rest():
    now = BEFORE | {"monotonic": 15.0, "vol_ctxt": 700, "threads": 3}

    assert {"cpu_pct": 0.0, "vol_ctxt_per_s": 0.0} == rates(BEFORE, now)


def test_samples_of_one_moment_say_nothing_of_rates():
    assert {} == rates(BEFORE, BEFORE)
