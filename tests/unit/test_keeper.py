"""Supervision of a child, in virtual time."""

from __future__ import annotations

from typing import Any

from fake_children import Nursery

from hangwatch.daemon.children import Hearing, Keeper
from hangwatch.testing import FakeClock

ALIVE = {"kind": "alive"}


def keeper(nursery: Nursery, clock: FakeClock, **more: Any) -> Keeper:
    return Keeper("some.module", "child", clock=clock, silence=5.0, start=nursery, **more)


def test_a_child_is_started_and_greeted():
    nursery, clock = Nursery(), FakeClock()
    keeper(nursery, clock, greet=lambda: ({"kind": "follow"},)).hear()

    assert [{"kind": "follow"}] == nursery.children[0].told


def test_what_it_says_is_returned_and_its_signs_of_life_are_not():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    kept.hear()
    nursery.children[0].said = [ALIVE, {"kind": "events"}]

    assert (({"kind": "events"},), Hearing.UNCHANGED) == kept.hear()


def test_a_child_that_dies_is_started_again_at_once_and_greeted_again():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock, greet=lambda: ({"kind": "follow"},))
    kept.hear()
    nursery.children[0].alive = False
    kept.hear()

    assert [[{"kind": "follow"}]] * 2 == [child.told for child in nursery.children]


def test_a_child_that_dies_over_and_over_is_started_less_and_less_often():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    for _ in range(600):
        kept.hear()
        for child in nursery.children:
            child.alive = False
        clock.sleep(0.5)

    assert 10 <= len(nursery.children) <= 20


def test_silence_is_told_once_and_so_is_its_end():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    heard = []
    for second in range(12):
        if second not in range(3, 10):
            for child in nursery.children:
                child.said = [ALIVE]
        heard.append(kept.hear()[1])
        clock.sleep(1.0)

    changes = [(at, h) for at, h in enumerate(heard) if h is not Hearing.UNCHANGED]
    assert [(8, Hearing.LOST), (10, Hearing.BACK)] == changes


def test_a_child_that_stays_silent_is_killed_and_replaced():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    for _ in range(18):
        kept.hear()
        clock.sleep(1.0)

    assert [False, True] == [child.alive for child in nursery.children]


def test_a_child_is_not_blamed_for_a_time_in_which_nobody_listened():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    heard = []
    for _ in range(3):
        heard.append(kept.hear()[1])
        clock.sleep(60.0)
        heard.append(kept.hear()[1])
        nursery.last.said = [ALIVE]
        clock.sleep(1.0)

    assert {Hearing.UNCHANGED} == set(heard)
    assert 1 == len(nursery.children)


def test_a_silent_child_is_found_out_by_a_loop_that_is_always_late():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    heard = []
    for _ in range(8):
        heard.append(kept.hear()[1])
        clock.sleep(4.0)

    assert Hearing.LOST in heard


def test_a_child_that_does_not_even_die_is_not_joined_by_another():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    kept.hear()
    nursery.children[0].immortal = True
    for _ in range(100):
        kept.hear()
        clock.sleep(1.0)
    alone = len(nursery.children)
    nursery.children[0].alive = False
    kept.hear()

    assert (1, 2) == (alone, len(nursery.children))


def test_a_machine_without_room_for_a_child_is_asked_again():
    nursery, clock = Nursery(), FakeClock()
    nursery.barren = True
    kept = keeper(nursery, clock)
    kept.hear()
    nursery.barren = False
    clock.sleep(1.0)
    kept.hear()

    assert 1 == len(nursery.children)


def test_the_last_words_of_a_child_that_takes_nothing_any_more_are_heard():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    kept.hear()
    nursery.last.said = [ALIVE, {"kind": "none"}]
    nursery.last.alive = False
    kept.tell({"kind": "watch"})

    assert (({"kind": "none"},), 0) == (kept.hear()[0], kept.losses)
    assert (((), Hearing.UNCHANGED), 1) == (kept.hear(), kept.losses)


def test_a_child_that_takes_nothing_is_replaced_though_it_says_that_it_lives():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    kept.hear()
    nursery.last.alive = False
    kept.tell({"kind": "watch"})
    nursery.last.said = [ALIVE]
    kept.hear()

    assert (2, 1) == (len(nursery.children), kept.losses)


def test_a_crash_of_the_child_is_for_the_log_and_nobody_else():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    kept.hear()
    nursery.children[0].said = [{"kind": "crash", "traceback": "Traceback"}]

    assert () == kept.hear()[0]


def test_a_closed_keeper_starts_nothing_any_more():
    nursery, clock = Nursery(), FakeClock()
    kept = keeper(nursery, clock)
    kept.hear()
    kept.close()
    kept.hear()

    assert [False] == [child.alive for child in nursery.children]
