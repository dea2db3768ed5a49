"""Candidate lines to heartbeats and signals."""

from __future__ import annotations

from datetime import timedelta, timezone
from pathlib import Path

import pytest

from hangwatch.core.parsing import needles, parse
from hangwatch.model.heartbeat import Heartbeat, Line, SignalSeen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import BeatSeen, SignalArrived
from hangwatch.model.profile import Signal
from hangwatch.model.time import Instant
from hangwatch.profiles.lmdeploy import PROFILE

BEAT = (
    b"[2026-08-19 13:44:49 DP0] Avg thr (in/out): 25113.4 / 1893.0 tokens/s, "
    b"Server (succeeded/failed/routed/waiting): 4123 / 6 / 31 / -1, "
    b"Engine (running/waiting): 29 / 2, KV cache: 71.3%, Prefix cache hit rate: 83.0%, "
    b"SpecDecoding metrics: Draft acceptance rate: 68.12%, Mean acceptance length: 2.36"
)


def of(text: bytes, *, pid: int | None = None) -> BeatSeen | SignalArrived | None:
    line = Line(source="log", text=text, at=Instant(7.0))
    found = parse(line, (PROFILE,), pid=pid, zone=timezone(timedelta(hours=8)))
    return found[0] if found else None


def beat(text: bytes, *, pid: int | None = None) -> Heartbeat:
    found = of(text, pid=pid)
    assert isinstance(found, BeatSeen)
    return found.beat


def signal(text: bytes) -> SignalSeen | None:
    found = of(text)
    return found.signal if isinstance(found, SignalArrived) else None


def test_a_heartbeat_gives_all_its_numbers():
    found = beat(BEAT)

    assert (25113.4, 1893.0, 29, 2, 31, -1, 4123, 6, 71.3, 83.0, 68.12) == (
        found.in_tps,
        found.out_tps,
        found.running,
        found.waiting,
        found.routed,
        found.api_waiting,
        found.finished,
        found.failed,
        found.kv_cache_pct,
        found.prefix_hit_pct,
        found.draft_acceptance_pct,
    )
    assert 31 == found.in_flight
    assert "2026-08-19T13:44:49+08:00" == (found.printed and found.printed.isoformat())


def test_a_ray_prefix_says_who_printed_it_and_goes_before_the_files_name():
    found = beat(b"\x1b[36m(run pid=7091, ip=192.0.2.4)\x1b[0m " + BEAT, pid=1)

    assert InstanceKey(host="192.0.2.4", pid=7091, tag="DP0") == found.instance
    assert found.relayed


def test_the_name_of_a_file_says_who_printed_what_has_no_prefix():
    assert InstanceKey(pid=4242, tag="DP0") == beat(BEAT, pid=4242).instance


@pytest.mark.parametrize(
    "drifted",
    [
        BEAT.replace(b"Server (succeeded/failed/routed/waiting)", b"Server (ok/bad/in/queued)"),
        BEAT.replace(b"KV cache: 71.3%", b"KV cache usage 71.3 percent"),
        BEAT.replace(b"25113.4 / 1893.0 tokens/s", b"lots"),
        BEAT[:70],
    ],
)
def test_a_format_that_drifts_is_still_a_sign_of_life(drifted: bytes):
    assert "DP0" == beat(drifted).instance.tag


def test_a_drifted_format_keeps_the_numbers_that_did_not_drift():
    found = beat(BEAT.replace(b"Server (succeeded/failed", b"Server (ok/failed"))

    assert (25113.4, 29, 71.3) == (found.in_tps, found.running, found.kv_cache_pct)


@pytest.mark.parametrize("number", [b"nan", b"inf"])
def test_not_a_number_is_a_number_that_the_line_does_not_say(number: bytes):
    assert 1893.0 == beat(BEAT.replace(b"25113.4", number)).tps


def test_a_lone_line_of_speculative_decoding_is_no_heartbeat():
    assert of(b"SpecDecoding metrics: Draft acceptance rate: 61.00%, Accepted: 1 tokens") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'INFO:     192.0.2.7:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK', Signal.COMPLETED),
        (b'INFO:     192.0.2.7:1 - "POST /generate HTTP/1.1" 200 OK', Signal.COMPLETED),
        (b'INFO:     192.0.2.7:1 - "POST /v1/completions HTTP/1.1" 503 Unavailable', None),
        (b'INFO:     192.0.2.7:1 - "GET /v1/models HTTP/1.1" 200 OK', None),
        (b'INFO:     192.0.2.7:1 - "POST /sleep?level=2 HTTP/1.1" 200 OK', Signal.SLEEP),
        (b'INFO:     192.0.2.7:1 - "POST /wakeup HTTP/1.1" 200 OK', Signal.WAKE),
        (b'INFO:     192.0.2.7:1 - "POST /update_weights HTTP/1.1" 200 OK', Signal.UPDATED),
        (b'INFO:     192.0.2.7:1 - "POST /abort_request HTTP/1.1" 200 OK', Signal.ABORTED),
        (b"HINT:    Please open http://0.0.0.0:23333 in a browser", Signal.READY),
        (b"INFO:     Started server process [4242]", Signal.STARTING),
        (b"INFO:     Shutting down", Signal.STOPPED),
        (b"x - lmdeploy - ERROR - agent.py:470 - Task <ModelAgentLoop> failed", Signal.ENGINE_DEAD),
        (b"PyTorch engine loop task has stopped: ['EngineMainLoop'].", Signal.ENGINE_DEAD),
        (b"coro=<lifespan_handler.<locals>._force_log() done>", Signal.BEAT_LOST),
    ],
)
def test_other_lines_that_matter_are_signals(text: bytes, expected: Signal | None):
    found = signal(text)

    assert expected == (found.signal if found else None)


@pytest.mark.parametrize(
    ("query", "parts"),
    [
        (b"", ()),
        (b"?tags=weights", ("weights",)),
        (b"?tags=weights&tags=kv_cache", ("weights", "kv_cache")),
    ],
)
def test_waking_names_the_parts_that_it_concerns(query: bytes, parts: tuple[str, ...]):
    found = signal(b'INFO:     192.0.2.7:1 - "POST /wakeup' + query + b' HTTP/1.1" 200 OK')

    assert found is not None
    assert parts == found.parts


def test_needles_are_literals_that_every_signal_of_these_tests_contains():
    assert all(isinstance(needle, bytes) and needle for needle in needles([PROFILE]))
    assert len(needles([PROFILE])) == len(set(needles([PROFILE])))


def test_every_line_of_a_real_log_says_at_most_one_thing():
    (case,) = (Path(__file__).parent.parent / "fixtures" / "cases").glob("127-*")

    found = [of(text) for text in (case / "log.txt").read_bytes().splitlines()]

    assert 19 == sum(isinstance(item, BeatSeen) for item in found)
