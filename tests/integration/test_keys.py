"""API keys: read from a file, used, and written nowhere."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest
from played import HEALTHY, METRICS, played
from running import Hangwatch, wait_for
from stalls import needs_stalls, stalled

from hangwatch.capture.rooms import StepRoom
from hangwatch.collectors.endpoints import COLLECTOR
from hangwatch.errors import ConfigError
from hangwatch.lab.launch import Server
from hangwatch.model.capture import CollectorError, FailureKind, Scope, Stage, Step, Target
from hangwatch.model.identity import ProcessId, Role
from hangwatch.system import procfs
from hangwatch.system.keys import KeyFile, masked

SECRET = "lmd-3f9a77c2e81b4d0f"  # no form that redaction would know


def written(tmp_path: Path, text: str, name: str = "keys") -> Path:
    file = tmp_path / name
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_a_file_has_a_key_on_each_line(tmp_path):
    file = KeyFile(written(tmp_path, "\none\n  two  \none\r\n"))

    assert ("one", "two") == file.read()


def test_a_mounted_secret_is_read_through_its_links(tmp_path):
    version = tmp_path / "..2026"
    version.mkdir()
    written(version, "one", "first")
    written(version, "two", "second")
    (tmp_path / "..data").symlink_to("..2026")
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(f"..data/{name}")

    assert ("one", "two") == KeyFile(tmp_path).read()


def test_a_file_that_changes_is_read_again(tmp_path):
    file = KeyFile(written(tmp_path, "one"))
    before = file.read()
    written(tmp_path, "another").replace(tmp_path / "keys")

    assert (("one",), ("another",)) == (before, file.read())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n \n", "there is no API key in"),
        ("one\nsk-1234 sk-5678\n", ":2: an API key is one word"),
        ("sk-\xe4\n", ":1: an API key is one word"),
        ("sk-1234\x00\n", ":1: an API key is one word"),
        ("x" * 70_000, "too large"),
    ],
)
def test_what_is_no_key_is_refused_and_not_quoted(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        KeyFile(written(tmp_path, text)).read()

    assert not re.search(r"sk-|\\xe4|xxx", str(caught.value))


def test_a_file_that_cannot_be_read_is_named_with_the_option(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory; check --api-key-file"):
        KeyFile(tmp_path / "keys").read()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "keys")

    with pytest.raises(ConfigError, match="is no regular file"):
        KeyFile(tmp_path / "keys").read()


@pytest.mark.parametrize(("mode", "exposed"), [(0o600, False), (0o640, False), (0o604, True)])
def test_a_file_that_everybody_can_read_is_told(tmp_path, mode, exposed):
    file = written(tmp_path, "one")
    file.chmod(mode)

    assert exposed == ("chmod 600" in KeyFile(file).exposed())


def test_an_echo_is_masked_within_json_too():
    said = json.dumps({"key": 'a"b', "other": "c"}).encode()

    assert {"key": "[redacted]", "other": "c"} == json.loads(masked(said, ('a"b', 'a"')))


# --- in a capture


LOCKED = {"body": METRICS["body"], "key": SECRET, "echo": True}


def endpoints(tmp_path: Path, pid: int, **options: str) -> None:
    """Run the collector once about one server."""
    target = Target(
        process=ProcessId(pid, procfs.start_ticks(pid) or 0),
        role=Role.API_SERVER,
        listeners=procfs.listeners(pid),
    )
    (listener,) = target.listeners
    step = Step(
        id="endpoints/1",
        collector="endpoints",
        scope=Scope.ENDPOINT,
        stage=Stage.A,
        sample=1,
        rung=2,
        folder=PurePosixPath("processes"),
        timeout=20.0,
        targets=(target,),
        options={
            f"path.{pid}.health": "/health",
            f"path.{pid}.metrics": "/metrics",
            f"url.{pid}.0": listener.url,
            **options,
        },
    )
    room = tmp_path / "room"
    room.mkdir()
    COLLECTOR.collect(step, StepRoom(room, room))


def test_a_capture_asks_with_the_key_and_masks_what_is_repeated(tmp_path):
    file = written(tmp_path, f"wrong\n{SECRET}\n")
    with played(tmp_path, {"/health": HEALTHY, "/metrics": LOCKED}) as servers:
        (pid,) = servers.pids
        endpoints(tmp_path, pid, api_key_file=str(file))
        asked = servers.asked(pid)

    (metrics,) = (tmp_path / "room").rglob("metrics.prom")
    assert "lmdeploy:generation_tokens_total" in metrics.read_text()
    assert "[redacted]" in metrics.read_text()
    assert SECRET not in metrics.read_text()
    assert {"/health": [""], "/metrics": ["wrong", SECRET]} == {
        path: [request.key for request in asked if request.path == path]
        for path in ("/health", "/metrics")
    }


@pytest.mark.parametrize("keys", ["", "wrong"])
def test_a_capture_that_is_refused_says_so_with_the_remedy(tmp_path, keys):
    options = {"api_key_file": str(written(tmp_path, keys))} if keys else {}
    with (
        played(tmp_path, {"/health": HEALTHY, "/metrics": LOCKED}) as servers,
        pytest.raises(CollectorError, match="/metrics: refused without an API key") as caught,
    ):
        endpoints(tmp_path, servers.pids[0], **options)

    assert FailureKind.NOT_PERMITTED is caught.value.failure.kind
    assert "--api-key-file" in caught.value.failure.hint
    assert list((tmp_path / "room").rglob("health.json"))


# --- on a volume that stalls


@needs_stalls
@pytest.mark.slow
def test_a_volume_that_stalls_under_the_keys_costs_neither_the_watch_nor_the_bundle(tmp_path):
    volume, folder = tmp_path / "volume", tmp_path / "keys"
    for each in (volume, tmp_path / "sound"):
        each.mkdir()
    folder.symlink_to(tmp_path / "sound")
    written(folder, SECRET)
    with (
        Server(tmp_path, "--fault", "blocked-call") as server,
        Hangwatch(
            *("watch", "--json", "--log-format", "json", "--log", str(server.log)),
            *("--heartbeat-interval", "1", "--stall-after", "6"),
            *("--api-key-file", str(folder / "keys")),
            *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state")),
            environment={"HANGWATCH_SAMPLE_GAP": "1"},
            under=stalled(volume),
        ) as daemon,
    ):
        daemon.wait("transition", after="ok")
        folder.unlink()
        folder.symlink_to(volume)
        server.start_fault()
        server.truth()
        bundle = daemon.wait("bundle")

        assert 0 == daemon.end()

    assert "hung" == bundle["verdict"]


@needs_stalls
@pytest.mark.slow
def test_a_daemon_that_begins_while_the_keys_cannot_be_read_watches_and_says_so(tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    with (
        Server(tmp_path) as server,
        Hangwatch(
            *("watch", "--json", "--log-format", "json", "--log", str(server.log)),
            *("--heartbeat-interval", "1", "--api-key-file", str(volume / "keys")),
            *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state")),
            under=stalled(volume),
        ) as daemon,
    ):
        daemon.wait("transition", after="ok")
        wait_for(lambda: daemon.read(0.2) and b"hangwatch.api_keys_not_read" in daemon.errors)

        assert 0 == daemon.end()

    assert b"its volume does not answer" in daemon.errors


# --- nowhere


@pytest.mark.slow
def test_no_byte_of_a_key_leaves_the_daemon_but_to_its_server(tmp_path):
    file = written(tmp_path, SECRET)
    arguments = ("--fault", "blocked-call", "--api-key-file", str(file))
    with Server(tmp_path, *arguments) as server:
        with Hangwatch(
            *("watch", "--json", "--log-format", "json", "--log", str(server.log)),
            *("--heartbeat-interval", "1", "--stall-after", "6", "--api-key-file", str(file)),
            *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state")),
            environment={"HANGWATCH_SAMPLE_GAP": "1"},
        ) as daemon:
            daemon.wait("transition", after="ok")
            wait_for(lambda: f"asked for /metrics with {SECRET}" in server.log.read_text())
            server.start_fault()
            server.truth()
            seen: list[bytes] = []

            def bundled() -> bool:
                seen.extend(shown_of(daemon.pid))
                daemon.read(0.2)
                return bool(daemon.of("bundle"))

            wait_for(bundled, "a bundle")
            bundle = Path(daemon.wait("bundle")["bundle"])
            daemon.end()
        told = json.dumps(daemon.events).encode() + daemon.errors

    kept = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    with tarfile.open(bundle) as tar:
        packed = [(each.name, opened.read()) for each in tar if (opened := tar.extractfile(each))]
    secret = SECRET.encode()
    assert [] == [name for name, data in packed if secret in data]
    assert [] == [data for data in (*seen, *kept, told) if secret in data]
    assert any(b"# asked with [redacted]" in data for _, data in packed)
    assert any(
        str(file).encode() in data for name, data in packed if name.endswith("/manifest.json")
    )


def shown_of(pid: int) -> Iterator[bytes]:
    """Yield what everybody may read of a process and of what it started."""
    family = [pid]
    for parent in family:
        family += procfs.children(parent)
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                yield Path(f"/proc/{parent}/{name}").read_bytes()
