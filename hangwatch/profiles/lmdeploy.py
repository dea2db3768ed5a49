"""LMDeploy: its heartbeat in every format since 0.9.2, its health, its metrics, its processes."""

from __future__ import annotations

import re
from typing import Final

from hangwatch.core.serving import (
    BORING_THREADS,
    CLIENT_TROUBLE,
    FORCE_LOG,
    INTEGER,
    LIFESPAN,
    NUMBER,
    posts,
)
from hangwatch.model.identity import Role
from hangwatch.model.profile import (
    EngineProfile,
    HealthMeaning,
    HealthPattern,
    MetricNames,
    ProbeKind,
    RolePattern,
    Signal,
    SignalPattern,
    StateProbe,
    StateTable,
)

_HEAD: Final = rb"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? (?P<tag>[^\]\n]{1,40})\] "
_THR: Final = rb"Avg thr \(in/out\): (?P<in_tps>%b) / (?P<out_tps>%b) tokens/s" % (NUMBER, NUMBER)
# The tail is optional piece by piece: a format that drifts costs the number that drifted.
_ENGINE: Final = (
    rb"(?:.*?Engine \(running/waiting\): (?P<running>%b) / (?P<waiting>%b))?"
    rb"(?:.*?KV cache: (?P<kv_cache_pct>%b)%%)?" % (INTEGER, INTEGER, NUMBER)
)
_EXTRAS: Final = (
    rb"(?:.*?Prefix cache hit rate: (?P<prefix_hit_pct>%b)%%)?"
    rb"(?:.*?Draft acceptance rate: (?P<draft_acceptance_pct>%b)%%)?" % (NUMBER, NUMBER)
)


_MANAGEMENT: Final = "serve/openai/endpoints/management.py"


def _int(name: str, path: str = "", minus: str = "") -> StateProbe:
    return StateProbe(name=name, kind=ProbeKind.INT, path=path, minus=minus)


def _bool(name: str, path: str) -> StateProbe:
    return StateProbe(name=name, kind=ProbeKind.BOOL, path=path)


def _length(name: str, path: str) -> StateProbe:
    return StateProbe(name=name, kind=ProbeKind.LENGTH, path=path)


def _none(name: str, path: str) -> StateProbe:
    return StateProbe(name=name, kind=ProbeKind.IS_NONE, path=path)


def _age(name: str, path: str) -> StateProbe:
    return StateProbe(name=name, kind=ProbeKind.AGE, path=path)


