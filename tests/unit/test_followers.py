"""The daemon's side of the followers, with children that say what a test wants."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest
from fake_children import FakeChild, Nursery

from hangwatch.core.codec import to_plain
from hangwatch.core.definition import define
from hangwatch.daemon import followers as module
from hangwatch.daemon.followers import Followers
from hangwatch.model.following import Foreign, NothingMatches
from hangwatch.model.heartbeat import Line
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import (
    BeatSeen,
    ChildBack,
    ChildSilent,
    SignalArrived,
    SourceFound,
    SourceGrew,
    SourceRetired,
    SourceUnreadable,
)
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Instant
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import FakeClock

BEAT = (
    b"2026-03-04 05:44:59,123 - lmdeploy - \x1b[31mINFO\x1b[0m - loggers.py:80 - [2026-03-04 "
    b"05:44:59 DP0] Avg thr (in/out): 10.0 / 100.0 tokens/s, API server (completed/routed/waiting):"
    b" 5 / 4 / 0, Engine (running/waiting): 4 / 0, KV cache: 10.0%, "
)


class Scene:
    """Followers of logs on a make-believe /data and the rest."""

    def __init__(self, *, profile: EngineProfile = PROFILE, **more: Any) -> None:
        self.clock = FakeClock()
        self.nursery = Nursery()
        self.followers = Followers(
            clock=self.clock,
            policy=Policy(),
            profiles={profile.name: profile},
            start=self.nursery,
            **more,
        )

    def say(self, child: FakeChild, *events: object) -> tuple[object, ...]:
        child.said = [{"kind": "events", "items": [to_plain(event) for event in events]}]
        return self.followers.hear()


@pytest.fixture(autouse=True)
def two_filesystems(monkeypatch):
    monkeypatch.setattr(
        module, "place_of", lambda pattern, _: "/data" if pattern.startswith("/data") else "/"
    )


def orders(child: FakeChild) -> list[list[str]]:
    return [message["request"]["patterns"] for message in child.told]


def test_each_filesystem_has_a_follower_of_its_own():
    scene = Scene()
    scene.followers.follow(["/var/a.log", "/data/b.log", "/var/c.log"])
    scene.followers.hear()

    assert [["/var/a.log", "/var/c.log"]] == orders(scene.nursery.children[0])
    assert [["/data/b.log"]] == orders(scene.nursery.children[1])


def test_what_leads_to_another_filesystem_is_handed_to_its_follower():
    scene = Scene()
    scene.followers.follow(["/var/*.log"])
    scene.followers.hear()
    scene.say(
        scene.nursery.children[0],
        Foreign(pattern="/data/x.log", mount="/data", at=Instant(0.0)),
    )
    scene.followers.hear()

    assert [["/data/x.log"]] == orders(scene.nursery.children[1])


def test_a_later_pattern_reaches_the_follower_that_runs():
    scene = Scene()
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    scene.followers.follow(["/var/b.log"])

    assert ["/var/a.log", "/var/b.log"] == orders(scene.nursery.last)[-1]


def test_a_line_becomes_a_beat_of_the_process_that_writes_its_log():
    scene = Scene()
    scene.followers.follow(["/var/worker-1-2-4242.out"])
    scene.followers.hear()
    found = SourceFound(source="/var/worker-1-2-4242.out", at=Instant(0.0), pid=4242)
    line = Line(source="/var/worker-1-2-4242.out", text=BEAT, at=Instant(1.0))
    heard = scene.say(scene.nursery.last, found, line)

    (_, seen) = heard
    assert isinstance(seen, BeatSeen)
    assert InstanceKey(pid=4242, tag="DP0") == seen.beat.instance


def test_a_known_writer_names_the_process_where_the_log_does_not():
    scene = Scene()
    scene.followers.writers["/var/server.log"] = 7
    scene.followers.follow(["/var/server.log"])
    scene.followers.hear()
    (found,) = scene.say(scene.nursery.last, SourceFound(source="/var/server.log", at=Instant(0.0)))

    assert SourceFound(source="/var/server.log", at=Instant(0.0), pid=7) == found


def test_a_line_from_before_we_listened_is_dated_by_its_stamp():
    scene = Scene(zone=lambda: UTC)
    scene.clock.sleep(100.0)
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    # Virtual time begins at 10:00:00; this was printed 40 s later.
    text = BEAT.replace(b"05:44:59", b"10:00:40")
    old = Line(source="/var/a.log", text=text, at=Instant(100.0), fresh=False)
    (seen,) = scene.say(scene.nursery.last, old)
    (new,) = scene.say(scene.nursery.last, replace(old, fresh=True))

    assert isinstance(seen, BeatSeen)
    assert isinstance(new, BeatSeen)
    assert (40.0, 100.0) == (seen.beat.at, new.beat.at)


def test_an_answer_from_before_we_listened_is_as_old_as_the_beat_above_it():
    scene = Scene(zone=lambda: UTC)
    scene.clock.sleep(100.0)
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    text = BEAT.replace(b"05:44:59", b"10:00:40")
    beat = Line(source="/var/a.log", text=text, at=Instant(100.0), fresh=False)
    answer = replace(
        beat, text=b'INFO:     127.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    )
    unknown = scene.say(scene.nursery.last, answer)
    (_, old) = scene.say(scene.nursery.last, beat, answer)
    (new,) = scene.say(scene.nursery.last, replace(answer, fresh=True))

    assert () == unknown
    assert isinstance(old, SignalArrived)
    assert isinstance(new, SignalArrived)
    assert (40.0, 100.0) == (old.signal.at, new.signal.at)


def test_growth_is_passed_on():
    scene = Scene()
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    grew = SourceGrew(source="/var/a.log", at=Instant(1.0), size=10)

    assert (grew,) == scene.say(scene.nursery.last, grew)


def test_a_silent_follower_blinds_its_own_logs_and_no_others():
    scene = Scene()
    scene.followers.follow(["/var/a.log", "/data/b.log"])
    scene.followers.hear()
    healthy, stuck = scene.nursery.children
    scene.say(stuck, SourceFound(source="/data/b.log", at=Instant(0.0)))
    scene.say(healthy, SourceFound(source="/var/a.log", at=Instant(0.0)))
    heard: list[object] = []
    for _ in range(10):
        healthy.said = [{"kind": "alive"}]
        heard += scene.followers.hear()
        scene.clock.sleep(1.0)
    stuck.said = [{"kind": "alive"}]
    heard += scene.followers.hear()

    silent, back = heard
    assert isinstance(silent, ChildSilent)
    assert isinstance(back, ChildBack)
    assert (("/data/b.log",), ("/data/b.log",)) == (silent.sources, back.sources)
    assert 0.0 == silent.at


def test_a_new_follower_goes_on_where_the_old_one_was():
    scene = Scene()
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    scene.nursery.last.said = [{"kind": "offsets", "offsets": {"a": 1}}]
    scene.followers.hear()
    scene.nursery.last.alive = False
    scene.followers.hear()
    scene.followers.hear()

    assert 2 == len(scene.nursery.children)
    assert {"a": 1} == scene.nursery.last.told[0]["offsets"]


def test_offsets_outlive_the_daemon():
    first = Scene()
    first.followers.follow(["/var/a.log"])
    first.followers.hear()
    first.nursery.last.said = [{"kind": "offsets", "offsets": {"a": 1}}]
    first.followers.hear()
    second = Scene(offsets=first.followers.offsets)
    second.followers.follow(["/var/a.log"])
    second.followers.hear()

    assert {"a": 1} == second.nursery.last.told[0]["offsets"]


def test_nonsense_from_a_follower_costs_nothing_but_itself():
    scene = Scene()
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    scene.nursery.last.said = [{"kind": "events", "items": [{"type": "Line"}]}]

    assert () == scene.followers.hear()


def test_a_retired_log_is_not_followed_any_more():
    scene = Scene()
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    scene.say(scene.nursery.last, SourceFound(source="/var/a.log", at=Instant(0.0)))
    scene.say(scene.nursery.last, SourceRetired(source="/var/a.log", at=Instant(1.0)))

    assert () == scene.followers.sources


def test_our_log_says_once_that_a_named_log_is_not_there(monkeypatch):
    said = []
    monkeypatch.setattr(module.log, "warning", lambda event, **facts: said.append((event, facts)))
    scene = Scene()
    scene.followers.follow(["/logs/x.log"])
    scene.followers.follow(["/ray/worker-*.out"], expected=False)
    scene.followers.hear()
    (child,) = scene.nursery.children
    missing = [
        NothingMatches(pattern=pattern, nearest="/", at=Instant(1.0))
        for pattern in ("/logs/x.log", "/ray/worker-*.out", "/logs/x.log")
    ]

    assert () == scene.say(child, *missing)
    assert ["hangwatch.nothing_matches"] == [event for event, _ in said]
    assert "/logs/x.log" == said[0][1]["pattern"]


DEAR = define("dear", {"heartbeat": r"steps: (?P<out_tps>\d+)[^!]*[^!]*[^!]*[^!]*!"})


def test_a_line_on_which_an_expression_takes_for_ever_does_not_hold_up_the_loop():
    scene = Scene(profile=DEAR)
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    dear, cheap = (
        Line(source="/var/a.log", text=text, at=Instant(1.0))
        for text in (b"steps: 1" + b"x" * 5000, b"steps: 1!")
    )
    heard = scene.say(scene.nursery.last, dear, cheap)

    assert [BeatSeen] == [type(seen) for seen in heard]


def test_a_log_whose_lines_take_too_long_is_given_up_and_called_unreadable():
    scene = Scene(profile=DEAR)
    scene.followers.follow(["/var/a.log", "/var/b.log"])
    scene.followers.hear()
    dear = [
        Line(source="/var/a.log", text=b"steps: 1" + b"x" * 5000, at=Instant(i)) for i in range(9)
    ]
    cheap = Line(source="/var/b.log", text=b"steps: 1!", at=Instant(9.0))
    heard = scene.say(scene.nursery.last, *dear, cheap)

    (gave_up, beat) = heard
    assert isinstance(gave_up, SourceUnreadable)
    assert "take too long" in gave_up.reason
    assert isinstance(beat, BeatSeen)


def test_the_time_of_dear_lines_is_forgiven_after_a_while():
    scene = Scene(profile=DEAR)
    scene.followers.follow(["/var/a.log"])
    scene.followers.hear()
    dear = Line(source="/var/a.log", text=b"steps: 1" + b"x" * 5000, at=Instant(0.0))
    for _ in range(12):
        assert () == scene.say(scene.nursery.last, dear)
        scene.clock.sleep(60.0)
