"""Where steps write."""

from dataclasses import replace
from pathlib import PurePosixPath

import pytest
from captures import step_for

from hangwatch.capture.rooms import Rooms, StepRoom
from hangwatch.model.capture import Artifact, CollectorError, FailureKind

STEP = replace(step_for(1, ticks=1), folder=PurePosixPath("processes/engine-1"))


def test_what_is_larger_than_a_room_keeps_its_head(tmp_path):
    room = StepRoom(tmp_path, tmp_path, quota=5)

    with pytest.raises(CollectorError) as caught:
        room.write("big", b"12345678")

    assert FailureKind.TOO_LARGE == caught.value.failure.kind
    assert b"12345" == (tmp_path / "big").read_bytes()
    assert [] == room.complete


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".x", "a/b/c", "", "a/../b", "a b"])
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a name"):
        StepRoom(tmp_path, tmp_path).write(name, b"")


def test_what_a_step_left_is_moved_to_its_place_and_says_whether_it_is_whole(tmp_path):
    rooms = Rooms.create(tmp_path, "test")
    directory = rooms.open()
    room = StepRoom(directory, tmp_path)
    room.write("whole.json", b"{}")
    (directory / "cut.json").write_bytes(b"{")
    (directory / "empty.json").touch()

    kept = rooms.keep(STEP, directory, frozenset(room.complete))

    folder = STEP.folder
    assert (
        Artifact(path=folder / "cut.json", size=1, complete=False),
        Artifact(path=folder / "whole.json", size=2),
    ) == kept
    assert b"{}" == (rooms.place(folder) / "whole.json").read_bytes()
    assert not directory.exists()


def test_a_later_step_reads_what_an_earlier_one_left_in_the_same_folder(tmp_path):
    (tmp_path / "procs.json").write_bytes(b"[]")
    room = StepRoom(tmp_path / "room", tmp_path)

    assert b"[]" == room.earlier("procs.json")
    assert room.earlier("other.json") is None


def test_the_work_directory_is_for_our_eyes_only(tmp_path):
    assert 0o700 == Rooms.create(tmp_path, "test").path.stat().st_mode & 0o777
