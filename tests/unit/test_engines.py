"""What the lines of vLLM and SGLang say, and which engine a log is of."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from hangwatch.core import loose
from hangwatch.core.endpoints import health_of_answer
from hangwatch.core.parsing import engine_of, parse
from hangwatch.model.heartbeat import Heartbeat, Line, SignalSeen
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import BeatSeen, SignalArrived
from hangwatch.model.profile import HealthMeaning, Signal
from hangwatch.model.time import Instant
from hangwatch.registry import profiles

ENGINES = profiles()
NEAR = datetime(2026, 6, 5, tzinfo=UTC)
V1 = (
    b"(APIServer pid=881) INFO 06-05 04:10:08 [loggers.py:271] Engine 000: Avg prompt throughput: "
    b"205.1 tokens/s, Avg generation throughput: 265.3 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
    b"GPU KV cache usage: 22.3%, Prefix cache hit rate: 64.1%"
)


def of(text: bytes, *, pid: int | None = None, known: str = "") -> BeatSeen | SignalArrived | None:
    line = Line(source="log", text=text, at=Instant(7.0))
    found = parse(line, ENGINES.values(), known=known, pid=pid, zone=UTC, near=NEAR)
    return found[0] if found else None


def beat(text: bytes, *, pid: int | None = None) -> Heartbeat:
    found = of(text, pid=pid)
    assert isinstance(found, BeatSeen)
    return found.beat


def signal(text: bytes, *, known: str = "") -> SignalSeen:
    found = of(text, known=known)
    assert isinstance(found, SignalArrived)
    return found.signal


def test_vllms_line_gives_all_its_numbers_and_the_year_that_it_lacks():
    found = beat(V1)

    assert ("vllm", 205.1, 265.3, 3, 2, 22.3, 64.1) == (
        found.profile,
        found.in_tps,
        found.out_tps,
        found.running,
        found.waiting,
        found.kv_cache_pct,
        found.prefix_hit_pct,
    )
    assert datetime(2026, 6, 5, 4, 10, 8, tzinfo=UTC) == found.printed


def test_vllms_own_prefix_is_no_ray_and_its_pid_only_a_claim():
    found = beat(V1)

    assert InstanceKey(pid=881, tag="Engine 000") == found.instance
    assert (False, True) == (found.relayed, found.claimed)


def test_whoever_is_known_to_write_the_log_goes_before_what_vllm_calls_itself():
    found = beat(V1, pid=40211)

    assert (InstanceKey(pid=40211, tag="Engine 000"), False) == (found.instance, found.claimed)


def test_process_1_of_a_container_names_nobody():
    found = beat(V1.replace(b"pid=881", b"pid=1"))

    assert "Engine 000" == found.instance.name


def test_behind_rays_prefix_the_actor_is_the_writer():
    found = beat(b"(vLLMHttpServer pid=2041, ip=192.0.2.7) " + V1)

    assert InstanceKey(host="192.0.2.7", pid=2041, tag="Engine 000") == found.instance
    assert found.relayed


def test_what_is_swapped_out_of_vllms_first_engine_is_in_flight():
    found = beat(
        b"INFO 06-05 04:10:08 metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg "
        b"generation throughput: 0.0 tokens/s, Running: 0 reqs, Swapped: 2 reqs, Pending: 0 reqs, "
        b"GPU KV cache usage: 99.3%, CPU KV cache usage: 50.0%."
    )

    assert ("vllm", 2) == (found.profile, found.in_flight)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ((b"(EngineCore pid=66) INFO 04-03 20:00:00 [gpu_model_runner.py:3219] Starting to load "
         b"model /models/big-moe..."), Signal.STARTING),
        (b"Loading safetensors checkpoint shards:  70% Completed | 21/30 [06:40<02:51, 19.0s/it]",
         Signal.STARTING),
        ((b"DEBUG 05-16 13:12:16 [utils.py:741] Waiting for 1 local, 0 remote core engine proc(s) "
         b"to start."), Signal.STARTING),
        (b"(APIServer pid=1) INFO:     Application startup complete.", Signal.READY),
        (b'(APIServer pid=1) INFO:     192.0.2.7:1 - "POST /sleep?level=2 HTTP/1.1" 200 OK',
         Signal.SLEEP),
        (b'INFO:     192.0.2.7:1 - "POST /pause?mode=keep HTTP/1.1" 200 OK', Signal.SLEEP),
        (b'INFO:     192.0.2.7:1 - "POST /resume HTTP/1.1" 200 OK', Signal.WAKE),
        ((b"(EngineCore_DP0 pid=9) INFO 06-05 04:10:08 [executor_base.py:210] It took 1.254 "
         b"seconds to fall asleep."), Signal.SLEEP),
        (b'INFO:     192.0.2.7:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK', Signal.COMPLETED),
        ((b"(APIServer pid=1) ERROR 10-20 03:20:50 [async_llm.py:485] vllm.v1.engine.exceptions."
         b"EngineDeadError: EngineCore encountered an issue."), Signal.ENGINE_DEAD),
        ((b"ERROR 12-01 23:08:02 [core_client.py:564] Engine core proc EngineCore_DP0 died "
         b"unexpectedly, shutting down client."), Signal.ENGINE_DEAD),
        ((b"(EngineCore_DP0 pid=9) ERROR 06-05 04:10:08 [ray_executor_v2.py:210] RayWorkerProc "
         b"rank=[0, 3] died unexpectedly, shutting down executor."), Signal.ENGINE_DEAD),
        (b"(APIServer pid=1) INFO:     Shutting down", Signal.STOPPED),
    ],
)  # fmt: skip
def test_vllms_other_lines_are_understood(line: bytes, wanted: Signal):
    assert wanted == signal(line, known="vllm").signal


def test_vllm_wakes_part_by_part():
    found = signal(
        b"INFO 06-05 04:10:08 [executor_base.py:226] It took 0.779162 seconds to wake up tags "
        b"['weights'].",
        known="vllm",
    )

    assert (Signal.WAKE, ("weights",)) == (found.signal, found.parts)


def test_the_notice_about_shared_memory_is_no_news():
    notice = (
        b"(EngineCore pid=902) INFO 07-02 22:04:54 [shm_broadcast.py:705] No available shared "
        b"memory broadcast block found in 60 seconds. This typically happens when some processes"
    )

    assert of(notice) is None


def test_what_the_engine_core_says_concerns_the_server_of_its_log():
    found = signal(
        b"(EngineCore_DP0 pid=902) ERROR 07-02 22:04:54 [core.py:710] EngineCore encountered a "
        b"fatal error."
    )

    assert InstanceKey() == found.instance


def test_sglangs_decode_line_gives_its_numbers():
    found = beat(
        b"[2026-07-09 03:20:00 DP1 TP4] Decode batch, #running-req: 9, #token: 91000, token usage: "
        b"0.41, cuda graph: True, gen throughput (token/s): 302.92, #queue-req: 1, "
    )

    assert ("sglang", "DP1 TP4", 9, 1, 302.92) == (
        found.profile,
        found.instance.tag,
        found.running,
        found.waiting,
        found.tps,
    )


def test_what_waits_for_memory_or_cache_in_a_decode_engine_of_sglang_is_in_flight():
    found = beat(
        b"[2026-08-21 19:02:30 TP0] Decode batch, #running-req: 0, #token: 0, token usage: 0.00,"
        b" pre-allocated usage: 0.00, #prealloc-req: 3, #transfer-req: 1, #retracted-req: 2,"
        b" cuda graph: True, gen throughput (token/s): 0.00, #queue-req: 0,"
    )

    assert (0, 4) == (found.running, found.in_flight)


def test_the_first_prefill_of_sglang_is_in_flight_although_nothing_runs_yet():
    found = beat(
        b"[2026-08-12 08:00:05 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: "
        b"0, token usage: 0.00, #running-req: 0, #queue-req: 0, input throughput (token/s): 0.00"
    )

    assert (1, None) == (found.in_flight, found.tps)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"[2026-03-10 06:00:00 TP0] Load weight begin. avail mem=138.21 GB", Signal.STARTING),
        (b"[2026-03-10 06:00:40] Capture cuda graph begin. This can take up to several minutes.",
         Signal.STARTING),
        (b"DeepGEMM warmup:  90%|#  | 14800/16384 [12:58<12:00, 19.01it/s]", Signal.STARTING),
        (b"[2026-08-12 08:00:02] The server is fired up and ready to roll!", Signal.READY),
        ((b'[2026-08-12 08:00:02] INFO:     192.0.2.7:1 - "POST /release_memory_occupation '
         b'HTTP/1.1" 200 OK'), Signal.SLEEP),
        ((b'[2026-08-12 08:00:02] INFO:     192.0.2.7:1 - "POST /resume_memory_occupation '
         b'HTTP/1.1" 200 OK'), Signal.WAKE),
        (b'INFO:     192.0.2.7:1 - "POST /update_weights_from_tensor HTTP/1.1" 200 OK',
         Signal.UPDATED),
        (b"[2026-03-14 04:59:11 TP0] Scheduler hit an exception: Traceback (most recent call",
         Signal.ENGINE_DEAD),
        ((b"[2026-03-14 04:59:11] SIGQUIT received. signum=None, frame=None. It usually means one "
         b"child failed."), Signal.ENGINE_DEAD),
    ],
)  # fmt: skip
def test_sglangs_other_lines_are_understood(line: bytes, wanted: Signal):
    assert wanted == signal(line, known="sglang").signal


def test_a_line_that_several_engines_print_tells_none_of_them():
    line = b"INFO:     Application startup complete."

    assert ("", "vllm") == (signal(line).profile, signal(line, known="vllm").profile)


def test_a_beat_tells_the_engine_of_its_log():
    found = of(V1)
    assert found is not None

    assert "vllm" == engine_of((found,))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"metrics.prom": b'sglang:num_running_reqs{model_name="x"} 2.0'}, "sglang"),
        ({"procs.json": b'[{"pid": 7, "title": "VLLM::EngineCore_DP0"}]'}, "vllm"),
        ({"procs.json": b'[{"pid": 7, "title": "ZMQMPEngine"}]'}, "lmdeploy"),
        ({"health.json": b"{}"}, "lmdeploy"),
    ],
)
def test_without_a_beat_metrics_and_processes_tell_the_engine(files: dict[str, bytes], wanted: str):
    assert wanted == loose.engine(files, ENGINES).name


def test_what_the_logs_say_goes_before_what_lies_beside_them():
    files = {"metrics.prom": b"sglang:num_running_reqs 2.0"}

    assert "vllm" == loose.engine(files, ENGINES, heard="vllm").name


@pytest.mark.parametrize(
    ("http", "body", "meaning"),
    [
        (200, b"", HealthMeaning.HEALTHY),
        (503, b"", HealthMeaning.DEAD),
        (500, b"Internal Server Error", HealthMeaning.DEAD),
        (503, b"Service Unavailable", HealthMeaning.UNHEALTHY),
    ],
)
def test_vllms_health_fails_only_once_its_engine_is_dead(
    http: int, body: bytes, meaning: HealthMeaning
):
    found = health_of_answer(http, body, ENGINES["vllm"], at=Instant(0.0))

    assert meaning is found.meaning


def test_sglang_is_never_asked_for_a_token():
    assert not {"/health", "/health_generate"} & set(ENGINES["sglang"].endpoints.values())


@pytest.mark.parametrize(
    ("engine", "command", "tokens"),
    [
        ("lmdeploy", "lmdeploy serve api_server /m --session-len 65536", "65536"),
        ("vllm", "vllm serve /m --max-model-len=32768 --port 1", "32768"),
        ("sglang", "python -m sglang.launch_server --context-length 16384", "16384"),
        ("vllm", "vllm serve /m --max-model-len 32k", None),
    ],
)
def test_the_context_length_is_read_from_the_command_line(
    engine: str, command: str, tokens: str | None
):
    pattern = ENGINES[engine].context
    assert pattern is not None

    found = pattern.search(command)

    assert tokens == (found and found["tokens"])
