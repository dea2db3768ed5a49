"""LMDeploy's own engine on a CPU: its scheduler, loops, requests and server half; no model.

usage: genuine_engine.py WHEEL NUMPY FAULT STEPS OUTPUT

What computes is stood in for: tensors, streams, the model's forward. That forward gives tokens
STEPS times, and then:

- ``hang``: never returns, awaiting something.
- ``blocked``: never returns, and blocks the event loop.
- ``leak``: it is never called, because all blocks but a few were lost before.
- ``idle``: it is never called, because nobody asks for anything.

When nothing moves any more, the program writes down what it says of itself, mostly through the
engine's own properties and methods, which nobody can call from outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import types

wheel, numpy_folder, fault, steps, output = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5]
sys.path[:0] = [wheel, numpy_folder]

import stubs  # noqa: E402

stubs.install("numpy", "lmdeploy")
package = types.ModuleType("lmdeploy")
package.__path__ = [wheel + "/lmdeploy"]  # its __init__ would import all of it
sys.modules["lmdeploy"] = package

import numpy as np  # noqa: E402
from lmdeploy.messages import GenerationConfig, PytorchEngineConfig  # noqa: E402
from lmdeploy.metrics.metrics_processor import metrics_processor  # noqa: E402
from lmdeploy.pytorch.config import (  # noqa: E402
    CacheConfig,
    DistConfig,
    MiscConfig,
    ModelConfig,
    SchedulerConfig,
)
from lmdeploy.pytorch.engine import engine as engine_module  # noqa: E402
from lmdeploy.pytorch.engine import inputs_maker  # noqa: E402
from lmdeploy.pytorch.engine.engine import Engine  # noqa: E402
from lmdeploy.pytorch.engine.engine_instance import EngineInstance  # noqa: E402
from lmdeploy.pytorch.engine.executor.uni_executor import UniExecutor  # noqa: E402
from lmdeploy.pytorch.engine.model_agent import agent as agent_module  # noqa: E402
from lmdeploy.pytorch.engine.model_agent.agent import (  # noqa: E402
    BaseModelAgent,
    BatchedOutputs,
    SleepWakeupState,
)
from lmdeploy.pytorch.messages import MessageStatus  # noqa: E402
from lmdeploy.pytorch.model_inputs import ModelInputs, ModelInputsDelta  # noqa: E402
from lmdeploy.pytorch.paging.scheduler import Scheduler  # noqa: E402
from lmdeploy.pytorch.spec_decode.guided_spec_helper import GuidedSpecHelper  # noqa: E402
from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent  # noqa: E402
from lmdeploy.pytorch.strategies.ar import ARStrategyFactory  # noqa: E402
from lmdeploy.serve.core.async_engine import AsyncEngine, PreprocessedRequest  # noqa: E402
from lmdeploy.serve.managers import SessionManager  # noqa: E402
from lmdeploy.serve.openai import api_server  # noqa: E402

BLOCK, BLOCKS, RESERVED, BATCHES, HANDLES = 16, 24, 2, 4, 6
PROMPTS = (20, 33, 64, 7, 130, 50, 18, 9)
DRAFTS = 4


class Numbers(stubs.Stub):
    """As much of a tensor as the scheduler's side asks for."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def numpy(self):
        return self.values

    def tolist(self):
        return self.values.tolist()


class Ready(stubs.Stub):
    def query(self):
        return True


class Never:
    """Something whose awaits do not end."""

    def __init__(self, after=0):
        self.left = after

    async def wait(self):
        if self.left:
            self.left -= 1
            return
        await asyncio.get_running_loop().create_future()


class Beats:
    """The first beat comes when it is told to; the next one never."""

    def __init__(self, first):
        self.first = first

    async def wait(self):
        await self.first.wait()
        self.first = asyncio.Event()


def create_model_inputs(self, messages, is_prefill):
    lengths = [message.num_token_ids for message in messages]
    totals = [
        message.num_history_ids + length for message, length in zip(messages, lengths, strict=True)
    ]
    return ModelInputs(
        input_ids=stubs.Stub(),
        seq_length=Numbers(lengths),
        history_lengths=stubs.Stub(),
        block_offsets=stubs.Stub(),
        is_decoding=not is_prefill,
        num_ignored_history=stubs.Stub(),
        max_q_seqlen=max(lengths),
        max_kv_seqlen=max(totals),
        sum_kv_seqlen=sum(totals),
        model_metas=[None] * len(messages),
    )


inputs_maker.InputsMakerAsync.create_model_inputs = create_model_inputs
inputs_maker._tensorlize_block_offsets = lambda *args, **kwargs: stubs.Stub()
ModelInputsDelta.seq_length = property(lambda self: Numbers([1] * len(self.indice_cpu)))
agent_module._try_to_cuda = lambda value, **kwargs: value


