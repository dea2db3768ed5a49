"""Announced pauses: durations, files, and what the daemon makes of them, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from fake_children import Nursery
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.codec import to_plain
from hangwatch.core.durations import seconds_of, spelled
from hangwatch.core.leasing import MAX_REASON, Look, Paper, Wish, clean, wish_of
from hangwatch.daemon.leases import Leases
from hangwatch.model.lease import Lease
from hangwatch.model.observation import LeaseReturned, LeaseTaken
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.testing import FakeClock

PATH = "/shared/lease"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("20m", 1200.0),
        ("1h30m", 5400.0),
        (" 1.5h\n", 5400.0),
        ("1d", 86_400.0),
        ("0", 0.0),
    ],
)
def test_a_duration_is_what_people_write(text, seconds):
    assert seconds == seconds_of(text)


@pytest.mark.parametrize(
    "text", ["", "m", "20 m", "1h30", "-5m", "30m1h", "soon", "1e3", "٣m", "9" * 99]
)
def test_what_is_no_duration_is_said_with_its_remedy(text):
    with pytest.raises(ValueError, match="write 90, 90s, 20m or 1h30m"):
        seconds_of(text)


@given(st.integers(1, 10**7))
def test_a_duration_that_was_spelled_is_read_as_it_was(seconds):
    assert seconds == seconds_of(spelled(seconds))


def test_a_line_says_for_how_long_and_why():
    assert Wish(seconds=1200.0, reason="weight sync") == wish_of("20m weight  sync\n")


def test_the_words_of_a_stranger_become_one_short_printable_line():
    assert "a b [31mc" == clean("a\n\tb \x1b[31mc")
    assert MAX_REASON == len(clean("x" * 10_000))


class Reader:
    """Somebody who looks at a file every half second, and whose clock is the file's."""

    def __init__(self, limit: float = 7200.0, lease: Lease | None = None) -> None:
        self.paper = Paper(PATH, limit=limit, lease=lease)
        self.now = 1000.0
        self.written_at = 0.0
        self.text: str | None = None

    def write(self, text: str | None, *, ago: float = 0.0) -> None:
        self.text, self.written_at = text, self.now - ago

    def look(self, times: int = 2, **more: Any) -> Lease | None:
        for _ in range(times):
            age = self.now - self.written_at
            version = (1, int(self.written_at * 10))
            look = Look(text=self.text, version=version, age=age) if not more else Look(**more)
            self.paper.see(look, Instant(self.now))
            self.now += 0.5
        return self.paper.lease

    @property
    def left(self) -> float | None:
        lease = self.paper.lease
        return None if lease is None else lease.until - lease.at


def test_a_file_that_appears_announces_a_pause_from_then_on():
    reader = Reader()
    reader.look()
    reader.write("20m weight sync\n")

    assert (
        Lease(id=PATH, at=1001.5, until=2201.5, reason="weight sync", holder=PATH) == reader.look()
    )


def test_a_change_counts_when_it_was_seen_twice():
    reader = Reader()
    reader.look()
    reader.write("2")
    half = reader.look(1)
    reader.write("20m")
    reader.look()

    assert half is None
    assert 1200.0 == reader.left


def test_a_file_that_stays_as_it_is_announces_nothing_new():
    reader = Reader()
    reader.look()
    reader.write("20m")
    first = reader.look()

    assert first is reader.look(100)


def test_the_same_text_written_again_renews_the_pause():
    reader = Reader()
    reader.look()
    reader.write("20m")
    first = reader.look()
    reader.look(100)
    reader.write("20m")
    second = reader.look()

    assert first is not None
    assert second is not None
    assert 50.5 == second.at - first.at


@pytest.mark.parametrize("end", [None, "", "0", "0\n", "  "])
def test_a_file_that_is_deleted_emptied_or_says_nought_ends_the_pause(end):
    reader = Reader()
    reader.look()
    reader.write("20m")
    reader.look()
    reader.write(end)

    assert reader.look() is None


def test_a_pause_is_cut_at_the_limit_and_what_was_asked_is_known():
    reader = Reader(limit=60.0)
    reader.look()
    reader.write("20m")
    reader.look()

    assert (60.0, 1200.0) == (reader.left, reader.paper.asked)


def test_garbage_announces_nothing_and_is_told_with_its_remedy():
    reader = Reader()
    reader.look()
    reader.write("20m")
    before = reader.look()
    reader.write("a while")

    assert before is reader.look()
    assert "'a' is no duration" in reader.paper.problem


