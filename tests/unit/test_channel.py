import json
import os
import struct

import pytest

from hangwatch.system.channel import MAX_MESSAGE, MAX_PENDING, Channel, ChannelClosedError


@pytest.fixture
def ends():
    there_read, here_write = os.pipe()
    here_read, there_write = os.pipe()
    here, there = Channel(here_read, here_write), Channel(there_read, there_write)
    yield here, there
    here.close()
    there.close()


def test_messages_arrive_whole_and_in_order(ends):
    here, there = ends
    for n in range(3):
        here.send({"n": n})

    assert ({"n": 0}, {"n": 1}, {"n": 2}) == there.receive()


def test_text_that_is_not_utf8_passes_unharmed(ends):
    here, there = ends
    name = b"/data/\xff\xfe.log".decode("utf-8", "surrogateescape")
    here.send({"name": name})

    assert ({"name": name},) == there.receive()


def test_a_sender_never_waits_for_a_peer_that_does_not_read(ends):
    here, _ = ends
    block = {"data": "x" * (MAX_MESSAGE - 100)}

    with pytest.raises(ChannelClosedError, match="does not read"):
        for _ in range(MAX_PENDING // MAX_MESSAGE + 2):
            here.send(block)


def test_what_waits_is_delivered_when_the_peer_reads_again(ends):
    here, there = ends
    here.send({"data": "x" * 1_000_000})
    received = []
    while not received:
        here.flush()
        received += there.receive()

    assert 0 == here.pending
    assert 1_000_000 == len(received[0]["data"])


def test_a_message_cut_off_by_the_end_of_the_peer_is_not_delivered(ends):
    here, there = ends
    here.send({"whole": True})
    body = json.dumps({"cut": True}).encode()
    os.write(here.write_fd, struct.pack(">I", len(body)) + body[:3])
    here.close()

    assert ({"whole": True},) == there.receive()
    with pytest.raises(ChannelClosedError, match="gone"):
        there.receive()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (struct.pack(">I", MAX_MESSAGE + 1), "announced a message"),
        (struct.pack(">I", 3) + b"{{{", "not JSON"),
        (struct.pack(">I", 2) + b"[]", "not an object"),
    ],
)
def test_a_peer_that_writes_nonsense_is_cut_off(ends, raw, words):
    here, there = ends
    os.write(here.write_fd, raw)

    with pytest.raises(ChannelClosedError, match=words):
        there.receive()


def test_a_message_too_large_to_be_received_is_not_sent(ends):
    here, there = ends

    with pytest.raises(ValueError, match="too large"):
        here.send({"data": "x" * MAX_MESSAGE})
    assert () == there.receive()
