"""What somebody sees who looks on: rows in virtual time, and the page they are drawn on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from scripted import HOUR, KEY, Run, beat, beats, key, line

from hangwatch.cli.news import Heard, note, sentence
from hangwatch.cli.page import Sheet, draw, sparkline
from hangwatch.core.board import Board, Row, Stop, board, fit, seconds, sentences, summary, tally
from hangwatch.model.identity import InstanceKey
from hangwatch.model.lease import Lease
from hangwatch.model.observation import CaptureEnded, CountersSeen, LeaseTaken
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Hung, Idle, Ok
from hangwatch.model.vitals import Counters
from hangwatch.testing import START

FREEZE = 300.0


def seen(run: Run, at: float) -> Board:
    return board(run.state, Instant(at))


def fleet(stopped: int, of: int, *, apart: float = 0.3, after: float = 125.0) -> Board:
    """Some of a fleet stop shortly after one another, last one first."""
    until = FREEZE + after
    scripts = [
        beats(9.0 - apart * i, FREEZE if i < stopped else until, instance=key(i), tps=500.0 + i)
        for i in range(of)
    ]
    return seen(Run().over(*scripts, until=until), until)


def rows(*words: str) -> tuple[Row, ...]:
    kinds = {"hung": Hung, "idle": Idle, "ok": Ok}
    return tuple(
        Row(
            instance=f"{4000 + i}",
            verdict=kinds[word](
                since=Instant(0.0), cause="x", confidence=Confidence.HIGH, because=("so it is",)
            ),
            since=START,
        )
        for i, word in enumerate(words)
    )


def shown(looked: Board, heard: Heard | None = None, **sheet: Any) -> list[str]:
    size = {"width": 120, "height": 24} | sheet
    return draw(looked, heard or Heard(), Sheet(**size), footer="Ctrl-C ends it")


def event(name: str, **facts: object) -> dict[str, object]:
    return {"schema": "hangwatch.watch/1", "event": name, "at": START.isoformat(), **facts}


# The rows


def test_a_row_says_what_the_last_beat_said_and_how_long_ago():
    (row,) = seen(Run().over(beats(10.0, 55.0), until=53.0), 53.0).rows

    assert ("100", 100, "lmdeploy") == (row.instance, row.pid, row.engine)
    assert (3.0, 0) == (row.silence, row.missed)
    assert (5000.0,) * 5 == row.tps
    assert (6, 0) == (row.running, row.waiting)
    assert ("ok", Confidence.HIGH) == (row.verdict.word, row.verdict.confidence)
    assert "" == row.incident


def test_beats_that_should_have_come_are_counted():
    run = Run().over(beats(10.0, 55.0), until=90.0)

    assert [0, 1, 4] == [seen(run, at).rows[0].missed for at in (64.0, 66.0, 90.0)]


def test_a_beat_without_tokens_stands_in_the_row():
    run = Run().over(beats(10.0, 35.0), [beat(40.0, tps=0.0)], until=41.0)

    assert (5000.0, 5000.0, 5000.0, 0.0) == seen(run, 41.0).rows[0].tps


def test_gauges_that_are_newer_than_the_beat_say_what_is_in_flight():
    gauges = CountersSeen(
        instance=KEY, counters=Counters(at=Instant(34.0), since=Instant(34.0), running=2, waiting=1)
    )
    before = Run().over(beats(10.0, 35.0), until=33.0)
    after = Run().over(beats(10.0, 35.0), [gauges], until=34.0)

    assert (6, 0) == (seen(before, 33.0).rows[0].running, seen(before, 33.0).rows[0].waiting)
    assert (2, 1) == (seen(after, 34.0).rows[0].running, seen(after, 34.0).rows[0].waiting)


def test_before_its_first_beat_an_instance_has_a_row_without_numbers():
    (row,) = seen(Run().over([line(5.0, Signal.STARTING)], until=8.0), 8.0).rows

    assert "loading" == row.verdict.word
    assert (None, (), None) == (row.silence, row.tps, row.running)


def test_ranks_of_one_process_are_told_apart():
    ranks = [InstanceKey(pid=7, tag=f"DP{i}") for i in range(2)]
    run = Run().over(*(beats(10.0 + i, 25.0, instance=r) for i, r in enumerate(ranks)), until=25.0)

    assert {"7 DP0", "7 DP1"} == {row.instance for row in seen(run, 25.0).rows}


def test_whoever_is_in_trouble_stands_first_and_then_whoever_was_longest():
    found = fleet(3, 8)

    assert ["102", "101", "100"] == [row.instance for row in found.rows[:3]]
    assert {"ok"} == {row.verdict.word for row in found.rows[3:]}
    assert {found.stops[0].incident} == {row.incident for row in found.rows[:3]}


# The incident


def test_a_fleet_that_stops_says_k_of_n_within_how_long_and_in_which_order():
    (stop,) = fleet(3, 8).stops
    first, order = sentences(stop)

    assert ["102", "101", "100"] == [name for name, _ in stop.order]
    assert [0.0, 0.3, 0.6] == pytest.approx([after for _, after in stop.order])
    assert first.startswith("3 of 8 stopped within 0.6 s, the first at 10:04:58; ")
    assert "they fell silent in this order: 102, 101 +0.30 s, 100 +0.60 s" == order


def test_one_that_stops_is_named():
    (stop,) = fleet(1, 2).stops

    assert sentences(stop)[0].startswith("1 of 2 stopped at 10:04:59: 100; ")


def test_an_incident_that_is_over_is_not_shown():
    run = Run().over(beats(10.0, 100.0), beats(400.0, 450.0), until=449.0)

    assert () == seen(run, 449.0).stops


def test_the_bundle_of_an_open_incident_is_shown():
    run = Run().over(beats(10.0, 100.0), until=300.0)
    ended = CaptureEnded(
        incident=run.state.incidents[0].id, at=Instant(300.0), bundle="/x/b.tar.gz", error=""
    )
    page = shown(seen(run.over([ended], until=301.0), 301.0), width=40, height=30)

    assert "/x/b.tar.gz" == seen(run, 301.0).stops[0].bundle
    assert "bundle: /x/b.tar.gz" in page


def test_what_cannot_be_asked_is_said_once_there_was_time_to_ask():
    run = Run().over(beats(10.0, 35.0), until=30.0)

    assert () == seen(run, 15.0).remarks
    assert ("not available: /health, /metrics, process states, GPUs",) == seen(run, 30.0).remarks


def test_an_announced_pause_is_said_until_it_is_over():
    lease = Lease(id="a", at=Instant(12.0), until=Instant(60.0), reason="update", holder="pid 7")
    run = Run().over(beats(10.0, 15.0), [LeaseTaken(lease=lease)], until=13.0)

    assert ("pid 7 announced a pause until 10:01:00: update",) == seen(run, 13.0).remarks
    assert () == tuple(r for r in seen(run, 61.0).remarks if "pause" in r)


# Room


def test_what_does_not_fit_is_counted():
    found, rest = fit(rows("hung", *["ok"] * 210, "idle", "idle"), 2)

    assert ["4000"] == [row.instance for row in found]
    assert "… and 212 more: 210 ok, 2 idle" == rest


def test_all_that_fits_is_shown():
    some = rows("ok", "ok")

    assert (some, "") == fit(some, 2)


def test_a_tally_begins_with_the_worst():
    assert "1 hung, 2 ok, 1 idle" == tally(rows("ok", "idle", "hung", "ok"))
    assert "no engine seen yet" == summary(Board(at=START))


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (9.96, "10 s"), (119.0, "119 s"), (120.0, "2 min"),
     (2 * HOUR, "2 h"), (47 * HOUR, "47 h"), (50 * HOUR, "2 d")],
)  # fmt: skip
def test_durations_are_said_as_people_say_them(value, words):
    assert words == seconds(value)


# The page

GOLDEN = """\
hangwatch  3 instances: 2 hung, 1 ok                                                        10:00:40
2 of 3 stopped within 0.3 s, the first at 10:00:00; hung (high), simultaneous-silence
they fell silent in this order: 4001, 4000 +0.30 s
capture: first sample, 12 of 40 steps, 1 failed, 3.1 s
not available: GPUs