def test_an_old_file_announces_nothing_to_somebody_who_comes_later():
    reader = Reader()
    reader.write("20m", ago=3600.0)

    assert reader.look() is None


def test_a_file_written_just_before_we_came_announces_what_is_left():
    reader = Reader()
    reader.write("20m", ago=300.0)
    reader.look()

    assert 899.5 == reader.left


def test_a_clock_that_is_ahead_gives_nobody_more_than_was_asked_for():
    reader = Reader()
    reader.write("20m", ago=-9000.0)
    reader.look()

    assert 1200.0 == reader.left


def test_who_comes_after_a_restart_goes_on_with_the_pause_that_is_known():
    known = Lease(id=PATH, at=Instant(900.0), until=Instant(2100.0), holder=PATH)
    reader = Reader(lease=known)
    reader.write("20m", ago=100.0)

    assert known is reader.look(10)


def test_a_file_that_was_deleted_while_nobody_looked_ends_the_pause():
    reader = Reader(lease=Lease(id=PATH, at=Instant(900.0), until=Instant(2100.0)))

    assert reader.look() is None


def test_a_volume_that_fails_takes_back_nothing():
    reader = Reader()
    reader.look()
    reader.write("20m")
    before = reader.look()

    assert before is reader.look(problem="cannot be read: Stale file handle")
    assert "Stale" in reader.paper.problem


class Scene:
    """The daemon's side, among fakes."""

    def __init__(self, tmp_path, **more: Any) -> None:
        self.clock = FakeClock()
        self.nursery = Nursery()
        self.told: list[tuple[str, str]] = []
        self.facts: dict[str, Any] = {}
        self.leases = Leases(
            clock=self.clock,
            policy=Policy(lease_limit=1200.0),
            socket=tmp_path / "lease.sock",
            file=None,
            tell=self.tell,
            start=self.nursery,
            **more,
        )
        self.leases.hear()

    def tell(self, what: str, lease: Lease, **facts: Any) -> None:
        self.told.append((what, lease.id))
        self.facts = facts

    def hear(self, *said: dict[str, Any]) -> tuple[Any, ...]:
        self.nursery.last.said = [*said]
        return self.leases.hear()


LEASE = Lease(id="a", at=Instant(0.0), until=Instant(1200.0), reason="sync", holder="pid 7")
TAKEN = {"kind": "taken", "lease": to_plain(LEASE), "asked": 1200.0}


def test_a_granted_lease_is_observed_and_told(tmp_path):
    scene = Scene(tmp_path)

    assert (LeaseTaken(lease=LEASE),) == scene.hear(TAKEN)
    assert [("taken", "a")] == scene.told
    assert {"seconds": 1200.0, "capped": False} == scene.facts


def test_a_lease_that_was_cut_says_so(tmp_path):
    scene = Scene(tmp_path)
    scene.hear({**TAKEN, "asked": 3600.0})

    assert scene.facts["capped"]


def test_a_lease_ends_with_its_time(tmp_path):
    scene = Scene(tmp_path)
    scene.hear(TAKEN)
    scene.clock.sleep(1200.0)
    scene.hear()

    assert [("taken", "a"), ("ended", "a")] == scene.told
    assert {} == scene.leases.held


def test_a_lease_that_is_given_back_is_observed_and_told_once(tmp_path):
    scene = Scene(tmp_path)
    back = {"kind": "returned", "id": "a", "at": 60.0}
    scene.hear(TAKEN)

    assert (LeaseReturned(id="a", at=Instant(60.0)),) == scene.hear(back)
    assert () == scene.hear(back)
    assert [("taken", "a"), ("returned", "a")] == scene.told


def test_a_new_lessor_is_told_what_was_granted_before(tmp_path):
    scene = Scene(tmp_path, known=[LEASE])
    scene.nursery.last.alive = False
    scene.leases.hear()
    scene.leases.hear()
    orders = [child.told[0]["leases"] for child in scene.nursery.children]

    assert [[to_plain(LEASE)]] * 2 == orders


def test_nonsense_from_the_lessor_is_left_alone(tmp_path):
    scene = Scene(tmp_path)

    assert () == scene.hear({"kind": "taken", "lease": {"id": 3}, "asked": "x"}, {"kind": "taken"})
