"""``hangwatch diagnose`` and ``hangwatch report``: exit codes, forms, bad input."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hangwatch.cli.main import command

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
HUNG = next(CASES.glob("028-*"))
IDLE = next(CASES.glob("101-*"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_an_alarm_exits_with_3():
    assert 3 == run("diagnose", HUNG, "--now", "2026-03-08T07:10:11+08:00").exit_code


def test_anything_else_exits_with_0():
    assert 0 == run("diagnose", IDLE, "--now", "2026-03-04T09:41:56+08:00").exit_code


def test_the_zone_of_now_is_the_zone_of_the_stamps():
    document = json.loads(
        run("diagnose", HUNG, "--json", "--now", "2026-03-08T07:10:11+08:00").output
    )

    assert ["2026-03-08T07:03:39+08:00", "2026-03-08T07:03:49+08:00"] == document["window"]


def test_limits_can_be_set():
    patient = run("diagnose", HUNG, "--now", "2026-03-08T07:10:11+08:00", "--stall-after", "100000")

    assert 0 == patient.exit_code


def test_piped_output_has_no_colour():
    assert "\x1b" not in run("diagnose", IDLE).output


@pytest.mark.parametrize(
    ("verb", "name", "words"),
    [
        ("diagnose", "nothing", "does not exist"),
        ("diagnose", "empty", "neither a bundle nor loose evidence"),
        ("diagnose", "garbage.bin", "no heartbeat"),
        ("diagnose", "cut.tar.gz", "cut short"),
        ("report", "foreign.tar.gz", "no hangwatch bundle"),
        ("report", "empty", "neither a bundle nor loose evidence"),
        ("report", "odd.tar.gz", "cannot be understood"),
    ],
)
def test_bad_input_gets_one_clear_sentence(tmp_path: Path, verb: str, name: str, words: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage.bin").write_bytes(os.urandom(5000))
    (tmp_path / "a.json").write_text('{"judgement": {"heartbeats": "many"}}')
    for archive, names in (
        ("foreign.tar.gz", ("x.txt",)),
        ("odd.tar.gz", ("manifest.json", "incident.json")),
    ):
        with tarfile.open(tmp_path / archive, "w:gz") as packed:
            for member in names:
                packed.add(tmp_path / "a.json", member)
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "odd.tar.gz").read_bytes()[:-40])

    result = run(verb, tmp_path / name)

    assert 1 == result.exit_code
    assert words in result.stderr
    assert 1 == result.stderr.count("\n")
    assert "Traceback" not in result.output


def test_loose_evidence_is_no_bundle():
    result = run("report", HUNG)

    assert 1 == result.exit_code
    assert "hangwatch diagnose" in result.stderr


def test_a_profile_that_is_not_there_is_said_with_those_that_are():
    result = run("diagnose", HUNG, "--profile", "nothing")

    assert 2 == result.exit_code
    assert "lmdeploy" in result.stderr
