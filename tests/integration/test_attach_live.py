"""``hangwatch attach`` on a terminal: what stands there while servers really hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import runs, state_of, wait_for
from terminal import ENTER, LEAVE, Terminal

from hangwatch.lab.launch import Fleet

QUICK = ("--heartbeat-interval", "1", "--stall-after", "6")
FAST = {"HANGWATCH_SAMPLE_GAP": "1"}

pytestmark = pytest.mark.slow


def attach(pid: int, folder: Path, *more: str) -> tuple[str, ...]:
    places = ("--output", str(folder / "out"), "--state", str(folder / "state"))
    return ("attach", "--pid", str(pid), *QUICK, *places, *more)


def bundles(folder: Path) -> list[Path]:
    return list((folder / "out").glob("*.tar.gz"))


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "ray").mkdir()
    options = ("--fault", "blocked-call", "--faulty", "2")
    with Fleet(tmp_path / "ray", *options, servers=3) as running:
        running.wait_ready()
        yield running


def test_a_fleet_that_hangs_is_seen_to_and_ctrl_c_ends_it(tmp_path, fleet):
    with Terminal(*attach(fleet.servers[0]["pid"], tmp_path), environment=FAST) as terminal:
        terminal.wait("3 instances: 3 ok")
        settings = terminal.settings
        fleet.start_fault()
        capturing = terminal.wait("capture: ", "2 of 3 stopped within")
        caught = terminal.wait("bundle: ", "1 ok")
        pressed_at = time.monotonic()
        terminal.press(b"\x03")
        code = terminal.finish()
        took = time.monotonic() - pressed_at
        after = terminal.settings
    (bundle,) = bundles(tmp_path)
    stopped = {str(server["pid"]) for server in fleet.servers[:2]}
    page = caught.splitlines()
    table = page[page.index("") + 2 :]  # behind a blank line and the head

    assert 0 == code
    assert took < 10  # two seconds on a machine that has nothing else to do
    assert "they fell silent in this order: " in capturing
    assert f"bundle: {bundle}" in caught.replace("\n", "")
    assert stopped == {row.split()[0] for row in table[:2]}
    assert table[2].startswith(str(fleet.servers[2]["pid"]))
    assert settings == after
    assert 1 == terminal.written.count(ENTER) == terminal.written.count(LEAVE)
    left = terminal.written.rpartition(LEAVE)[2]
    assert "2 of 3 stopped within" in left
    assert str(bundle) == left.splitlines()[-1]
    assert not list((tmp_path / "state").glob("attach-*"))


def test_a_terminal_that_nobody_reads_stops_neither_the_capture_nor_the_end(tmp_path, fleet):
    with Terminal(*attach(fleet.servers[0]["pid"], tmp_path), environment=FAST) as terminal:
        terminal.wait("3 instances: 3 ok")
        # Nobody reads from here on, and the terminal takes 4 kB more at most.
        terminal.press(b"\x13")
        fleet.start_fault()
        wait_for(lambda: bundles(tmp_path), "the bundle")
        # As from a supervisor: ^C would let the terminal go on.
        os.kill(terminal.pid, signal.SIGINT)
        wait_for(lambda: terminal.process.poll() is not None, "its end")

    assert 0 == terminal.process.returncode


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(tmp_path, healthy):
    with Terminal(*attach(healthy.pid, tmp_path)) as terminal:
        terminal.wait("1 instance: 1 ok")
        terminal.press(b"\x1a")
        wait_for(lambda: state_of(terminal.pid) == "T", "the stop")
        wait_for(
            lambda: not terminal.read(0.1) and terminal.written.endswith(LEAVE), "the old screen"
        )
        terminal.press(b"fg\n")
        terminal.wait("1 instance: 1 ok", skip=len(terminal.pages))
        terminal.press(b"\x03")
        code = terminal.finish()

    assert 0 == code
    assert 2 == terminal.written.count(ENTER) == terminal.written.count(LEAVE)


def test_the_page_follows_the_size_of_the_terminal(tmp_path, healthy):
    with Terminal(*attach(healthy.pid, tmp_path)) as terminal:
        wide = terminal.wait("1 instance: 1 ok", "tokens/s")
        terminal.resize(40, 8)
        wait_for(lambda: terminal.read(0.1) and fits(terminal.page, 40, 8), "a small page")
        terminal.press(b"\x03")
        terminal.finish()

    assert not fits(wide, 60, 8)


def fits(page: str, width: int, height: int) -> bool:
    rows = page.splitlines()
    return len(rows) <= height and max(map(len, rows)) <= width


def test_no_color_and_a_poor_encoding_are_heeded(tmp_path, healthy):
    poor = {"NO_COLOR": "1", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    with Terminal(*attach(healthy.pid, tmp_path), environment=poor) as terminal:
        page = terminal.wait("1 instance: 1 ok", "###")
        terminal.press(b"\x03")
        terminal.finish()

    assert page.isascii()
    assert "\x1b[3" not in terminal.written


def test_paths_go_to_a_file_as_soon_as_they_are_there(tmp_path, fleet):
    file = tmp_path / "paths"
    with file.open("wb") as out:
        arguments = attach(fleet.servers[0]["pid"], tmp_path)
        with Terminal(*arguments, environment=FAST, stdout=out.fileno()) as terminal:
            terminal.wait("3 instances: 3 ok")
            fleet.start_fault()
            terminal.wait("bundle: ")
            wait_for(file.read_text, "its path")
            printed = file.read_text().splitlines()
            terminal.press(b"\x03")
            terminal.finish()

    assert [str(bundles(tmp_path)[0])] == printed


def test_without_a_terminal_each_transition_is_a_line(tmp_path, fleet):
    process = subprocess.Popen(
        [sys.executable, "-m", "hangwatch", *attach(fleet.servers[0]["pid"], tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | FAST,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        early = next(line for line in process.stderr if ": ok (" in line)
        fleet.start_fault()
        path = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        rest, told = process.communicate(timeout=60)

    assert (0, "") == (process.returncode, rest)
    assert [path] == [str(bundle) for bundle in bundles(tmp_path)]
    lines = told.splitlines()
    assert early[8:10] == "  "
    for server in fleet.servers[:2]:
        assert any(f"  {server['pid']}: " in line and "hung (" in line for line in lines)
    assert any(line.endswith(f"bundle written: {path}") for line in lines)
    assert "\x1b" not in told
    assert "hangwatch." not in told
    assert runs(fleet.servers[0]["pid"])
