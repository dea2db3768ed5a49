"""Captures that are withheld, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hangwatch.daemon.shadow import Shadow
from hangwatch.model.incident import Incident
from hangwatch.model.observation import CaptureEnded
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Hung, SuspectedHang
from hangwatch.testing import FakeClock

SUSPECTED = SuspectedHang(since=Instant(0.0), cause="silence", confidence=Confidence.LOW)
HUNG = Hung(since=Instant(0.0), cause="silence", confidence=Confidence.HIGH)
INCIDENT = Incident(
    id="x-1", members=(), watched=1, verdict=SUSPECTED, detected_at=Instant(0.0), confirmed=True
)


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.withheld: list[Incident] = []
        self.shadow = Shadow(clock=self.clock, stage_a=5.0, withhold=self.withheld.append)
        self.shadow.begin(INCIDENT)

    def until_withheld(self, incident: Incident = INCIDENT, **more: Any) -> float:
        while not self.withheld:
            self.clock.sleep(1.0)
            self.shadow.answer([incident], **more)
        return self.clock.now()


def test_an_incident_is_withheld_when_stage_a_would_be_over():
    assert 5.0 == Scene().until_withheld()


def test_an_incident_that_others_may_still_join_is_waited_for_but_not_for_ever():
    assert 13.0 == Scene().until_withheld(unsettled={"x-1"})


def test_what_is_withheld_is_what_the_incident_had_become():
    scene = Scene()
    scene.until_withheld(replace(INCIDENT, verdict=HUNG))

    assert [HUNG] == [incident.verdict for incident in scene.withheld]


def test_the_loop_hears_once_that_there_will_be_no_capture():
    scene = Scene()
    scene.until_withheld()
    ended = CaptureEnded(incident="x-1", at=Instant(5.0), error="observed only")

    assert scene.shadow.busy
    assert (ended,) == scene.shadow.hear()
    assert () == scene.shadow.hear()
    assert not scene.shadow.busy


def test_the_end_of_the_watch_withholds_at_once():
    scene = Scene()
    scene.shadow.stop()

    assert [INCIDENT] == scene.withheld
