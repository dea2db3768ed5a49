import json
import re
from datetime import UTC, datetime
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.model.capture import Artifact, Evidence, Failure, FailureKind, Phase
from hangwatch.model.heartbeat import Heartbeat, Line
from hangwatch.model.identity import InstanceKey, ProcessId
from hangwatch.model.observation import BeatSeen, HealthSeen, Observation
from hangwatch.model.profile import EngineProfile, HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Hung, Idle, Verdict
from hangwatch.model.vitals import Health, Outcome
from hangwatch.registry import profiles

EVIDENCE = Evidence(
    step="stacks/4242/1",
    collector="stacks",
    sample=1,
    phase=Phase.ONSET,
    target=ProcessId(4242, 991_532),
    started_at=Instant(12.5),
    artifacts=(Artifact(path=PurePosixPath("processes/engine-4242/threads.json"), size=18),),
    failure=Failure(kind=FailureKind.NOT_PERMITTED, message="no", hint="add SYS_PTRACE"),
)

BEAT = BeatSeen(
    beat=Heartbeat(
        instance=InstanceKey(pid=7, tag="DP0"),
        at=Instant(3.0),
        printed=datetime(2026, 3, 4, 13, 44, 49),
        running=7,
    )
)


@pytest.mark.parametrize("value", [EVIDENCE, BEAT], ids=["evidence", "observation"])
def test_a_value_survives_the_way_through_plain_data(value):
    assert value == from_plain(type(value), to_plain(value))


def test_the_type_key_tells_the_members_of_a_union_apart():
    seen = HealthSeen(
        instance=InstanceKey(tag="DP0"),
        health=Health(
            at=Instant(1.0),
            outcome=Outcome.ANSWERED,
            http=503,
            meaning=HealthMeaning.LOOP_BLOCKED,
        ),
    )

    assert seen == from_plain(Observation, to_plain(seen))


def test_two_verdicts_of_equal_shape_keep_their_types():
    common = {"since": Instant(1.0), "cause": "x", "confidence": Confidence.LOW}

    assert Idle(**common) == from_plain(Verdict, to_plain(Idle(**common)))
    assert Hung(**common) == from_plain(Verdict, to_plain(Hung(**common)))


@given(st.binary())
def test_every_byte_of_a_line_survives(data):
    line = Line(source="x.log", text=data, at=Instant(0.0))

    assert line == from_plain(Line, to_plain(line))


def test_unknown_keys_of_a_newer_writer_are_ignored():
    plain = to_plain(ProcessId(1, 2)) | {"namespace": 4}

    assert ProcessId(1, 2) == from_plain(ProcessId, plain)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"pid": "7"}, "ProcessId.pid: expected int, got str"),
        ({"pid": True}, "ProcessId.pid: expected int, got bool"),
        ({}, "missing 1 required positional argument"),
        ([], "expected an object for ProcessId"),
        ({"type": "Hung", "pid": 1}, "expected ProcessId, got Hung"),
    ],
)
def test_data_of_another_shape_is_refused_with_the_place(data, words):
    with pytest.raises(CodecError, match=words.replace(".", r"\.")):
        from_plain(ProcessId, data)


def test_a_date_that_is_none_is_refused_with_the_place():
    plain = to_plain(BEAT)
    plain["beat"]["printed"] = "yesterday"

    with pytest.raises(CodecError, match=r"beat: Heartbeat\.printed"):
        from_plain(BeatSeen, plain)


def test_a_value_without_a_plain_form_is_refused():
    with pytest.raises(CodecError, match="object has no plain form"):
        to_plain(object())


def test_a_wall_time_keeps_its_offset():
    wall = datetime(2026, 3, 4, tzinfo=UTC)

    assert wall == from_plain(datetime, to_plain(wall))


@pytest.mark.parametrize("profile", profiles().values(), ids=lambda profile: profile.name)
def test_a_profile_travels_with_its_patterns(profile):
    plain = json.loads(json.dumps(to_plain(profile)))

    assert profile == from_plain(EngineProfile, plain)


@pytest.mark.parametrize("data", [{"pattern": "("}, {"pattern": "(", "flags": 0}, "x", None])
def test_what_is_no_pattern_is_refused(data):
    with pytest.raises(CodecError):
        from_plain(re.Pattern[str], data)
