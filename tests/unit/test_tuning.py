"""The trade-off between false alarms and latency over logs that are there."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from hangwatch.capture.schemas import schemas
from hangwatch.cli.main import command as hangwatch
from hangwatch.core.tuning import SETTINGS, tune
from hangwatch.model.policy import Policy
from hangwatch.model.tuning import Setting, Tuning
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.system import logmaterial

PROFILES = {"lmdeploy": PROFILE}
START = datetime(2026, 3, 4, 10, 0, 0, tzinfo=UTC)
HOUR = 3600


def line(seconds: float, running: int) -> str:
    stamp = START + timedelta(seconds=seconds)
    return (
        f"[{stamp:%Y-%m-%d %H:%M:%S} DP0] Avg thr (in/out): {4000 + seconds % 997:.1f} / 500.0 "
        "tokens/s, "
        f"Server (succeeded/failed/routed/waiting): 0 / 0 / {running} / 0, "
        f"Engine (running/waiting): {running} / 0, KV cache: 20.0%, \n"
    )


def written(path: Path, gaps: list[float], *, running: int = 5) -> Path:
    """Write a log whose beats are *gaps* apart."""
    at = 0.0
    text = [line(at, running)]
    for gap in gaps:
        at += gap
        text.append(line(at, running))
    path.write_text("".join(text))
    return path


def tuned(path: Path, until: float | None = None) -> Tuning:
    end = None if until is None else START + timedelta(seconds=until)
    material = logmaterial.read([path], profiles=PROFILES.values(), zone=UTC, until=end)
    return tune(
        material,
        profiles=PROFILES,
        policy=Policy(),
        until=material.ends_at if end is None else material.epoch.instant_of(end),
    )


def setting(result: Tuning, limit: float) -> Setting:
    return next(s for s in result.settings if s.stall_after == limit)


def test_a_silence_that_ended_by_itself_is_a_false_alarm_of_every_shorter_limit(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", [10.0] * 20 + [97.0] + [10.0] * 20))

    assert [1, 1, 1, 1, 0] == [s.false for s in result.settings[:5]]
    assert [97.0] == [round(silence.seconds) for silence in result.silences]


def test_a_silence_without_work_is_no_alarm_of_any_limit(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", [10.0] * 20 + [5000.0] + [10.0] * 20, running=0))

    assert {0} == {s.false for s in result.settings}
    assert () == result.silences


def test_a_stop_is_found_by_every_limit_that_the_log_outlasts(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", [10.0] * 20), until=200 + 100)

    assert {30.0: 1, 90.0: 1, 120.0: 0} == {
        limit: setting(result, limit).found for limit in (30.0, 90.0, 120.0)
    }
    assert 1 == setting(result, 120.0).missed
    assert [False] == [silence.ended for silence in result.silences]


def test_stops_of_one_moment_count_once(tmp_path: Path):
    for number in range(8):
        written(tmp_path / f"worker-a-ffffffff-{100 + number}.out", [10.0] * 20 + [97.0, 10.0])

    result = tuned(tmp_path)

    assert 8 == len(result.silences)
    assert 1 == setting(result, 60.0).false


def test_a_short_log_recommends_nothing_below_the_present_setting(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", [10.0] * 300))

    assert not result.enough
    assert 120.0 == result.recommended


def test_a_long_log_of_short_gaps_recommends_less_than_the_default(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", [10.0, 10.0, 10.0, 22.0] * 600))

    assert result.enough
    assert 45.0 == result.recommended


def test_the_recommended_limit_keeps_clear_of_silences_that_are_a_habit(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", ([10.0] * 500 + [140.0]) * 6))

    assert 240.0 == result.recommended
    assert 280.0 == result.calibrated


def test_one_outlier_does_not_make_every_hang_late(tmp_path: Path):
    result = tuned(written(tmp_path / "a.log", ([10.0] * 500 + [50.0]) * 5 + [500.0, 10.0]))

    assert 90.0 == result.recommended
    assert "outlier" in result.reason


def test_a_job_that_was_shut_down_is_no_silence(tmp_path: Path):
    log = written(tmp_path / "a.log", [10.0] * 20)
    with log.open("a") as out:
        out.write("INFO:     Shutting down\n")

    assert () == tuned(log, until=5000).silences


@pytest.mark.parametrize("until", [None, 900.0])
def test_the_document_keeps_to_its_schema(tmp_path: Path, until: float | None):
    log = written(tmp_path / "a.log", [10.0] * 20 + [97.0] + [10.0] * 20)
    end = [] if until is None else ["--until", (START + timedelta(seconds=until)).isoformat()]

    found = CliRunner().invoke(
        hangwatch, ["replay", "--tune", "--json", "--tz", "Z", *end, str(log)]
    )

    assert 0 == found.exit_code
    document = json.loads(found.output)
    jsonschema.validate(
        document, schemas()["hangwatch.tune.1"], format_checker=jsonschema.FormatChecker()
    )
    assert list(SETTINGS) == [s["stall_after_s"] for s in document["settings"]]


def test_people_see_a_bar_for_false_alarms_and_what_to_choose(tmp_path: Path):
    log = written(tmp_path / "a.log", [10.0] * 20 + [97.0] + [10.0] * 20)

    found = CliRunner().invoke(hangwatch, ["replay", "--tune", "--tz", "Z", str(log)])

    assert 0 == found.exit_code
    assert (
        "       90 s         0 of 0             1  ██████████████████████████████" in found.output
    )
    assert "      120 s         0 of 0             0  ← now, recommended" in found.output
    assert "the logs are short" in found.output


def test_a_log_without_heartbeats_says_so(tmp_path: Path):
    (tmp_path / "a.log").write_text("nothing of interest\n")

    found = CliRunner().invoke(hangwatch, ["replay", "--tune", str(tmp_path / "a.log")])

    assert 0 == found.exit_code
    assert "no heartbeat was found" in found.output
