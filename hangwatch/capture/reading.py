"""From paths to a diagnosis: what ``diagnose``, ``report`` and the bundle's writer share.

A bundle brings what the detector said at the time, and is diagnosed by the rules of today. Loose
evidence is replayed, with what the snapshots say of the engines at its end. What
``hangwatch-rescue.py`` printed is loose evidence in one file, which knows when it was taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Final

from hangwatch import registry
from hangwatch.core import loose
from hangwatch.core.codec import CodecError
from hangwatch.core.definition import define
from hangwatch.core.diagnosis import diagnose
from hangwatch.core.layout import INCIDENT, MANIFEST, Kind, place
from hangwatch.core.redaction import Redactor
from hangwatch.core.replay import heard, replay
from hangwatch.core.rescue import Rescued, unpack
from hangwatch.errors import NotABundleError
from hangwatch.model.dossier import Diagnosis, Dossier
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Instant
from hangwatch.model.verdict import ALARMS, Blind, Confidence, Verdict
from hangwatch.system import evidence, logmaterial
from hangwatch.system.evidence import EvidenceFiles

AT_THE_END: Final = (
    "this is how it was when the log ended; what would be said after a longer silence tells "
    "--now TIME"
)


def explain(dossier: Dossier) -> Diagnosis:
    """Return what all built-in rules make of a dossier."""
    return diagnose(dossier, registry.rules().values())


def read(
    paths: Iterable[Path],
    *,
    policy: Policy | None = None,
    now: datetime | None = None,
    zone: tzinfo | None = None,
    profile: str = "",
    defined: tuple[EngineProfile, ...] = (),
) -> Dossier:
    """Return the dossier of a bundle, packed or unpacked, or of loose evidence.

    Args:
        paths: One bundle or folder, or any number of files.
        policy: Limits for loose evidence; a bundle brings its own.
        now: When to evaluate loose evidence; ``None`` takes its end.
        zone: Zone of naive stamps; ``None`` takes that of *now*, else the local one.
        profile: Engine profile; ``""`` takes a bundle's own, else the one that the logs, the
            metrics or the processes point to.
        defined: Profiles besides the built-in ones; a bundle brings those of its time.

    Raises:
        NotABundleError: There is no evidence, or it is damaged.
        ConfigError: There is no profile of that name.
    """
    chosen = tuple(paths)
    files = evidence.read(chosen)
    if files.is_bundle:
        return _bundle(files, profile, defined)
    return _loose(
        files,
        chosen,
        policy=policy or Policy(),
        now=now,
        zone=zone,
        profiles=registry.chosen(profile, defined),
    )


def read_bundle(path: Path) -> Dossier:
    """Return the dossier of a bundle, and of nothing else.

    Raises:
        NotABundleError: It is no bundle, or is damaged.
    """
    files = evidence.read([path])
    if not files.is_bundle:
        raise NotABundleError(
            f"{path} is no bundle: {MANIFEST} or {INCIDENT} is missing; for loose evidence use "
            "hangwatch diagnose"
        )
    return _bundle(files, "", ())


def _bundle(files: EvidenceFiles, profile: str, defined: tuple[EngineProfile, ...]) -> Dossier:
    try:
        result = loose.recorded(files.files)
    except (CodecError, ValueError, KeyError) as error:
        raise NotABundleError(
            f"{files.origin} has an {INCIDENT} that cannot be understood ({error}): it may come "
            "from a later version of hangwatch"
        ) from error
    defined = (*_recorded_profiles(files.files), *defined)
    name = profile or _recorded_profile(files.files, defined)
    return loose.dossier(
        files.files,
        origin=files.origin,
        result=result,
        profile=registry.profile(name, defined),
        sizes=files.sizes,
        problems=files.problems,
    )


def _recorded_profile(files: Mapping[str, bytes], defined: tuple[EngineProfile, ...]) -> str:
    name = json.loads(files[INCIDENT]).get("profile")
    return name if isinstance(name, str) and name in registry.profiles(defined) else "lmdeploy"


def _recorded_profiles(files: Mapping[str, bytes]) -> tuple[EngineProfile, ...]:
    """Return the profiles that the configuration of a bundle's time defined, as far as they are."""
    found = []
    try:
        settings = json.loads(files[MANIFEST])["settings"]["profiles"]["value"]
        for name, table in settings.items():
            found.append(define(name, table))
    except (KeyError, TypeError, AttributeError, ValueError):
        pass  # an older bundle, a redacted expression: its own profile is missing then
    return tuple(found)


