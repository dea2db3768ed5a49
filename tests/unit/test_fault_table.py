"""What the laboratory says of its faults is in order, and in the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hangwatch
from hangwatch.core.diagnosis import ALARM_WORDS
from hangwatch.lab import faults

DOCS = Path(hangwatch.__file__).parents[1] / "docs" / "reference"
ALL = faults.everything()


def row(name: str, fault: faults.Fault) -> str:
    def coded(words: tuple[str, ...]) -> str:
        return ", ".join(f"`{word}`" for word in words)

    cells = (f"`{name}`", fault.title, fault.shows, fault.place)
    return " | ".join((*cells, coded(fault.verdicts), coded(fault.causes), fault.needs))


@pytest.mark.parametrize("name", ALL)
def test_the_reference_tells_of_the_fault_what_its_file_does(name):
    assert f"| {row(name, ALL[name])} |" in (DOCS / "faults.md").read_text()


@pytest.mark.parametrize("name", ALL)
def test_what_would_be_right_to_say_of_it_can_be_said(name):
    text = (DOCS / "verdicts.md").read_text()
    known = set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))
    planned = {"file-lock-stale", "fork-held-lock", "gil-held-by-c-code", "livelock"}
    planned |= {"queue-mutual-wait"}
    alarms = ALARM_WORDS & set(ALL[name].verdicts)

    assert set(ALL[name].causes) <= known | planned
    assert set(ALL[name].verdicts) <= known | ALARM_WORDS
    assert ALL[name].hangs == bool(alarms)
    assert alarms in (set(), set(ALL[name].verdicts))


def test_the_laboratorys_alarms_are_the_products():
    assert set(faults.ALARMS) == ALARM_WORDS
