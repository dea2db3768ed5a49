"""What a profiler wrote becomes stacks and counts, whatever else it wrote."""

from hangwatch.core.sampling import Sampling, parse, render

RECORDED = (
    b"py-spy> Sampling process 20 times a second for 3600 seconds. Press Control-C to exit.\n\n"
    b"thread (7): MainThread;main (a.py:1);poll (a.py:5) 30\n"
    b"thread (7): MainThread;main (a.py:1);poll (a.py:6);look (b.py:2) 9\n"
    b"thread (8): worker; 1;wait (a.py:9) 39\n"
    b"py-spy> Wrote raw flamegraph data to '/dev/stdout'. Samples: 78 Errors: 2\n"
    b"py-spy> You can use the flamegraph.pl script from https://github.com to generate a SVG\n"
)


def test_each_thread_has_its_stacks_with_their_counts():
    seen = parse(RECORDED)

    assert {
        "thread (7)": {
            "thread (7): MainThread;main (a.py:1);poll (a.py:5)": 30,
            "thread (7): MainThread;main (a.py:1);poll (a.py:6);look (b.py:2)": 9,
        },
        "thread (8)": {"thread (8): worker; 1;wait (a.py:9)": 39},
    } == seen.threads
    assert (39, 2) == (seen.samples, seen.errors)


def test_a_line_that_was_cut_off_is_not_believed():
    whole = b"thread (7): Main;poll (a.py:5) 30\n"

    assert parse(whole) == parse(whole + b"thread (8): worker;wait (a.py:9) 3")


def test_the_threads_that_moved_most_come_first_and_of_each_what_was_seen_most():
    text = render(parse(RECORDED), pid=7, rate=20, seconds=2.0).decode()

    assert [
        "# process 7: 39 samples, 2 failed; 20/s for 2.0 s.",
        "thread (7): MainThread;main (a.py:1);poll (a.py:5) 30",
        "thread (7): MainThread;main (a.py:1);poll (a.py:6);look (b.py:2) 9",
        "thread (8): worker; 1;wait (a.py:9) 39",
    ] == text.splitlines()


def test_what_is_written_can_be_read_again():
    seen = parse(RECORDED)

    assert seen.threads == parse(render(seen, pid=7, rate=20, seconds=2.0)).threads


def test_nothing_that_was_seen_is_said_as_nothing():
    assert Sampling() == parse(b"")
    assert 0 == Sampling().samples
