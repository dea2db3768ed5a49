"""Profiles that a configuration file defines."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.definition import DefinitionError, define, literal
from hangwatch.core.parsing import parse
from hangwatch.model.heartbeat import Line
from hangwatch.model.identity import Role
from hangwatch.model.observation import BeatSeen, SignalArrived
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant

TABLE: dict[str, Any] = {
    "heartbeat": (
        r"\[(?P<stamp>[\d: -]{19})\] steps: (?P<out_tps>\S{1,20}) tok/s, "
        r"running (?P<running>\d+)"
    ),
    "interval": 5,
    "says_idle": True,
    "dead": ["worker died: ", "engine crashed"],
    "endpoints": {"health": "/healthz"},
    "metrics": {"tokens": "mytool_tokens_total"},
    "roles": {"api_server": "mytool serve"},
}  # fmt: skip


def table(**changes: Any) -> dict[str, Any]:
    return {**TABLE, **changes}


def of(text: bytes) -> BeatSeen | SignalArrived | None:
    line = Line(source="log", text=text, at=Instant(0.0))
    found = parse(line, (define("mytool", TABLE),))
    return found[0] if found else None


def test_a_table_is_a_profile():
    found = define("mytool", TABLE)

    assert (5.0, True, (b" tok/s, running ",)) == (
        found.interval,
        found.says_idle,
        found.needles,
    )
    assert {"health": "/healthz"} == found.endpoints
    assert ("mytool_tokens_total",) == found.metrics.tokens
    assert [Role.API_SERVER] == [known.role for known in found.roles]


def test_its_heartbeat_is_read():
    found = of(b"[2026-03-01 10:00:00] steps: 100.5 tok/s, running 3")

    assert isinstance(found, BeatSeen)
    assert ("mytool", 100.5, 3) == (found.beat.profile, found.beat.out_tps, found.beat.running)


def test_what_is_called_a_number_and_is_none_costs_that_number_alone():
    found = of(b"[2026-03-01 10:00:00] steps: fast tok/s, running 3")

    assert isinstance(found, BeatSeen)
    assert (None, 3) == (found.beat.out_tps, found.beat.running)


def test_its_other_lines_are_read():
    found = of(b"ERROR engine crashed")

    assert isinstance(found, SignalArrived)
    assert Signal.ENGINE_DEAD is found.signal.signal


@pytest.mark.parametrize(
    ("name", "changes", "keys", "words"),
    [
        ("lmdeploy", {}, (), "is taken"),
        ("auto", {}, (), "is taken"),
        ("My Tool", {}, (), "is no name"),
        ("m", {"heartbeat": "steps ("}, ("heartbeat",), "no regular expression"),
        ("m", {"heartbeat": 3}, ("heartbeat",), "takes a string"),
        ("m", {"heartbeat": r"steps: (?P<runing>\d+)"}, ("heartbeat",), "did you mean running"),
        ("m", {"heartbeat": ".*"}, ("heartbeat",), "matches an empty line"),
        ("m", {"heartbeat": r"\d+ \w+"}, ("heartbeat",), "or give needle"),
        ("m", {"heartbeat": "one line|other line"}, ("heartbeat",), "characters in a row"),
        ("m", {"heartbeat": "(?i)steps: "}, ("heartbeat",), "characters in a row"),
        ("m", {"heartbeat": r"steps: (\w+ ?)*$"}, ("heartbeat",), "can take for ever"),
        ("m", {"heartbeat": r"steps: (?:a|a)*$"}, ("heartbeat",), "can take for ever"),
        ("m", {"heartbeat": r"steps: .*a.*b.*c.*d"}, ("heartbeat",), "take long to fail"),
        ("m", {"heartbeat": "steps: " + "x" * 3000}, ("heartbeat",), "longer than"),
        ("m", {"ready": ["up and running", r"\d"]}, ("ready",), "characters in a row"),
        ("m", {"needle": "ab"}, ("needle",), "4 characters"),
        ("m", {"interval": 0}, ("interval",), "greater than 0"),
        ("m", {"interval": True}, ("interval",), "greater than 0"),
        ("m", {"says_idle": "no"}, ("says_idle",), "true or false"),
        ("m", {"redy": "x"}, ("redy",), "did you mean ready"),
        ("m", {"endpoints": {"helth": "/x"}}, ("endpoints", "helth"), "did you mean health"),
        ("m", {"endpoints": {"health": "health"}}, ("endpoints", "health"), "takes a path"),
        ("m", {"endpoints": {"health": "/a/../b"}}, ("endpoints", "health"), "takes a path"),
        ("m", {"endpoints": {"health": "http://x/"}}, ("endpoints", "health"), "takes a path"),
        ("m", {"metrics": {"tokens": [3]}}, ("metrics", "tokens"), "takes a string"),
        ("m", {"roles": {"boss": "x"}}, ("roles", "boss"), "unknown key"),
        ("m", {"context": r"--len \d+"}, ("context",), "no group 'tokens'"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place_and_the_remedy(
    name: str, changes: dict[str, Any], keys: tuple[str, ...], words: str
):
    with pytest.raises(DefinitionError) as caught:
        define(name, table(**changes), taken=("lmdeploy",))

    assert keys == caught.value.keys
    assert words in str(caught.value)


def test_a_heartbeat_is_needed():
    with pytest.raises(DefinitionError, match="heartbeat is missing"):
        define("m", {"interval": 3})


@pytest.mark.parametrize(
    "path",
    ["/terminate", "/health_generate", "/sleep", "/flush_cache", "/v1/completions",
     "/abort_request",
     "/release_memory_occupation", "/update_weights", "/start_profile", "/api/Shutdown"],
)  # fmt: skip
def test_no_path_that_does_something_is_asked(path: str):
    with pytest.raises(DefinitionError, match="only reads"):
        define("m", table(endpoints={"health": path}))


@pytest.mark.parametrize("path", ["/health", "/is_sleeping", "/metrics", "/v1/models", "/-/ready"])
def test_paths_that_only_read_are_taken(path: str):
    assert {"health": path} == define("m", table(endpoints={"health": path})).endpoints


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"abc\.def", "abc.def"),
        (r"abcd?efg", "abc"),
        (r"ab+cdef", "cdef"),
        (r"ab{2}cdef", "cdef"),
        (r"abcde{2}f", "abcde"),
        (r"ab{0,2}cdef", "cdef"),
        (r"abc(?:defghi)jkl", "abc"),
        (r"abc[defgh)]jklm", "jklm"),
        (r"^steps:\s+", "steps:"),
        (r"one|two", ""),
        (r"(?P<x>one|two) three", " three"),
        (r"\bwords\b here", "words here"),
    ],
)
def test_the_literal_of_an_expression_is_its_longest_sure_run(pattern: str, wanted: str):
    assert wanted == literal(pattern)


PIECES = st.sampled_from(
    ["a", "b", " ", r"\.", ".", r"\d", "[ab]", "[^]x]", "(a|b)", "(?:ab)", "^", "$"]
)
REPEATS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{0,2}", "{1,}", "*?"])
PATTERNS = st.lists(st.tuples(PIECES, REPEATS).map("".join), max_size=8).map("".join)


@given(PATTERNS, st.text("ab .7", max_size=30))
def test_every_match_contains_the_literal(pattern: str, text: str):
    try:
        found = re.search(pattern, text)
    except re.error:
        return

    assert found is None or literal(pattern) in text
