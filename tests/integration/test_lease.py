"""Announced pauses, from a shell, from training scripts and from a file, to a real daemon."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from running import Hangwatch, kill, runs, wait_for

import hangwatch
from hangwatch.errors import LeaseError
from hangwatch.lab.launch import Fleet
from hangwatch.system import leasing
from hangwatch.system.leasing import Pause


def watch(tmp_path: Path, *more: str) -> Hangwatch:
    return Hangwatch(
        *("watch", "--json", "--log", str(tmp_path / "nothing-yet.log")),
        *("--output", str(tmp_path / "out"), "--state", str(tmp_path / "state"), *more),
        environment={"HANGWATCH_LEASE_LIMIT": "3600"},
    )


@pytest.fixture
def daemon(tmp_path):
    with watch(tmp_path, "--lease-file", str(tmp_path / "lease")) as running:
        wait_for((tmp_path / "state" / leasing.SOCKET).exists, "the socket")
        yield running


@pytest.fixture(autouse=True)
def _forgetful():
    leasing._told.clear()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hangwatch", "lease", *arguments],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
        env=os.environ | environment,
    )


def gives_back(ident: str, state: Path) -> bool:
    """Say whether somebody answers and knows the lease."""
    try:
        leasing.give_back(ident, state=state, timeout=30.0)
    except LeaseError:
        return False
    return True


def test_a_shell_announces_a_pause_and_ends_it_by_its_id(tmp_path, daemon):
    state = str(tmp_path / "state")
    taken = run("--for", "20m", "--reason", "weight sync", "--state", state)
    ident = taken.stdout.strip()
    told = daemon.wait("lease_taken", lease=ident)
    returned = run("--return", ident, HANGWATCH_STATE=state)
    daemon.wait("lease_returned", lease=ident)

    assert (0, 0, "") == (taken.returncode, returned.returncode, returned.stderr)
    assert taken.stderr.startswith("granted until ")
    assert (1200.0, False, "weight sync") == (told["seconds"], told["capped"], told["reason"])
    assert told["holder"].startswith("pid ")


def test_a_pause_beyond_the_limit_is_cut_and_both_sides_hear_of_it(tmp_path, daemon):
    done = run("--for", "2h", "--state", str(tmp_path / "state"), "--json")
    answer = json.loads(done.stdout)

    assert ("hangwatch.lease/1", 3600.0, True) == (
        answer["schema"],
        answer["seconds"],
        answer["capped"],
    )
    assert daemon.wait("lease_taken", lease=answer["lease"])["capped"]


def test_a_lease_that_nobody_holds_cannot_be_returned(tmp_path, daemon):
    done = run("--return", "abc", "--state", str(tmp_path / "state"))

    assert (1, "hangwatch: no lease 'abc' is held: it has ended, or never was\n") == (
        done.returncode,
        done.stderr,
    )


def test_without_a_daemon_a_shell_hears_what_to_do(tmp_path):
    done = run("--for", "20m", "--state", str(tmp_path))

    assert 1 == done.returncode
    assert f"no hangwatch watches with the state directory {tmp_path}" in done.stderr
    assert "hangwatch watch" in done.stderr


@pytest.mark.parametrize(
    "arguments", [(), ("--for", "a while"), ("--for", "1m", "--return", "abc")], ids=" ".join
)
def test_a_command_line_that_says_nothing_clear_is_refused(arguments):
    assert 2 == run(*arguments).returncode


def test_a_nought_is_no_pause(tmp_path, daemon):
    done = run("--for", "0", "--state", str(tmp_path / "state"))

    assert (1, "hangwatch: a lease lasts some seconds, not 0\n") == (done.returncode, done.stderr)


def test_a_script_announces_a_pause_for_a_block_and_ends_it_though_the_block_raises(
    tmp_path, daemon
):
    with (
        pytest.raises(ZeroDivisionError),
        hangwatch.lease(minutes=20, reason="sync", state=tmp_path / "state") as pause,
    ):
        _ = 1 / 0
    told = daemon.wait("lease_taken", lease=pause.id)
    daemon.wait("lease_returned", lease=pause.id)

    assert (1200.0, "sync", f"pid {os.getpid()}") == (
        told["seconds"],
        told["reason"],
        told["holder"],
    )


def test_a_pause_can_be_announced_without_a_block_and_ended_twice(tmp_path, daemon, caplog):
    pause = hangwatch.lease(1200, state=tmp_path / "state")
    pause.end()
    pause.end()
    daemon.wait("lease_returned", lease=pause.id)

    assert [] == caplog.records


def test_a_pause_that_is_entered_again_inside_itself_ends_with_the_outer_block(tmp_path, daemon):
    pause = hangwatch.lease(1200, state=tmp_path / "state")
    with pause:
        with pause:
            first = pause.id
        leasing.take(1200, ident=first, state=tmp_path / "state")  # it is still held
    with pause:
        second = pause.id
    daemon.wait("lease_returned", lease=first)
    daemon.wait("lease_returned", lease=second)

    assert first != second


def test_many_ranks_announce_at_once(tmp_path, daemon):
    code = (
        "import sys, hangwatch\nfor _ in range(20): hangwatch.lease(60, required=True, timeout=30)"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"HANGWATCH_STATE": str(tmp_path / "state")},
        )
        for _ in range(8)
    ]
    codes = [rank.wait(60.0) for rank in ranks]
    wait_for(lambda: 160 == len({told["lease"] for told in daemon.of("lease_taken")}))

    assert [0] * 8 == codes


def test_more_visitors_than_are_heard_at_once_wait_and_none_is_forgotten(tmp_path, daemon):
    state = tmp_path / "state"
    mute = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for wire in mute:
        wire.connect(str(state / leasing.SOCKET))
    granted = leasing.take(60, ident="late", state=state, timeout=30.0)
    for wire in mute:
        wire.close()

    assert 60.0 == granted


def test_a_lessor_without_descriptors_rests_and_hears_who_waits_when_it_has_some(tmp_path, daemon):
    lessor = psutil.Process(daemon.child("hangwatch.daemon.lessor"))
    limits = lessor.rlimit(psutil.RLIMIT_NOFILE)
    lessor.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(30.0)
        wire.connect(str(tmp_path / "state" / leasing.SOCKET))
        wire.sendall(b'{"take": "x", "seconds": 60}\n')
        before = lessor.cpu_times().user + lessor.cpu_times().system
        time.sleep(2.0)  # a machine under load only makes the share of one that spins smaller
        spent = lessor.cpu_times().user + lessor.cpu_times().system - before
        lessor.rlimit(psutil.RLIMIT_NOFILE, limits)
        answer = json.loads(wire.recv(4096))

    assert 0.5 > spent
    assert 60.0 == answer["seconds"]


@pytest.mark.parametrize(
    "question",
    [
        *(b"\n", b"[]\n", b"\xff\n", b"x" * 9000, b"[" * 4000 + b"\n", b'"return"\n'),
        *(b'{"take": 1}\n', b'{"take": "x", "seconds": 1e999}\n'),
        b'{"take": "x", "seconds": %s}\n' % (b"9" * 400),
    ],
    ids=lambda question: question[:20].decode("latin-1").strip(),
)
def test_whatever_comes_through_the_socket_the_next_one_is_heard(tmp_path, daemon, question):
    state = tmp_path / "state"
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(30.0)
        wire.connect(str(state / leasing.SOCKET))
        wire.sendall(question)
        answer = wire.recv(4096) if question.endswith(b"\n") else b'{"error"'

    assert answer.startswith(b'{"error"')
    assert 60.0 == leasing.take(60, ident="next", state=state, timeout=30.0)


def test_a_script_without_a_daemon_goes_on_and_says_so_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with hangwatch.lease(minutes=20, state=tmp_path) as pause:
                pass

    assert (0.0, None) == (pause.seconds, pause.until)
    assert "no hangwatch watches" in pause.problem
    assert 1 == len(caplog.records)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "20m", None])
def test_a_script_that_asks_for_nonsense_goes_on(tmp_path, wrong):
    assert hangwatch.lease(wrong, state=tmp_path).problem


def test_a_script_can_insist(tmp_path):
    with pytest.raises(LeaseError, match="hangwatch watch"):
        hangwatch.lease(60, state=tmp_path, required=True)


def test_a_daemon_that_does_not_answer_holds_a_script_up_for_its_patience_only(tmp_path):
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / leasing.SOCKET))
        deaf.listen(0)
        began = time.monotonic()
        pauses = [hangwatch.lease(60, state=tmp_path, timeout=0.2) for _ in range(3)]
        elapsed = time.monotonic() - began

    assert all("did not answer within 0.2 s" in pause.problem for pause in pauses)
    assert elapsed < 5.0  # three times 0.2, and whatever a busy machine adds


def test_the_import_of_a_script_loads_nothing_but_the_standard_library(tmp_path):
    code = (
        "import sys; before = set(sys.modules); import hangwatch;"
        "light = set(sys.modules) - before;"
        "hangwatch.lease(1, state=sys.argv[1]); import json;"
        "print(json.dumps([sorted(light), sorted(set(sys.modules) - before)]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        capture_output=True,
        check=True,
        timeout=60.0,
    )
    light, loaded = json.loads(done.stdout)
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names

    assert ["hangwatch"] == light
    assert {"hangwatch"} == foreign


def test_only_the_owner_can_knock(tmp_path, daemon):
    mode = (tmp_path / "state" / leasing.SOCKET).stat().st_mode

    assert stat.S_ISSOCK(mode)
    assert 0o600 == stat.S_IMODE(mode)


@pytest.mark.needs_root
def test_another_user_hears_why_it_is_not_heard():
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        Path(folder).chmod(0o711)
        door.bind(f"{folder}/{leasing.SOCKET}")
        Path(folder, leasing.SOCKET).chmod(0o600)
        os.seteuid(65534)
        try:
            pause = hangwatch.lease(60, state=folder)
        finally:
            os.seteuid(0)

    assert "belongs to another user" in pause.problem


def test_a_state_directory_with_a_long_path_is_no_obstacle(tmp_path):
    deep = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 5)
    deep.mkdir(parents=True)
    with watch(deep):
        wait_for((deep / "state" / leasing.SOCKET).exists, "the socket")

        assert 60.0 == leasing.take(60, ident="x", state=deep / "state", timeout=30.0)


def test_a_file_on_a_shared_volume_announces_a_pause_until_it_is_gone(tmp_path, daemon):
    file = tmp_path / "lease"
    file.write_text("20m weight sync\n")
    taken = daemon.wait("lease_taken")
    file.unlink()
    daemon.wait("lease_returned", lease=str(file))

    assert (str(file), "weight sync") == (taken["lease"], taken["reason"])
    assert 1140.0 < taken["seconds"] <= 1200.0  # what was left when it was first looked at


def test_a_file_that_says_nothing_clear_is_told_once_and_what_to_write(tmp_path, daemon):
    file = tmp_path / "lease"
    file.write_text("a while\n")
    wait_for(lambda: daemon.read() and b"hangwatch.leases_unheard" in daemon.errors)
    file.write_text("20m")
    daemon.wait("lease_taken")
    wait_for(lambda: daemon.read() and b"hangwatch.leases_heard_again" in daemon.errors)

    assert 1 == daemon.errors.count(b"hangwatch.leases_unheard")
    assert b"write 90, 90s, 20m or 1h30m" in daemon.errors


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_read(tmp_path, daemon, kind):
    path = tmp_path / "lease"
    if kind == "link":
        (tmp_path / "secret").write_text("20m a secret")
        path.symlink_to("secret")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    wait_for(lambda: daemon.read() and b"hangwatch.leases_unheard" in daemon.errors)

    assert b"plain file" in daemon.errors
    assert b"secret" not in daemon.errors


def test_a_killed_lessor_is_replaced_and_knows_what_was_granted(tmp_path, daemon):
    state = tmp_path / "state"
    leasing.take(1200, ident="before", state=state, timeout=30.0)
    daemon.wait("lease_taken", lease="before")
    lessor = daemon.child("hangwatch.daemon.lessor")
    kill(lessor)
    wait_for(lambda: set(daemon.children("hangwatch.daemon.lessor")) - {lessor}, "a new lessor")

    wait_for(lambda: gives_back("before", state), "an answer of the new lessor")
    daemon.wait("lease_returned", lease="before")


def test_a_lease_outlives_the_daemon_that_granted_it(tmp_path):
    state = tmp_path / "state"
    with watch(tmp_path) as daemon:
        wait_for((state / leasing.SOCKET).exists, "the socket")
        leasing.take(1200, ident="long", state=state, timeout=30.0)
        daemon.wait("lease_taken", lease="long")
        memory = state / "memory.json"
        wait_for(lambda: memory.exists() and '"long"' in memory.read_text(), "the memory")
        kill(daemon.pid)
    with watch(tmp_path) as daemon:
        daemon.wait("watching")
        wait_for(lambda: gives_back("long", state), "the new lessor")
        daemon.wait("lease_returned", lease="long")


def test_the_socket_goes_with_the_daemon(tmp_path, daemon):
    lessor = daemon.child("hangwatch.daemon.lessor")

    assert 0 == daemon.end()
    assert not (tmp_path / "state" / leasing.SOCKET).exists()
    assert not runs(lessor)


def test_a_stopped_daemon_grants_and_hears_of_it_when_it_goes_on(tmp_path, daemon):
    daemon.wait("watching")
    daemon.process.send_signal(signal.SIGSTOP)
    granted = leasing.take(1200, ident="meanwhile", state=tmp_path / "state", timeout=30.0)
    daemon.process.send_signal(signal.SIGCONT)
    daemon.wait("lease_taken", lease="meanwhile")

    assert 1200.0 == granted


def test_a_pause_is_typed():
    annotations = hangwatch.lease.__annotations__

    assert Pause.__name__ == annotations["return"]


@pytest.mark.slow
def test_engines_that_stand_still_under_a_lease_are_paused_and_alarm_when_it_is_returned(tmp_path):
    state = tmp_path / "state"
    with (
        Fleet(tmp_path / "ray", "--fault", "blocked-call", servers=2) as fleet,
        Hangwatch(
            *("watch", "--json", "--heartbeat-interval", "1", "--stall-after", "4"),
            *("--output", str(tmp_path / "out"), "--state", str(state)),
            environment={"HANGWATCH_SAMPLE_GAP": "1"},
        ) as daemon,
    ):
        fleet.wait_ready()
        names = [str(server["pid"]) for server in fleet.servers]
        for name in names:
            daemon.wait("transition", instance=name, after="ok")
        with hangwatch.lease(minutes=20, reason="weight sync", state=state, timeout=30.0):
            fleet.start_fault()
            paused = [daemon.wait("transition", instance=n, after="paused") for n in names]
            fleet.truth()
            quiet = daemon.of("incident")
        daemon.wait("incident")
        daemon.end()

    assert [] == quiet
    assert {"not-a-hang:lease"} == {told["cause"] for told in paused}
    assert all("weight sync" in told["because"][0] for told in paused)