def _loose(
    files: EvidenceFiles,
    paths: tuple[Path, ...],
    *,
    policy: Policy,
    now: datetime | None,
    zone: tzinfo | None,
    profiles: Mapping[str, EngineProfile],
) -> Dossier:
    rescued = _rescued(files, profiles.values())
    now = now or rescued.ended
    zone = zone or (now.tzinfo if now is not None else None) or datetime.now().astimezone().tzinfo
    assert zone is not None
    if files.logs or rescued.logs:
        material = logmaterial.read(
            files.logs,
            profiles=profiles.values(),
            zone=zone,
            until=now,
            held=rescued.logs,
        )
    else:
        material = logmaterial.of({}, profiles=profiles.values(), zone=zone, until=now)
    until = material.epoch.instant_of(now) if now is not None else material.ends_at
    redactor = Redactor()
    # What somebody collected by hand beside it is newer than what the rescue found.
    kept, withheld = loose.redacted({**rescued.files, **files.files}, redactor)

    said = heard(material, profiles=profiles)
    profile = loose.engine(kept, profiles, heard=said.engine)
    # Without any log there is no engine to judge: stacks are shown, and the rules speak.
    keys = said.instances if material.sources else ()
    seen = loose.snapshots(kept, profile=profile, at=until, instances=keys)
    result = replay(material, profiles=profiles, policy=policy, until=until, snapshots=seen)
    # A log by its name may well hold no beat; anything else was given by mistake.
    nameless = all(path.is_file() and place(path.name).kind is Kind.OTHER for path in files.logs)
    if not result.instances and not material.lines and not kept and nameless:
        names = ", ".join(str(path) for path in paths)
        titles = " or ".join(each.title for each in profiles.values())
        raise NotABundleError(
            f"{names}: no heartbeat of {titles} in it, and no other evidence beside it"
        )
    if not result.instances and not material.sources and kept:
        result = replace(result, verdict=_without_log(until))
    if now is None and result.instances and not isinstance(result.verdict, ALARMS):
        # Without a time nobody knows how long the silence after the last line went on.
        result = replace(result, notes=(*result.notes, AT_THE_END))
    return loose.dossier(
        kept,
        origin=files.origin,
        result=result,
        profile=profile,
        redactor=redactor,
        sizes=files.sizes,
        problems=(*files.problems, *rescued.problems, *withheld),
    )


def _without_log(at: Instant) -> Verdict:
    """Return what can be said of an engine whose log is not there."""
    return Blind(
        since=at,
        cause=loose.NO_LOG,
        confidence=Confidence.HIGH,
        because=("no log was given, and its heartbeats would say (kubectl logs --timestamps)",),
    )


def _rescued(files: EvidenceFiles, profiles: Iterable[EngineProfile]) -> Rescued:
    """Return what the rescue printed, nothing if there is no such document.

    Raises:
        NotABundleError: It is damaged, or there are several.
    """
    if len(files.rescues) > 1:
        raise NotABundleError(
            f"{' and '.join(sorted(files.rescues))} are of several machines or moments: give one "
            "of them at a time"
        )
    for name, data in files.rescues.items():
        try:
            return unpack(data, profiles)
        except ValueError as error:
            raise NotABundleError(f"{name}: {error}") from error
    return Rescued()
