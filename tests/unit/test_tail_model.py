"""An interpreter of file actions against a model of what a follower must deliver."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hangwatch.core.framing import MAX_LINE
from hangwatch.model.following import FollowRequest
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import SourceRetired, SourceUnreadable
from hangwatch.system.tail import LINGER, VACANT_LIMIT, Tailer
from hangwatch.testing import FakeClock

NUMBER = re.compile(rb"Avg thr #(\d+)#")


class World:
    """A writer, a rotator and a follower of one log."""

    def __init__(self, root: Path, pattern: str) -> None:
        self.log = root / "server.log"
        self.clock = FakeClock()
        request = FollowRequest(patterns=(str(root / pattern),), needles=(b"Avg thr",))
        self.tailer = Tailer(request, clock=self.clock)
        self.tailer.poll()
        self.writer = self.log.open("ab", buffering=0)
        self.unfinished = b""
        self.written = 0
        self.certain: set[int] = set()  # cannot have been lost
        self.unseen: set[int] = set()  # written since the last look
        self.seen: list[int] = []
        self.broken = False

    # Actions.

    def line(self, size: int) -> None:
        """Write a whole line."""
        self.finish()
        self._put(self._text(size))
        self._mark_written()

    def half(self, size: int) -> None:
        """Write the beginning of a line."""
        self.finish()
        whole = self._text(size)
        cut = min(size, len(whole) - 1)
        self._put(whole[:cut])
        self.unfinished = whole[cut:]

    def finish(self, _: int = 0) -> None:
        """Write the rest of it."""
        if self.unfinished:
            rest, self.unfinished = self.unfinished, b""
            self._put(rest)
            self._mark_written()

    def noise(self, size: int) -> None:
        """Write what is of no interest: a bar, NULs, a huge line."""
        self.finish()
        self._put([b"\r 20%|##   | 1/5 [00:01<00:04, 1.0it/s]", bytes(5), b"\xff\xfe\n"][size % 3])

    def huge(self, size: int) -> None:
        """Write a line that is too long to keep."""
        self.finish()
        self._put(b"z" * (MAX_LINE + size) + b"Avg thr\n")

    def look(self, seconds: int) -> None:
        """Let the follower look."""
        self.clock.sleep(0.01 * seconds)
        while True:
            for event in self.tailer.poll():
                if isinstance(event, Line):
                    self.seen += [int(number) for number in NUMBER.findall(event.text)[-1:]]
                    assert event.fresh
                assert not isinstance(event, SourceRetired | SourceUnreadable)
            if not self.tailer.behind:
                break
        self.certain |= self.unseen
        self.unseen.clear()

    def rotate(self, _: int) -> None:
        """Rename the log; the writer reopens at once, and writes."""
        self.look(0)
        self._shift()
        self.log.rename(self.log.with_name("server.log.1"))
        self.writer.close()
        self.writer = self.log.open("ab", buffering=0)

    def rotate_slowly(self, size: int) -> None:
        """Rename the log under a writer that goes on for a while."""
        self.look(0)
        self.log.rename(self.log.with_name("server.log.1"))
        self.log.touch()
        self.line(size)
        self.look(0)
        self.line(size)
        self.writer.close()
        self.writer = self.log.open("ab", buffering=0)

    def rename_only(self, size: int) -> None:
        """Rename the log; the writer never learns of it, then gives in."""
        self.look(0)
        self.log.rename(self.log.with_name("server.log.1"))
        self.line(size)
        self.look(0)
        self.finish()
        self.writer.close()
        self.writer = self.log.open("ab", buffering=0)
        self.line(size)

    def truncate(self, _: int) -> None:
        """Copy the log away and truncate it; what was not seen may be lost."""
        self._shift()
        shutil.copy(self.log, self.log.with_name("server.log.1"))
        os.truncate(self.log, 0)
        self._lose()

    def overwrite(self, size: int) -> None:
        """Start the log anew, longer than it was."""
        length = self.log.stat().st_size
        self.writer.close()
        self.writer = self.log.open("wb", buffering=0)
        self._lose()
        self.writer.close()
        self.writer = self.log.open("ab", buffering=0)
        while self.log.stat().st_size <= length:
            self.line(MAX_LINE // 8 + size)

    def recreate(self, _: int) -> None:
        """Delete the log and begin a new one."""
        self.look(0)
        self.log.unlink()
        self.writer.close()
        self._abandon()
        self.writer = self.log.open("ab", buffering=0)

    # Helpers.

    def _text(self, size: int) -> bytes:
        # No two lines are alike anywhere, as stamps and numbers make it in a real log.
        filler = b"<%d>" % self.written
        return b"Avg thr #%d# " % self.written + filler * (size // len(filler)) + b"\n"

    def _put(self, data: bytes) -> None:
        self.writer.write(data)

    def _shift(self) -> None:
        for number in range(4, 0, -1):
            old = self.log.with_name(f"server.log.{number}")
            if old.exists():
                old.rename(self.log.with_name(f"server.log.{number + 1}"))

    def _mark_written(self) -> None:
        self.unseen.add(self.written)
        self.written += 1

    def _lose(self) -> None:
        self.unseen.clear()
        self._abandon()

    def _abandon(self) -> None:
        if self.unfinished:
            self.unfinished = b""
            self.written += 1  # its first half may have been seen


ACTIONS = [
    World.line, World.line, World.line, World.half, World.finish, World.noise, World.huge,
    World.look, World.look, World.rotate, World.rotate_slowly, World.rename_only,
]  # fmt: skip
LOSSY = [*ACTIONS, World.truncate, World.overwrite, World.recreate]


def play(actions: list[tuple[object, int]], pattern: str) -> World:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), pattern)
        try:
            for action, size in actions:
                action(world, size)  # type: ignore[operator]
            world.finish()
            world.writer.write(b"\n")
            world.look(0)
            world.look(int(LINGER * 100) + 100)
            world.look(0)
            assert 1 >= sum(len(source.files) for source in world.tailer._sources.values())
            world.clock.sleep(VACANT_LIMIT)
            world.look(0)
        finally:
            world.writer.close()
            world.tailer.close()
        return world


def scripts(actions: list[object]) -> st.SearchStrategy[list[tuple[object, int]]]:
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 300)), max_size=25)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(scripts(list(ACTIONS)), st.sampled_from(["server.log", "server*", "."]))
def test_whatever_is_renamed_each_line_arrives_once_and_in_order(actions, pattern):
    world = play(actions, pattern)

    assert list(range(world.written)) == sorted(world.seen)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(scripts(list(LOSSY)), st.sampled_from(["server.log", "server*"]))
def test_under_truncation_no_line_arrives_twice_and_none_that_we_could_see_is_lost(
    actions, pattern
):
    world = play(actions, pattern)
    seen = Counter(world.seen)

    assert set() == world.certain - set(seen)
    assert set(range(world.written)) >= set(seen)
    assert {1} >= set(seen.values())
