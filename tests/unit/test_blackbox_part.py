"""The daemon's side of the black box, in virtual time."""

from __future__ import annotations

from pathlib import Path

from fake_children import Nursery

from hangwatch.daemon.blackbox import BlackBox
from hangwatch.daemon.roster import Roster
from hangwatch.testing import FakeClock


def test_a_server_its_kin_and_what_all_share_are_recorded_once_they_are_known():
    nursery, roster = Nursery(), Roster()
    box = BlackBox(clock=FakeClock(), roster=roster, ring=Path("/state/ring"), start=nursery)
    assert () == box.hear()
    assert [] == nursery.children

    key = roster.attach(7)
    box.hear()
    roster.find(key, url="", kin=(7, 8))
    roster.accompany({7: 70, 8: 80, 9: 90})
    box.hear()

    assert [[[7, 0]], [[7, 70], [8, 80], [9, 90]]] == [
        told["processes"] for told in nursery.last.told
    ]
    assert {"/state/ring"} == {told["ring"] for told in nursery.last.told}


def test_a_recorder_that_falls_silent_is_replaced_and_told_whom_to_record_and_blinds_nobody():
    nursery, roster, clock = Nursery(), Roster(), FakeClock()
    box = BlackBox(clock=clock, roster=roster, ring=Path("/state/ring"), start=nursery)
    roster.attach(7)
    for _ in range(90):
        assert () == box.hear()
        clock.sleep(1.0)

    assert 2 == len(nursery.children)
    assert not nursery.children[0].alive
    assert [[7, 0]] == nursery.last.told[0]["processes"]
