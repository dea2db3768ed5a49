"""Old logs in virtual time, and the verb that replays them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner

from hangwatch.cli.main import command as hangwatch
from hangwatch.core.replay import heard, replay
from hangwatch.model.policy import Policy
from hangwatch.model.replay import LogMaterial, ReplayResult
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.registry import profiles
from hangwatch.system import logmaterial

PROFILES = {"lmdeploy": PROFILE}
START = datetime(2026, 3, 4, 10, 0, 0, tzinfo=UTC)
CASES = Path(__file__).parent.parent / "fixtures" / "cases"


def line(seconds: float, *, running: int = 5, tps: float = 4000.0, finished: int = 0) -> str:
    stamp = START + timedelta(seconds=seconds)
    return (
        f"[{stamp:%Y-%m-%d %H:%M:%S} DP0] Avg thr (in/out): {tps} / 500.0 tokens/s, "
        f"Server (succeeded/failed/routed/waiting): {finished} / 0 / {running} / 0, "
        f"Engine (running/waiting): {running} / 0, KV cache: 20.0%, \n"
    )


def read(folder: Path, until: float | None = None) -> LogMaterial:
    end = None if until is None else START + timedelta(seconds=until)
    return logmaterial.read([folder], profiles=PROFILES.values(), zone=UTC, until=end)


def run(folder: Path, until: float, **limits: float) -> ReplayResult:
    material = read(folder, until)
    return replay(
        material,
        profiles=PROFILES,
        policy=Policy(**limits),  # type: ignore[arg-type]
        until=material.epoch.instant_of(START + timedelta(seconds=until)),
    )


def access(request: str) -> str:
    return f'INFO:     192.0.2.7:41001 - "{request} HTTP/1.1" 200 OK\n'


def test_lines_arrive_at_their_stamps_counted_from_the_first(tmp_path: Path):
    (tmp_path / "log.txt").write_text("".join(line(at) for at in (0, 10, 20)))

    assert [0.0, 10.0, 20.0] == [found.at for found in read(tmp_path).lines]


def test_a_step_back_of_the_clock_moves_what_lies_behind_it(tmp_path: Path):
    stamps = (*range(0, 100, 10), *range(-3500, -3400, 10))
    (tmp_path / "log.txt").write_text("".join(line(at) for at in stamps))

    found = read(tmp_path)

    assert [float(at) for at in range(0, 200, 10)] == [entry.at for entry in found.lines]
    assert "steps back" in found.notes[0]
    assert START + timedelta(seconds=-3410) == found.epoch.wall_of(found.ends_at)


def test_a_lone_leap_with_unchanged_numbers_is_a_step_of_the_clock(tmp_path: Path):
    stamps = (*range(0, 100, 10), *range(700, 800, 10))
    (tmp_path / "log.txt").write_text("".join(line(at) for at in stamps))

    assert [] == [t for t in run(tmp_path, 795).transitions if t.after.word != "ok"]


def test_a_leap_with_other_numbers_is_a_stall(tmp_path: Path):
    stamps = (*range(0, 100, 10), *range(700, 800, 10))
    (tmp_path / "log.txt").write_text("".join(line(at, tps=4000.0 + at) for at in stamps))

    assert "suspected_hang" in [t.after.word for t in run(tmp_path, 795).transitions]


def test_requests_without_a_stamp_are_spread_until_the_next_stamp(tmp_path: Path):
    answered = access("POST /v1/completions") * 9
    (tmp_path / "log.txt").write_text(line(0) + answered + line(100))

    assert [float(at) for at in range(0, 101, 10)] == [found.at for found in read(tmp_path).lines]


def test_what_changes_the_meaning_of_silence_counts_from_the_stamp_before_it(tmp_path: Path):
    (tmp_path / "log.txt").write_text(line(0) + access("POST /sleep?level=2") + line(9000))

    assert 0.0 == read(tmp_path).lines[1].at
    assert ["ok", "paused", "ok"] == [t.after.word for t in run(tmp_path, 9005).transitions]


def test_stamps_of_other_lines_date_those_without(tmp_path: Path):
    other = "2026-03-04 10:05:00,123 - lmdeploy - WARNING - engine.py:1 - nothing\n"
    (tmp_path / "log.txt").write_text(line(0) + other + access("POST /sleep") + line(9000))

    assert 300.123 == pytest.approx(read(tmp_path).lines[1].at)


def test_arrival_times_go_before_stamps(tmp_path: Path):
    (tmp_path / "log.txt").write_text(line(0) + "noise\n" + line(900))
    (tmp_path / "arrival.txt").write_text("5\n7\n15\n")

    assert [0.0, 10.0] == [found.at for found in read(tmp_path).lines]


def last_word(folder: Path, until: float) -> str:
    return run(folder, until).verdict.word


def test_a_log_that_takes_other_lines_while_beats_are_missing_has_a_path_that_lives(
    tmp_path: Path,
):
    beats = "".join(line(at) for at in range(0, 100, 10))
    late = (START + timedelta(seconds=150)).strftime("%Y-%m-%d %H:%M:%S")
    (tmp_path / "log.txt").write_text(f"{beats}[{late}] Health check failed: it is mute\n")

    assert "hung" == last_word(tmp_path, 300)


@pytest.mark.parametrize(
    ("last", "expected"),
    [("noise\n", "hung"), (access("GET /health"), "suspected_hang")],
)
def test_the_arrival_of_a_line_proves_the_path_but_for_answers_to_whoever_watches(
    last: str, expected: str, tmp_path: Path
):
    beats = "".join(line(at) for at in range(0, 100, 10))
    (tmp_path / "log.txt").write_text(beats + last)
    (tmp_path / "arrival.txt").write_text("".join(f"{at}\n" for at in (*range(0, 100, 10), 150)))

    assert expected == last_word(tmp_path, 300)


def test_a_line_that_a_rotation_cut_is_whole_again(tmp_path: Path):
    text = "".join(line(at) for at in range(0, 100, 10))
    (tmp_path / "server.log.1").write_text(text[:700])
    (tmp_path / "server.log").write_text(text[700:])

    found = read(tmp_path)

    assert 10 == len(found.lines)
    assert ("server.log",) == found.sources


def test_a_snapshot_of_a_packed_bundle_is_read_from_memory():
    files = {"logs/worker-aa-01000000-77.out": line(0).encode(), "manifest.json": b"{}"}

    found = logmaterial.of(files, profiles=PROFILES.values(), zone=UTC)

    assert ("logs/worker-aa-01000000-77.out",) == found.sources


def test_a_copied_and_truncated_log_is_followed_on(tmp_path: Path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.txt").write_text("".join(line(at) for at in range(0, 100, 10)))
    (tmp_path / "parts" / "b.txt").write_text("".join(line(at) for at in range(100, 200, 10)))
    operations = [
        {"t": 0, "op": "append", "path": "log.txt", "from": "parts/a.txt"},
        {"t": 1, "op": "copy", "path": "log.txt", "to": "log.txt.1"},
        {"t": 2, "op": "truncate", "path": "log.txt"},
        {"t": 3, "op": "append", "path": "log.txt", "from": "parts/b.txt"},
    ]
    (tmp_path / "replay.json").write_text(json.dumps(operations))

    result = run(tmp_path, 195)

    assert 20 == result.heartbeats
    assert ["ok"] == [t.after.word for t in result.transitions]


def test_a_file_operation_cannot_leave_its_folder(tmp_path: Path):
    operations = [{"t": 0, "op": "write", "path": "../escaped"}]
    (tmp_path / "replay.json").write_text(json.dumps(operations))

    result = CliRunner().invoke(hangwatch, ["replay", str(tmp_path)])

    assert 2 == result.exit_code
    assert not (tmp_path.parent / "escaped").exists()


def test_a_log_of_several_hours_of_eight_servers_is_replayed_whole(tmp_path: Path):
    text = [
        f"(run_lmdeploy_server_wrapper pid={40000 + i}) " + line(at + i)
        for at in range(0, 4 * 3600, 10)
        for i in range(8)
    ]
    (tmp_path / "driver.log").write_text("".join(text))

    result = run(tmp_path, 4 * 3600 + 600)

    assert 4 * 360 * 8 == result.heartbeats
    assert 8 == len(result.incidents[0].members)


# --- the verb ------------------------------------------------------------------------------------


def test_an_alarm_at_the_end_exits_with_three_and_one_before_it_does_not(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("".join(line(at, tps=4000.0 + at) for at in range(0, 100, 10)))
    verb = ["replay", str(log), "--tz", "+00:00"]

    assert 3 == CliRunner().invoke(hangwatch, [*verb, "--until", "2026-03-04T10:10:00"]).exit_code
    assert 0 == CliRunner().invoke(hangwatch, verb).exit_code


def test_a_log_that_ends_says_what_a_longer_silence_would_have_meant(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("".join(line(at) for at in range(0, 100, 10)))

    output = CliRunner().invoke(hangwatch, ["replay", str(log), "--tz", "+00:00"]).output

    assert "DP0 would be suspected_hang at 2026-03-04T10:03:30+00:00" in output


def test_servers_that_change_alike_in_one_second_share_a_line(tmp_path: Path):
    for i in range(4):
        text = "".join(line(at) for at in range(0, 100, 10))
        (tmp_path / f"worker-{i}a-01000000-4021{i}.out").write_text(text)
    arguments = ["replay", str(tmp_path), "--tz", "+00:00", "--until", "2026-03-04T10:10:00"]

    lines = CliRunner().invoke(hangwatch, arguments).output.splitlines()

    assert "4 instances: 40210, 40211, 40212, …" in lines[1]
    assert "ok → suspected_hang" in lines[1]
    assert any("40210's last heartbeat had" in told for told in lines)


def test_the_document_has_what_the_contract_promises():
    (case,) = CASES.glob("028-*")
    until = "2026-03-08T07:10:11+08:00"

    result = CliRunner().invoke(hangwatch, ["replay", str(case), "--json", "--until", until])
    document = json.loads(result.output)

    assert "hangwatch.replay/1" == document["schema"]
    assert {"heartbeats", "transitions", "incidents", "verdict", "cause", "instances"} <= set(
        document
    )
    (incident,) = document["incidents"]
    assert ("hung", "one-instance-silent") == (incident["verdict"], incident["cause"])
    assert "2026-03-08T07:03:39+08:00" == incident["since"]
    assert "2026-03-08T07:05:39+08:00" == incident["detected_at"]
    assert ["51039"] == incident["instances"]
    assert all(
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?[+-]\d\d:\d\d", entry["since"])
        for entry in document["instances"]
    )


def test_naive_stamps_take_the_offset_of_the_evaluation_time(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("".join(line(at) for at in range(0, 100, 10)))
    until = (START + timedelta(seconds=100)).replace(tzinfo=timezone(timedelta(hours=8)))

    arguments = ["replay", str(log), "--json", "--now", until.isoformat(), "--tz", "-05:00"]
    document = json.loads(CliRunner().invoke(hangwatch, arguments).output)

    assert "2026-03-04T10:01:30+08:00" == document["instances"][0]["last_heartbeat"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing.log"], 2, "does not exist"),
        (["empty"], 2, "no log was found"),
        (["log.txt", "--tz", "east"], 2, "is no offset"),
        (["log.txt", "--until", "noon"], 2, "is no time"),
        (["log.txt", "--profile", "nobody"], 2, "there is no profile"),
        (["bad"], 2, "no list of file operations"),
        (["steps"], 2, "no number of seconds"),
    ],
)
def test_bad_input_gets_one_sentence_with_its_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.txt").write_text(line(0))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "replay.json").write_text("[1, 2]")
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "log.txt").write_text(line(0))
    (tmp_path / "steps" / "arrival.txt").write_text("soon\n")
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(hangwatch, ["replay", *arguments])

    assert code == result.exit_code
    assert words in result.output
    assert "Traceback" not in result.output


def test_pods_in_one_stream_of_kubectl_are_several_instances():
    line = (
        "[pod/rollout-{pod}/engine] 2026-03-04T05:{minute:02}:00.1Z (APIServer pid=1) INFO 03-04 "
        "05:{minute:02}:00 [loggers.py:271] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg "
        "generation throughput: 2.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs\n"
    )
    log = "".join(line.format(pod=pod, minute=minute) for minute in range(3) for pod in "ab")

    material = logmaterial.of({"pods.log": log.encode()}, profiles=profiles().values(), zone=UTC)
    found = heard(material, profiles=profiles())

    assert ["rollout-a/Engine 000", "rollout-b/Engine 000"] == [k.name for k in found.instances]
    assert "vllm" == found.engine
