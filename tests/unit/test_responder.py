"""Captures as the daemon sees them, in virtual time."""

from __future__ import annotations

from dataclasses import replace

from fake_children import Nursery

from hangwatch.core.codec import to_plain
from hangwatch.daemon.responder import Responder
from hangwatch.model.capture import CaptureKind, CaptureRequest, Means, Touch
from hangwatch.model.identity import InstanceKey, ProcessId
from hangwatch.model.incident import Incident
from hangwatch.model.observation import CaptureEnded, StacksSeen
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Hung, SuspectedHang
from hangwatch.model.vitals import Motion, StackVital
from hangwatch.system import logs
from hangwatch.testing import FakeClock

VERDICT = SuspectedHang(since=Instant(0.0), cause="silence", confidence=Confidence.LOW)


class Scene:
    """A responder among fakes."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.nursery = Nursery()
        self.told: list[tuple[str, str]] = []
        self.responder = Responder(
            clock=self.clock,
            request=self.request,
            tell=lambda kind, incident, facts: self.told.append((kind, incident)),
            start=self.nursery,
        )

    def request(self, incident: Incident) -> CaptureRequest:
        return CaptureRequest(
            id=incident.id,
            kind=CaptureKind.INCIDENT,
            output="/nowhere",
            profile="lmdeploy",
            policy=Policy(),
            epoch=self.clock.epoch(),
            incident=incident,
        )

    def begin(self, name: str = "x-1") -> Incident:
        incident = Incident(
            id=name, members=(), watched=1, verdict=VERDICT, detected_at=Instant(0.0)
        )
        self.responder.begin(incident)
        self.responder.hear()
        return incident

    def pass_time(self, seconds: float) -> list[object]:
        heard: list[object] = []
        for _ in range(int(seconds)):
            self.clock.sleep(1.0)
            heard += self.responder.hear()
        return heard


def test_an_incident_gets_a_conductor_with_an_order():
    scene = Scene()
    scene.begin()

    assert ["capture"] == [message["kind"] for message in scene.nursery.last.told]
    assert "hangwatch.capture.conductor" == scene.nursery.last.module
    assert [("started", "x-1")] == scene.told


def test_an_incident_has_one_capture_however_often_it_is_asked_for():
    scene = Scene()
    scene.begin()
    scene.begin()

    assert 1 == len(scene.nursery.children)


def stage_a(scene: Scene) -> tuple[object, ...]:
    seen = StacksSeen(
        instance=InstanceKey(pid=7), stacks=StackVital(at=Instant(5.0), motion=Motion.FROZEN)
    )
    scene.nursery.last.said = [{"kind": "stage_a", "stacks": [to_plain(seen)], "processes": []}]
    heard = scene.responder.hear()
    assert (seen,) == heard
    return heard


def hung(incident: Incident) -> Incident:
    verdict = Hung(since=Instant(0.0), cause="silence", confidence=Confidence.HIGH)
    return replace(incident, verdict=verdict)


def test_what_stage_a_saw_is_judged_before_the_conductor_is_answered():
    scene = Scene()
    incident = scene.begin()
    stage_a(scene)
    scene.responder.answer([hung(incident)])

    answer = scene.nursery.last.told[-1]
    assert ("verdict", "hung") == (answer["kind"], answer["word"])
    assert to_plain(hung(incident)) == answer["request"]["incident"]


def test_an_answer_waits_until_nobody_else_may_join_but_not_for_ever():
    scene = Scene()
    incident = scene.begin()
    stage_a(scene)
    waited = 0
    while len(scene.nursery.last.told) == 1:
        scene.responder.answer([hung(incident)], unsettled={incident.id})
        scene.clock.sleep(1.0)
        waited += 1

    assert 9 == waited


def test_a_conductor_that_did_not_ask_is_not_answered():
    scene = Scene()
    incident = scene.begin()
    scene.responder.answer([hung(incident)])

    assert 1 == len(scene.nursery.last.told)


def test_a_bundle_ends_the_capture():
    scene = Scene()
    scene.begin()
    scene.nursery.last.said = [{"kind": "bundle", "path": "/b.tar.gz"}]
    heard = scene.responder.hear()

    assert (CaptureEnded(incident="x-1", at=Instant(0.0), bundle="/b.tar.gz"),) == heard
    assert not scene.responder.busy
    assert not scene.nursery.last.alive


def test_a_failure_that_the_conductor_reports_is_final():
    scene = Scene()
    scene.begin()
    scene.nursery.last.said = [{"kind": "failed", "error": "disk full", "hint": ""}]
    heard = scene.responder.hear()

    assert (CaptureEnded(incident="x-1", at=Instant(0.0), error="disk full"),) == heard
    assert 1 == len(scene.nursery.children)


def test_a_killed_conductor_is_replaced_and_asked_again():
    scene = Scene()
    scene.begin()
    scene.nursery.last.kill()
    scene.pass_time(1)

    assert 2 == len(scene.nursery.children)
    assert ["capture"] == [message["kind"] for message in scene.nursery.last.told]


def test_conductors_that_die_over_and_over_end_the_capture_with_an_error():
    scene = Scene()
    scene.begin()
    heard: list[object] = []
    for _ in range(10):
        scene.nursery.last.kill()
        heard += scene.pass_time(1)

    assert 3 == len(scene.nursery.children)
    (ended,) = heard
    assert isinstance(ended, CaptureEnded)
    assert "lost 3 times" in ended.error


def test_a_silent_conductor_is_replaced():
    scene = Scene()
    scene.begin()
    scene.pass_time(32)

    assert [False, True] == [child.alive for child in scene.nursery.children]


def test_a_conductor_is_not_blamed_for_a_time_in_which_nobody_listened():
    scene = Scene()
    scene.begin()
    scene.clock.sleep(3600.0)
    scene.pass_time(1)

    assert [True] == [child.alive for child in scene.nursery.children]


def test_a_conductor_that_talks_and_talks_is_not_waited_for_for_ever():
    scene = Scene()
    scene.begin()
    for _ in range(600):
        scene.nursery.last.said = [{"kind": "alive"}]
        scene.pass_time(1)

    assert 3 == len(scene.nursery.children)
    assert not scene.responder.busy


def test_captures_beyond_the_second_wait_for_their_turn():
    scene = Scene()
    for name in ("a", "b", "c"):
        scene.begin(name)
    running = len(scene.nursery.children)
    scene.nursery.children[0].said = [{"kind": "bundle", "path": "/a"}]
    scene.pass_time(1)

    assert (2, 3) == (running, len(scene.nursery.children))


def test_a_request_to_stop_reaches_the_conductor_and_its_bundle_still_counts():
    scene = Scene()
    scene.begin()
    scene.responder.stop()
    told = scene.nursery.last.told[-1]
    scene.nursery.last.said = [{"kind": "bundle", "path": "/b.tar.gz"}]
    (ended,) = scene.responder.hear()

    assert {"kind": "stop"} == told
    assert isinstance(ended, CaptureEnded)
    assert "/b.tar.gz" == ended.bundle


def test_a_conductor_that_dies_while_we_stop_is_not_replaced():
    scene = Scene()
    scene.begin()
    scene.responder.stop()
    scene.nursery.last.kill()
    scene.pass_time(1)

    assert 1 == len(scene.nursery.children)
    assert not scene.responder.busy


def test_each_touch_of_a_process_is_an_event_of_our_log(monkeypatch):
    scene = Scene()
    scene.begin()
    touch = Touch(
        at=Instant(1.0),
        process=ProcessId(42, 7),
        step="native/42",
        means=Means.ATTACH,
        incident="x",
    )
    fact = {k: v for k, v in to_plain(touch).items() if k != "type"}
    scene.nursery.last.said = [{"kind": "touched", **fact}, {"kind": "touched", "pid": 42}]
    events: list[dict[str, object]] = []
    monkeypatch.setattr(logs._output, "take", lambda event: events.append(dict(event)))

    scene.responder.hear()

    told, unreadable = events
    assert ("hangwatch.target_read", "attach", 42, 7, "native/42", "x") == tuple(
        told[key] for key in ("event", "means", "pid", "start_ticks", "step", "incident")
    )
    assert "hangwatch.touch_unreadable" == unreadable["event"]
