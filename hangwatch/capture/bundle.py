"""Evidence to one tarball: redacted, explained, written whole or not at all.

What may fail is done first and in memory; the disk sees one file under a name that claims nothing,
in the work directory, and it gets its own name only when every byte of it is safe. Nothing that
was not redacted enters it: a file that cannot be redacted is withheld, and the manifest says so.
When the evidence is too large to be attached to an issue, the least telling files are left out
first, and the manifest says which.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import platform
import secrets
import socket
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hangwatch import __version__, registry
from hangwatch.capture import manifest as form
from hangwatch.capture.reading import explain
from hangwatch.core import aftermath, baseline, contracts, loose
from hangwatch.core.codec import to_plain
from hangwatch.core.hindsight import judgement
from hangwatch.core.layout import (
    AUDIT,
    BEATS,
    INCIDENT,
    ISSUE,
    MANIFEST,
    REPORT,
    SUFFIX,
    aftermath_name,
    bundle_name,
    bundle_number,
)
from hangwatch.core.objects import listed
from hangwatch.core.redaction import Redactor, WithheldError
from hangwatch.core.story import headline
from hangwatch.errors import ConfigError, OutputError
from hangwatch.model.capture import (
    Artifact,
    CaptureKind,
    CaptureOutcome,
    CaptureRequest,
    Evidence,
    Failure,
    FailureKind,
    Step,
)
from hangwatch.model.dossier import Diagnosis, Dossier
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import ProcessId
from hangwatch.model.profile import EngineProfile
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Clock, Instant
from hangwatch.system.keys import KeyFile

MAX_BUNDLE: Final = 24 << 20
"""Bytes, packed: what GitHub takes as an attachment of an issue is 25 MB."""

MAX_AFTERMATH: Final = 4 << 20
"""Bytes, packed, of a later look: stacks and states of 40 processes are a tenth of that."""

RESERVE: Final = 1 << 20
"""Bytes, packed, for the reports, the manifest and the archive's own headers."""

MAX_UNPACKED: Final = 256 << 20
"""Bytes of evidence that are held in memory."""

SCHEMA: Final = "hangwatch.incident/1"

