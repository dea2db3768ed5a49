"""What an engine's endpoints say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.endpoints import (
    MAX_ENGINES,
    MAX_MESSAGE,
    counters,
    health_of_answer,
    health_of_error,
    health_of_words,
    samples,
    says_sleeping,
)
from hangwatch.model.dossier import MetricSample
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Health, Outcome
from hangwatch.profiles.lmdeploy import PROFILE

NOW = Instant(100.0)

WORDS = [
    ("unhealthy", "Backend health probe timed out after 10.0s.", HealthMeaning.LOOP_BLOCKED),
    ("unhealthy", "Backend scheduler_tick has not advanced for 412.6s.", HealthMeaning.NO_PROGRESS),
    (
        "unhealthy",
        "… but schedule metrics report no active or waiting sequences.",
        HealthMeaning.LOST_REQUEST,
    ),
    ("unhealthy", "PyTorch ZMQ engine process is not alive.", HealthMeaning.DEAD),
    ("initializing", "Engine health monitor is starting.", HealthMeaning.STARTING),
    ("unhealthy", "Something that nobody has written yet.", HealthMeaning.UNHEALTHY),
]


def answer(http: int, **words: str) -> Health:
    return health_of_answer(http, json.dumps(words).encode(), PROFILE, at=NOW, elapsed=0.5)


@pytest.mark.parametrize(("status", "message", "meaning"), WORDS)
def test_the_words_decide_what_an_answer_means(status, message, meaning):
    health = answer(503, status=status, message=message)

    assert (Outcome.ANSWERED, meaning) == (health.outcome, health.meaning)
    assert (503, status, message) == (health.http, health.status, health.message)


def test_sleeping_and_healthy_are_told_apart_although_both_answer_200():
    assert HealthMeaning.SLEEPING is answer(200, status="sleeping", message="zzz").meaning
    assert HealthMeaning.HEALTHY is answer(200, status="healthy", message="").meaning


def test_an_answer_without_words_is_healthy_only_with_a_good_status_code():
    assert HealthMeaning.HEALTHY is health_of_answer(200, b"", PROFILE, at=NOW).meaning
    assert HealthMeaning.UNHEALTHY is health_of_answer(503, b"", PROFILE, at=NOW).meaning
    assert HealthMeaning.UNHEALTHY is answer(500, status="healthy", message="").meaning


@pytest.mark.parametrize("http", [301, 401, 404, 502])
def test_what_cannot_be_a_health_endpoint_says_nothing_of_the_engine(http):
    health = health_of_answer(http, b'{"detail":"Not Found"}', PROFILE, at=NOW)

    assert Outcome.FAILED is health.outcome
    assert None is health.meaning
    assert f"HTTP {http}: Not Found" == health.message


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("timeout after 10 s", Outcome.TIMED_OUT),
        ("Read timed out.", Outcome.TIMED_OUT),
        ("Connection refused", Outcome.REFUSED),
        ("Connection reset by peer", Outcome.FAILED),
    ],
)
def test_no_answer_is_told_by_its_reason(error, outcome):
    assert outcome is health_of_error(error, at=NOW).outcome
    assert outcome is health_of_words(PROFILE, at=NOW, error=error).outcome


def test_words_taken_down_without_a_status_code_count_as_an_answer():
    health = health_of_words(PROFILE, at=NOW, status="healthy", message="Engine is healthy.")

    assert HealthMeaning.HEALTHY is health.meaning


def test_a_message_is_kept_short():
    health = answer(503, status="unhealthy", message="x" * 10_000)

    assert MAX_MESSAGE == len(health.message)


def test_only_a_plain_yes_means_asleep():
    assert says_sleeping(b'{"is_sleeping": true}')
    assert not says_sleeping(b'{"is_sleeping": false}')
    assert not says_sleeping(b'{"is_sleeping": "true"}')
    assert not says_sleeping(b"[true]")
    assert not says_sleeping(b"")


METRICS = """\
# HELP lmdeploy:generation_tokens_total Number of generation tokens processed.
# TYPE lmdeploy:generation_tokens_total counter
lmdeploy:generation_tokens_total{engine="0",model_name="a"} 100.0
lmdeploy:generation_tokens_total{engine="1",model_name="a"} 7.0
lmdeploy:prompt_tokens_total{engine="0",model_name="a"} 900
lmdeploy:prompt_tokens_total{engine="1",model_name="a"} 2.5e3
lmdeploy:num_requests_running{engine="0",model_name="a"} 5.0
lmdeploy:num_requests_waiting{engine="0",model_name="a"} 2.0
lmdeploy:num_api_requests_waiting{engine="0",model_name="a"} -1.0
lmdeploy:num_api_requests_routed{engine="0",model_name="a"} 7.0
lmdeploy:num_requests_running{engine="1",model_name="a"} NaN
process_cpu_seconds_total 12.5 1700000000000
"""


def test_engines_are_counted_apart():
    found = counters((sample for _, sample in samples(METRICS)), PROFILE, at=NOW)

    assert {"0", "1"} == set(found)
    zero, one = found["0"], found["1"]
    assert (1000.0, 5, 2, 7) == (zero.tokens, zero.running, zero.waiting, zero.routed)
    assert (2507.0, None, None, None) == (one.tokens, one.running, one.waiting, one.routed)
    assert NOW == zero.at == zero.since


def test_samples_without_the_engines_label_belong_to_the_only_engine():
    found = counters(
        (sample for _, sample in samples("lmdeploy:num_requests_running 3")), PROFILE, at=NOW
    )

    assert {""} == set(found)
    assert (3, None) == (found[""].running, found[""].tokens)


def test_a_sample_knows_its_line_and_its_labels():
    text = '# HELP a b\n\na{b="x\\"y\\\\z\\nw",c="}"} 1.5 # {e="1"} 2\n'

    line, sample = next(samples(text))

    assert 3 == line
    assert {"b": 'x"y\\z\nw', "c": "}"} == dict(sample.labels)
    assert 1.5 == sample.value


def test_a_line_of_megabytes_is_no_sample_and_the_next_one_is():
    text = f'a{{b="{"x" * (1 << 20)}"}} 1\nc 2\n'

    assert [(2, "c")] == [(line, sample.name) for line, sample in samples(text)]


def test_no_answer_makes_engines_without_end():
    name = PROFILE.metrics.tokens[0]
    found = (MetricSample(name=name, value=1.0, labels={"engine": str(i)}) for i in range(5000))

    assert MAX_ENGINES == len(counters(found, PROFILE, at=NOW))


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    counters((sample for _, sample in samples(text)), PROFILE, at=NOW)


@given(st.integers(100, 599), st.binary())
def test_any_answer_is_understood_without_an_error(http, body):
    assert http == health_of_answer(http, body, PROFILE, at=NOW).http
