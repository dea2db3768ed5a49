"""Files to a dossier: one parser for bundles and for loose evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from hangwatch.core.loose import dossier, family, redacted, snapshots
from hangwatch.core.redaction import Redactor
from hangwatch.model.dossier import Citation, Dossier, ProcessRecord
from hangwatch.model.identity import InstanceKey, Role
from hangwatch.model.observation import CountersSeen, HealthSeen, ProcessesSeen, StacksSeen
from hangwatch.model.policy import Policy
from hangwatch.model.profile import HealthMeaning
from hangwatch.model.replay import ReplayResult
from hangwatch.model.time import Epoch, Instant
from hangwatch.model.verdict import Confidence, Hung
from hangwatch.model.vitals import Motion
from hangwatch.profiles.lmdeploy import PROFILE

AT = Instant(500.0)
EPOCH = Epoch(boot_id="", at=AT, wall=datetime(2026, 3, 4, 5, 50, tzinfo=UTC))
ONE = InstanceKey(tag="DP0")
A, B = InstanceKey(pid=10, tag="DP0"), InstanceKey(pid=20, tag="DP0")
BLOCKED = json.dumps(
    {"http": 503, "status": "unhealthy", "message": "Backend health probe timed out after 10.0s."}
).encode()


def procs(*rows: Mapping[str, object]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def result(**changes: object) -> ReplayResult:
    verdict = Hung(since=Instant(1.0), cause="x", confidence=Confidence.HIGH)
    values: dict[str, object] = {
        "heartbeats": 1,
        "instances": (),
        "transitions": (),
        "incidents": (),
        "verdict": verdict,
        "until": AT,
        "epoch": EPOCH,
        "policy": Policy(),
    }
    return ReplayResult(**{**values, **changes})  # type: ignore[arg-type]


def read(files: Mapping[str, bytes]) -> Dossier:
    return dossier(files, origin="test", result=result(), profile=PROFILE)


def seen(files: Mapping[str, bytes], *keys: InstanceKey) -> tuple[object, ...]:
    return snapshots(files, profile=PROFILE, at=AT, instances=keys)


def test_a_process_is_cited_by_its_line():
    [row] = read({"procs.json": procs({"pid": 7, "role": "engine", "state": "D"})}).processes

    assert Citation(path="procs.json", line=2, text="pid 7, engine, state D") == row.citation


def test_unknown_keys_are_kept():
    [row] = read({"procs.json": procs({"pid": 7, "read_bytes_per_s": 3})}).processes

    assert {"read_bytes_per_s": 3} == row.extra


def test_the_last_sample_is_the_one_that_counts():
    found = read(
        {
            "procs.json": procs({"pid": 7, "state": "R"}),
            "procs2.json": procs({"pid": 7, "state": "S"}),
        }
    )

    assert ["S"] == [row.state for row in found.processes]


def test_a_gpu_table_is_read_with_its_units():
    table = (
        b"index, name, utilization.gpu [%], utilization.memory [%], memory.used [MiB], "
        b"memory.total [MiB], power.draw [W], power.limit [W], clocks.sm [MHz], "
        b"ecc.errors.uncorrected.volatile.total, pstate\n"
        b"3, NVIDIA H200, 100 %, 0 %, 121034 MiB, 143771 MiB, 131.20 W, 700.00 W, 1980 MHz, "
        b"[N/A], P0\n"
    )

    [gpu] = read({"gpu.csv": table}).gpus

    assert (3, "NVIDIA H200", 100.0, 0.0, 131.2) == (
        gpu.index,
        gpu.name,
        gpu.utilization_pct,
        gpu.memory_activity_pct,
        gpu.power_w,
    )
    assert gpu.ecc_uncorrected is None


def test_metrics_may_be_a_list_of_lines():
    listed = json.dumps(['lmdeploy:num_requests_running{engine="0"} 5.0']).encode()

    [sample] = read({"metrics.prom": listed}).metrics

    assert ("lmdeploy:num_requests_running", 5.0) == (sample.name, sample.value)


def test_a_file_that_is_cut_short_gives_what_is_whole_and_says_so():
    found = read({"procs.json": procs({"pid": 1}, {"pid": 2})[:-9]})

    assert [1] == [row.pid for row in found.processes]
    assert "procs.json is cut short or not JSON; what is whole was read" in found.problems


def test_nonsense_is_a_problem_and_no_error():
    found = read({"threads.json": b"oops", "gpu.csv": b"a,b\n1,2\n", "health.json": b"\xff"})

    assert 3 <= len(found.problems)


def test_the_folder_of_a_process_says_whose_its_files_are():
    found = seen({"processes/api_server-20/health.json": BLOCKED}, A, B)

    assert [(B, HealthMeaning.LOOP_BLOCKED)] == [
        (item.instance, item.health.meaning) for item in found if isinstance(item, HealthSeen)
    ]


def test_a_health_answer_without_owner_belongs_to_the_only_instance():
    [found] = seen({"health.json": BLOCKED}, ONE)

    assert isinstance(found, HealthSeen)
    assert ONE == found.instance


def test_a_health_answer_without_owner_is_nobodys_among_several_servers():
    assert () == seen({"health.json": BLOCKED}, A, B)


def test_counters_go_to_the_engine_of_their_label():
    text = b'lmdeploy:generation_tokens_total{engine="0"} 5\nlmdeploy:generation_tokens_total{engine="1"} 9\n'  # noqa: E501

    found = seen({"metrics.prom": text}, InstanceKey(tag="DP0"), InstanceKey(tag="DP1"))

    assert [("DP0", 5.0), ("DP1", 9.0)] == [
        (item.instance.tag, item.counters.tokens)
        for item in found
        if isinstance(item, CountersSeen)
    ]


def test_a_server_that_is_missing_among_listed_servers_is_gone():
    found = seen({"procs.json": procs({"pid": 20, "state": "S", "role": "ray_worker"})}, A, B)

    assert {A: [""], B: ["S"]} == {
        item.instance: [vital.state for vital in item.processes]
        for item in found
        if isinstance(item, ProcessesSeen)
    }


def test_a_table_without_servers_says_nothing_of_them():
    found = seen({"procs.json": procs({"pid": 99, "state": "S", "role": "engine_worker"})}, A, B)

    assert () == found


def test_stacks_of_a_child_belong_to_its_server():
    thread = {"pid": 21, "os_thread_id": 21, "thread_name": "MainThread", "frames": [
        {"name": "stuck", "filename": "/x/app.py", "line": 3},
        {"name": "_run_once", "filename": "/usr/lib/python3.12/asyncio/base_events.py", "line": 1},
    ]}  # fmt: skip
    dump = json.dumps([thread]).encode()

    found = seen(
        {
            "procs.json": procs({"pid": 20}, {"pid": 21, "ppid": 20}),
            "threads.json": dump,
            "threads2.json": dump,
        },
        A,
        B,
    )

    assert [(B, Motion.FROZEN, 21)] == [
        (item.instance, item.stacks.motion, item.stacks.pid)
        for item in found
        if isinstance(item, StacksSeen)
    ]


def test_a_family_is_what_says_so_and_its_descendants():
    rows = [
        ProcessRecord(pid=1, extra={"instance": "10"}),
        ProcessRecord(pid=2, ppid=1),
        ProcessRecord(pid=3, ppid=2),
        ProcessRecord(pid=4, ppid=9),
    ]

    assert [1, 2, 3] == [row.pid for row in family(10, "10", rows)]


def test_loose_evidence_is_redacted_before_it_is_parsed():
    files = {
        "procs.json": procs({"pid": 7, "cmdline": "serve --api-keys plainkey"}),
        "core.7": b"\x7fELF",
    }

    kept, problems = redacted(files, Redactor())

    assert b"plainkey" not in kept["procs.json"]
    assert "core.7" not in kept
    assert () == problems


def test_what_the_detector_quotes_is_redacted_too():
    verdict = Hung(
        since=Instant(1.0),
        cause="x",
        confidence=Confidence.HIGH,
        because=("10.1.2.3 said password=hunter22",),
    )

    found = dossier(
        {}, origin="t", result=result(verdict=verdict), profile=PROFILE, redactor=Redactor()
    )

    assert ("address-1 said password=[redacted]",) == found.verdict.because


def test_words_of_other_tools_are_roles_too():
    from hangwatch.core.loose import role_of

    assert [Role.API_SERVER, Role.ENGINE, Role.ENGINE_WORKER, Role.OTHER] == [
        role_of(word) for word in ("api_server+engine", "engine_core", "tp_worker", "ray_actor")
    ]
