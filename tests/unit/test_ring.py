"""The black box's file: what is written can be read, by anybody, at any moment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hangwatch.model.identity import ProcessId
from hangwatch.model.recording import UNSEEN
from hangwatch.system.ring import ABSENT, ROWS, SLOTS, Ring, read

ONE, TWO = ProcessId(1, 11), ProcessId(2, 22)


def fill(ring: Ring, looks: int, *, begin: float = 0.0, slots: int = 1) -> None:
    for i in range(looks):
        n = ring.look
        ring.write(begin + 0.25 * i, [n * 1000, n * 3] * slots)
    ring.flush()


def test_what_a_thread_did_since_the_look_before_is_read(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        ring.seat(ONE, 1, b"python")
        fill(ring, 4)
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    (track,) = found.tracks
    assert ((ONE, 1, "python"), [0.0, 0.25, 0.5, 0.75]) == (
        (track.process, track.tid, track.name),
        list(found.at),
    )
    assert ([UNSEEN, 3, 3, 3], [UNSEEN, 1000, 1000, 1000]) == (
        list(track.slices),
        list(track.run_us),
    )


def test_only_the_last_ten_minutes_are_kept_and_the_file_does_not_grow(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        ring.seat(ONE, 1, b"")
        size = (tmp_path / "ring").stat().st_size
        fill(ring, ROWS + 100)
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    assert (ROWS, 25.0) == (len(found.at), found.at[0])
    assert (size, 0o600) == (
        (tmp_path / "ring").stat().st_size,
        stat.S_IMODE((tmp_path / "ring").stat().st_mode),
    )


def test_counters_wrap_around(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        ring.seat(ONE, 1, b"")
        ring.write(0.0, [ABSENT - 9, ABSENT - 1])
        ring.write(0.25, [90, 1])
        ring.flush()
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    assert (100, 3) == (found.tracks[0].run_us[1], found.tracks[0].slices[1])


def test_a_gap_of_ours_is_unseen_and_so_is_a_thread_that_nobody_looked_at(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        ring.seat(ONE, 1, b"")
        fill(ring, 3)
        fill(ring, 2, begin=60.0)
        ring.write(60.5, [ABSENT, ABSENT])
        fill(ring, 2, begin=60.75)
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    seen = [count != UNSEEN for count in found.tracks[0].slices]
    assert [False, True, True, False, True, False, False, True] == seen


def test_one_that_ended_keeps_its_row_until_it_is_overwritten(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        for _ in range(SLOTS):
            ring.seat(ONE, ring.look + len(ring.slots), b"")
        fill(ring, 3, slots=SLOTS)
        ring.leave(0, ended_at=0.6)
        fill(ring, ROWS - 3, begin=0.75, slots=SLOTS)
        kept = read(tmp_path / "ring", "boot")
        fill(ring, 4, begin=600.0, slots=SLOTS)
        slot = ring.seat(TWO, 2, b"")

    assert kept is not None
    assert 0.6 == kept.tracks[0].ended_at
    assert 0 == slot


def test_a_slot_that_was_given_away_says_nothing_of_who_had_it_before(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        for tid in range(SLOTS):
            ring.seat(ONE, tid, b"")
        ring.leave(5, ended_at=0.0)
        fill(ring, ROWS, slots=SLOTS)

        assert 5 == ring.seat(TWO, 2, b"")
        fill(ring, 3, begin=600.0, slots=SLOTS)
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    (track,) = (track for track in found.tracks if track.process == TWO)
    assert 2 == sum(count != UNSEEN for count in track.slices)


def test_more_threads_than_slots_widen_the_ring_and_nothing_is_lost(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        ring.seat(ONE, 1, b"")
        fill(ring, 10)
        for tid in range(2, SLOTS + 5):
            ring.seat(ONE, tid, b"")
        fill(ring, 10, begin=2.5, slots=SLOTS + 4)
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    assert (20, SLOTS + 4) == (len(found.at), len(found.tracks))
    assert [UNSEEN] + [3] * 19 == list(found.tracks[0].slices)


def test_a_later_recorder_goes_on_where_one_was_killed(tmp_path: Path):
    first = Ring(tmp_path / "ring", "boot")
    first.seat(ONE, 1, b"")
    fill(first, 5)
    with Ring(tmp_path / "ring", "boot") as second:
        slot = second.seat(ONE, 1, b"")
        fill(second, 5, begin=20.0)
        found = read(tmp_path / "ring", "boot")

    assert (0, 10) == (slot, len(found.at) if found else 0)


def test_a_ring_of_another_boot_says_nothing_and_is_begun_anew(tmp_path: Path):
    with Ring(tmp_path / "ring", "before") as ring:
        fill(ring, 5, slots=0)

    assert read(tmp_path / "ring", "now") is None
    with Ring(tmp_path / "ring", "now") as ring:
        assert 0 == ring.look


@pytest.mark.parametrize("damage", [b"", b"{}", os.urandom(8192), b'{"schema":"hangwatch.ring/2"}'])
def test_a_file_that_is_none_of_ours_is_replaced_and_never_believed(tmp_path: Path, damage: bytes):
    (tmp_path / "ring").write_bytes(damage)

    with pytest.raises(ValueError, match="no black box"):
        read(tmp_path / "ring", "boot")
    with Ring(tmp_path / "ring", "boot") as ring:
        fill(ring, 2, slots=0)
        found = read(tmp_path / "ring", "boot")
    assert found is not None
    assert 2 == len(found.at)


def test_a_look_that_was_cut_short_is_left_out(tmp_path: Path):
    with Ring(tmp_path / "ring", "boot") as ring:
        ring.seat(ONE, 1, b"")
        fill(ring, 6)
        place = ring._shape.place(3)
        os.pwrite(ring._fd, os.urandom(20), place + 4)
        found = read(tmp_path / "ring", "boot")

    assert found is not None
    assert [0.0, 0.25, 0.5, 1.0, 1.25] == list(found.at)
    assert [UNSEEN, 3, 3, UNSEEN, 3] == list(found.tracks[0].slices)
