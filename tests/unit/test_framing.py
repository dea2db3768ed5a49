"""Envelopes come off, and a line of interest is found whatever the block boundaries."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.framing import MAX_HEAD, MAX_LINE, Scanner, peel
from hangwatch.model.following import Dialect
from hangwatch.model.heartbeat import Peeled

BEAT = (
    b"[2026-03-04 13:30:00 DP0] Avg thr (in/out): 7264.6 / 501.6 tokens/s, "
    b"Engine (running/waiting): 6 / 0, KV cache: 30.9%, "
)
NEEDLE = b"Avg thr (in/out)"


def scan(*blocks: bytes, needles: tuple[bytes, ...] = (NEEDLE,)) -> list[tuple[int, bytes]]:
    scanner = Scanner(needles)
    found = [hit for block in blocks for hit in scanner.feed(block)]
    return found + list(scanner.finish())


def bodies(*blocks: bytes) -> list[bytes]:
    return [peel(line).body for _, line in scan(*blocks)]


# Envelopes.


def test_a_bare_line_is_its_own_body():
    assert Peeled(body=BEAT) == peel(BEAT)


def test_a_ray_prefix_names_the_worker():
    line = b"(run_lmdeploy_server_wrapper pid=71000, ip=192.0.2.7) " + BEAT

    assert Peeled(
        body=BEAT, host="192.0.2.7", pid=71000, actor="run_lmdeploy_server_wrapper"
    ) == peel(line)


def test_a_ray_prefix_without_a_name_still_gives_the_pid():
    assert Peeled(body=BEAT, pid=7) == peel(b"(pid=7) " + BEAT)


def test_colour_is_taken_off_wherever_it_stands():
    line = b"\x1b[36m(server pid=7091)\x1b[0m " + BEAT[:40] + b"\x1b[1;31m" + BEAT[40:] + b"\x1b[K"

    assert Peeled(body=BEAT, pid=7091, actor="server") == peel(line)


def test_a_terminal_title_is_taken_off():
    assert Peeled(body=BEAT) == peel(b"\x1b]0;rollout\x07" + BEAT)


def test_rays_count_of_folded_lines_is_read_and_taken_off():
    line = (
        b"\x1b[36m(s pid=1)\x1b[0m " + BEAT + b"\x1b[32m [repeated 4x across cluster]"
        b" (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication)"
        b"\x1b[0m"
    )

    assert Peeled(body=BEAT, pid=1, actor="s", repeated=4) == peel(line)


def test_a_container_runtimes_stamp_is_kept():
    line = b"2026-08-19T05:44:49.123456789Z stdout F " + BEAT

    assert Peeled(body=BEAT, stamp=datetime(2026, 8, 19, 5, 44, 49, 123456, tzinfo=UTC)) == peel(
        line
    )


def test_a_part_of_a_container_runtimes_line_is_not_complete():
    assert not peel(b"2026-08-19T05:44:49Z stdout P " + BEAT).complete


def test_a_stamp_that_is_no_moment_is_taken_off_all_the_same():
    assert Peeled(body=BEAT) == peel(b"2026-13-41T05:44:49Z stdout F " + BEAT)


def test_kubectls_stamps_are_taken_off():
    assert BEAT == peel(b"2026-08-19T05:44:49.1+08:00 (a pid=3) " + BEAT).body


def test_a_line_behind_nuls_is_the_line():
    assert Peeled(body=BEAT) == peel(bytes(4096) + BEAT + b"\r\n")


@pytest.mark.parametrize(
    "bar",
    [
        b"\r 10%|#         | 1/9 [00:01<00:09, 1.00s/it]\r 20%|##        | 2/9 [00:02, 1.0it/s]\r",
        b"\r 20%|##        | 2/9 [00:02<00:07, 1.0it/s]",
        b"\x00\x00\r  0%|          | 0/9 [00:00<?, ?it/s]",
    ],
    ids=["before a CR", "glued", "glued, behind NULs"],
)
def test_a_line_behind_a_progress_bar_is_the_line(bar):
    assert Peeled(body=BEAT) == peel(bar + BEAT)


def test_a_workers_line_behind_the_drivers_own_bar_keeps_its_prefix():
    line = b"\r 20%|##   | 2/9 [00:02<00:07, 1.0it/s](server pid=71000) " + BEAT

    assert Peeled(body=BEAT, pid=71000, actor="server") == peel(line)


def test_a_bar_in_front_of_nothing_is_a_body():
    bar = b" 20%|##        | 2/9 [00:02<00:07, 1.0it/s]"

    assert Peeled(body=bar) == peel(b"\r" + bar)


@given(st.binary(max_size=300))
def test_peeling_never_fails(line):
    peel(line)


# Scanning.


def test_a_line_has_the_offset_of_its_first_byte():
    assert [(6, BEAT), (7 + len(BEAT), b"x" + BEAT)] == scan(
        b"hello\n" + BEAT + b"\nx" + BEAT + b"\n"
    )


def test_a_last_line_without_an_end_is_found_when_nothing_will_follow():
    scanner = Scanner((NEEDLE,))

    assert [] == list(scanner.feed(BEAT))
    assert ((0, BEAT),) == scanner.finish()
    assert () == scanner.finish()


def test_one_line_with_two_needles_is_one_candidate():
    assert [(0, BEAT)] == scan(BEAT + b"\n", needles=(NEEDLE, b"KV cache", b"Avg"))


def test_without_needles_nothing_is_found():
    assert [] == scan(BEAT + b"\n", needles=())


def test_a_line_of_megabytes_is_skipped_without_losing_its_neighbours():
    huge = NEEDLE + b"A" * (3 << 20)
    blocks = [b"".join([BEAT, b"\n", huge, b"\n", BEAT, b"\n"])]

    assert [BEAT, BEAT] == bodies(*blocks)
    assert [BEAT, BEAT] == bodies(
        *(blocks[0][i : i + 4096] for i in range(0, len(blocks[0]), 4096))
    )


def test_a_line_of_megabytes_costs_no_memory():
    scanner = Scanner((NEEDLE,))
    for _ in range(1000):
        list(scanner.feed(b"A" * 4096))

        assert MAX_LINE >= scanner.offset - scanner.line_offset


def test_a_heartbeat_behind_a_bar_of_megabytes_counts_and_keeps_its_envelope():
    bar = b"\rDeepGEMM warmup:   0%|      | 37/16384 [00:01<12:00, 19.01it/s]" * 40_000
    stream = b"(server pid=71000) loading" + bar + b"\r" + BEAT + b"\n"
    found = scan(*(stream[i : i + 65536] for i in range(0, len(stream), 65536)))

    assert [Peeled(body=BEAT, pid=71000, actor="server")] == [peel(line) for _, line in found]
    assert MAX_HEAD + len(BEAT) >= len(found[0][1])


def test_a_heartbeat_with_a_bar_behind_it_in_its_own_line_counts():
    assert [BEAT] == bodies(BEAT + b"\r 20%|##        | 2/9 [00:02<00:07, 1.0it/s]\n")


def test_a_heartbeat_behind_a_hole_of_megabytes_counts():
    assert [BEAT] == bodies(*(bytes(1 << 16) for _ in range(100)), b"\0" + BEAT + b"\n")


def test_lines_that_end_in_cr_lf_count_once():
    assert [BEAT, BEAT] == bodies(BEAT + b"\r\n" + BEAT + b"\r", b"\n")


def test_parts_of_a_container_runtimes_line_are_joined_stream_by_stream():
    cri = b"2026-08-19T05:44:49.1Z "
    stream = (
        cri + b"stdout P " + BEAT[:30] + b"\n"
        + cri + b"stderr P half of\n"
        + cri + b"stdout P " + BEAT[30:33] + b"\n"
        + cri + b"stderr F another line\n"
        + cri + b"stdout F " + BEAT[33:] + b"\n"
        + cri + b"stdout F " + BEAT + b"\n"
    )  # fmt: skip

    assert [BEAT, BEAT] == bodies(stream)
    assert [BEAT, BEAT] == bodies(*(stream[i : i + 1] for i in range(len(stream))))


def test_parts_that_never_end_cost_no_memory():
    scanner = Scanner((NEEDLE,))
    part = b"2026-08-19T05:44:49.1Z stdout P " + b"A" * 16000 + b"\n"
    for _ in range(100):
        list(scanner.feed(part))
    found = list(scanner.feed(b"2026-08-19T05:44:49.1Z stdout F A\n" + BEAT + b"\n"))

    assert [BEAT] == [line for _, line in found]
    assert 4 * MAX_LINE > sum(len(line) for _, line in scanner._joining.values())


def test_the_unfinished_line_of_a_rotated_file_goes_on_in_the_next_one():
    scanner = Scanner((NEEDLE,))
    list(scanner.feed(b"old\n" + BEAT[:60]))
    scanner.continue_in_next_file()

    assert [BEAT, BEAT] == [line for _, line in scanner.feed(BEAT[60:] + b"\n" + BEAT + b"\n")]
    assert 2 + len(BEAT) + len(BEAT[60:]) == scanner.offset


def docker(text: bytes, *, stream: str = "stdout", end: str = "\n") -> bytes:
    log = text.decode() + end
    record = {"log": log, "stream": stream, "time": "2026-08-19T05:44:49.123456789Z"}
    written = json.dumps(record, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return written.encode() + b"\n"


def copied(text: bytes) -> bytes:
    return json.dumps(json.loads(docker(text))).encode() + b"\n"


def kubectl(text: bytes) -> bytes:
    return b"[pod/rollout-7/engine] 2026-08-19T05:44:49.1Z " + text + b"\n"


WRITTEN = datetime(2026, 8, 19, 5, 44, 49, tzinfo=UTC)


@pytest.mark.parametrize("wrap", [docker, copied, kubectl])
def test_the_line_in_an_envelope_keeps_its_stamp(wrap):
    (found,) = [peel(line) for _, line in scan(wrap(BEAT))]

    assert found.stamp is not None
    assert (BEAT, WRITTEN) == (found.body, found.stamp.replace(microsecond=0))


@pytest.mark.parametrize("wrap", [docker, kubectl])
def test_rays_prefix_and_colour_come_off_within_an_envelope(wrap):
    line = b"\x1b[36m(run_server pid=42, ip=192.0.2.9)\x1b[0m \x1b[32m" + BEAT + b"\x1b[0m"

    (found,) = [peel(line) for _, line in scan(wrap(line))]

    assert (BEAT, 42, "192.0.2.9") == (found.body, found.pid, found.host)


def test_kubectls_prefix_names_the_pod():
    (found,) = [peel(line) for _, line in scan(kubectl(b"(APIServer pid=1) " + BEAT))]

    assert ("rollout-7", 1, BEAT) == (found.host, found.pid, found.body)


def test_a_needle_with_quotes_is_found_although_docker_escapes_them():
    line = b'INFO: 192.0.2.7:1 - "POST /v1/completions HTTP/1.1" 200 OK in "eu" <b>'
    needles = (b'"POST /v1/', b'in "eu" <b>')

    assert [line] == [peel(hit).body for _, hit in scan(docker(line), needles=needles[:1])]
    assert [line] == [peel(hit).body for _, hit in scan(docker(line), needles=needles[1:])]


def test_a_line_that_docker_split_over_several_records_is_joined_stream_by_stream():
    stream = (
        docker(BEAT[:30], end="")
        + docker(b"half of", stream="stderr", end="")
        + docker(BEAT[30:33], end="")
        + docker(b"another line", stream="stderr")
        + docker(BEAT[33:])
        + docker(BEAT)
    )

    assert [BEAT, BEAT] == bodies(stream)
    assert [BEAT, BEAT] == bodies(*(stream[i : i + 1] for i in range(len(stream))))


def test_a_bar_that_docker_split_without_end_costs_no_memory():
    scanner = Scanner((NEEDLE,))
    for _ in range(100):
        list(scanner.feed(docker(b"10%|#  | 1/9 [00:00<00:01, 1.0it/s]\r" * 400, end="")))
    found = list(scanner.feed(docker(BEAT)))

    assert [BEAT] == [peel(line).body for _, line in found]
    assert 4 * MAX_LINE > sum(len(record.text) for _, record in scanner._records.values())


@pytest.mark.parametrize(
    "line",
    [b'{"log":"', b'{"log":"x"', b'{"log":"x","stream":1,"time":null}', b'{"log":"\\ud800"}'],
)
def test_what_only_looks_like_dockers_is_peeled_all_the_same(line):
    assert isinstance(peel(line).body, bytes)


TEXT = st.lists(
    st.sampled_from([b"\r", b"\x00", NEEDLE, b"Avg", b" thr ", b"(in/out)", b"noise", b"x" * 50]),
    max_size=8,
).map(b"".join)
PLAIN = st.lists(TEXT, max_size=12).map(b"\n".join)
RUNTIME = st.lists(
    st.tuples(st.sampled_from([b"stdout", b"stderr"]), st.sampled_from([b"P", b"F"]), TEXT),
    max_size=12,
).map(lambda lines: b"".join(b"2026-08-19T05:44:49.1Z %b %b %b\n" % line for line in lines))


DOCKER = st.lists(
    st.tuples(TEXT, st.sampled_from(["stdout", "stderr"]), st.booleans()), max_size=12
).map(
    lambda records: b"".join(
        docker(text, stream=stream, end="\n" if whole else "") for text, stream, whole in records
    )
)


@given(PLAIN | RUNTIME | DOCKER, st.lists(st.integers(1, 200), max_size=20))
def test_block_boundaries_change_nothing(stream, cuts):
    blocks, at = [], 0
    for size in cuts:
        blocks.append(stream[at : at + size])
        at += size
    blocks.append(stream[at:])

    assert bodies(stream) == bodies(*blocks)


NEEDLES = st.lists(st.text("ab", min_size=1, max_size=12).map(str.encode), max_size=6)


@given(NEEDLES, st.text("ab\n", max_size=300).map(str.encode))
def test_needles_that_share_a_search_find_what_they_would_find_alone(needles, stream):
    expected = [line for line in stream.split(b"\n") if any(needle in line for needle in needles)]

    assert expected == [line for _, line in scan(stream, needles=tuple(needles))]


LMDEPLOY = Dialect(beats=(NEEDLE,), others=(b"sleep",))
VLLM = Dialect(beats=(b"Avg prompt",), others=(b"pause",))
LINES = (b"sleep\n", b"pause\n", BEAT + b"\n", b"sleep\n", b"pause\n", b"common\n")


def test_once_an_engine_was_heard_only_its_own_lines_are_looked_for():
    needles = (*LMDEPLOY.beats, *LMDEPLOY.others, *VLLM.beats, *VLLM.others, b"common")
    scanner = Scanner(needles, dialects=(LMDEPLOY, VLLM))

    found = [hit for line in LINES for _, hit in scanner.feed(line)]

    assert [b"sleep", b"pause", BEAT, b"sleep", b"common"] == found


def test_another_engine_may_still_be_heard_in_the_same_log():
    needles = (*LMDEPLOY.beats, *LMDEPLOY.others, *VLLM.beats, *VLLM.others)
    scanner = Scanner(needles, dialects=(LMDEPLOY, VLLM))
    lines = (BEAT + b"\n", b"Avg prompt\n", b"pause\n", b"sleep\n")

    found = [hit for line in lines for _, hit in scanner.feed(line)]

    assert [BEAT, b"Avg prompt", b"pause", b"sleep"] == found
