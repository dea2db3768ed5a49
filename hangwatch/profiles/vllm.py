"""vLLM: its statistics line of both engines, its health, its metrics, its processes."""

from __future__ import annotations

import re
from typing import Final

from hangwatch.core.serving import (
    BORING_THREADS,
    CHECKPOINT_SHARDS,
    CLIENT_TROUBLE,
    FORCE_LOG,
    INTEGER,
    LIFESPAN,
    NUMBER,
    posts,
    says,
)
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

_DEVELOPMENT: Final = "entrypoints/serve/dev/sleep/api_router.py and rlhf/api_router.py"

PROFILE: Final = EngineProfile(
    name="vllm",
    title="vLLM",
    # V1 names the engine, V0 (until 0.10) has nothing between its file and the numbers. Neither is
    # LMDeploy's oldest format, which has its tag in brackets there.
    alive=re.compile(
        rb"(?:(?P<tag>Engine \d{1,4}|\d{1,4} Engines? Aggregated): |\.py:\d+\] )"
        rb"Avg (?:prompt|generation) throughput\b"
    ),
    needles=(b"Avg prompt throughput", b"Avg generation throughput"),
    families=(
        # "Pending" and "Swapped" are V0's; what is swapped out is in flight, too.
        re.compile(
            rb"Avg prompt throughput: (?P<in_tps>%b) tokens/s"
            rb"(?:, Avg generation throughput: (?P<out_tps>%b) tokens/s)?"
            rb"(?:.*?Running: (?P<running>%b) reqs)?"
            rb"(?:.*?Swapped: (?P<routed>%b) reqs)?"
            rb"(?:.*?(?:Waiting|Pending): (?P<waiting>%b) reqs)?"
            rb"(?:.*?GPU KV cache usage: (?P<kv_cache_pct>%b)%%)?"
            rb"(?:.*?Prefix cache hit rate: (?P<prefix_hit_pct>%b)%%)?"
            % (NUMBER, NUMBER, INTEGER, INTEGER, INTEGER, NUMBER, NUMBER)
        ),
        re.compile(rb"Avg generation throughput: (?P<out_tps>%b) tokens/s" % NUMBER),
    ),
    # VLLM_LOG_STATS_INTERVAL; V0 and V1 before 0.8.3 print every 5 s.
    interval=10.0,
    says_idle=True,
    prefix=re.compile(
        r"(?P<server>(?:APIServer|ApiServer)(?:_\d+)?)|EngineCore\S*|VllmWorker\S*(?: \S+)?"
        r"|Worker\S*|DPCoordinator\S*"
    ),
    parts=("weights", "kv_cache"),
    signals=(
        *posts(
            Signal.COMPLETED,
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/embeddings",
            "/v1/score",
            "/v1/rerank",
            "/v1/audio/",
            "/inference/v1/generate",
            "/generate",
            source="uvicorn's access log; entrypoints/openai/api_server.py and serve/disagg",
        ),
        *posts(Signal.SLEEP, "/sleep", "/pause", source=_DEVELOPMENT),
        *posts(Signal.WAKE, "/wake_up", "/resume", source=_DEVELOPMENT),
        *posts(Signal.UPDATED, "/update_weights", "/finish_weight_update", source=_DEVELOPMENT),
        *posts(Signal.ABORTED, "/abort_request", source=_DEVELOPMENT),
        SignalPattern(
            signal=Signal.SLEEP,
            pattern=re.compile(rb"It took [\d.]+ seconds to fall asleep"),
            needle=b"seconds to fall asleep",
            source="v1/executor/abstract.py, Executor.sleep",
        ),
        SignalPattern(
            signal=Signal.WAKE,
            pattern=re.compile(rb"It took [\d.]+ seconds to wake up(?: tags (?P<part>[^.\n]*))?"),
            needle=b"seconds to wake up",
            source="v1/executor/abstract.py, Executor.wake_up",
        ),
        FORCE_LOG,
        SignalPattern(
            signal=Signal.ENGINE_DEAD,
            pattern=re.compile(rb"\b(?:Async)?EngineDeadError\b: |\bEngineDeadError\("),
            needle=b"EngineDeadError",
            source="v1/engine/exceptions.py; engine/async_llm_engine.py",
        ),
        SignalPattern(
            signal=Signal.ENGINE_DEAD,
            pattern=re.compile(
                rb"(?:Engine core|Worker) proc \S+ died unexpectedly"
                rb"|RayWorkerProc rank=[^\n]{1,200}? died unexpectedly"
            ),
            needle=b" died unexpectedly",
            source="v1/engine/core_client.py; v1/executor, multiproc and ray_executor_v2",
        ),
        says(
            Signal.ENGINE_DEAD,
            "EngineCore encountered a fatal error",
            source="v1/engine/core.py, EngineCoreProc.run_engine_core",
        ),
        SignalPattern(
            signal=Signal.ENGINE_DEAD,
            pattern=re.compile(
                rb"EngineCore failed to start|AsyncLLM output_handler failed"
                rb"|Engine background task failed"
            ),
            needle=b" failed",
            source="v1/engine/core.py; v1/engine/async_llm.py; engine/async_llm_engine.py",
        ),
        says(
            Signal.STARTING,
            "vLLM API server version",
            source="entrypoints/utils.py, the first line of a server",
        ),
        says(
            Signal.STARTING,
            "Starting to load model ",
            source="v1/worker/gpu_model_runner.py, load_model",
        ),
        CHECKPOINT_SHARDS,
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"Waiting for \d+ .*?core engine proc\(s\) to (?:start|connect)"),
            needle=b"core engine proc(s) to ",
            source="v1/engine/utils.py, wait_for_engine_startup; printed every 10 s at DEBUG",
        ),
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"torch\.compile takes [\d.]+ s"),
            needle=b"torch.compile takes",
            source="compilation/monitor.py",
        ),
        says(
            Signal.STARTING,
            "Capturing CUDA graph",
            source="v1/worker/gpu_model_runner.py, capture_model: the progress bar's title",
        ),
        says(
            Signal.STARTING,
            "Graph capturing finished in",
            source="v1/worker/gpu_model_runner.py, capture_model",
        ),
        *LIFESPAN,
    ),
    endpoints={"health": "/health", "metrics": "/metrics", "sleeping": "/is_sleeping"},
    health=(
        # check_health raises only once the engine is known to be dead; its 200 proves nothing.
        HealthPattern(
            meaning=HealthMeaning.DEAD,
            pattern=re.compile(r"^: $|EngineDead|Engine ?[Cc]ore|Internal Server Error"),
            http=(500, 503),
            source="entrypoints/serve/instrumentator/health.py; v1/engine/async_llm.py",
        ),
        HealthPattern(
            meaning=HealthMeaning.HEALTHY,
            pattern=re.compile(r"^(?:healthy|ok)?: "),
            source="entrypoints/serve/instrumentator/health.py: an empty 200",
        ),
    ),
    metrics=MetricNames(
        tokens=("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting", "vllm:num_requests_swapped"),
        label="engine",
    ),
    roles=(
        RolePattern(role=Role.ENGINE, pattern=re.compile(r"^VLLM::EngineCor")),
        RolePattern(
            role=Role.ENGINE_WORKER, pattern=re.compile(r"^VLLM::Worker|^ray::RayWorkerWrapper")
        ),
        RolePattern(
            role=Role.API_SERVER,
            pattern=re.compile(
                r"^VLLM::APIServer|\bvllm\s+serve\b|vllm\.entrypoints\.(?:openai\.)?api_server"
                r"|^ray::vLLMHttpServer"
            ),
        ),
        RolePattern(
            role=Role.HELPER,
            pattern=re.compile(
                r"^VLLM::DPCoordinat|multiprocessing\.(?:resource_tracker|forkserver)"
            ),
        ),
        RolePattern(role=Role.RAY_WORKER, pattern=re.compile(r"^ray::")),
    ),
    context=re.compile(r"--max[-_]model[-_]len[= ](?P<tokens>\d+)(?![\w.])"),
    producer=CLIENT_TROUBLE,
    boring_threads=BORING_THREADS,
    source=(
        "vllm/v1/metrics/loggers.py, LoggingStatLogger and AggregatedLoggingStatLogger; "
        "vllm/engine/metrics.py, LoggingStatLogger (V0); vllm/logging_utils/formatter.py; "
        "vllm/utils/system_utils.py, decorate_logs"
    ),
)
