"""The follower as a process: it tells what it reads, and hangs alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, eventually

from hangwatch.core.codec import from_plain, to_plain
from hangwatch.model.following import FollowEvent, FollowRequest, NothingMatches
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import SourceFound, SourceRetired
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.spawn import Child

BEAT = "[2026-03-04 13:30:00 DP0] Avg thr (in/out): 1.0 / 2.0 tokens/s #%d"


class Listener:
    """The parent's side of one follower."""

    def __init__(self, *patterns: Path | str, offsets: Any = None, **kw: Any) -> None:
        self.child = Child("hangwatch.daemon.follower", name="follower")
        self.events: list[Any] = []
        self.offsets: dict[str, Any] = {}
        self.alive = 0
        self.follow(*patterns, offsets=offsets, **kw)

    def follow(self, *patterns: Path | str, offsets: Any = None, **kw: Any) -> None:
        request = FollowRequest(
            patterns=tuple(map(str, patterns)), needles=(b"Avg thr (in/out)",), **kw
        )
        self.child.channel.send(
            {"kind": "follow", "request": to_plain(request), "offsets": offsets or {}}
        )

    def hear(self) -> None:
        for message in self.child.channel.wait(0.05):
            match message["kind"]:
                case "events":
                    self.events += from_plain(tuple[FollowEvent, ...], message["items"])
                case "offsets":
                    self.offsets = message["offsets"]
                case "alive":
                    self.alive += 1
                case _:
                    raise AssertionError(message)

    def until(self, condition: Any) -> None:
        def met() -> Any:
            self.hear()
            return condition()

        eventually(met)

    def lines(self, *, fresh: bool = True) -> list[str]:
        return [e.text.decode() for e in self.events if isinstance(e, Line) and e.fresh is fresh]

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def listen():
    listeners = []

    def start(*arguments: Any, **kw: Any) -> Listener:
        listeners.append(Listener(*arguments, **kw))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.child.kill()
        listener.child.close()


def write(path: Path, *numbers: int) -> None:
    with path.open("a") as log:
        log.write("".join(BEAT % number + "\n" for number in numbers))


def test_it_tells_the_past_and_the_present_of_logs_and_how_far_it_is(tmp_path, listen):
    write(tmp_path / "worker-a-01000000-42.out", 1)
    listener = listen(tmp_path / "*.out")
    listener.until(lambda: listener.lines(fresh=False))
    write(tmp_path / "worker-a-01000000-42.out", 2)
    write(tmp_path / "worker-b-01000000-43.out", 3)
    listener.until(lambda: len(listener.lines()) == 2 and len(listener.offsets) == 2)

    assert [BEAT % 1] == listener.lines(fresh=False)
    assert {BEAT % 2, BEAT % 3} == set(listener.lines())
    assert [42, 43] == [event.pid for event in listener.told(SourceFound)]


def test_it_says_that_it_is_alive_when_there_is_nothing_to_say(tmp_path, listen):
    (tmp_path / "worker.out").touch()
    listener = listen(tmp_path / "*.out")
    listener.until(lambda: listener.alive >= 3)

    assert ["SourceFound"] == [type(event).__name__ for event in listener.events]


def test_a_pattern_that_matches_nothing_is_told_once_with_what_exists_of_its_path(tmp_path, listen):
    pattern = tmp_path / "session_latest" / "logs" / "*.out"
    listener = listen(pattern)
    listener.until(lambda: listener.told(NothingMatches))
    listener.follow(pattern, tmp_path / "later.log")
    listener.until(lambda: len(listener.told(NothingMatches)) > 1)

    told = [(event.pattern, event.nearest) for event in listener.told(NothingMatches)]
    assert [(str(pattern), str(tmp_path)), (str(tmp_path / "later.log"), str(tmp_path))] == told


def test_a_new_one_goes_on_where_the_killed_one_was_and_takes_nothing_for_fresh(tmp_path, listen):
    log = tmp_path / "a.log"
    write(log, 1)
    first = listen(log)
    first.until(lambda: first.offsets)
    os.kill(first.child.pid, signal.SIGKILL)
    eventually(lambda: not first.child.alive)
    write(log, *range(2, 10_000))
    second = listen(log, offsets=first.offsets)
    second.until(lambda: len(second.lines(fresh=False)) >= 9_998)

    assert [BEAT % i for i in range(2, 10_000)] == second.lines(fresh=False)[-9_998:]
    assert [] == second.lines()


def test_what_is_asked_for_may_change_without_a_break(tmp_path, listen):
    write(tmp_path / "a.log", 1)
    listener = listen(tmp_path / "a.log")
    listener.until(lambda: listener.told(SourceFound))
    write(tmp_path / "a.log", 2)
    write(tmp_path / "b.log", 3)
    listener.follow(tmp_path / "a.log", tmp_path / "b.log")
    listener.until(lambda: len(listener.told(SourceFound)) == 2)
    listener.until(lambda: len(listener.lines()) == 1)
    listener.follow(tmp_path / "b.log")
    listener.until(lambda: listener.told(SourceRetired))

    assert [BEAT % 2] == listener.lines()
    assert [BEAT % 1, BEAT % 3] == listener.lines(fresh=False)
    assert [str(tmp_path / "a.log")] == [event.source for event in listener.told(SourceRetired)]


def test_a_parent_that_does_not_listen_stops_the_reading_and_loses_nothing(tmp_path, listen):
    log = tmp_path / "a.log"
    listener = listen(log)
    listener.until(lambda: listener.alive)
    write(log, *range(100_000))
    listener.until(lambda: len(listener.told(Line)) == 100_000)

    assert [BEAT % i for i in range(100_000)] == [
        event.text.decode() for event in listener.told(Line)
    ]


def test_it_ends_when_its_parent_closes_the_channel(tmp_path, listen):
    listener = listen(tmp_path / "a.log")
    listener.until(lambda: listener.alive)

    assert listener.child.close(PATIENCE)
    assert 0 == listener.child.process.returncode


def test_a_stream_is_told_at_once_and_its_end_too(listen):
    read_fd, write_fd = os.pipe()
    listener = listen(streams={"-": f"/proc/{os.getpid()}/fd/{read_fd}"})
    listener.until(lambda: listener.told(SourceFound))
    os.write(write_fd, (BEAT % 1).encode() + b"\n")
    listener.until(listener.lines)
    os.close(write_fd)
    listener.until(lambda: listener.told(SourceRetired))
    os.close(read_fd)

    assert [BEAT % 1] == listener.lines()


def test_a_request_that_makes_no_sense_is_passed_over(tmp_path, listen):
    listener = listen(tmp_path / "a.log")
    listener.child.channel.send({"kind": "follow", "request": {"patterns": 7}})
    listener.child.channel.send({"kind": "nonsense"})
    before = listener.alive
    listener.until(lambda: listener.alive > before + 1)

    assert listener.child.alive


def test_a_killed_follower_is_noticed_at_once(tmp_path, listen):
    listener = listen(tmp_path / "a.log")
    listener.child.kill()
    with pytest.raises(ChannelClosedError):
        listener.until(lambda: False)


def test_it_starts_without_the_heavy_libraries():
    import subprocess
    import sys

    heavy = {"pydantic", "rich", "click", "jinja2", "structlog", "psutil"}
    code = (
        "import sys, hangwatch.daemon.follower, hangwatch.daemon.copier;"
        f"print(sorted({heavy} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()