# What is left out last comes first: stacks and states, then versions, then tails of logs.
_IMPORTANCE: Final = {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 9: 1, 8: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleWritten:
    """A bundle that is safe on disk.

    Attributes:
        path: Where it is.
        verdict: Word of the verdict.
        cause: Slug of the cause.
        report: ``REPORT.md``.
        diagnosis: What it says, for whoever shows it at once.
    """

    path: Path
    verdict: str
    cause: str
    report: str
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class AftermathWritten:
    """A later look that is safe on disk.

    Attributes:
        path: Where it is.
        outcome: ``still_frozen``, ``recovered``, ``ended`` or ``mixed``.
        sentence: The same for people.
    """

    path: Path
    outcome: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """Files that go into the bundle, and the evidence as they make it."""

    files: Mapping[str, bytes]
    evidence: tuple[Evidence, ...]
    cut: tuple[form.Cut, ...]


def write(outcome: CaptureOutcome, request: CaptureRequest, *, clock: Clock) -> BundleWritten:
    """Write the bundle of a capture into the output directory.

    Args:
        outcome: What the capture left; its work directory stays, for the caller to remove.
        request: What it was asked for.
        clock: For the time of writing.

    Raises:
        OutputError: It cannot be written: the disk is full, the directory may not be written.
            Nothing is left that looks like a bundle.
        ConfigError: The profile does not exist.
    """
    profile = registry.profile(request.profile, request.profiles)
    key = _key(request.state)
    redactor = Redactor(key, hosts=_own_names(), secrets=_api_keys(request.api_key_file))
    contents = _fit(_redacted(outcome, redactor), MAX_BUNDLE)
    result = _judged(outcome, request, contents, profile, redactor)
    draft = _manifest(outcome, request, contents, redactor=redactor, key=key, clock=clock)
    dossier = _dossier(contents, draft, result, profile, request)
    diagnosis = explain(dossier)
    started = request.epoch.wall_of(outcome.started_at).astimezone(UTC)
    name = bundle_name(started, bundle_number(request.epoch.boot_id, request.id))
    diagnosis = replace(diagnosis, dossier=replace(dossier, origin=name))
    report = registry.renderers()["markdown"].render(diagnosis)
    made = {
        INCIDENT: _incident(request, result, diagnosis, redactor),
        BEATS: _beats(result),
        AUDIT: _audit(outcome, request),
        REPORT: report.encode(),
        ISSUE: registry.renderers()["issue"].render(diagnosis).encode(),
    }
    files = {**contents.files, **made}
    final = _seal(draft, files, contents.evidence)
    ordered = {MANIFEST: final, **{k: files[k] for k in (REPORT, ISSUE, INCIDENT, BEATS, AUDIT)}}
    ordered |= {k: files[k] for k in sorted(contents.files)}
    path = _put(Path(request.output), Path(outcome.work), name, ordered, started)
    return BundleWritten(
        path=path,
        verdict=diagnosis.verdict,
        cause=diagnosis.cause,
        report=report,
        diagnosis=diagnosis,
    )


def write_aftermath(
    outcome: CaptureOutcome, request: CaptureRequest, *, clock: Clock
) -> AftermathWritten:
    """Write what a later look brought beside the bundle that it follows; see ``write``.

    Raises:
        OutputError: It cannot be written.
    """
    assert request.after is not None
    key = _key(request.state)
    redactor = Redactor(key, hosts=_own_names(), secrets=_api_keys(request.api_key_file))
    contents = _fit(_redacted(outcome, redactor), MAX_AFTERMATH)
    said = aftermath.document(
        replace(request, incident=redactor.value(request.incident)),
        outcome,
        ends=_listed(contents.files.get(aftermath.ENDS, b""), "processes"),
        kernel=_listed(contents.files.get("kernel_events.json", b""), "events"),
    )
    files = {**contents.files, aftermath.FILE: said}
    draft = _manifest(outcome, request, contents, redactor=redactor, key=key, clock=clock)
    final = _seal(draft, files, contents.evidence)
    bundle = Path(request.after.bundle)
    name = aftermath_name(bundle.name, request.after.number)
    started = request.epoch.wall_of(outcome.started_at).astimezone(UTC)
    ordered = {MANIFEST: final, aftermath.FILE: said, **dict(sorted(contents.files.items()))}
    path = _put(bundle.parent, Path(outcome.work), name, ordered, started)
    told = json.loads(said)
    return AftermathWritten(path=path, outcome=told["outcome"], sentence=told["sentence"])


def _listed(data: bytes, key: str) -> list[Mapping[str, Any]]:
    return [row for row, _ in listed(data, key) if isinstance(row, dict)]


# ---------------------------------------------------------------------- redaction


def _key(state: str) -> bytes:
    """Return the key of the state directory; one of this bundle alone where there is none."""
    if state:
        with contextlib.suppress(OSError):
            found = (Path(state) / "pseudonym.key").read_bytes()
            if found:
                return found
    return secrets.token_bytes(32)


def _api_keys(file: str) -> tuple[str, ...]:
    """Return the keys that a server may have repeated; its answers were masked when they came."""
    try:
        return KeyFile(file).read() if file else ()
    except ConfigError:
        return ()


def _own_names() -> tuple[str, ...]:
    names = [socket.gethostname(), platform.node()]
    names += [os.environ.get(name, "") for name in ("HOSTNAME", "POD_NAME", "NODE_NAME")]
    return tuple(name for name in names if name)


def _redacted(outcome: CaptureOutcome, redactor: Redactor) -> _Contents:
    """Read and redact every artifact, the most important first."""
    work = Path(outcome.work)
    steps = {step.id: step for step in outcome.plan.steps}
    for _, path, data in _artifacts(work, outcome.evidence, steps):
        if data is not None and path.suffix != ".out":
            redactor.learn(data)
    files: dict[str, bytes] = {}
    cut: list[form.Cut] = []
    withheld: dict[str, str] = {}
    left = MAX_UNPACKED
    for artifact, path, data in _artifacts(work, outcome.evidence, steps):
        name = path.as_posix()
        if data is None:
            withheld[name] = "it could not be read"
        elif len(data) > left:
            withheld[name] = "there is more evidence than a bundle holds"
        else:
            try:
                files[name] = redactor.file(name, data)
                left -= len(data)
            except WithheldError as error:
                withheld[name] = str(error)
        if name in withheld:
            cut.append(form.Cut(path=name, size=artifact.size, reason=withheld[name]))
    evidence = tuple(
        redactor.value(_without(item, withheld, FailureKind.WITHHELD)) for item in outcome.evidence
    )
    return _Contents(files=files, evidence=evidence, cut=tuple(cut))


def _artifacts(
    work: Path, evidence: Iterable[Evidence], steps: Mapping[str, Step]
) -> Iterator[tuple[Artifact, Any, bytes | None]]:
    def importance(item: Evidence) -> int:
        step = steps.get(item.step)
        return _IMPORTANCE.get(step.rung, 1) if step is not None else 1

    for item in sorted(evidence, key=importance):
        for artifact in item.artifacts:
            try:
                yield artifact, artifact.path, (work / artifact.path).read_bytes()
            except OSError:
                yield artifact, artifact.path, None


def _without(evidence: Evidence, lost: Mapping[str, str], kind: FailureKind) -> Evidence:
    """Return the evidence without the artifacts that are lost; a failure says why."""
    gone = [a for a in evidence.artifacts if a.path.as_posix() in lost]
    if not gone:
        return evidence
    failure = evidence.failure or Failure(
        kind=kind, message=f"{gone[0].path.name}: {lost[gone[0].path.as_posix()]}"
    )
    kept = tuple(artifact for artifact in evidence.artifacts if artifact not in gone)
    return replace(evidence, artifacts=kept, failure=failure)


def _fit(contents: _Contents, size: int) -> _Contents:
    """Leave out what does not fit when packed; files come in the order of their importance."""
    left = size - RESERVE
    files: dict[str, bytes] = {}
    lost: dict[str, str] = {}
    cut = list(contents.cut)
    for name, data in contents.files.items():
        packed = len(zlib.compress(data, 6)) + 512
        if packed <= left:
            files[name] = data
            left -= packed
        else:
            lost[name] = "the bundle is full"
            cut.append(form.Cut(path=name, size=len(data), reason=lost[name]))
    evidence = tuple(_without(item, lost, FailureKind.TOO_LARGE) for item in contents.evidence)
    return _Contents(files=files, evidence=evidence, cut=tuple(cut))


# ---------------------------------------------------------------------- judgement and dossier


def _judged(
    outcome: CaptureOutcome,
    request: CaptureRequest,
    contents: _Contents,
    profile: EngineProfile,
    redactor: Redactor,
) -> ReplayResult:
    keys = list(
        dict.fromkeys(
            (
                *(item.instance for item in request.instances),
                *(beat.instance for beat in request.beats),
            )
        )
    )
    until = _heard_until(outcome, request)
    seen = loose.snapshots(contents.files, profile=profile, at=until, instances=keys)
    result = judgement(request, seen, until=until, profile=profile, word=outcome.verdict)
    redacted: ReplayResult = redactor.value(result)
    return redacted


def _heard_until(outcome: CaptureOutcome, request: CaptureRequest) -> Instant:
    """Return the instant that the verdict is about.

    Nobody listens to what is well while it is recorded: beats of that time are not missed ones.
    """
    if request.kind is not CaptureKind.RUN:
        return outcome.ended_at
    return max((request.epoch.at, *(beat.at for beat in request.beats)))


def _dossier(
    contents: _Contents,
    draft: Mapping[str, Any],
    result: ReplayResult,
    profile: EngineProfile,
    request: CaptureRequest,
) -> Dossier:
    return loose.dossier(
        {**contents.files, MANIFEST: json.dumps(draft).encode()},
        origin=request.id,
        result=result,
        profile=profile,
    )


# ---------------------------------------------------------------------- what we write ourselves


def _incident(
    request: CaptureRequest, result: ReplayResult, diagnosis: Diagnosis, redactor: Redactor
) -> bytes:
    document = {
        "schema": SCHEMA,
        "id": request.id,
        "kind": request.kind.value,
        "profile": request.profile,
        "headline": headline(diagnosis),
        "verdict": diagnosis.verdict,
        "cause": diagnosis.cause,
        "confidence": diagnosis.confidence.value,
        "since": contracts.instant(result.epoch, result.verdict.since),
        "window": contracts.window(result.epoch, result.window),
        "instances": contracts.instances(result.epoch, result.instances),
        "judgement": to_plain(result),
        "incident": to_plain(redactor.value(request.incident)),
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def _audit(outcome: CaptureOutcome, request: CaptureRequest) -> bytes:
    lines = [
        {
            "at": request.epoch.wall_of(touch.at).isoformat(timespec="milliseconds"),
            "pid": touch.process.pid,
            "start_ticks": touch.process.start_ticks,
            "step": touch.step,
            "means": touch.means.value,
            "incident": touch.incident,
        }
        for touch in outcome.touches
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _beats(result: ReplayResult) -> bytes:
    columns = (
        "in_tps", "out_tps", "running", "waiting", "routed", "api_waiting", "finished", "failed",
        "kv_cache_pct", "prefix_hit_pct", "draft_acceptance_pct",
    )  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("time", "monotonic", "server", "engine", *columns))
    beats: list[Heartbeat] = sorted(
        (beat for record in result.instances for beat in record.beats), key=lambda beat: beat.at
    )
    for beat in beats:
        writer.writerow(
            (
                contracts.instant(result.epoch, beat.at),
                round(beat.at, 3),
                beat.instance.name,
                beat.instance.tag,
                *(getattr(beat, column) for column in columns),
            )
        )
    return text.getvalue().encode("utf-8", "replace")


def _manifest(
    outcome: CaptureOutcome,
    request: CaptureRequest,
    contents: _Contents,
    *,
    redactor: Redactor,
    key: bytes,
    clock: Clock,
) -> dict[str, Any]:
    epoch = request.epoch
    first = outcome.first_evidence_at
    return {
        "schema": form.SCHEMA,
        "kind": request.kind.value,
        "id": request.id,
        "created": contracts.moment(clock.wall()),
        "hangwatch": __version__,
        "python": platform.python_version(),
        "profile": request.profile,
        "clocks": {
            "boot_id": epoch.boot_id,
            "monotonic": epoch.at,
            "wall": contracts.moment(epoch.wall),
        },
        "policy": _plain(request.policy),
        "settings": redactor.value(dict(request.settings)),
        "capture": {
            "started": contracts.instant(epoch, outcome.started_at),
            "ended": contracts.instant(epoch, outcome.ended_at),
            "elapsed_s": round(outcome.ended_at - outcome.started_at, 3),
            "first_evidence_s": None if first is None else round(first - outcome.started_at, 3),
            "sample_gap_s": outcome.plan.sample_gap,
            "deadline_s": outcome.plan.deadline,
            "stopped": outcome.stopped,
            "abandoned": outcome.abandoned,
            "skew_s": _skew(outcome),
        },
        "processes": [
            {
                "pid": target.process.pid,
                "start_ticks": target.process.start_ticks,
                "role": target.role.value,
                "instance": redactor.string(target.instance),
                "rank": target.rank,
                "gpu": target.gpu,
                "why": redactor.string(target.why),
                "python": target.python,
                "pause_ms": _pause_ms(outcome, target.process),
            }
            for target in outcome.targets
        ],
        "steps": [_plain(item) for item in contents.evidence],
        "files": {},
        "cut": [item.model_dump() for item in contents.cut],
        "redaction": {
            "counts": dict(redactor.counts),
            "key_id": hashlib.sha256(b"key id:" + key).hexdigest()[:8],
        },
        "notes": [redactor.string(note) for note in outcome.plan.notes],
        "baseline": json.loads(contents.files.get(baseline.INDEX, b"[]")),
    }


def _plain(value: object) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(value)
    plain.pop("type", None)
    return plain


def _pause_ms(outcome: CaptureOutcome, process: ProcessId) -> float:
    """Return how long a process stood still for the whole capture."""
    return round(sum(each.pause_ms for each in outcome.evidence if each.target == process), 1)


def _skew(outcome: CaptureOutcome) -> dict[str, float]:
    """Return, by rung and sample, the seconds between its first and its last step."""
    rungs = {step.id: step.rung for step in outcome.plan.steps}
    begun: dict[str, list[float]] = {}
    for item in outcome.evidence:
        if item.started_at is not None and item.step in rungs:
            begun.setdefault(f"{rungs[item.step]}/{item.sample}", []).append(item.started_at)
    return {rung: round(max(at) - min(at), 3) for rung, at in sorted(begun.items())}


def _seal(
    draft: Mapping[str, Any], files: Mapping[str, bytes], evidence: Iterable[Evidence]
) -> bytes:
    """Return the manifest with the hash of every other file."""
    partial = {a.path.as_posix() for item in evidence for a in item.artifacts if not a.complete}
    records = {
        name: {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "complete": name not in partial,
        }
        for name, data in sorted(files.items())
    }
    whole = form.Manifest.model_validate({**draft, "files": records})
    return (whole.model_dump_json(indent=1, by_alias=True) + "\n").encode()


# ---------------------------------------------------------------------- the disk


def _put(
    output: Path, work: Path, name: str, files: Mapping[str, bytes], started: datetime
) -> Path:
    """Write the archive under a name that claims nothing, then give it its own."""
    packing = work / f"{name}.packing"
    try:
        descriptor = os.open(packing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _pack(file, name.removesuffix(SUFFIX), files, started)
            file.flush()
            os.fsync(file.fileno())
        path = _name(packing, output, name)
    except OSError as error:
        raise OutputError(_remedy(error, output)) from error
    finally:
        with contextlib.suppress(OSError):
            packing.unlink()
    try:
        _sync(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise OutputError(_remedy(error, output)) from error
    return path


def _pack(file: Any, top: str, files: Mapping[str, bytes], started: datetime) -> None:
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            info.mode = 0o600
            info.mtime = int(started.timestamp())
            archive.addfile(info, io.BytesIO(data))


def _name(packing: Path, output: Path, name: str) -> Path:
    """Move the archive to its name; never onto another bundle."""
    for tail in ("", *(f"-{n}" for n in range(2, 100))):
        path = output / f"{name.removesuffix(SUFFIX)}{tail}{SUFFIX}"
        try:
            os.link(packing, path)
        except FileExistsError:
            continue
        except OSError as error:
            # No hard links here (some network and container file systems).
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if path.exists():
                continue
            packing.rename(path)
        return path
    raise FileExistsError(errno.EEXIST, "a hundred bundles of this second exist", str(output))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(descriptor)


def _remedy(error: OSError, output: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"the disk of {output} is full, no bundle was written: make room there, or choose "
            "another directory with --output"
        )
    return (
        f"the bundle cannot be written into {output}: {(error.strerror or str(error)).lower()}; "
        "choose another directory with --output"
    )
