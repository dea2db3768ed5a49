"""Logs are followed through rotation, truncation, links that turn, and trouble."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hangwatch.core.framing import peel
from hangwatch.model.following import FollowRequest, Foreign, LinkRefused
from hangwatch.model.heartbeat import Line
from hangwatch.model.observation import (
    SourceFound,
    SourceGrew,
    SourceReadable,
    SourceRetired,
    SourceUnreadable,
)
from hangwatch.system import tail
from hangwatch.system.paths import MountTable, place_of
from hangwatch.system.tail import LINGER, VACANT_LIMIT, Tailer
from hangwatch.testing import FakeClock


def beat(number: int, size: int = 0) -> str:
    return f"[2026-03-04 13:30:00 DP0] Avg thr #{number}# {'x' * size}"


class Watch:
    """A tailer in virtual time and what it has told so far."""

    def __init__(
        self, *patterns: Path | str, needles: tuple[bytes, ...] = (b"Avg thr",), **kw: Any
    ):
        positions = kw.pop("positions", ())
        request = FollowRequest(patterns=tuple(map(str, patterns)), needles=needles, **kw)
        self.clock = FakeClock()
        self.tailer = Tailer(request, clock=self.clock, positions=positions)
        self.events: list[Any] = []

    def poll(self, seconds: float = 1.0) -> Watch:
        self.clock.sleep(seconds)
        self.events += self.tailer.poll()
        while self.tailer.behind:
            self.events += self.tailer.poll()
        return self

    def lines(self, *, fresh: bool | None = None) -> list[str]:
        return [
            peel(event.text).body.decode()
            for event in self.events
            if isinstance(event, Line) and fresh in {None, event.fresh}
        ]

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def open_files(self) -> int:
        return sum(len(source.files) for source in self.tailer._sources.values())


def write(path: Path, *lines: str, end: str = "\n", mode: str = "a") -> None:
    with path.open(mode) as log:
        log.write("".join(line + end for line in lines))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


# Fresh or not.


def test_what_lay_in_a_file_before_we_listened_is_not_fresh(log):
    write(log, beat(1))
    watch = Watch(log).poll()
    write(log, beat(2))
    watch.poll()

    assert [beat(1)] == watch.lines(fresh=False)
    assert [beat(2)] == watch.lines(fresh=True)
    assert 1 == len(watch.told(SourceGrew))


def test_a_file_born_later_is_fresh_from_its_first_byte(tmp_path):
    watch = Watch(tmp_path / "*.log").poll()
    write(tmp_path / "a.log", beat(1))
    watch.poll()

    assert [beat(1)] == watch.lines(fresh=True)


def test_a_file_that_was_moved_here_and_is_older_than_we_are_is_not_fresh(tmp_path):
    write(tmp_path / "elsewhere", beat(1))
    os.utime(tmp_path / "elsewhere", (1e9, 1e9))
    watch = Watch(tmp_path / "*.log").poll()
    (tmp_path / "elsewhere").rename(tmp_path / "a.log")
    watch.poll()

    assert [beat(1)] == watch.lines(fresh=False)
    assert [] == watch.lines(fresh=True)


def test_of_a_long_past_only_the_end_is_read_and_it_begins_with_a_whole_line(log):
    write(log, *(beat(i, size=100) for i in range(10_000)))
    watch = Watch(log).poll()
    found = watch.lines(fresh=False)

    assert [beat(i, size=100) for i in range(10_000 - len(found), 10_000)] == found
    assert tail.BACKLOG >= sum(len(line) + 1 for line in found) > tail.BACKLOG - 200


def test_a_line_finished_after_we_came_is_fresh(log):
    write(log, beat(1)[:20], end="")
    watch = Watch(log).poll()
    write(log, beat(1)[20:])
    watch.poll()

    assert [beat(1)] == watch.lines(fresh=True)


def test_a_saved_position_widens_the_past_that_is_read(log):
    write(log, ":job_id:01000000", *(beat(i, size=100) for i in range(100)))
    first = Watch(log).poll()
    (position,) = first.tailer.positions()
    write(log, *(beat(i, size=100) for i in range(100, 5000)))
    again = Watch(log, positions=(position,)).poll()

    assert [beat(i, size=100) for i in range(100, 5000)] == again.lines(fresh=False)
    assert [] == again.lines(fresh=True)


def test_a_saved_position_of_another_file_with_the_same_inode_is_not_believed(log):
    write(log, "first log", *(beat(i) for i in range(10)))
    (position,) = Watch(log).poll().tailer.positions()
    log.write_text("second log\n")
    write(log, *(beat(i, size=100) for i in range(5000)))
    again = Watch(log, positions=(position,)).poll()

    assert position.inode == log.stat().st_ino
    assert tail.BACKLOG >= sum(len(line) + 1 for line in again.lines())


# Rotation and truncation.


@pytest.mark.parametrize("pattern", ["server.log", "server*"])
def test_a_line_split_by_a_rotation_is_one_line(log, pattern):
    watch = Watch(log.parent / pattern).poll()
    write(log, beat(1))
    write(log, beat(2)[:25], end="")
    watch.poll()
    log.rename(log.with_name("server.log.1"))
    watch.poll()
    write(log, beat(2)[25:], beat(3))
    watch.poll().poll()

    assert [beat(1), beat(2), beat(3)] == watch.lines(fresh=True)
    assert [] == watch.told(SourceRetired)
    assert {str(log)} == {event.source for event in watch.told(Line)}


def test_an_old_file_is_read_to_its_end_before_the_new_one(log):
    write(log, beat(1))
    watch = Watch(log).poll()
    write(log, *(beat(i, size=1000) for i in range(2, 9000)))
    log.rename(log.with_name("server.log.1"))
    write(log, beat(9000))
    watch.poll()

    assert [beat(i, size=1000) for i in range(2, 9000)] + [beat(9000)] == watch.lines(fresh=True)


def test_a_writer_that_is_slow_to_reopen_loses_nothing(log):
    watch = Watch(log).poll()
    with log.open("a") as writer:
        writer.write(beat(1) + "\n")
        writer.flush()
        watch.poll()
        log.rename(log.with_name("server.log.1"))
        log.touch()  # logrotate's `create`
        for number in range(2, 50):
            writer.write(beat(number) + "\n")
            writer.flush()
            watch.poll(20.0)
        write(log, beat(50))
        watch.poll()
        writer.write(beat(51) + "\n")
        writer.flush()
    watch.poll().poll(LINGER).poll(LINGER)

    assert [beat(i) for i in range(1, 52)] == watch.lines(fresh=True)
    assert 1 == watch.open_files()


def test_a_truncated_file_is_read_from_its_beginning(log):
    write(log, beat(1), beat(2))
    watch = Watch(log).poll()
    shutil.copy(log, log.with_name("server.log.1"))
    os.truncate(log, 0)
    write(log, beat(3))
    watch.poll()

    assert [beat(3)] == watch.lines(fresh=True)


def test_a_copy_left_by_a_truncating_rotation_is_no_news(log):
    watch = Watch(log.parent / "server*").poll()
    write(log, beat(1), beat(2))
    watch.poll()
    shutil.copy(log, log.with_name("server.log.1"))
    os.truncate(log, 0)
    watch.poll()
    write(log, beat(3))
    watch.poll()

    assert [beat(1), beat(2), beat(3)] == watch.lines()
    assert [str(log)] == [event.source for event in watch.told(SourceFound)]


def test_an_overwritten_file_that_is_longer_than_before_is_not_taken_for_a_longer_one(log):
    write(log, beat(1))
    watch = Watch(log).poll()
    write(log, *(beat(i) for i in range(2, 6)), mode="w")
    watch.poll()

    assert [beat(i) for i in range(2, 6)] == watch.lines(fresh=True)


def test_a_hole_left_by_a_writer_that_does_not_append_is_jumped_over(log):
    with log.open("w") as writer:
        writer.write((beat(1) + "\n") * 1000)
        writer.flush()
        watch = Watch(log).poll()
        os.truncate(log, 0)
        watch.poll()
        writer.seek(1 << 40)  # a terabyte of NULs, of which the disk knows nothing
        writer.write(beat(2) + "\n")
    watch.poll()

    assert [beat(2)] == watch.lines(fresh=True)


def test_a_deleted_and_created_log_is_followed_in_its_new_file(log):
    write(log, beat(1))
    watch = Watch(log).poll()
    log.unlink()
    watch.poll()
    write(log, beat(2))
    watch.poll().poll(LINGER + 1).poll()

    assert [beat(2)] == watch.lines(fresh=True)
    assert [] == watch.told(SourceRetired)
    assert 1 == watch.open_files()


def test_a_deleted_log_is_read_while_it_grows_and_left_when_it_has_long_been_quiet(log):
    with log.open("a") as writer:
        writer.write(beat(1) + "\n")
        writer.flush()
        watch = Watch(log).poll()
        log.unlink()
        watch.poll()
        writer.write(beat(2) + "\n")
        writer.flush()
        watch.poll(VACANT_LIMIT - 1).poll(VACANT_LIMIT - 1)

        assert [beat(2)] == watch.lines(fresh=True)
        assert [] == watch.told(SourceRetired)

        watch.poll(2.0)

    assert [str(log)] == [event.source for event in watch.told(SourceRetired)]
    assert 0 == watch.open_files()


def test_a_log_that_is_replaced_by_its_own_copy_is_read_on(log):
    write(log, *(beat(i) for i in range(5)))
    watch = Watch(log).poll()
    shutil.copy(log, log.with_name("copy"))
    log.with_name("copy").rename(log)
    write(log, beat(5))
    watch.poll()

    assert [beat(5)] == watch.lines(fresh=True)


def test_a_renamed_log_under_the_same_glob_is_not_read_again(tmp_path):
    watch = Watch(tmp_path / "*.log").poll()
    write(tmp_path / "a.log", beat(1))
    watch.poll()
    (tmp_path / "a.log").rename(tmp_path / "b.log")
    watch.poll()
    write(tmp_path / "b.log", beat(2))
    watch.poll(VACANT_LIMIT + 1).poll(VACANT_LIMIT + 1).poll(VACANT_LIMIT + 1)
    write(tmp_path / "b.log", beat(3))
    watch.poll()

    assert [beat(1), beat(2), beat(3)] == watch.lines(fresh=True)


def test_a_file_with_two_names_is_read_once(tmp_path):
    write(tmp_path / "a.log", beat(1))
    os.link(tmp_path / "a.log", tmp_path / "b.log")
    (tmp_path / "c.log").symlink_to("a.log")
    watch = Watch(tmp_path / "*.log").poll()

    assert [beat(1)] == watch.lines()


def test_compressed_rotations_are_not_logs(tmp_path):
    (tmp_path / "server.log.2.gz").write_bytes(b"\x1f\x8bAvg thr\n")
    watch = Watch(tmp_path).poll()

    assert [] == watch.events


# Names and links.


def test_a_directory_means_the_files_in_it(tmp_path):
    write(tmp_path / "a.log", beat(1))
    write(tmp_path / ".hidden", beat(2))
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "b.log", beat(3))
    watch = Watch(tmp_path).poll()

    assert [beat(1)] == watch.lines()


def session(root: Path, name: str, pid: int, *lines: str) -> Path:
    logs = root / name / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"worker-00a1-02000000-{pid}.out"
    write(path, *lines)
    return path


def turn(link: Path, target: str) -> None:
    fresh = link.with_name("fresh_link")
    fresh.symlink_to(target)
    fresh.rename(link)


def test_when_a_session_link_turns_the_old_logs_retire_and_the_new_ones_are_fresh(tmp_path):
    old = session(tmp_path, "session_A", 5001)
    turn(tmp_path / "session_latest", "session_A")
    watch = Watch(tmp_path / "session_latest/logs/worker-*.out").poll()
    write(old, beat(1))
    watch.poll()
    write(old, beat(2))
    turn(tmp_path / "session_latest", "session_B")
    session(tmp_path, "session_B", 9007, beat(3))
    watch.poll()

    assert [beat(1), beat(2), beat(3)] == watch.lines(fresh=True)
    assert [5001, 9007] == [event.pid for event in watch.told(SourceFound)]
    assert [str(tmp_path / "session_latest/logs" / old.name)] == [
        event.source for event in watch.told(SourceRetired)
    ]


def test_an_engine_that_outlives_its_session_link_is_found_again(tmp_path):
    old = session(tmp_path, "session_A", 5001, beat(1))
    turn(tmp_path / "session_latest", "session_A")
    watch = Watch(tmp_path / "session_latest/logs/worker-*.out").poll()
    turn(tmp_path / "session_latest", "session_B")
    watch.poll()
    write(old, beat(2))
    watch.poll()

    assert [beat(2)] == watch.lines(fresh=True)
    assert [SourceFound, SourceRetired, SourceFound] == [
        type(event) for event in watch.events if isinstance(event, SourceFound | SourceRetired)
    ]


def test_an_absolute_session_link_is_followed_beneath_its_own_directory(tmp_path):
    session(tmp_path, "session_A", 5001, beat(1))
    turn(tmp_path / "session_latest", str(tmp_path / "session_A"))
    watch = Watch(tmp_path / "session_latest/logs/*.out").poll()

    assert [beat(1)] == watch.lines()


def test_a_link_out_of_its_directory_is_refused_and_reported_once(tmp_path):
    (tmp_path / "logs").mkdir()
    write(tmp_path / "secret", beat(1))
    (tmp_path / "logs" / "worker.out").symlink_to("../secret")
    watch = Watch(tmp_path / "logs" / "*.out").poll().poll()

    assert [] == watch.lines()
    assert [(str(tmp_path / "logs/worker.out"), str(tmp_path / "secret"))] == [
        (event.path, event.target) for event in watch.told(LinkRefused)
    ]


def test_a_link_to_another_directory_is_refused_before_that_is_listed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "x.out", beat(1))
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    watch = Watch(tmp_path / "a" / "link" / "*.out").poll()

    assert [] == watch.lines()
    assert 1 == len(watch.told(LinkRefused))


def test_a_link_may_lead_beneath_a_configured_root(tmp_path):
    (tmp_path / "containers").mkdir()
    (tmp_path / "pods").mkdir()
    write(tmp_path / "pods" / "0.log", beat(1))
    (tmp_path / "containers" / "c.log").symlink_to(tmp_path / "pods" / "0.log")
    watch = Watch(tmp_path / "containers/*.log", roots=(str(tmp_path / "pods"),)).poll()

    assert [beat(1)] == watch.lines()
    assert [] == watch.told(LinkRefused)


def test_links_in_a_circle_are_told_and_harmless(tmp_path):
    (tmp_path / "a.log").symlink_to("b.log")
    (tmp_path / "b.log").symlink_to("a.log")
    watch = Watch(tmp_path / "a.log").poll().poll()

    assert 1 == len(watch.told(SourceUnreadable))


def test_a_link_that_turns_to_another_file_goes_on_under_its_name(tmp_path):
    write(tmp_path / "a", beat(1))
    turn(tmp_path / "current.log", "a")
    watch = Watch(tmp_path / "current.log").poll()
    write(tmp_path / "a", beat(2))
    write(tmp_path / "b", beat(3))
    turn(tmp_path / "current.log", "b")
    watch.poll()

    assert [beat(2), beat(3)] == watch.lines(fresh=True)
    assert {str(tmp_path / "current.log")} == {event.source for event in watch.told(Line)}


def test_a_worker_file_names_its_process_and_its_header_the_actor(tmp_path):
    log = tmp_path / "worker-00a1-ffffffff-71000.out"
    log.write_text(":job_id:02000000\n:task_name:run_server\n")
    watch = Watch(tmp_path / "*.out").poll()
    write(log, ":actor_name:Store", beat(1))
    watch.poll()

    assert [(71000, "run_server"), (71000, "Store")] == [
        (event.pid, event.actor) for event in watch.told(SourceFound)
    ]
    assert [beat(1)] == watch.lines()


def test_a_log_is_read_through_an_open_descriptor_whatever_becomes_of_its_name(log):
    with log.open("a") as writer:
        path = f"/proc/{os.getpid()}/fd/{writer.fileno()}"
        watch = Watch(path).poll()
        log.unlink()
        writer.write(beat(1) + "\n")
        writer.flush()
        watch.poll()
    watch.poll()

    assert [(f"{log} (fd of {os.getpid()})", beat(1))] == [
        (event.source, event.text.decode()) for event in watch.told(Line)
    ]
    assert [os.getpid()] == [event.pid for event in watch.told(SourceFound)]
    assert 1 == len(watch.told(SourceRetired))


def test_a_pipe_is_read_without_waiting_and_ends_with_its_writers(tmp_path):
    read_fd, write_fd = os.pipe()
    watch = Watch(streams={"-": f"/proc/{os.getpid()}/fd/{read_fd}"}).poll()
    os.write(write_fd, beat(1).encode() + b"\n" + beat(2).encode())
    watch.poll()
    os.close(write_fd)
    watch.poll().poll()
    os.close(read_fd)

    assert [("-", None), ("-", None)] == [(e.source, e.offset) for e in watch.told(Line)]
    assert [beat(1), beat(2)] == watch.lines(fresh=True)
    assert ["the stream ended"] == [event.reason for event in watch.told(SourceRetired)]


# Trouble.


def test_a_log_that_cannot_be_opened_is_said_once_and_read_when_it_can(log, monkeypatch):
    write(log, beat(1))
    monkeypatch.setattr(tail, "open_regular", refuse := Refuse(tail.open_regular))
    refuse.error = PermissionError(13, "Permission denied")
    watch = Watch(log).poll().poll().poll()

    assert ["Permission denied"] == [event.reason for event in watch.told(SourceUnreadable)]

    refuse.error = None
    watch.poll(tail.MAX_PAUSE)
    write(log, beat(2))
    watch.poll()

    assert [beat(1)] == watch.lines(fresh=False)
    assert [beat(2)] == watch.lines(fresh=True)
    assert 1 == len(watch.told(SourceReadable))


class Refuse:
    """Opens files, or raises."""

    def __init__(self, really: Any) -> None:
        self.really = really
        self.error: OSError | None = None
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.really(*arguments)


def test_a_stale_handle_is_let_go_and_taken_anew_where_it_was(log, monkeypatch):
    write(log, beat(1))
    watch = Watch(log).poll()
    write(log, beat(2)[:20], end="")
    watch.poll()
    monkeypatch.setattr(tail, "open_regular", refuse := Refuse(tail.open_regular))
    monkeypatch.setattr(tail.os, "pread", stale := Refuse(os.pread))
    stale.error = refuse.error = OSError(116, "Stale file handle")
    watch.poll()
    refuse.calls = 0
    for _ in range(300):
        watch.poll()

    assert ["Stale file handle"] == [event.reason for event in watch.told(SourceUnreadable)]
    assert 15 >= refuse.calls  # growing pauses, not a loop

    stale.error = refuse.error = None
    write(log, beat(2)[20:], beat(3))
    watch.poll(tail.MAX_PAUSE)

    assert [beat(2), beat(3)] == watch.lines(fresh=True)
    assert 1 == len(watch.told(SourceReadable))


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    write(tmp_path / "a.log", beat(1))
    watch = Watch(tmp_path / "*.log").poll()
    listdir = os.listdir

    def stale(path: str) -> list[str]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "listdir", stale)
    watch.poll().poll(VACANT_LIMIT * 2)
    write(tmp_path / "a.log", beat(2))
    watch.poll()
    monkeypatch.setattr(os, "listdir", listdir)
    watch.poll()

    assert [] == watch.told(SourceRetired)
    assert [beat(2)] == watch.lines(fresh=True)
    assert 1 == len(watch.told(SourceUnreadable))
    assert 1 == len(watch.told(SourceReadable))


def test_what_is_no_file_is_said_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    watch = Watch(tmp_path / "pipe").poll().poll().poll()

    assert ["it is not a regular file"] == [e.reason for e in watch.told(SourceUnreadable)]
    assert 1 == len(watch.events)


def test_a_quiet_file_is_opened_anew_so_that_a_network_filesystem_shows_its_growth(
    log, monkeypatch
):
    write(log, beat(1))
    watch = Watch(log).poll()
    monkeypatch.setattr(tail, "open_regular", opened := Refuse(tail.open_regular))
    watch.poll(tail.REOPEN_AFTER).poll(tail.REOPEN_AFTER)
    write(log, beat(2))
    watch.poll()

    assert 2 == opened.calls
    assert [beat(2)] == watch.lines(fresh=True)


def test_a_flood_in_one_log_delays_no_other(tmp_path):
    watch = Watch(tmp_path / "*.log").poll()
    write(tmp_path / "a.log", "x" * 200 * 1000 * 1000)
    write(tmp_path / "b.log", beat(1))
    watch.events += watch.tailer.poll()

    assert [beat(1)] == watch.lines()
    assert watch.tailer.behind


def test_our_own_requests_in_an_access_log_are_no_growth(log):
    echo = 'INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK'
    write(log, beat(1))
    watch = Watch(log, echoes=(b'"GET /health ',)).poll()
    write(log, echo, echo)
    watch.poll()

    assert [] == watch.told(SourceGrew)

    write(log, echo, beat(2))
    watch.poll()

    assert [log.stat().st_size] == [event.size for event in watch.told(SourceGrew)]


# Filesystems.


def test_a_mount_that_is_not_ours_is_reported_and_never_touched(tmp_path, monkeypatch):
    touched = []
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: touched.append(str(path)) or lstat(path))
    (tmp_path / "link").symlink_to("/proc/self")
    watch = (
        Watch(
            "/proc/*/status",
            tmp_path / "link" / "status",
            mount=MountTable().mount_of(str(tmp_path)),
        )
        .poll()
        .poll()
    )

    assert ["/proc", "/proc"] == [event.mount for event in watch.told(Foreign)]
    assert {"/proc/self/status", "/proc/*/status"} == {e.pattern for e in watch.told(Foreign)}
    assert not [path for path in touched if path.startswith("/proc")]


def test_a_pattern_lies_on_the_mount_of_its_literal_part(log):
    mounts = MountTable()
    with log.open("w") as writer:
        place = place_of(f"/proc/{os.getpid()}/fd/{writer.fileno()}", mounts)

    assert mounts.mount_of(str(log)) == place_of(str(log.parent / "no" / "such-*"), mounts)
    assert "/proc" == place_of("/proc/*/x", mounts)
    assert place.startswith("mnt_id:")
