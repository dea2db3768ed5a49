"""Engines that call themselves alike, each in a log of its own."""

from __future__ import annotations

from dataclasses import replace
from heapq import merge

from scripted import Run, beats

from hangwatch.core.naming import Names
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import BeatSeen

DP0 = InstanceKey(tag="DP0")


def log(source: str, first: float, until: float, *, tps: float = 5000.0) -> list[BeatSeen]:
    return beats(first, until, instance=DP0, source=source, tps=tps)


def told(*logs: list[BeatSeen]) -> list[BeatSeen]:
    names = Names()
    found = [names.told(seen) for seen in merge(*logs, key=lambda seen: seen.at)]
    return [seen for seen in found if isinstance(seen, BeatSeen)]


def called(seen: list[BeatSeen]) -> set[str]:
    return {one.beat.instance.name for one in seen}


def test_two_servers_in_two_logs_are_two_engines():
    seen = told(log("/a/one.log", 0, 100), log("/a/two.log", 4, 100, tps=4000.0))

    assert {"DP0", "DP0 (two.log)"} == called(seen)
    assert {"/a/one.log"} == {s.beat.source for s in seen[4:] if s.beat.instance == DP0}


def test_logs_of_one_name_in_two_folders_are_told_by_their_folders():
    seen = told(log("/a/server.log", 0, 100), log("/b/server.log", 4, 100, tps=4000.0))

    assert {"DP0", "DP0 (b/server.log)"} == called(seen)


def test_a_copy_of_a_log_is_the_same_engine():
    copied = [
        replace(seen, beat=replace(seen.beat, source="/a/copy.log", at=seen.beat.at))
        for seen in log("/a/one.log", 0, 100)
    ]

    assert {"DP0"} == called(told(log("/a/one.log", 0, 100), copied))


def test_a_log_that_goes_on_under_another_name_is_the_same_engine():
    seen = told(log("/a/monday.log", 0, 100), log("/a/tuesday.log", 100, 200, tps=4000.0))

    assert {"DP0"} == called(seen)


def test_a_server_that_hangs_is_not_hidden_by_one_that_beats_in_another_log():
    seen = told(log("/a/one.log", 0, 300), log("/a/two.log", 4, 100, tps=4000.0))

    run = Run().over(seen, until=300)

    assert {"DP0 (two.log)"} == {t.instance.name for t in run.alarms()}


def test_a_log_that_was_retired_is_forgotten():
    names = Names()
    for number in range(10):
        for seen in log(f"/a/{number}.log", number * 200, number * 200 + 100):
            names.told(seen)
        names.forget(f"/a/{number}.log")
    again = names.told(log("/a/3.log", 5000, 5001)[0])

    assert isinstance(again, BeatSeen)
    assert DP0 == again.beat.instance
    assert "/a/9.log" not in str(vars(names))