class Forward:
    """The model: a token for each sequence, STEPS times; then nothing, for ever."""

    def __init__(self, agent):
        self.agent, self.never = agent, Never(steps)

    async def __call__(self, inputs, delta, **rest):
        engine = self.agent.engine
        size = len(inputs.seq_length.tolist() if inputs is not None else delta.indice_cpu)
        engine.sizes.append(size)
        if fault == "blocked" and engine.forwards == steps:
            await engine.settled.wait()
            write(json.dumps(truth(engine, engine.server)))
            time.sleep(1e6)
        await self.never.wait()
        outputs = BatchedOutputs(
            next_token_ids=Numbers(np.full((size, 1), 7)), stopped=Numbers([False] * size)
        )
        outputs.to_cpu = lambda: outputs
        engine.forwards += 1
        self.agent._out_que.put_nowait((outputs, Ready()))


def build_agent(engine):
    agent = BaseModelAgent.__new__(BaseModelAgent)
    for name, value in {
        "engine": engine,
        "stream": stubs.Stub(),
        "out_stream": stubs.Stub(),
        "dist_ctx": stubs.Stub(),
        "dist_config": DistConfig(),
        "cache_config": engine.cache_config,
        "tasks": set(),
        "rank": 0,
        "guided_decoding_manager": None,
        "state": SleepWakeupState(is_sleeping=False),
        "spec_agent": types.SimpleNamespace(_enabled=True, num_spec_tokens=DRAFTS),
        "_pending_h2d_transfers": agent_module.deque(),
    }.items():
        setattr(agent, name, value)
    agent.all_context = stubs.Stub
    agent._async_step = Forward(agent)
    agent._keep_h2d_transfer = lambda transfer: None
    return agent


def build_engine():
    engine = Engine.__new__(Engine)
    engine.forwards, engine.sizes = 0, []
    engine.engine_config = PytorchEngineConfig(max_batch_size=BATCHES)
    engine.cache_config = CacheConfig(
        max_batches=BATCHES,
        block_size=BLOCK,
        num_cpu_blocks=0,
        num_gpu_blocks=BLOCKS,
        num_reserved_gpu_blocks=RESERVED,
        enable_prefix_caching=True,
    )
    engine.scheduler_config = SchedulerConfig(max_batches=BATCHES, max_session_len=4096)
    engine.model_config = ModelConfig(
        hidden_size=8,
        num_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=[2],
        head_dim=8,
    )
    engine.misc_config, engine.dist_config = MiscConfig(), DistConfig()
    engine.specdecode_config = None
    strategies = ARStrategyFactory(engine.model_config)
    engine.sampling_strategy = strategies.build_sampling_strategy()
    engine.sampling_strategy.make_sampling_inputs = lambda seqs: stubs.Stub()
    engine.model_agent_strategy = strategies.build_model_agent_strategy()
    for name in ("make_extra_inputs", "make_stopping_criteria"):
        setattr(engine.model_agent_strategy, name, lambda *args, **kwargs: stubs.Stub())
    engine.engine_strategy = strategies.build_engine_strategy(
        engine.cache_config, engine.scheduler_config
    )
    engine.seq_strategy = strategies.build_sequence_strategy()
    engine.seq_meta = engine_module._build_seq_meta(
        engine.model_config, engine.cache_config, engine.seq_strategy, engine.sampling_strategy
    )
    engine.scheduler = Scheduler(
        engine.scheduler_config, engine.cache_config, seq_meta=engine.seq_meta
    )
    engine.executor = UniExecutor.__new__(UniExecutor)
    engine.executor.model_agent = build_agent(engine)
    engine.executor.device_type = "cpu"
    engine.adapter_manager, engine.input_processor, engine.engine_conn = None, None, stubs.Stub()
    engine.max_session_len = 4096
    engine.req_manager = engine._bind_request_manager()
    engine.req_manager.set_main_loop_func(engine.async_loop)
    engine._loop_main = engine._engine_loop = None
    return engine


Engine.model_config = None


def build_server(engine):
    server = AsyncEngine.__new__(AsyncEngine)
    server.engine = engine
    engine.create_instance = lambda *args: EngineInstance(engine)
    server.session_mgr = SessionManager()
    server.session_mgr.build_request_handle_pool(engine, HANDLES)
    server.is_sleeping, server.epoch = False, 3
    server._last_scheduler_tick, server._last_scheduler_tick_time = None, 0.0
    server._dispatched_start_time = server._idle_schedule_start_time = None

    server.num_spec_token, server.stat_loggers, server.backend = 0, [], "pytorch"
    server.tokenizer = stubs.Stub()
    server.tokenizer.detokenize_incrementally = lambda ids, state, **rest: ("", state)
    server.start_loop = lambda *args, **kwargs: None
    return server


