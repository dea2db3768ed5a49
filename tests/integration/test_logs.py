"""Our own log with a reader that stopped reading."""

import json
import os
import re
import time

from hangwatch.system import logs
from hangwatch.system.logs import LineWriter, configure, log


def read_all(fd: int) -> str:
    os.set_blocking(fd, False)
    text = b""
    while True:
        try:
            block = os.read(fd, 1 << 16)
        except BlockingIOError:
            return text.decode()
        if not block:
            return text.decode()
        text += block


def test_events_are_json_objects_with_their_facts():
    read, write = os.pipe()
    writer = configure(form="json", fd=write)
    log.info("hangwatch.capture_finished", incident="x-1", complete=11)
    writer.close()
    logs._output.writer = None

    event = json.loads(read_all(read))
    assert ["timestamp", "level", "event"] == list(event)[:3]
    assert event["timestamp"].endswith("Z")
    assert ("hangwatch.capture_finished", "info", "x-1", 11) == (
        event["event"],
        event["level"],
        event["incident"],
        event["complete"],
    )
    os.close(read)
    os.close(write)


def test_console_lines_let_no_escape_sequence_through():
    read, write = os.pipe()
    writer = configure(form="console", fd=write)
    log.warning("hangwatch.source_unreadable", reason="\x1b[2Jgone\nand on")
    writer.close()
    logs._output.writer = None

    text = read_all(read)
    assert "\x1b" not in text
    assert 1 == text.count("\n")
    os.close(read)
    os.close(write)


def test_before_anybody_asks_for_it_the_log_is_quiet(capfd):
    log.info("hangwatch.started")

    assert ("", "") == capfd.readouterr()


def test_a_full_pipe_costs_lines_never_time_and_the_loss_is_told():
    read, write = os.pipe()
    writer = LineWriter(write, limit=10)
    for _ in range(2000):
        writer.write("x" * 1000)
    dropped = writer.dropped
    deadline = time.monotonic() + 30
    text = ""
    while "\nafter\n" not in text and time.monotonic() < deadline:
        text += read_all(read)
        writer.write("after")
        time.sleep(0.01)

    assert dropped > 1000
    assert dropped <= sum(int(count) for count in re.findall(r"(\d+) lines dropped\n", text))
    writer.close()
    os.close(read)
    os.close(write)


def test_a_reader_that_is_gone_costs_nothing_but_lines():
    read, write = os.pipe()
    os.close(read)
    writer = LineWriter(write)
    writer.write("into the void")
    writer.close()

    assert 1 == writer.dropped
    os.close(write)
