"""What became of a hang: when it is looked at again, and what is said of it."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import jsonschema
from scripted import HOUR, POLICY, PROFILES, Run, beats

from hangwatch.capture.schemas import schemas
from hangwatch.core import aftermath
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.core.fleet import Memory, begin, due, remember
from hangwatch.core.layout import aftermath_name, aftermath_number, is_bundle_name
from hangwatch.core.objects import objects
from hangwatch.model.capture import (
    AfterBundle,
    CaptureKind,
    CaptureOutcome,
    CapturePlan,
    CaptureRequest,
)
from hangwatch.model.incident import Incident, IncidentState
from hangwatch.model.observation import AftermathEnded, CaptureEnded, StartCapture, TakeAftermath
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Dead
from hangwatch.system import evidence
from hangwatch.testing import FakeClock

BUNDLE = "/bundles/hangwatch-20260304T054459Z-a1b2c3.tar.gz"


def hung(policy=POLICY) -> Run:
    """Return a run in which one engine hangs at 1000 and its bundle is there at 1200."""
    run = Run(policy).over(beats(0, 1000), until=1200)
    (start,) = run.of(StartCapture)
    return run.over(
        [CaptureEnded(incident=start.incident.id, at=Instant(1200), bundle=BUNDLE)], until=1201
    )


def looks(run: Run) -> list[TakeAftermath]:
    return run.of(TakeAftermath)


def ended(run: Run, at: float) -> AftermathEnded:
    return AftermathEnded(incident=looks(run)[-1].incident.id, at=Instant(at))


def test_a_hang_that_lasts_is_looked_at_again_when_the_policy_says():
    run = hung().over(until=1499)
    assert [] == looks(run)
    assert 1500.0 == due(run.state)

    run.over(until=1501)
    run.over([ended(run, 1503)], until=2999)
    assert [(1, False, BUNDLE)] == [(a.number, a.last, a.bundle) for a in looks(run)]

    run.over(until=3001)
    run.over([ended(run, 3003)], until=4 * HOUR)
    assert [1, 2] == [action.number for action in looks(run)]


def test_one_that_recovers_is_looked_at_at_once_and_then_no_more():
    run = hung().over(beats(1300, 4 * HOUR), until=4 * HOUR)
    assert [(1, True)] == [(action.number, action.last) for action in looks(run)]

    run.over([ended(run, 4 * HOUR)], until=5 * HOUR)
    assert 1 == len(looks(run))
    assert () == run.state.aftermaths


def test_one_that_recovers_after_its_times_is_looked_at_once_more_at_the_end():
    run = hung()
    for at in (1503.0, 3003.0):
        run.over(until=at - 1)
        run.over([ended(run, at)], until=at)
    run.over(beats(9000, 9100), until=9100)

    assert [(1, False), (2, False), (3, True)] == [(a.number, a.last) for a in looks(run)]


def test_one_that_recovers_while_it_is_looked_at_is_looked_at_once_more():
    run = hung().over(until=1501)
    run.over(beats(1502, 1600), until=1600)
    assert 1 == len(looks(run))

    run.over([ended(run, 1600)], beats(1600, 1700), until=1700)
    assert [(1, False), (2, True)] == [(a.number, a.last) for a in looks(run)]


def test_one_whose_engines_die_is_looked_at_at_once_and_one_of_dead_engines_when_they_are_gone():
    (start,) = hung().of(StartCapture)
    alive: Incident = start.incident
    died = Dead(since=Instant(1300.0), cause="child-dead", confidence=Confidence.HIGH)
    dead = replace(alive, members=tuple(replace(m, verdict=died) for m in alive.members))
    gone = replace(dead, state=IncidentState.CLOSED)
    of_alive, of_dead = (
        aftermath.begin(incident, BUNDLE, Instant(1200.0), POLICY) for incident in (alive, dead)
    )
    assert of_alive is not None
    assert of_dead is not None

    assert 1500.0 == aftermath.due(of_alive, alive, POLICY)
    assert 1200.0 == aftermath.due(of_alive, dead, POLICY)
    assert 1500.0 == aftermath.due(of_dead, dead, POLICY)
    assert 1200.0 == aftermath.due(of_dead, gone, POLICY)


def test_without_a_bundle_or_without_times_nothing_is_looked_at_again():
    failed = Run().over(beats(0, 1000), until=1200)
    (start,) = failed.of(StartCapture)
    failed.over([CaptureEnded(incident=start.incident.id, at=Instant(1200))], until=4 * HOUR)
    never = hung(replace(POLICY, aftermath=())).over(beats(1300, 1400), until=4 * HOUR)

    assert [] == looks(failed) == looks(never)


def test_a_notice_is_about_engines_that_are_well_and_has_no_aftermath():
    (start,) = hung().of(StartCapture)
    incident: Incident = replace(start.incident, notice=True)

    assert None is aftermath.begin(incident, BUNDLE, Instant(0.0), POLICY)


def test_a_restarted_daemon_looks_again_where_the_former_was_killed_and_makes_up_for_the_rest():
    run = hung().over(until=1501)
    memory = from_plain(Memory, to_plain(remember(run.state)))
    state = begin(POLICY, PROFILES, FakeClock().epoch(), Instant(9000), memory=memory)
    again = Run(state=state).over(until=9001)

    assert [(1, False)] == [(action.number, action.last) for action in looks(again)]
    again.over([ended(again, 9003)], until=9 * HOUR)
    assert 1 == len(looks(again))


def test_a_memory_of_before_there_were_aftermaths_is_understood():
    plain = to_plain(remember(hung().state))
    del plain["aftermaths"]

    assert () == from_plain(Memory, plain).aftermaths


# ---------------------------------------------------------------------- what is said


def document(run: Run, *, ends=(), kernel=(), last=False) -> dict[str, object]:
    incident = (looks(run) or run.of(StartCapture))[-1].incident
    request = CaptureRequest(
        id=incident.id,
        kind=CaptureKind.AFTERMATH,
        output="/bundles",
        profile="lmdeploy",
        policy=POLICY,
        epoch=run.state.epoch,
        incident=incident,
        after=AfterBundle(bundle=BUNDLE, number=1, captured_at=Instant(1200.0), last=last),
    )
    outcome = CaptureOutcome(
        work="/work.partial",
        plan=CapturePlan(targets=(), steps=(), sample_gap=5.0, deadline=60.0),
        evidence=(),
        started_at=Instant(1500.0),
        ended_at=Instant(1501.0),
    )
    said = json.loads(aftermath.document(request, outcome, ends=ends, kernel=kernel))
    checker = jsonschema.FormatChecker()
    jsonschema.validate(said, schemas()["hangwatch.aftermath.1"], format_checker=checker)
    return said


def end(pid: int, role: str, state: str, **more: object) -> dict[str, object]:
    return {"pid": pid, "role": role, "instance": "100", "state": state, **more}


def test_engines_that_stand_where_they_stood_are_still_stopped():
    said = document(hung().over(until=1501), ends=[end(100, "api_server", "S")])

    assert "still_frozen" == said["outcome"]
    assert "5 min after the capture: 1 of 1 still stopped" == said["sentence"]


def test_an_engine_that_beats_again_has_recovered():
    said = document(hung().over(beats(1300, 1400), until=1400), last=True)

    assert ("recovered", "5 min after the capture: 1 of 1 working again") == (
        said["outcome"],
        said["sentence"],
    )


def test_who_killed_an_engine_is_said_as_far_as_it_shows():
    run = hung().over(until=1501)
    zombie = end(101, "engine", "Z", exit_signal=9)
    reaped = end(101, "engine", "gone")
    oom = {"kind": "oom_kill", "pid": 101, "text": "Killed process 101 (python)"}

    assert "killed by signal 9" in document(run, ends=[zombie])["sentence"]
    assert "engine 101 is gone" in document(run, ends=[reaped])["sentence"]
    told = document(run, ends=[reaped], kernel=[oom])
    assert "engine 101 was killed by the kernel, for want of memory" in told["sentence"]
    assert ("ended", ["Killed process 101 (python)"]) == (
        told["outcome"],
        told["ended"][0]["kernel"],
    )


# ---------------------------------------------------------------------- beside the bundle


def test_the_name_of_a_look_says_whose_it_is_and_claims_no_bundle():
    bundle = Path(BUNDLE).name
    name = aftermath_name(bundle, 2)

    assert "hangwatch-20260304T054459Z-a1b2c3.aftermath-2.tar.gz" == name
    assert 2 == aftermath_number(bundle, name)
    assert None is aftermath_number("hangwatch-20260304T054459Z-ffffff.tar.gz", name)
    assert None is aftermath_number(bundle, bundle)
    assert not is_bundle_name(name)


def archive(path: Path, **files: bytes) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"top/{name.replace('__', '.')}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_what_lies_beside_a_bundle_is_read_with_it_and_nothing_of_another(tmp_path: Path):
    bundle = tmp_path / Path(BUNDLE).name
    archive(bundle, manifest__json=b"{}", incident__json=b"{}")
    said = json.dumps({"number": 1, "outcome": "recovered", "sentence": "it works"}).encode()
    archive(tmp_path / aftermath_name(bundle.name, 1), aftermath__json=said, procs__json=b"[]")
    archive(tmp_path / aftermath_name("hangwatch-other.tar.gz", 1), aftermath__json=b"{}")
    (tmp_path / aftermath_name(bundle.name, 2)).write_bytes(b"cut short")

    found = evidence.read([bundle])

    assert {"aftermath/1/aftermath.json": said} == {
        name: data for name, data in found.files.items() if name.startswith("aftermath")
    }
    assert 1 == len(found.problems)
    assert "aftermath-2" in found.problems[0]
    (raw,) = (raw for raw, _ in objects(said))
    read = aftermath.record(raw, "aftermath/1/aftermath.json")
    assert read is not None
    assert ("recovered", "it works") == (read.outcome, read.sentence)