async def serve(server, beats):
    """The server's own life: health monitor, metrics, beats."""

    async def sleep(seconds):
        await beats.wait()

    api_server.asyncio = types.SimpleNamespace(
        sleep=sleep, get_running_loop=asyncio.get_running_loop, create_task=asyncio.create_task
    )
    handler = api_server.create_lifespan_handler(
        types.SimpleNamespace(enable_metrics=True), server, stubs.Stub()
    )
    async with handler(None):
        await asyncio.get_running_loop().create_future()


async def request(server, number, length):
    session = server.session_mgr.get(1000 + number)
    wanted = PreprocessedRequest(
        session=session,
        inputs={"input_ids": [number + 3] * length},
        input_token_len=length,
        gen_config=GenerationConfig(max_new_tokens=100 + number),
        adapter_name=None,
    )
    async for _ in server.generate(wanted):
        pass


async def draft():
    """The real draft loop, whose third look at a grammar does not come back."""
    agent = SpecModelAgent.__new__(SpecModelAgent)
    agent.num_spec_tokens, agent.rank = DRAFTS, 0
    agent._forward_impl = lambda inputs: stubs.Stub()
    matcher = stubs.Stub()
    agent.guided_helper = types.SimpleNamespace(
        get_processors=lambda *args: {0: matcher},
        manager=types.SimpleNamespace(is_terminated=lambda each: False),
    )
    never = Never(2)

    async def get_outputs(*args, **kwargs):
        await never.wait()
        return stubs.Stub(), None, stubs.Stub()

    inputs = stubs.Stub(dp_meta=None, is_chunk=False, target_position_ids=None)
    inputs.step = lambda *args: inputs
    agent.proposer = types.SimpleNamespace(
        get_outputs=get_outputs, update_inputs_decoding=lambda *args: inputs
    )
    await agent._async_autoregressive_model_forward(inputs, stubs.Stub(), stubs.Stub())


async def verify():
    """The real verification pass, whose second look at the grammar does not come back."""
    helper = GuidedSpecHelper.__new__(GuidedSpecHelper)
    helper._mgr = stubs.Stub()
    helper._mgr.is_terminated = lambda each: False
    never = Never(3)

    async def to_thread(function, *args):
        await never.wait()

    sizes = types.SimpleNamespace(size=lambda axis: (1, DRAFTS + 1)[axis])

    class Scores(stubs.Stub):
        def size(self, axis):
            return sizes.size(axis)

    asyncio_of_helper = sys.modules[GuidedSpecHelper.__module__].asyncio
    patched = types.SimpleNamespace(to_thread=to_thread)
    sys.modules[GuidedSpecHelper.__module__].asyncio = patched
    try:
        await helper.apply_serial_bitmask(Scores(), {0: stubs.Stub()}, stubs.Stub(), DRAFTS)
    finally:
        sys.modules[GuidedSpecHelper.__module__].asyncio = asyncio_of_helper


def sequences(scheduler):
    for session in scheduler.sessions.values():
        for each in session.sequences.values():
            yield {
                "id": each.seq_id,
                "session": each.session_id,
                "state": type(each.state).__name__,
                "prompt": PROMPTS[each.session_id - 1000],
                "position": each.num_history_ids,
                "next": each.num_token_ids,
                "generated": len(each.generated_ids),
                "at most": each.sampling_param.max_new_tokens,
                "unguided": each.sampling_param.response_format is None,
                "blocks": each.num_blocks,
                "cached": each.cached_tokens,
            }


def batch(engine):
    """What the batch must be, by the forwards that were done."""
    running = [
        each
        for session in engine.scheduler.sessions.values()
        for each in session.sequences.values()
        if each.status is MessageStatus.RUNNING
    ]
    prefill = engine.forwards == 0
    return {
        "sequences": engine.sizes[-1],
        "decode": not prefill,
        "tokens a sequence": "absent" if prefill else 1,
        "longest": "absent" if prefill else max(each.num_valid_ids for each in running),
    }


