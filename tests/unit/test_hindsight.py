"""What is to be said of a capture once its evidence is in."""

from __future__ import annotations

from dataclasses import replace

from dossiers import SILENT, WORKING, instance

from hangwatch.core.hindsight import judgement, onset
from hangwatch.model.capture import CapturedInstance, CaptureKind, CaptureRequest
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident, Member, Transition
from hangwatch.model.observation import Observation, StacksSeen
from hangwatch.model.policy import Policy
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Ok, StopWindow, SuspectedHang
from hangwatch.model.vitals import Motion, StackVital
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import FakeClock

A, B = InstanceKey(pid=1, tag="DP0"), InstanceKey(pid=2, tag="DP0")
DOUBT = SuspectedHang(since=Instant(100.0), cause="one-instance-silent", confidence=Confidence.LOW)
WINDOW = StopWindow(earliest=Instant(100.0), latest=Instant(110.0))


def beat(key: InstanceKey, at: float) -> Heartbeat:
    return Heartbeat(
        instance=key, at=Instant(at), source="w.out", in_tps=1.0, out_tps=9.0, running=2, waiting=0
    )


def request(**changes: object) -> CaptureRequest:
    incident = Incident(
        id="i",
        members=(Member(instance=A, verdict=DOUBT, window=WINDOW),),
        watched=2,
        verdict=DOUBT,
        detected_at=Instant(220.0),
        window=WINDOW,
    )
    values: dict[str, object] = {
        "id": "i",
        "kind": CaptureKind.INCIDENT,
        "output": "",
        "profile": "lmdeploy",
        "policy": Policy(),
        "epoch": FakeClock().epoch(),
        "incident": incident,
        "instances": (CapturedInstance(instance=A, pid=1),),
        "beats": tuple(beat(A, at) for at in (80.0, 90.0, 100.0)),
        **changes,
    }
    return CaptureRequest(**values)  # type: ignore[arg-type]


def judged(*snapshots: Observation, word: str = "", **changes: object) -> ReplayResult:
    return judgement(
        request(**changes), snapshots, until=Instant(230.0), profile=PROFILE, word=word
    )


def frozen(key: InstanceKey) -> StacksSeen:
    stacks = StackVital(
        at=Instant(229.0), motion=Motion.FROZEN, frame="get (a.py:1)", pid=1, thread="MainThread"
    )
    return StacksSeen(instance=key, stacks=stacks)


def test_a_frozen_stack_confirms_a_suspicion():
    result = judged(frozen(A))

    assert ("hung", "event-loop-blocked") == (result.verdict.word, result.verdict.cause)
    assert ["hung"] == [record.verdict.word for record in result.instances]


def test_the_daemons_later_word_stands():
    assert "hung" == judged(word="hung").verdict.word


def test_evidence_never_takes_an_alarm_back():
    fresh = tuple(beat(A, at) for at in (210.0, 220.0, 228.0))

    assert "suspected_hang" == judged(beats=fresh).verdict.word


def test_siblings_keep_what_the_daemon_said_of_them():
    well = Ok(since=Instant(225.0), cause="not-a-hang:busy", confidence=Confidence.HIGH)
    change = Transition(instance=B, before=None, after=well, at=Instant(225.0))

    result = judged(
        instances=(CapturedInstance(instance=A, pid=1), CapturedInstance(instance=B, pid=2)),
        beats=(*(beat(A, at) for at in (90.0, 100.0)), beat(B, 225.0)),
        transitions=(change,),
    )

    assert ["ok"] == [r.verdict.word for r in result.instances if r.instance == B]


def test_a_capture_without_an_incident_is_judged_by_its_evidence():
    result = judged(frozen(A), incident=None)

    assert "hung" == result.verdict.word


def test_a_capture_of_nothing_raises_no_alarm():
    assert "loading" == judged(incident=None, beats=(), instances=()).verdict.word


def test_the_onset_is_never_wider_than_one_window():
    staggered = [instance(pid, stopped=100.0 + pid) for pid in range(8)]

    assert StopWindow(earliest=Instant(100.0), latest=Instant(110.0)) == onset(staggered)


def test_the_first_to_stop_gives_the_onset_of_a_cascade():
    cascade = [instance(1, stopped=100.0), instance(2, stopped=130.0)]

    assert StopWindow(earliest=Instant(100.0), latest=Instant(110.0)) == onset(cascade)


def test_working_instances_have_no_part_in_the_onset():
    calm = replace(instance(1, WORKING), window=WINDOW)

    assert onset([calm]) is None
    assert onset([instance(2, SILENT, stopped=50.0), calm]) == StopWindow(
        earliest=Instant(50.0), latest=Instant(60.0)
    )
