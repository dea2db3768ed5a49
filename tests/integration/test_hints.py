import os
import select

import pytest

from hangwatch.system.hints import Hints


@pytest.fixture
def hints():
    hints = Hints()
    yield hints
    hints.close()


def opened(path):
    fd = os.open(path, os.O_RDONLY)
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino), fd


def rings(hints, seconds):
    return bool(select.select([hints], [], [], seconds)[0])


def test_growth_of_a_watched_file_wakes_the_one_who_waits(hints, tmp_path):
    log = tmp_path / "worker.out"
    log.write_bytes(b"")
    files = dict([opened(log)])
    hints.watch(files)
    with log.open("ab") as out:
        out.write(b"line\n")

    assert hints.cover(files)
    assert rings(hints, 30)


def test_growth_of_its_neighbours_wakes_nobody(hints, tmp_path):
    log, neighbour = tmp_path / "worker.out", tmp_path / "raylet.out"
    log.write_bytes(b"")
    hints.watch(dict([opened(log)]))
    neighbour.write_bytes(b"line\n")
    neighbour.write_bytes(b"line\n")

    assert not rings(hints, 0.3)


def test_a_drained_hint_is_forgotten(hints, tmp_path):
    log = tmp_path / "worker.out"
    log.write_bytes(b"")
    hints.watch(dict([opened(log)]))
    log.write_bytes(b"line\n")
    assert rings(hints, 30)
    while rings(hints, 0.2):
        hints.drain()

    assert not rings(hints, 0.2)


def test_a_file_without_a_name_is_not_covered(hints, tmp_path):
    log = tmp_path / "worker.out"
    log.write_bytes(b"")
    files = dict([opened(log)])
    log.unlink()
    hints.watch(files)

    assert not hints.cover(files)
