"""Stamps in lines, with and without a year."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.stamps import find

NEW_YEAR = datetime(2027, 1, 1, 0, 1, 55, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "year"),
    [
        (b"INFO 12-31 23:59:50 [loggers.py:271] x", 2026),
        (b"INFO 01-01 00:00:00 [loggers.py:271] x", 2027),
        (b"(APIServer pid=1) ERROR 12-31 23:59:50 x", 2026),
    ],
)
def test_a_stamp_without_a_year_is_of_the_nearest_one(line: bytes, year: int):
    found = find(line, near=NEW_YEAR)

    assert year == (found and found.year)


def test_a_leap_day_is_of_a_leap_year():
    assert datetime(2028, 2, 29, 1) == find(b"INFO 02-29 01:00:00 x", near=NEW_YEAR)


def test_without_a_moment_near_it_a_stamp_without_a_year_is_none():
    assert find(b"INFO 12-31 23:59:50 x") is None


@pytest.mark.parametrize(
    "line",
    [b"batch 12-31 23:59:50", b"12-31 23:59:50", b"v1.12-31 23:59:50", b"INFO 13-41 99:00:00"],
)
def test_numbers_that_only_look_like_one_are_none(line: bytes):
    assert find(line, near=NEW_YEAR) is None


@given(
    st.datetimes(datetime(2001, 1, 1), datetime(2099, 1, 1)),
    st.timedeltas(timedelta(days=-180), timedelta(days=180)),
)
def test_whatever_lies_half_a_year_away_gets_its_own_year_back(moment: datetime, away: timedelta):
    moment = moment.replace(microsecond=0)
    line = f"INFO {moment:%m-%d %H:%M:%S} [x.py:1] x".encode()

    assert moment == find(line, near=moment + away)
