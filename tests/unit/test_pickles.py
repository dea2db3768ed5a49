"""Plain data out of a pickle, and nothing else."""

from __future__ import annotations

import contextlib
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.pickles import NotPlainDataError, loads

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.lists(inner, min_size=4).map(tuple)
    ),
    max_leaves=30,
)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


@given(PLAIN)
def test_plain_data_is_read_as_pickle_reads_it(value):
    assert value == loads(pickle.dumps(value, protocol=2))


def test_what_stands_twice_is_read_twice():
    frame = {"line": 7}

    assert [frame, frame] == loads(pickle.dumps([frame, frame], protocol=2))


@pytest.mark.parametrize("value", [Evil(), {"entries": [Evil()]}, os.system, ValueError("x"), {1}])
def test_what_would_import_or_call_anything_is_refused(value):
    with pytest.raises(NotPlainDataError):
        loads(pickle.dumps(value, protocol=2))


@given(st.binary())
def test_garbage_is_refused_in_one_way(data: bytes):
    with contextlib.suppress(NotPlainDataError):
        loads(data)


@given(PLAIN, st.data())
def test_a_dump_that_is_cut_off_is_refused(value, data):
    whole = pickle.dumps(value, protocol=2)
    length = data.draw(st.integers(0, len(whole) - 1))

    with pytest.raises(NotPlainDataError):
        loads(whole[:length])
