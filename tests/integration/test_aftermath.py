"""A hang that goes on, ends by itself, or is ended: looked at again beside its bundle."""

from __future__ import annotations

import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest
from running import Hangwatch, runs, state_of, wait_for

from hangwatch.capture.reading import explain, read_bundle
from hangwatch.lab.launch import Server

pytestmark = pytest.mark.slow


def watch(server: Server, folder: Path, *times: str) -> Hangwatch:
    return Hangwatch(
        *("watch", "--json", "--log", str(server.log), "--heartbeat-interval", "1"),
        *("--stall-after", "6", "--output", str(folder / "out"), "--state", str(folder / "state")),
        environment={"HANGWATCH_AFTERMATH": ":".join(times), "HANGWATCH_SAMPLE_GAP": "1"},
    )


def said(path: str) -> dict[str, Any]:
    with tarfile.open(path) as archive:
        (member,) = (m for m in archive.getmembers() if m.name.endswith("/aftermath.json"))
        found = archive.extractfile(member)
        assert found is not None
        return json.load(found)


def names(path: str) -> set[str]:
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers()}


def working(daemon: Hangwatch) -> None:
    """Return when the server was seen to work and its processes are known."""
    daemon.wait("transition", after="ok")
    wait_for(lambda: daemon.read(0.1) and b"server_found" in daemon.errors, "its processes")


def test_a_hang_is_looked_at_again_while_it_lasts_and_at_once_when_it_ends(tmp_path):
    with Server(tmp_path) as server, watch(server, tmp_path, "2") as daemon:
        working(daemon)
        os.kill(server.engine_pid, signal.SIGSTOP)
        bundle = daemon.wait("bundle")["bundle"]
        first = daemon.wait("aftermath")
        os.kill(server.engine_pid, signal.SIGCONT)
        last = daemon.wait("aftermath", skip=len(daemon.events))
        assert 0 == daemon.end()

    stem = bundle.removesuffix(".tar.gz")
    assert [f"{stem}.aftermath-{n}.tar.gz" for n in (1, 2)] == [
        event["aftermath"] for event in (first, last)
    ]
    assert ["still_frozen", "recovered"] == [event["outcome"] for event in (first, last)]
    assert (False, True) == (said(first["aftermath"])["last"], said(last["aftermath"])["last"])
    assert 0o600 == Path(first["aftermath"]).stat().st_mode & 0o777
    assert {"manifest.json", "procs.json", "ends.json"} <= names(first["aftermath"])
    assert not any(name.endswith("threads.json") for name in names(first["aftermath"]))
    (remark,) = (f for f in explain(read_bundle(Path(bundle))).findings if f.rule == "afterwards")
    assert "1 of 1 still stopped" in remark.sentence
    assert "1 of 1 working again" in remark.sentence
    assert "aftermath/1/aftermath.json" == remark.citations[0].path


def test_a_server_that_is_killed_after_the_bundle_is_told_to_have_ended(tmp_path):
    with Server(tmp_path) as server, watch(server, tmp_path, "600") as daemon:
        working(daemon)
        os.kill(server.engine_pid, signal.SIGSTOP)
        daemon.wait("bundle")
        server.process.kill()  # its engine dies with it, and nobody has reaped it yet
        wait_for(lambda: state_of(server.pid) == "Z", "its end")
        last = daemon.wait("aftermath", seconds=120)
        assert 0 == daemon.end()

    found = said(last["aftermath"])
    assert ("ended", True) == (last["outcome"], found["last"])
    killed = next(row for row in found["ended"] if row["pid"] == server.pid)
    assert "signal 9" == killed["by"]
    assert os.getpid() == killed["parent"]["pid"]
    assert "was killed by signal 9" in last["sentence"]


def test_a_daemon_that_is_stopped_in_between_looks_again_when_it_is_back(tmp_path):
    with Server(tmp_path) as server:
        with watch(server, tmp_path, "5") as daemon:
            working(daemon)
            os.kill(server.engine_pid, signal.SIGSTOP)
            bundle = daemon.wait("bundle")["bundle"]
            assert 0 == daemon.end()
            assert [] == daemon.of("aftermath")
        with watch(server, tmp_path, "5") as daemon:
            look = daemon.wait("aftermath")
            daemon.process.kill()
        assert look["bundle"] == bundle
        assert runs(server.engine_pid)
        assert [] == list((tmp_path / "out").glob("*.partial"))
