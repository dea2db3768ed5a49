"""Who ceased to run as before, and when: recordings with known stops."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import jsonschema
import pytest

from hangwatch.capture.schemas import schemas
from hangwatch.core import blackbox
from hangwatch.core.redaction import Redactor
from hangwatch.model.capture import Target
from hangwatch.model.identity import ProcessId, Role
from hangwatch.model.recording import UNSEEN, Change, Recording, Stop, Track
from hangwatch.model.time import Epoch, Instant

EPOCH = Epoch(boot_id="", at=Instant(0.0), wall=datetime(2026, 3, 4, 5, 0, tzinfo=UTC))
PERIOD = 0.25
END = 180.0

Pattern = Callable[[float, random.Random], tuple[float, float]]
"""Instant in, slices a second and share of a core out."""


def at(until: float = END, gap: tuple[float, float] = (0.0, 0.0)) -> list[float]:
    looks = [1000.0 + PERIOD * i for i in range(int(until / PERIOD))]
    return [look for look in looks if not gap[0] <= look - 1000.0 < gap[1]]


def track(
    pid: int,
    pattern: Pattern,
    *,
    looks: Sequence[float] = (),
    tid: int = 0,
    seed: int = 1,
    ended_at: float | None = None,
) -> Track:
    """Play a pattern, sixty-fourths of a look at a time, so that a stop cuts a look in two."""
    rng = random.Random(seed * 1000 + pid)
    looks = looks or at()
    slices, run = [UNSEEN], [UNSEEN]
    for since, now in itertools.pairwise(looks):
        if now - since > 3 * PERIOD or (ended_at is not None and now >= ended_at):
            slices.append(UNSEEN)
            run.append(UNSEEN)
            continue
        count = share = 0.0
        for i in range(64):
            rate, part = pattern(since - 1000.0 + (now - since) * i / 64, rng)
            count += rng.random() < rate * (now - since) / 64
            share += part / 64
        slices.append(round(count))
        run.append(round(share * (now - since) * 1e6))
    return Track(
        process=ProcessId(pid, 7),
        tid=tid or pid,
        name="python",
        slices=slices,
        run_us=run,
        ended_at=None if ended_at is None else Instant(ended_at),
    )


def engine(stop: float, *, rate: float = 120.0, ticks: float = 8.0) -> Pattern:
    return lambda t, _: (rate, 0.3) if t < stop else (ticks, 0.001)


def recording(*tracks: Track, looks: Sequence[float] = ()) -> Recording:
    return Recording(period=PERIOD, at=looks or at(), tracks=tracks)


def stop_of(*tracks: Track, looks: Sequence[float] = (), progress: float = 90.0) -> Stop:
    (found,) = blackbox.stops(
        recording(*tracks, looks=looks), progress_at=Instant(1000.0 + progress)
    )
    return found


def window(stop: Stop) -> tuple[float, float]:
    assert stop.earliest is not None
    assert stop.latest is not None
    return stop.earliest - 1000.0, stop.latest - 1000.0


@pytest.mark.parametrize("tenth", range(10))
def test_a_busy_engine_that_falls_quiet_is_placed_within_a_quarter_of_a_second(tenth: int):
    stopped = 100.0 + tenth * 0.1

    found = stop_of(track(1, engine(stopped), seed=tenth))
    earliest, latest = window(found)

    assert Change.QUIET is found.change
    assert pytest.approx(PERIOD) == latest - earliest
    assert earliest - 0.06 <= stopped <= latest + 0.06


def test_the_order_of_two_stops_is_told_only_where_it_is_certain():
    wrong = told = 0
    for seed in range(60):
        rng = random.Random(seed)
        apart = rng.uniform(0.0, 1.2)
        first, second = track(1, engine(100.0), seed=seed), track(2, engine(100 + apart), seed=seed)
        found = blackbox.stops(recording(first, second), progress_at=Instant(1090.0))
        order = blackbox.lead(stops_read(found))
        told += order is not None
        if order is not None:
            wrong += order.first[0].pid != 1
            assert order.least - 0.13 <= apart <= order.most + 0.13

    assert 0 == wrong
    assert told > 40


def stops_read(found: Sequence[Stop]) -> tuple[blackbox.ProcessStop, ...]:
    rows = [
        (row, blackbox.Citation(path="stops.json", line=n))
        for n, row in enumerate(
            json.loads(blackbox.stops_document(found, targets={}, epoch=EPOCH)), 2
        )
    ]
    return blackbox.recorded(rows, EPOCH)


def test_a_burst_after_the_stop_such_as_an_answer_to_our_own_question_moves_nothing():
    def pattern(t: float, _: random.Random) -> tuple[float, float]:
        if t < 100.0:
            return 60.0, 0.2
        return (80.0, 0.1) if 4.0 <= t % 10 < 4.25 else (0.0, 0.0)

    earliest, latest = window(stop_of(track(1, pattern)))

    assert earliest - 0.1 <= 100.0 <= latest + 0.1


def test_a_store_that_is_asked_once_a_second_is_placed_within_its_usual_pause():
    def pattern(t: float, _: random.Random) -> tuple[float, float]:
        return (40.0, 0.05) if t < 100.2 and t % 1.0 < 0.2 else (0.0, 0.0)

    found = stop_of(track(1, pattern))
    earliest, latest = window(found)

    assert Change.QUIET is found.change
    assert 0.9 <= latest - earliest <= 2.5
    assert earliest <= 100.2 <= latest


def test_a_thread_that_begins_to_spin_is_placed_too():
    found = stop_of(track(1, lambda t, _: (50.0, 0.2) if t < 100.0 else (20.0, 0.99)))
    earliest, latest = window(found)

    assert Change.SPINNING is found.change
    assert earliest <= 100.0 <= latest


def test_what_runs_on_as_before_is_unchanged_and_what_never_ran_says_nothing():
    def rarely(t: float, _: random.Random) -> tuple[float, float]:
        return (8.0, 0.0) if t % 20 < 0.25 else (0.0, 0.0)

    assert Change.UNCHANGED is stop_of(track(1, engine(999.0))).change
    assert Change.INACTIVE is stop_of(track(1, rarely)).change


def test_an_uneven_load_is_no_stop():
    def uneven(t: float, rng: random.Random) -> tuple[float, float]:
        return (150.0, 0.5) if int(t / 2.5) % 2 else (2.0, 0.01)

    assert Change.UNCHANGED is stop_of(track(1, uneven)).change


def test_a_process_that_was_recorded_too_short_before_the_stop_is_unknown():
    assert Change.UNKNOWN is stop_of(track(1, engine(5.0)), progress=3.0).change


def test_a_process_that_ended_did_so_between_two_looks():
    found = stop_of(track(1, engine(999.0), ended_at=1120.0))

    assert Change.ENDED is found.change
    assert (119.75, 120.0) == window(found)


def test_a_gap_of_ours_is_never_a_sign_of_silence():
    looks = at(gap=(110.0, 172.0))

    assert Change.UNCHANGED is stop_of(track(1, engine(999.0), looks=looks), looks=looks).change


def test_of_several_threads_the_busiest_that_changed_speaks_for_the_process():
    main = track(1, lambda t, _: (10.0, 0.01))
    loop = track(1, engine(100.0), tid=2)
    helper = track(1, engine(140.0, rate=30.0, ticks=0.0), tid=3)

    found = stop_of(main, loop, helper)

    assert (2, Change.QUIET) == (found.tid, found.change)


def test_without_a_sign_of_progress_all_but_the_end_is_the_past():
    (found,) = blackbox.stops(recording(track(1, engine(150.0))))

    assert Change.QUIET is found.change


def test_the_documents_say_who_stopped_first_and_keep_to_their_schema():
    store, other = track(1, engine(100.0)), track(2, engine(100.9))
    target = Target(process=ProcessId(1, 7), role=Role.STORE)
    kept = recording(store, other)
    found = blackbox.stops(kept, progress_at=Instant(1090.0))

    text = blackbox.stops_document(found, targets={target.process: target}, epoch=EPOCH)

    assert [("store", 1), (None, 2)] == [(r.get("role"), r["pid"]) for r in json.loads(text)]
    assert text.splitlines()[1].startswith(b' {"pid": 1,')
    jsonschema.validate(
        json.loads(text),
        schemas()["loose-evidence.stops.1"],
        format_checker=jsonschema.FormatChecker(),
    )
    rows = list(csv.DictReader(io.StringIO(blackbox.counters_document(kept, EPOCH).decode())))
    assert ("1", "1", "2") == (rows[0]["pid"], rows[0]["tid"], rows[-1]["pid"])
    assert [str(n) if n != UNSEEN else "-" for n in store.slices[:40]] == rows[0]["slices"].split()


def test_a_line_of_counters_ends_where_looks_are_missing():
    looks = at(30.0, gap=(12.0, 15.0))
    kept = recording(track(1, engine(999.0), looks=looks), looks=looks)

    rows = list(csv.DictReader(io.StringIO(blackbox.counters_document(kept, EPOCH).decode())))

    assert [40, 8, 40, 20] == [len(row["slices"].split()) for row in rows]
    assert "1015.0" == rows[2]["monotonic"]
    assert "-" == rows[2]["slices"].split()[0]


def test_redaction_leaves_the_numbers_alone_and_takes_a_secret_out_of_a_name():
    secret = "sk-proj-" + "Ab1" * 12
    named = replace(track(1, engine(100.0)), name=secret)
    kept = recording(named)
    document = blackbox.counters_document(kept, EPOCH)
    found = blackbox.stops_document(
        blackbox.stops(kept, progress_at=Instant(1090.0)), targets={}, epoch=EPOCH
    )

    redacted = Redactor().file("blackbox/counters.csv", document)

    assert secret.encode() not in redacted + Redactor().file("blackbox/stops.json", found)
    assert document.count(b"\n") == redacted.count(b"\n")
    assert document.splitlines()[1].split(b",")[5:] == redacted.splitlines()[1].split(b",")[5:]
