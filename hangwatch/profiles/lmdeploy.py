"""LMDeploy: its heartbeat in every format since 0.9.2, its health, its metrics, its processes."""

from __future__ import annotations

import re
from typing import Final

from hangwatch.model.identity import Role
from hangwatch.model.profile import (
    EngineProfile,
    HealthMeaning,
    HealthPattern,
    MetricNames,
    RolePattern,
    Signal,
    SignalPattern,
)

_NUM: Final = rb"(?:-?\d+(?:\.\d+)?|nan|-?inf)"
_INT: Final = rb"-?\d+"
_HEAD: Final = rb"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? (?P<tag>[^\]\n]{1,40})\] "
_THR: Final = rb"Avg thr \(in/out\): (?P<in_tps>%b) / (?P<out_tps>%b) tokens/s" % (_NUM, _NUM)
# The tail is optional piece by piece: a format that drifts costs the number that drifted.
_ENGINE: Final = (
    rb"(?:.*?Engine \(running/waiting\): (?P<running>%b) / (?P<waiting>%b))?"
    rb"(?:.*?KV cache: (?P<kv_cache_pct>%b)%%)?" % (_INT, _INT, _NUM)
)
_EXTRAS: Final = (
    rb"(?:.*?Prefix cache hit rate: (?P<prefix_hit_pct>%b)%%)?"
    rb"(?:.*?Draft acceptance rate: (?P<draft_acceptance_pct>%b)%%)?" % (_NUM, _NUM)
)


def _access(method: bytes, path: bytes) -> re.Pattern[bytes]:
    """Return a pattern for uvicorn's access line of a request that succeeded."""
    return re.compile(rb'"' + method + rb" " + path + rb' HTTP/[\d.]+" 2\d\d')


