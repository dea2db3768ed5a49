"""From what a capture left to one file, whole or not at all."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest

from hangwatch.capture import bundle, reading
from hangwatch.capture.schemas import schemas
from hangwatch.core.layout import is_bundle_name
from hangwatch.errors import OutputError
from hangwatch.model.capture import (
    Artifact,
    CapturedInstance,
    CaptureKind,
    CaptureOutcome,
    CapturePlan,
    CaptureRequest,
    Evidence,
    Failure,
    FailureKind,
    Phase,
    Scope,
    Stage,
    Step,
    Target,
)
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.incident import Incident, Member, Transition
from hangwatch.model.policy import Policy
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, StopWindow, SuspectedHang
from hangwatch.system import evidence
from hangwatch.testing import FakeClock

CLOCK = FakeClock(1000.0)
PLANTED = [
    (entry["what"], "".join(entry["line"]), "".join(entry["secret"]), entry["log_only"])
    for entry in json.loads(
        Path(__file__).parents[1].joinpath("fixtures", "planted-secrets.json").read_text("utf-8")
    )
]
ENGINES = (4242, 4252)
FRAMES = (
    ("/opt/v/lib/python3.12/site-packages/lmdeploy/pytorch/engine/engine.py", "Loop.fetch", 153),
    ("/usr/lib/python3.12/asyncio/base_events.py", "BaseEventLoop._run_once", 1954),
)


def threads(pid: int) -> bytes:
    frames = [{"filename": f, "name": n, "line": line} for f, n, line in FRAMES]
    dump = [{"pid": pid, "os_thread_id": pid, "thread_name": "MainThread", "frames": frames}]
    return json.dumps(dump, indent=1).encode()


def evidence_files() -> dict[str, bytes]:
    files = {
        "procs.json": json.dumps(
            [{"pid": p, "role": "engine", "state": "S", "instance": f"{p}"} for p in ENGINES]
        ).encode(),
        "logs/worker.out": b"[2026-03-04 10:00:00 DP0] Avg thr (in/out): 1.0 / 2.0 tokens/s\n",
    }
    for pid in ENGINES:
        files[f"processes/engine-{pid}/threads.json"] = threads(pid)
        files[f"processes/engine-{pid}/threads2.json"] = threads(pid)
    return files


def captured(
    tmp_path: Path,
    files: Mapping[str, bytes],
    *,
    rungs: Mapping[str, int] | None = None,
    **changes: Any,
) -> tuple[CaptureOutcome, CaptureRequest]:
    """Lay out what a capture of two engines left."""
    output = tmp_path / "out"
    work = output / "hangwatch-test.x.partial"
    work.mkdir(parents=True, exist_ok=True)
    steps, left = [], []
    for number, (name, data) in enumerate(files.items()):
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        step = Step(
            id=f"step/{number}",
            collector="stacks",
            scope=Scope.NODE,
            stage=Stage.A,
            sample=1,
            rung=(rungs or {}).get(name, 5),
            folder=PurePosixPath(name).parent,
            timeout=10.0,
        )
        steps.append(step)
        left.append(
            Evidence(
                step=step.id,
                collector="stacks",
                sample=1,
                phase=Phase.ONSET,
                started_at=Instant(990.0 + number / 100),
                artifacts=(Artifact(path=PurePosixPath(name), size=len(data)),),
            )
        )
    keys = [InstanceKey(pid=pid, tag="DP0") for pid in ENGINES]
    verdict = SuspectedHang(
        since=Instant(900.0), cause="simultaneous-silence", confidence=Confidence.LOW
    )
    window = StopWindow(earliest=Instant(900.0), latest=Instant(910.0))
    incident = Incident(
        id="20260304T101600-1",
        members=tuple(
            Member(instance=key, verdict=verdict, window=window, last_beat_at=Instant(900.0))
            for key in keys
        ),
        watched=2,
        verdict=verdict,
        detected_at=Instant(980.0),
        window=window,
    )
    beats = tuple(
        Heartbeat(
            instance=key, at=Instant(at), source="w.out", in_tps=1.0, out_tps=9.0, running=3,
            waiting=0, routed=3,
        )
        for key in keys
        for at in (880.0, 890.0, 900.0)
    )  # fmt: skip
    request = CaptureRequest(
        id=incident.id,
        kind=CaptureKind.INCIDENT,
        output=str(output),
        profile="lmdeploy",
        policy=Policy(),
        epoch=CLOCK.epoch(),
        incident=incident,
        instances=tuple(CapturedInstance(instance=key, pid=key.pid) for key in keys),
        beats=beats,
        transitions=tuple(
            Transition(instance=key, before=None, after=verdict, at=Instant(980.0)) for key in keys
        ),
        settings={"stall_after": {"value": 120.0, "origin": "default"}},
    )
    targets = tuple(
        Target(process=ProcessId(pid, 7), role=Role.ENGINE, instance=str(pid), why="seed")
        for pid in ENGINES
    )
    outcome = CaptureOutcome(
        work=str(work),
        plan=CapturePlan(targets=targets, steps=tuple(steps), sample_gap=5.0, deadline=60.0),
        evidence=tuple(left),
        started_at=Instant(985.0),
        ended_at=Instant(998.0),
        verdict="hung",
        first_evidence_at=Instant(985.4),
    )
    return replace(outcome, **changes), request


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive:
            stream = archive.extractfile(member)
            assert stream is not None
            found[member.name.split("/", 1)[1]] = stream.read()
        return found


@pytest.fixture
def written(tmp_path: Path) -> bundle.BundleWritten:
    outcome, request = captured(tmp_path, evidence_files())
    return bundle.write(outcome, request, clock=CLOCK)


# --- what is in it -------------------------------------------------------------------------------


def test_a_bundle_has_its_name_its_mode_and_its_files(written: bundle.BundleWritten):
    found = contents(written.path)

    assert is_bundle_name(written.path.name)
    assert 0o600 == stat.S_IMODE(written.path.stat().st_mode)
    assert {"manifest.json", "REPORT.md", "issue.md", "incident.json", "history/beats.csv"} <= set(
        found
    )
    assert set(evidence_files()) <= set(found)


def test_the_bundle_says_what_the_capture_found(written: bundle.BundleWritten):
    assert ("hung", "event-loop-blocked") == (written.verdict, written.cause)
    assert "2 of 2 servers stopped answering work" in written.report
    assert "Loop.fetch (lmdeploy/pytorch/engine/engine.py:153)" in written.report


def test_a_bundle_read_again_gives_the_same_diagnosis(written: bundle.BundleWritten):
    again = reading.explain(reading.read_bundle(written.path))

    assert written.diagnosis.findings == again.findings
    assert (written.verdict, written.cause) == (again.verdict, again.cause)
    assert written.diagnosis.dossier.instances == again.dossier.instances


def test_an_unpacked_bundle_gives_the_same_diagnosis(written: bundle.BundleWritten, tmp_path: Path):
    with tarfile.open(written.path) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [folder] = (tmp_path / "unpacked").iterdir()

    again = reading.explain(reading.read_bundle(folder))

    assert written.diagnosis.findings == again.findings


def test_the_manifest_has_the_hash_of_every_other_file(written: bundle.BundleWritten):
    found = contents(written.path)
    manifest = json.loads(found.pop("manifest.json"))

    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == {
        name: record["sha256"] for name, record in manifest["files"].items()
    }


def test_manifest_and_incident_keep_to_their_schemas(written: bundle.BundleWritten):
    found = contents(written.path)

    for name in ("manifest", "incident"):
        jsonschema.validate(
            json.loads(found[f"{name}.json"]),
            schemas()[f"hangwatch.{name}.1"],
            format_checker=jsonschema.FormatChecker(),
        )


def test_every_beat_is_in_the_history(written: bundle.BundleWritten):
    rows = list(csv.DictReader(io.StringIO(contents(written.path)["history/beats.csv"].decode())))

    assert 6 == len(rows)
    assert ("2026-03-04T10:14:40+00:00", "4242", "9.0") == (
        rows[0]["time"],
        rows[0]["server"],
        rows[0]["out_tps"],
    )


def test_settings_keep_their_origins(written: bundle.BundleWritten):
    manifest = json.loads(contents(written.path)["manifest.json"])

    assert {"stall_after": {"value": 120.0, "origin": "default"}} == manifest["settings"]


# --- redaction -----------------------------------------------------------------------------------


def test_no_planted_secret_is_in_the_tarball(tmp_path: Path):
    log = "\n".join(line for _, line, _, _ in PLANTED).encode()
    notes = [line for _, line, _, log_only in PLANTED if not log_only]
    files = {
        **evidence_files(),
        "logs/server.out": log,
        "processes/engine-4242/launch.json": json.dumps({"arguments": " ; ".join(notes)}).encode(),
        "processes/engine-4242/environ.json": json.dumps(
            {"OPENAI_API_KEY": PLANTED[3][2], "HANGWATCH_NOTE": "; ".join(notes)}
        ).encode(),
        "processes/engine-4242/health.json": json.dumps(
            {"http": 503, "status": "unhealthy", "message": "; ".join(notes)}
        ).encode(),
    }
    outcome, request = captured(tmp_path, files)
    outcome = replace(
        outcome,
        evidence=(
            replace(
                outcome.evidence[0],
                failure=Failure(
                    kind=FailureKind.TOOL_FAILED, message="; ".join(notes), hint=notes[0]
                ),
            ),
            *outcome.evidence[1:],
        ),
    )

    found = contents(bundle.write(outcome, request, clock=CLOCK).path)

    left = [
        (what, name)
        for what, _, secret, _ in PLANTED
        for name, data in found.items()
        if secret.encode() in data or base64.b64encode(secret.encode()) in data
    ]
    assert [] == left


def test_a_core_dump_never_enters_a_bundle(tmp_path: Path):
    files = {**evidence_files(), "gpu/core.4242": b"\x7fELF" + bytes(100)}
    outcome, request = captured(tmp_path, files)

    found = contents(bundle.write(outcome, request, clock=CLOCK).path)

    manifest = json.loads(found["manifest.json"])
    assert "gpu/core.4242" not in found
    assert ["gpu/core.4242"] == [cut["path"] for cut in manifest["cut"]]
    assert ["withheld"] == [s["failure"]["kind"] for s in manifest["steps"] if s["failure"]]


def test_names_are_the_same_in_two_bundles_of_one_state_directory(tmp_path: Path):
    (tmp_path / "pseudonym.key").write_bytes(b"k" * 32)
    names = []
    for place in ("a", "b"):
        files = {**evidence_files(), "logs/x.out": b"peer 10.20.30.40\n"}
        outcome, request = captured(tmp_path / place, files)
        request = replace(request, state=str(tmp_path))
        names.append(contents(bundle.write(outcome, request, clock=CLOCK).path)["logs/x.out"])

    assert names[0] == names[1]


# --- bounds --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_left_out_logs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_BUNDLE", bundle.RESERVE + 20_000)
    noise = base64.b85encode(os.urandom(40_000)).replace(b"@", b"a")
    lines = b"\n".join(noise[i : i + 80] for i in range(0, len(noise), 80))
    files = {"logs/big.out": lines, **evidence_files()}
    outcome, request = captured(tmp_path, files, rungs={"logs/big.out": 8})

    written = bundle.write(outcome, request, clock=CLOCK)

    found = contents(written.path)
    manifest = json.loads(found["manifest.json"])
    assert set(evidence_files()) <= set(found)
    assert [("logs/big.out", "the bundle is full")] == [
        (cut["path"], cut["reason"]) for cut in manifest["cut"]
    ]


# --- the disk ------------------------------------------------------------------------------------


def bundles(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.rglob("*") if is_bundle_name(path.name)]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EIO, "cannot be written")],
)
@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_disk_that_fails_leaves_nothing_that_looks_like_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, call: str
):
    outcome, request = captured(tmp_path, evidence_files())

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)

    with pytest.raises(OutputError, match=f"{words}.*--output"):
        bundle.write(outcome, request, clock=CLOCK)
    assert [] == bundles(tmp_path)


def test_a_directory_that_vanished_is_named_with_the_remedy(tmp_path: Path):
    outcome, request = captured(tmp_path, evidence_files())
    request = replace(request, output=str(tmp_path / "nowhere"))

    with pytest.raises(OutputError, match=r"nowhere.*--output"):
        bundle.write(outcome, request, clock=CLOCK)


def test_a_second_bundle_never_replaces_the_first(tmp_path: Path):
    outcome, request = captured(tmp_path, evidence_files())

    first = bundle.write(outcome, request, clock=CLOCK)
    second = bundle.write(outcome, request, clock=CLOCK)

    assert first.path != second.path
    assert 2 == len(bundles(tmp_path))


def test_where_there_are_no_hard_links_the_bundle_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    outcome, request = captured(tmp_path, evidence_files())

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)

    assert bundle.write(outcome, request, clock=CLOCK).path.exists()


def test_a_file_that_vanished_meanwhile_costs_only_itself(tmp_path: Path):
    outcome, request = captured(tmp_path, evidence_files())
    Path(outcome.work, "logs/worker.out").unlink()

    manifest = json.loads(
        contents(bundle.write(outcome, request, clock=CLOCK).path)["manifest.json"]
    )

    assert [("logs/worker.out", "it could not be read")] == [
        (cut["path"], cut["reason"]) for cut in manifest["cut"]
    ]


def test_a_capture_without_any_evidence_is_a_bundle_too(tmp_path: Path):
    outcome, request = captured(tmp_path, {})

    written = bundle.write(outcome, request, clock=CLOCK)

    assert evidence.read([written.path]).is_bundle
    assert "hung" == written.verdict