# ``Engine.async_loop`` is suspended from start to failure, hung or not, and its locals lead to
# everything in an engine's process; ``EngineHealthMonitor._run`` does so in the server's.
_SCHEDULER: Final = (
    "Engine.async_loop:self.scheduler",
    "EngineLoop.wait_tasks:self.scheduler",
    "EngineLoop.send_response_loop:self.scheduler",
    "EngineLoop.main_loop:scheduler",
    "ZMQMPEngine._mp_proc_async:engine.scheduler",
    "EngineInstance.async_stream_infer:self.engine.scheduler",
)
_ENGINE_STATE: Final = (
    StateTable(
        name="scheduler",
        where=_SCHEDULER,
        probes=(
            # +1 after each forward: at rest over two samples with sequences, it is stalled
            _int("tick", "scheduler_tick"),
            _length("sequences", "seq_manager._seq_map"),
            StateProbe(
                name="by status", kind=ProbeKind.LENGTHS, path="seq_manager._status_seq_map"
            ),
            _length("sessions", "sessions"),
            _int("KV blocks free", "block_manager.allocator._gpu_allocator._free_count"),
            _int("KV blocks", "block_manager.num_gpu_blocks"),
            _int("KV blocks reserved", "cache_config.num_reserved_gpu_blocks"),
            _int("block size", "cache_config.block_size"),
            _length("evictable", "block_trie._kv_lifecycle.leaves"),
            _length("state slots in use", "state_manager._runtime_states"),
            _int("state slots", "state_manager.num_runtime_states"),
            _length("KV loads", "kv_load_coordinator._loads"),
            _length("KV save leases", "kv_save_coordinator._leases"),
        ),
        source=(
            "pytorch/paging/scheduler.py, Scheduler; block_manager/base_block_manager.py, "
            "LogicalAllocator and PhysicalAllocator; pytorch/messages.py, SequenceManager"
        ),
    ),
    StateTable(
        name="engine loop",
        where=(
            "Engine.async_loop:self._engine_loop",
            "EngineLoop.wait_tasks:self",
            "EngineLoop.send_response_loop:self",
            "EngineLoop.main_loop:self",
        ),
        probes=(
            # set while the main loop does not wait for work: it has some
            _bool("runnable", "has_runable_event.event._value"),
            # of the executor in the same process only; zero under Ray
            _int("forwards in flight", "forward_event._counter"),
            _bool("forward done", "forward_event._value"),
            _length("responses queued", "resp_queue._queue"),
            _length("loops", "tasks"),
            _length("running", "inputs_maker.running_seqs"),
            _length("to evict", "inputs_maker.to_evict_seqs"),
            _bool("next is prefill", "inputs_maker.next_is_prefill"),
            _bool("sleep requested", "_sleep_requested"),
            _bool("sleep drained", "_main_sleep_drain_event._value"),
            _bool("awake", "_sleep_resume_event._value"),
            _bool("stopping", "stop_event._value"),
            _int("draft tokens", "config.num_speculative_tokens"),
        ),
        source="pytorch/engine/engine_loop.py, EngineLoop; inputs_maker.py, InputsMakerAsync",
    ),
    StateTable(
        name="requests",
        where=(
            "Engine.async_loop:self.req_manager",
            "RequestManager.sender_wait_loop:self",
            "EngineLoop.wait_tasks:self.req_manager",
        ),
        probes=(
            _length("queued", "requests._queue"),
            _int("since the start", "requests._unfinished_tasks"),
            _length("senders waiting", "_condition._waiters"),
            _length("refused kinds", "_blocked_request_types"),
        ),
        source="pytorch/engine/request.py, RequestManager",
    ),
    StateTable(
        name="model agent",
        where=(
            "Engine.async_loop:self.executor.model_agent",
            "BaseModelAgent.wait_tasks:self",
            "BaseModelAgent._async_loop_inputs_preprocess:self",
        ),
        probes=(
            _length("preprocess queue", "_pre_in_que._queue"),
            _length("input queue", "_in_que._queue"),
            _length("output queue", "_out_que._queue"),
            _length("waiting for output", "_out_que._getters"),
            _length("copies pending", "_pending_h2d_transfers"),
            _bool("speculation", "spec_agent._enabled"),
            _int("draft tokens", "spec_agent.num_spec_tokens"),
            _bool("sleeping", "state.is_sleeping"),
        ),
        source="pytorch/engine/model_agent/agent.py, BaseModelAgent",
    ),
    StateTable(
        name="batch in flight",
        where=("EngineLoop._main_loop_get_outputs",),
        probes=(
            _length("sequences", "running"),
            _none("decode", "model_inputs"),
            _none("none prepared", "next_running"),
            _int("longest", "delta.max_kv_seqlen"),
            _int("tokens a sequence", "delta.max_q_seqlen"),
        ),
        source="pytorch/engine/engine_loop.py, EngineLoop._main_loop_get_outputs",
    ),
    StateTable(
        name="draft",
        # the second since 0.18
        where=(
            "SpecModelAgent._async_model_forward",
            "SpecModelAgent._async_autoregressive_model_forward",
        ),
        probes=(
            _int("step", "loop_idx"),
            _int("steps", "loop_count"),
            _length("drafts", "draft_tokens_li"),
            _none("unguided", "draft_guided_processors"),
        ),
        source="pytorch/spec_decode/spec_agent.py, SpecModelAgent",
    ),
    StateTable(
        name="verification",
        where=("GuidedSpecHelper.apply_serial_bitmask",),
        probes=(
            _int("position", "pos"),
            _int("draft tokens", "num_spec_tokens"),
            _length("grammars", "forked"),
        ),
        source="pytorch/spec_decode/guided_spec_helper.py, GuidedSpecHelper",
    ),
    StateTable(
        name="sequence",
        where=tuple(f"{where}.seq_manager._seq_map.*" for where in _SCHEDULER),
        probes=(
            _int("id", "seq_id"),
            _int("session", "session.session_id"),
            StateProbe(name="state", kind=ProbeKind.TYPE, path="_state"),
            _int("prompt start", "input_start_pos"),
            _int("prompt", "input_end_pos", "prompt start"),
            # tokens whose KV is computed, and those of the next forward
            _int("position", "_num_history_ids"),
            _int("next", "_num_token_ids"),
            _int("generated", "num_new_tokens"),
            _int("at most", "sampling_param.max_new_tokens"),
            _none("unguided", "sampling_param.response_format"),
            _int("blocks", "logical_blocks._num_real"),
            _int("cached", "cached_tokens"),
            # since the last progress where drafts are made, else since it came
            _age("age", "arrive_time"),
        ),
        source="pytorch/messages.py, SchedulerSequence; paging/seq_states/states.py",
    ),
    StateTable(
        name="request",
        where=("EngineInstance.async_stream_infer",),
        probes=(
            _int("session", "session_id"),
            _int("prompt", "prompt_ids_len"),
            _int("given out", "output_offset"),
            _int("at most", "sampling_param.max_new_tokens"),
            _bool("response set", "resp.event._value"),
            _bool("done", "resp.is_done"),
        ),
        source="pytorch/engine/engine_instance.py, EngineInstance; request.py, Response",
    ),
    StateTable(
        name="streams",
        where=("AsyncRPCServer.run:self",),
        probes=(
            _length("outputs", "stream_output"),
            _length("tasks", "stream_tasks"),
            _int("since the start", "_stream_idx"),
        ),
        source="pytorch/engine/mp_engine/zmq_rpc.py, AsyncRPCServer",
    ),
    StateTable(
        name="streams of Ray",
        where=("RayEngineWorker._stream_task_wrapper:self",),
        probes=(
            _length("outputs", "_stream_aiter"),
            _length("tasks", "_stream_task"),
            _int("since the start", "_stream_id"),
        ),
        source="pytorch/engine/mp_engine/ray_engine.py, RayEngineWorker",
    ),
)
_SERVER_STATE: Final = (
    StateTable(
        name="server",
        where=(
            "EngineHealthMonitor._run:self.async_engine",
            "create_lifespan_handler.<locals>.lifespan_handler.<locals>._force_log:async_engine",
        ),
        probes=(
            _length("sessions", "session_mgr.sessions"),
            _length("handles free", "session_mgr.request_handle_pool.pool._queue"),
            _int("handles", "session_mgr.request_handle_pool.size"),
            _int("dispatched", "session_mgr.request_handle_pool.size", "handles free"),
            _length("waiting for a handle", "session_mgr.request_handle_pool.pool._getters"),
            _bool("sleeping", "is_sleeping"),
            _int("epoch", "epoch"),
            _int("tick", "_last_scheduler_tick"),
            _age("tick moved", "_last_scheduler_tick_time"),
        ),
        source=(
            "serve/core/async_engine.py, AsyncEngine; serve/managers/session_manager.py, "
            "RequestHandlePool"
        ),
    ),
    StateTable(
        name="calls to the engine",
        where=("AsyncRPCClient.listen:self",),
        # one a stream; an engine that does not answer adds the health probe and the metrics
        probes=(_length("pending", "pending"),),
        source="pytorch/engine/mp_engine/zmq_rpc.py, AsyncRPCClient",
    ),
    StateTable(
        name="streams from the engine",
        where=("MPEngineInstance.async_stream_infer:self.engine",),
        probes=(
            _length("sessions", "session_states"),
            _length("being cancelled", "pending_cancel_sessions"),
        ),
        source="pytorch/engine/mp_engine/base.py, MPEngine",
    ),
    StateTable(
        name="counters",
        where=("MetricsProcessor._run_metrics_handler:self",),
        probes=(
            _int("requests", "scheduler_stats.num_total_reqs"),
            _int("succeeded", "scheduler_stats.num_succeeded_reqs"),
            _int("cancelled", "scheduler_stats.num_cancelled_reqs"),
            _int("aborted", "scheduler_stats.num_aborted_reqs"),
            _int("failed", "scheduler_stats.num_errored_reqs"),
            _int("routed", "scheduler_stats.num_api_routed_reqs"),
            _length("queued", "metrics_queue._queue"),
        ),
        source="metrics/metrics_processor.py, MetricsProcessor; metrics/stats.py, SchedulerStats",
    ),
    StateTable(
        name="last beat",
        where=("create_lifespan_handler.<locals>.lifespan_handler.<locals>._force_log",),
        probes=(
            _int("tick", "schedule_metrics.scheduler_tick"),
            _int("active", "schedule_metrics.active_seqs"),
            _int("waiting", "schedule_metrics.waiting_seqs"),
        ),
        source="serve/openai/api_server.py, lifespan_handler; messages.py, ScheduleMetrics",
    ),
    StateTable(
        name="health monitor",
        where=("EngineHealthMonitor._run:self",),
        probes=(
            _age("last success", "_last_success_time"),
            _bool("probing", "_probe_lock._locked"),
        ),
        source="serve/core/health.py, EngineHealthMonitor",
    ),
    StateTable(
        name="request at the server",
        where=("AsyncEngine.generate",),
        probes=(
            _int("session", "session_id"),
            _int("prompt", "input_len"),
            _int("generated", "gen_len"),
            _int("at most", "gen_config.max_new_tokens"),
            _none("waits for a handle", "session._handle"),
        ),
        source="serve/core/async_engine.py, AsyncEngine.generate",
    ),
)


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
            % (INTEGER, INTEGER, INTEGER, INTEGER)
            + _ENGINE
            + _EXTRAS
        ),
        # B: 0.12.1 and 0.12.2
        re.compile(
            _THR + rb", API server \(completed/routed/waiting\): (?P<finished>%b)"
            rb" / (?P<routed>%b) / (?P<api_waiting>%b)"
            % (INTEGER, INTEGER, INTEGER)
            + _ENGINE
            + _EXTRAS
        ),
        # A0 to A4: 0.9.2 to 0.12.0; "Unfinished" counts what the server has not answered yet
        re.compile(
            rb"Avg prompt throughput: (?P<in_tps>%b) tokens/s"
            rb"(?:, Avg generation throughput: (?P<out_tps>%b) tokens/s)?"
            rb"(?:, Finished: (?P<finished>%b) reqs)?(?:, Unfinished: (?P<routed>%b) reqs)?"
            rb"(?:.*?Running: (?P<running>%b) reqs)?(?:.*?Waiting: (?P<waiting>%b) reqs)?"
            rb"(?:.*?GPU KV cache usage: (?P<kv_cache_pct>%b)%%)?"
            % (NUMBER, NUMBER, INTEGER, INTEGER, INTEGER, INTEGER, NUMBER)
            + _EXTRAS
        ),
        # a format to come, as far as it keeps today's words
        re.compile(_THR + _ENGINE + _EXTRAS),
    ),
    interval=10.0,
    polls_gpu=True,
    parts=("weights", "kv_cache"),
    signals=(
        *posts(
            Signal.COMPLETED,
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/chat/interactive",
            "/v1/responses",
            "/generate",
            source="uvicorn's access log; serve/openai/endpoints, router.post",
        ),
        *posts(Signal.SLEEP, "/sleep", source=_MANAGEMENT),
        *posts(Signal.WAKE, "/wakeup", source=_MANAGEMENT),
        *posts(Signal.UPDATED, "/update_weights", source=_MANAGEMENT),
        *posts(Signal.ABORTED, "/abort_request", source=_MANAGEMENT),
        FORCE_LOG,
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
            signal=Signal.STARTING,
            pattern=re.compile(rb"Loading weights from \w+"),
            needle=b"Loading weights from",
            source="pytorch/weight_loader/model_weight_loader.py, the progress bar's title",
        ),
        *LIFESPAN,
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
    context=re.compile(r"--session[-_]len[= ](?P<tokens>\d+)\b"),
    producer=CLIENT_TROUBLE,
    boring_threads=BORING_THREADS,
    state=(*_ENGINE_STATE, *_SERVER_STATE),
    source=(
        "lmdeploy/metrics/loggers.py, LoggingStatLogger.log; "
        "serve/openai/api_server.py, lifespan_handler"
    ),
)