PROFILE: Final = EngineProfile(
    name="lmdeploy",
    title="LMDeploy",
    # Liveness is loose: the format changed five times between 2025-11 and 2026-03.
    alive=re.compile(_HEAD + rb"Avg (?:thr|prompt throughput|generation throughput)\b"),
    needles=(b"Avg thr", b"Avg prompt throughput", b"Avg generation throughput"),
    families=(
        # C: 0.12.3 and later
        re.compile(
            _THR
            + rb", Server \(succeeded/failed/routed/waiting\): (?P<finished>%b) / (?P<failed>%b)"
            rb" / (?P<routed>%b) / (?P<api_waiting>%b)"
            % (_INT, _INT, _INT, _INT)
            + _ENGINE
            + _EXTRAS
        ),
        # B: 0.12.1 and 0.12.2
        re.compile(
            _THR + rb", API server \(completed/routed/waiting\): (?P<finished>%b)"
            rb" / (?P<routed>%b) / (?P<api_waiting>%b)" % (_INT, _INT, _INT) + _ENGINE + _EXTRAS
        ),
        # A0 to A4: 0.9.2 to 0.12.0; "Unfinished" counts what the server has not answered yet
        re.compile(
            rb"Avg prompt throughput: (?P<in_tps>%b) tokens/s"
            rb"(?:, Avg generation throughput: (?P<out_tps>%b) tokens/s)?"
            rb"(?:, Finished: (?P<finished>%b) reqs)?(?:, Unfinished: (?P<routed>%b) reqs)?"
            rb"(?:.*?Running: (?P<running>%b) reqs)?(?:.*?Waiting: (?P<waiting>%b) reqs)?"
            rb"(?:.*?GPU KV cache usage: (?P<kv_cache_pct>%b)%%)?"
            % (_NUM, _NUM, _INT, _INT, _INT, _INT, _NUM)
            + _EXTRAS
        ),
        # a format to come, as far as it keeps today's words
        re.compile(_THR + _ENGINE + _EXTRAS),
    ),
    stamp_format="%Y-%m-%d %H:%M:%S",
    interval=10.0,
    silent_when_idle=True,
    parts=("weights", "kv_cache"),
    signals=(
        SignalPattern(
            signal=Signal.COMPLETED,
            pattern=_access(
                rb"POST", rb"/v1/(?:(?:chat/)?completions|chat/interactive|responses)(?:\?[^ \"]*)?"
            ),
            needle=b'"POST /v1/',
            source="uvicorn's access log; serve/openai/endpoints, router.post",
        ),
        SignalPattern(
            signal=Signal.COMPLETED,
            pattern=_access(rb"POST", rb"/generate"),
            needle=b'"POST /generate',
            source="serve/openai/endpoints/generate.py",
        ),
        SignalPattern(
            signal=Signal.SLEEP,
            pattern=_access(rb"POST", rb"/sleep(?:\?[^ \"]*)?"),
            needle=b'"POST /sleep',
            source="serve/openai/endpoints/management.py, sleep",
        ),
        SignalPattern(
            signal=Signal.WAKE,
            pattern=_access(rb"POST", rb"/wakeup(?:\?(?P<part>[^ \"]*))?"),
            needle=b'"POST /wakeup',
            source="serve/openai/endpoints/management.py, wakeup",
        ),
        SignalPattern(
            signal=Signal.UPDATED,
            pattern=_access(rb"POST", rb"/update_weights[^ \"]*"),
            needle=b'"POST /update_weights',
            source="serve/openai/endpoints/management.py, update_weights",
        ),
        SignalPattern(
            signal=Signal.ABORTED,
            pattern=_access(rb"POST", rb"/abort_request(?:\?[^ \"]*)?"),
            needle=b'"POST /abort_request',
            source="serve/openai/endpoints/management.py, abort_request",
        ),
        SignalPattern(
            signal=Signal.BEAT_LOST,
            pattern=re.compile(rb"_force_log\(\) done|, in _force_log\b"),
            needle=b"_force_log",
            source="serve/openai/api_server.py, lifespan_handler: the loop has no try/except",
        ),
        SignalPattern(
            signal=Signal.ENGINE_DEAD,
            pattern=re.compile(rb"Task <[^<>\n]+> failed\b|EngineMainLoop failed\b"),
            needle=b" failed",
            source="pytorch/engine/request.py and model_agent/agent.py, task call-backs",
        ),
        SignalPattern(
            signal=Signal.ENGINE_DEAD,
            pattern=re.compile(
                rb"engine loop task has stopped|engine main loop has stopped"
                rb"|engine process is not alive|engine request loop is not alive"
            ),
            needle=b"engine ",
            source="pytorch/engine/engine.py, get_health_status; mp_engine/zmq_rpc.py",
        ),
        SignalPattern(
            signal=Signal.READY,
            pattern=re.compile(rb"^HINT:\s+Please open"),
            needle=b"HINT:",
            source="serve/openai/api_server.py, printed right before uvicorn.run",
        ),
        SignalPattern(
            signal=Signal.READY,
            pattern=re.compile(rb"Application startup complete"),
            needle=b"Application startup complete",
            source="uvicorn/lifespan/on.py",
        ),
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"Started server process \[\d+\]"),
            needle=b"Started server process",
            source="uvicorn/server.py",
        ),
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"Loading weights from \w+"),
            needle=b"Loading weights from",
            source="pytorch/weight_loader/model_weight_loader.py, the progress bar's title",
        ),
        SignalPattern(
            signal=Signal.STOPPED,
            pattern=re.compile(rb"INFO: +Shutting down"),
            needle=b" Shutting down",
            source="uvicorn/server.py",
        ),
        SignalPattern(
            signal=Signal.STOPPED,
            pattern=re.compile(rb"Finished server process \[\d+\]"),
            needle=b"Finished server process",
            source="uvicorn/server.py",
        ),
    ),
    endpoints={"health": "/health", "metrics": "/metrics", "sleeping": "/is_sleeping"},
    health=(
        HealthPattern(
            meaning=HealthMeaning.LOOP_BLOCKED,
            pattern=re.compile(r"health probe timed out|No successful health probe"),
            source="serve/core/health.py, _probe_once_unlocked and snapshot",
        ),
        HealthPattern(
            meaning=HealthMeaning.NO_PROGRESS,
            pattern=re.compile(r"scheduler_tick has not advanced"),
            source="serve/core/async_engine.py, health_probe",
        ),
        HealthPattern(
            meaning=HealthMeaning.LOST_REQUEST,
            pattern=re.compile(r"no active or waiting sequences"),
            source="serve/core/async_engine.py, health_probe",
        ),
        HealthPattern(
            meaning=HealthMeaning.DEAD,
            pattern=re.compile(
                r"is not alive|main loop has stopped|loop task has stopped"
                r"|health probe failed: .*(?:ActorDied|ActorUnavailable|RayActorError|actor died)"
            ),
            source="pytorch/engine/engine.py, get_health_status; mp_engine/zmq_rpc.py",
        ),
        HealthPattern(
            meaning=HealthMeaning.SLEEPING,
            pattern=re.compile(r"^sleeping\b|Engine is sleeping"),
            source="serve/core/health.py",
        ),
        HealthPattern(
            meaning=HealthMeaning.STARTING,
            pattern=re.compile(r"^initializing\b|health monitor is starting"),
            source="serve/core/health.py",
        ),
        HealthPattern(
            meaning=HealthMeaning.UNHEALTHY,
            pattern=re.compile(
                r"^unhealthy\b|health probe failed|not initialized|did not complete an initial"
            ),
            source="serve/core/health.py",
        ),
        HealthPattern(
            meaning=HealthMeaning.HEALTHY,
            pattern=re.compile(r"^healthy\b|Engine is healthy|^(?::\s*)?$"),
            source="serve/core/async_engine.py; before 0.14 the answer has no body",
        ),
    ),
    # 102 s: unhealthy after 90 s without a tick (H1), looked at every 12 s; H2 shows after 22 s.
    healthy_is_proof_after=102.0,
    metrics=MetricNames(
        tokens=("lmdeploy:prompt_tokens_total", "lmdeploy:generation_tokens_total"),
        running=("lmdeploy:num_requests_running",),
        waiting=("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting"),
        routed=("lmdeploy:num_api_requests_routed", "lmdeploy:num_requests_unfinished"),
        label="engine",
    ),
    roles=(
        RolePattern(
            role=Role.API_SERVER,
            pattern=re.compile(
                r"ray::run_lmdeploy_server_wrapper|lmdeploy\b.*\bserve\b.*api_server"
            ),
        ),
        RolePattern(
            role=Role.ENGINE,
            pattern=re.compile(r"^ZMQMPEngine|ray::RayEngineWorker|mp_engine_proc"),
        ),
        RolePattern(
            role=Role.ENGINE_WORKER, pattern=re.compile(r"ray::RayWorkerWrapper|ExecutorProc-\d+")
        ),
        RolePattern(role=Role.STORE, pattern=re.compile(r"ray::SharedStore|ray::TraceStore")),
        RolePattern(role=Role.SESSION_SERVER, pattern=re.compile(r"ray::SessionServer")),
        RolePattern(
            role=Role.RAY_SYSTEM,
            pattern=re.compile(r"\braylet\b|gcs_server|log_monitor\.py|dashboard|monitor\.py"),
        ),
        RolePattern(role=Role.RAY_WORKER, pattern=re.compile(r"^ray::")),
        RolePattern(role=Role.DRIVER, pattern=re.compile(r"xtuner/v1/train/cli/rl\.py|\brl\.py\b")),
        RolePattern(
            role=Role.HELPER,
            pattern=re.compile(r"multiprocessing\.(?:resource_tracker|forkserver)|SyncManager"),
        ),
    ),
    boring_threads=(
        re.compile(r"^ZMQbg/"),
        re.compile(r"^pt_(?:nccl|autograd|gloo)"),
        re.compile(r"^NCCL "),
        re.compile(r"^tqdm_monitor|^Thread-\d+ \(tqdm"),
        re.compile(r"^ray_(?:import|listen|print)|^raylet_client|_RayGrpc|^grpc_"),
    ),
    tracker="InternLM/lmdeploy",
    source=(
        "lmdeploy/metrics/loggers.py, LoggingStatLogger.log; "
        "serve/openai/api_server.py, lifespan_handler"
    ),
)
