"""SGLang: its batch lines, which come with steps and not with the clock, and its processes."""

from __future__ import annotations

import re
from typing import Final

from hangwatch.core.serving import (
    BORING_THREADS,
    CHECKPOINT_SHARDS,
    CLIENT_TROUBLE,
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

_SERVER: Final = "entrypoints/http_server.py"
_STEP: Final = rb"(?: \[\d+\])?[,.] "

PROFILE: Final = EngineProfile(
    name="sglang",
    title="SGLang",
    alive=re.compile(
        rb"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?"
        rb"(?: (?P<tag>[A-Z][^\]\n]{0,60}))?\] "
        rb"(?:Decode|Prefill) batch\b"
    ),
    needles=(b"Decode batch", b"Prefill batch"),
    families=(
        # A decode engine fed by prefill engines counts what waits for memory or cache apart.
        re.compile(
            rb"Decode batch" + _STEP + rb"#running-req: (?P<running>%b)"
            rb"(?:.*?#prealloc-req: (?P<routed>%b), #transfer-req: (?P<api_waiting>%b))?"
            rb"(?:.*?gen throughput \(token/s\): (?P<out_tps>%b))?"
            rb"(?:.*?#queue-req: (?P<waiting>%b))?" % (INTEGER, INTEGER, INTEGER, NUMBER, INTEGER)
        ),
        # "input throughput" is that of the batch before, and the sequences of this batch are in
        # flight without being among the running ones yet.
        re.compile(
            rb"Prefill batch" + _STEP + rb"#new-seq: (?P<routed>%b)"
            rb"(?:.*?#running-req: (?P<running>%b))?(?:.*?#queue-req: (?P<waiting>%b))?"
            % (INTEGER, INTEGER, INTEGER)
        ),
    ),
    # Every decode_log_interval (40) steps: a second or two on most models, more on slow ones. Its
    # gauges are refreshed every 30 s while it is idle, so nothing should be believed sooner.
    interval=10.0,
    step_driven=True,
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
            "/generate",
            "/encode",
            "/classify",
            source=_SERVER,
        ),
        *posts(Signal.SLEEP, "/release_memory_occupation", "/pause_generation", source=_SERVER),
        *posts(Signal.WAKE, "/resume_memory_occupation", "/continue_generation", source=_SERVER),
        *posts(Signal.UPDATED, "/update_weights", source=_SERVER),
        *posts(Signal.ABORTED, "/abort_request", source=_SERVER),
        SignalPattern(
            signal=Signal.ENGINE_DEAD,
            pattern=re.compile(rb"\] \w+ hit an exception: "),
            needle=b" hit an exception",
            source="managers/scheduler.py, run_scheduler_process; detokenizer_manager.py",
        ),
        says(
            Signal.ENGINE_DEAD,
            "SIGQUIT received.",
            source="managers/tokenizer_manager.py, running_phase_sigquit_handler",
        ),
        says(
            Signal.ENGINE_DEAD,
            "Received sigquit from a child process",
            source="the same, before 0.5",
        ),
        says(
            Signal.READY,
            "The server is fired up and ready to roll!",
            source="entrypoints/http_server.py, after the warm-up request",
        ),
        says(
            Signal.STARTING,
            "server_args=ServerArgs(",
            source="entrypoints/http_server.py, launch_server: the first line of a server",
        ),
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"Load weight (?:begin|end)\b"),
            needle=b"Load weight ",
            source="model_executor/model_runner.py, load_model",
        ),
        CHECKPOINT_SHARDS,
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"Capture \w+ graph (?:begin|end|bs)\b"),
            needle=b"Capture ",
            source="model_executor/model_runner.py, init_device_graphs",
        ),
        says(
            Signal.STARTING,
            "Capturing batches (",
            source="model_executor/cuda_graph_runner.py, the progress bar's title",
        ),
        SignalPattern(
            signal=Signal.STARTING,
            pattern=re.compile(rb"DeepGEMM JIT Pre-Compile session|DeepGEMM warmup:"),
            needle=b"DeepGEMM ",
            source="layers/deep_gemm_wrapper/compile_utils.py",
        ),
        *LIFESPAN,
    ),
    # Not /health: unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is off, it generates a token as
    # /health_generate does. This one is answered by the HTTP server alone.
    endpoints={"health": "/v1/models", "metrics": "/metrics"},
    health=(
        HealthPattern(
            meaning=HealthMeaning.HEALTHY,
            pattern=re.compile(r"^(?:healthy|ok)?: "),
            source="entrypoints/http_server.py",
        ),
    ),
    metrics=MetricNames(
        # sglang:prompt_tokens_total and its like grow only when a request ends.
        tokens=("sglang:realtime_tokens_total",),
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        label="dp_rank",
    ),
    roles=(
        RolePattern(role=Role.ENGINE, pattern=re.compile(r"^sglang::schedul")),
        RolePattern(
            role=Role.ENGINE_WORKER,
            pattern=re.compile(r"^sglang::(?:detokeni|data_par|tokeniz)"),
        ),
        RolePattern(
            role=Role.API_SERVER,
            pattern=re.compile(r"sglang\.launch_server|\bsglang\s+serve\b|^sglang::server"),
        ),
        RolePattern(
            role=Role.HELPER,
            pattern=re.compile(r"multiprocessing\.(?:resource_tracker|forkserver)"),
        ),
        RolePattern(role=Role.RAY_WORKER, pattern=re.compile(r"^ray::")),
    ),
    context=re.compile(r"--context[-_]length[= ](?P<tokens>\d+)(?![\w.])"),
    producer=CLIENT_TROUBLE,
    boring_threads=BORING_THREADS,
    source=(
        "sglang/srt/managers/scheduler_metrics_mixin.py, log_decode_stats and log_prefill_stats; "
        "sglang/srt/utils/common.py, configure_logger"
    ),
)
