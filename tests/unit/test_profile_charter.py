"""What every engine profile must keep."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from hangwatch.core.parsing import parse
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import BeatSeen
from hangwatch.model.profile import EngineProfile, Signal
from hangwatch.model.time import Instant
from hangwatch.registry import profiles

FIXTURES = Path(__file__).parent.parent / "fixtures" / "heartbeats"
PROFILES = tuple(profiles().values())
LINES = [
    pytest.param(profile, line, id=f"{profile.name}-{file.stem}-{number}")
    for profile in PROFILES
    for file in sorted((FIXTURES / profile.name).glob("*.txt"))
    for number, line in enumerate(file.read_bytes().splitlines(), 1)
    if line.strip()
]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_a_profile_brings_a_real_line_of_its_engine(profile: EngineProfile):
    assert [] != list((FIXTURES / profile.name).glob("*.txt"))


@pytest.mark.parametrize(("profile", "line"), LINES)
def test_a_heartbeat_is_recognised_and_dated(profile: EngineProfile, line: bytes):
    seen = Line(source="log", text=line, at=Instant(0.0))

    (found,) = parse(seen, PROFILES, near=datetime(2026, 6, 1))

    assert isinstance(found, BeatSeen)
    assert profile.name == found.beat.profile
    assert found.beat.printed is not None
    assert found.beat.printed.year > 2024


@pytest.mark.parametrize(("profile", "line"), LINES)
def test_a_heartbeat_contains_a_needle_within_its_match(profile: EngineProfile, line: bytes):
    assert any(needle in line for needle in profile.needles)


@pytest.mark.parametrize(("profile", "line"), LINES)
def test_one_family_reads_the_numbers(profile: EngineProfile, line: bytes):
    found = next((m for f in profile.families if (m := f.search(line))), None)

    assert found is not None
    assert found["running"] is not None


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_every_endpoint_is_a_path_that_only_reads(profile: EngineProfile):
    assert all(
        path.startswith("/") and "terminate" not in path for path in profile.endpoints.values()
    )


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_every_signal_says_where_it_was_read(profile: EngineProfile):
    assert all(pattern.source and pattern.needle for pattern in profile.signals)
    assert set(Signal) >= {pattern.signal for pattern in profile.signals}


NAME = r"[A-Za-z_]\w*"
WHERE = re.compile(rf"[\w.<>]+(:{NAME}(\.({NAME}|\*))*)?")
PATH = re.compile(rf"({NAME}(\.{NAME})*)?")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_every_state_probe_is_a_path_to_one_number(profile: EngineProfile):
    names = [table.name for table in profile.state]

    assert len(set(names)) == len(names)
    for table in profile.state:
        assert table.source
        assert all(WHERE.fullmatch(where) for where in table.where)
        before: list[str] = []
        for probe in table.probes:
            assert PATH.fullmatch(probe.path)
            assert probe.name not in before
            assert not probe.minus or probe.minus in before
            before.append(probe.name)