instance    beat  tokens/s          run/wait  verdict      since     why
4000        36 s    ▄▇█          -       6/2  hung (high)  10:00:00  its last heartbeat had 8 reque…
4001        36 s    ▄▇█          -       6/2  hung (high)  10:00:00  its last heartbeat had 8 reque…
4002       2.0 s  ████████   9,000       1/0  ok (high)    10:00:00  so it is

10:00:40  so it is
Ctrl-C ends it
"""


def test_the_page_of_a_fleet_that_stopped():
    first, second, third = rows("hung", "hung", "ok")
    why = ("its last heartbeat had 8 requests in flight (running 6, waiting 2)",)
    hung = replace(first.verdict, because=why, cause="simultaneous-silence")
    numbers = {"running": 6, "waiting": 2, "tps": (200.0, 400.0, 500.0), "silence": 36.0}
    looked = Board(
        at=START + timedelta(seconds=40),
        rows=(
            replace(first, verdict=hung, missed=3, **numbers),
            replace(second, verdict=hung, missed=3, **numbers),
            replace(third, running=1, waiting=0, tps=(9000.0,) * 16, silence=2.0),
        ),
        stops=(
            Stop(incident="i", verdict=hung, since=START, watched=3,
                 order=(("4001", 0.0), ("4000", 0.3))),
        ),
        remarks=("not available: GPUs",),
    )  # fmt: skip
    heard = Heard().event(
        event("capture", incident="i", part="first sample", done=12, failed=1, total=40,
              elapsed_s=3.14)
    )  # fmt: skip
    page = shown(looked, heard.say("10:00:40  so it is"), width=100, height=20)

    assert GOLDEN.splitlines() == page


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("height", [3, 5, 10, 24, 60])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_page_keeps_to_its_sheet(width, height, count):
    heard = Heard()
    for _ in range(9):
        heard = heard.say("10:00:00  " + "a long sentence about an engine " * 5)
    looked = replace(fleet(2, 3), rows=fleet(2, 3).rows + rows(*["ok"] * count))
    page = shown(looked, heard, width=width, height=height)

    assert len(page) <= height
    assert max(map(len, page)) <= width
    assert page[0].startswith("hangwatch")


def test_a_narrow_terminal_still_says_who_is_in_which_state():
    page = shown(Board(at=START, rows=rows("hung", "ok")), width=40, height=12)

    assert ["4000           -  hung", "4001           -  ok"] == page[3:5]


def test_without_unicode_the_page_is_ascii():
    page = shown(replace(fleet(2, 3), remarks=("it said “no” …",)), ascii=True)

    assert "\n".join(page).isascii()
    assert any("########" in row for row in page)
    assert 'it said "no" ~' in page


def test_no_color_leaves_no_colour():
    styled = "\n".join(shown(fleet(1, 2), styled=True))
    plain = "\n".join(shown(fleet(1, 2), styled=True, plain=True))

    assert "\x1b[1;31m" in styled
    assert "31m" not in plain
    assert "\x1b[1m" in plain
    assert "\x1b" not in "\n".join(shown(fleet(1, 2)))


def test_evidence_on_the_page_commands_no_terminal():
    (bad,) = rows("hung")
    bad = replace(
        bad,
        instance="\x1b[2J",
        verdict=replace(bad.verdict, because=("\x1b]0;title\x07\u202e\n[red]",)),
    )
    page = "\n".join(shown(Board(at=START, rows=(bad,))))

    assert page.replace("\n", "").isprintable()
    assert "[red]" in page


def test_bars_are_as_high_as_their_share_of_the_greatest():
    assert "▁▅█" == sparkline((0.0, 500.0, 1000.0))
    assert "" == sparkline(())


def test_a_verdict_of_yesterday_has_its_date():
    (row,) = rows("idle")
    page = shown(Board(at=START + timedelta(days=2), rows=(row,)))

    assert "03-04 10:00" in page[3]


# What happened


def test_a_transition_is_one_sentence_with_its_reason():
    facts = {"instance": "7", "before": "ok", "after": "hung", "confidence": "high"}
    why = ["/health says so", "and more"]
    changed = event("transition", cause="event-loop-blocked", because=why, **facts)

    assert "10:00:00  7: ok -> hung (high), event-loop-blocked: /health says so" == sentence(
        changed
    )
    assert "10:00:00  7: hung (high), " in sentence({**changed, "before": "hung"})
    assert "10:00:00  7: hung (high), " in sentence({**changed, "before": None})


def test_the_progress_of_a_capture_goes_when_its_bundle_is_there():
    progress = event("capture", incident="i", part="looking", done=0, failed=0, total=0,
                     elapsed_s=0.2)  # fmt: skip
    during = Heard().event(progress)
    after = during.event(event("bundle", incident="i", bundle="/x/b.tar.gz"))

    assert {"i": "capture: looking, 0.2 s"} == during.captures
    assert ({}, ("10:00:00  bundle written: /x/b.tar.gz",)) == (after.captures, after.news)


def test_old_news_are_forgotten():
    heard = Heard()
    for i in range(1000):
        heard = heard.say(str(i))

    assert (50, "999") == (len(heard.news), heard.news[-1])


def test_our_own_warnings_are_told_and_what_is_told_otherwise_is_not():
    silent = {"event": "hangwatch.child_silent", "level": "warning", "child": "follower",
              "timestamp": START.isoformat()}  # fmt: skip

    assert note(silent).endswith("  child silent: child=follower")
    assert "" == note({**silent, "level": "info"})
    assert "" == note({**silent, "event": "hangwatch.verdict_changed"})