def truth(engine, server):
    """What the process says of itself."""
    scheduler, loop = engine.scheduler, engine._engine_loop
    agent = engine.executor.model_agent
    pool = server.session_mgr.request_handle_pool
    asked = fault != "idle"
    found = {
        "scheduler": {
            "tick": scheduler.scheduler_tick,
            "sequences": sum(len(s.sequences) for s in scheduler.sessions.values()),
            "by status": {
                status.name: scheduler.seq_manager.num_sequences(status) for status in MessageStatus
            },
            "sessions": len(scheduler.sessions),
            "KV blocks free": scheduler.block_manager.get_num_free_gpu_blocks(),
            "KV blocks": engine.cache_config.num_gpu_blocks,
            "KV blocks reserved": RESERVED,
            "block size": BLOCK,
            "evictable": len(scheduler.block_trie.leaves),
            "KV loads": 0,
            "KV save leases": 0,
        },
        "engine loop": {
            "runnable": loop.has_runable_event.event.is_set(),
            "forwards in flight": loop.forward_event._counter,
            "forward done": loop.forward_event.is_set(),
            "responses queued": loop.resp_queue.qsize(),
            "loops": len(loop.tasks),
            "running": len(loop.inputs_maker.running_seqs),
            "to evict": len(loop.inputs_maker.to_evict_seqs),
            "next is prefill": loop.inputs_maker.next_is_prefill,
            "sleep requested": False,
            "sleep drained": loop._main_sleep_drain_event.is_set(),
            "awake": loop._sleep_resume_event.is_set(),
            "stopping": loop.stop_event.is_set(),
            "draft tokens": None,
        },
        "requests": {
            "queued": engine.req_manager.requests.qsize(),
            "senders waiting": len(engine.req_manager._condition._waiters),
            "refused kinds": 0,
        },
        "model agent": {
            "preprocess queue": agent._pre_in_que.qsize(),
            "input queue": agent._in_que.qsize(),
            "output queue": agent._out_que.qsize(),
            "waiting for output": len(agent._out_que._getters),
            "copies pending": 0,
            "speculation": True,
            "draft tokens": DRAFTS,
            "sleeping": False,
        },
        "draft": {"step": 1, "steps": DRAFTS - 1, "drafts": 2, "unguided": False},
        "verification": {"position": 1, "draft tokens": DRAFTS, "grammars": 1},
        "server": {
            "sessions": len(server.session_mgr.sessions),
            "handles": HANDLES,
            # The pool is made for the first request.
            "dispatched": pool.num_dispatched if asked else "absent",
            "handles free": pool.pool.qsize() if asked else "absent",
            "waiting for a handle": len(PROMPTS) - HANDLES if asked else "absent",
            "sleeping": False,
            "epoch": 3,
            "tick": server._last_scheduler_tick,
        },
        "sequence": list(sequences(scheduler)),
        "request": [
            {"session": 1000 + i, "prompt": PROMPTS[i], "at most": 100 + i}
            for i in range(HANDLES if asked else 0)
        ],
        "counters": {
            "requests": metrics_processor.scheduler_stats.num_total_reqs,
            "succeeded": 0,
            "cancelled": 0,
            "aborted": 0,
            "failed": 0,
            "routed": HANDLES if asked else 0,
            "queued": metrics_processor.metrics_queue.qsize(),
        },
        "request at the server": [
            {
                "session": 1000 + i,
                "prompt": length,
                "at most": 100 + i,
                "waits for a handle": i >= HANDLES,
            }
            for i, length in enumerate(PROMPTS if asked else ())
        ],
        "last beat": {
            "tick": scheduler.scheduler_tick,
            "active": scheduler.schedule_metrics.active_seqs,
            "waiting": scheduler.schedule_metrics.waiting_seqs,
        },
    }
    if engine.sizes:
        found["batch in flight"] = batch(engine)
    return found


def write(text):
    with open(output + ".part", "w") as out:
        out.write(text)
    os.rename(output + ".part", output)


async def main():
    engine = build_engine()
    engine.server = server = build_server(engine)
    engine.settled = asyncio.Event()
    if fault == "leak":
        engine.scheduler.block_manager.allocator.allocate(BLOCKS - RESERVED, "gpu")
    first = asyncio.Event()
    engine.start()
    while engine._engine_loop is None:
        await asyncio.sleep(0.01)
    tasks = [
        asyncio.create_task(request(server, i, n), name=f"request-{i}")
        for i, n in enumerate(PROMPTS if fault != "idle" else ())
    ]
    tasks += [
        asyncio.create_task(draft(), name="draft"),
        asyncio.create_task(verify(), name="verify"),
        asyncio.create_task(serve(server, Beats(first)), name="server"),
    ]
    await asyncio.sleep(0.1)
    last, same = None, 0
    while same < 20:
        await asyncio.sleep(0.05)
        for task in tasks:
            assert not task.done(), task.result()
        now = json.dumps(truth(engine, server))
        same, last = (same + 1 if now == last else 0), now
        if same == 5:
            first.set()
        if same == 10:
            engine.settled.set()
    write(last)
    await asyncio.get_running_loop().create_future()


asyncio.run(main())
