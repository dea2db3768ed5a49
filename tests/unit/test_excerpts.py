"""Of a long log its end is kept, and what surrounds the moment that matters."""

from datetime import UTC, datetime, timedelta

import pytest

from hangwatch.core import excerpts

START = datetime(2026, 3, 4, 5, 0, 0, tzinfo=UTC)
LINES = [
    f"[{START + timedelta(seconds=second):%Y-%m-%d %H:%M:%S},123 I 7 7] line {second} {'x' * 40}\n"
    for second in range(20_000)
]
LOG = "".join(LINES).encode()
LIMIT = 64 << 10


def kept(log, *, around=None, limit=LIMIT):
    def read(offset, length):
        return log[offset : offset + length]

    return excerpts.parts(read, len(log), limit=limit, around=around)


def test_a_short_log_is_kept_whole():
    assert ((0, 5),) == kept(b"hello", around=START)
    assert () == kept(b"")


def test_of_a_long_log_the_end_is_kept():
    assert ((len(LOG) - LIMIT, len(LOG)),) == kept(LOG)


def test_a_moment_within_the_end_needs_no_second_part():
    assert 1 == len(kept(LOG, around=START + timedelta(seconds=19_990)))


@pytest.mark.parametrize("second", [0, 1, 400, 9_999, 17_000])
def test_what_surrounds_an_earlier_moment_is_kept_besides(second):
    (begin, end), (tail, size) = kept(LOG, around=START + timedelta(seconds=second))

    assert LINES[second].encode() in LOG[begin:end]
    assert (LIMIT, len(LOG)) == (end - begin + size - tail, size)


def test_stamps_with_an_offset_are_compared_as_such():
    log = LOG.replace(b",123 I", b",123+02:00 I")

    (begin, end), _ = kept(log, around=START + timedelta(seconds=9_000) - timedelta(hours=2))

    assert b"line 9000 " in log[begin:end]


def test_a_log_without_stamps_keeps_its_end():
    assert 1 == len(kept(b"no stamp here\n" * 100_000, around=START))


def test_a_part_begins_with_a_whole_line():
    assert b"two\n" == excerpts.whole_lines(b"ne\ntwo\n", first=False)
    assert b"one\ntwo\n" == excerpts.whole_lines(b"one\ntwo\n", first=True)
    assert b"endless" == excerpts.whole_lines(b"endless", first=False)
