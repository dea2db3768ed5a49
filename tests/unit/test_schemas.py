"""Documents keep to the schemas that the repository publishes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import jsonschema
import pytest

from hangwatch import registry
from hangwatch.capture.reading import explain, read
from hangwatch.capture.schemas import FOLDER, schemas
from hangwatch.core import contracts
from hangwatch.core.replay import replay
from hangwatch.model.policy import Policy
from hangwatch.system import logmaterial

ROOT = Path(__file__).parents[2]
CASES = sorted(path for path in (ROOT / "tests" / "fixtures" / "cases").iterdir() if path.is_dir())
LOOSE = {
    "threads.json": "threads",
    "threads2.json": "threads",
    "tasks.json": "tasks",
    "procs.json": "procs",
    "health.json": "health",
    "metrics.prom": "metrics",
}


def check(document: object, name: str) -> None:
    jsonschema.validate(document, schemas()[name], format_checker=jsonschema.FormatChecker())


def test_the_published_schemas_are_those_of_the_types():
    published = {
        path.name.removesuffix(".schema.json"): json.loads(path.read_text())
        for path in FOLDER.glob("*.schema.json")
    }

    assert schemas() == published


@pytest.mark.parametrize("name", schemas())
def test_a_schema_is_one(name: str):
    jsonschema.Draft202012Validator.check_schema(schemas()[name])


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name[:3])
def test_a_diagnosis_keeps_to_its_schema(case: Path):
    expected = json.loads((case / "expect.json").read_text())
    now = datetime.fromisoformat(expected["clock"]["now"])

    document = registry.renderers()["json"].render(explain(read([case], now=now)))

    check(json.loads(document), "hangwatch.diagnose.1")


def test_a_replay_keeps_to_its_schema():
    profiles = registry.profiles()
    zone = datetime.now().astimezone().tzinfo
    assert zone is not None
    material = logmaterial.read([CASES[0]], profiles=profiles.values(), zone=zone)

    result = replay(material, profiles=profiles, policy=Policy(), until=material.ends_at)

    check(contracts.replayed(result), "hangwatch.replay.1")


@pytest.mark.parametrize(
    "path",
    [path for case in CASES for path in case.iterdir() if path.name in LOOSE],
    ids=lambda path: f"{path.parent.name[:3]}-{path.name}",
)
def test_loose_evidence_keeps_to_its_schema(path: Path):
    check(json.loads(path.read_text()), f"loose-evidence.{LOOSE[path.name]}.1")
