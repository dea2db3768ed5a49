"""How an engine was configured: by its arguments, and by what its ``/metrics`` say of it.

Three engines, and three names for the same thing: settings are brought together under one name
each, beside the option that set them. What was not set is not here; the engine's own defaults
depend on its version. Under Ray there are no arguments, and the metrics alone speak.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from hangwatch.core import endpoints

MAX_VALUE: Final = 64
"""Characters of a value: a number, a word, a few of either."""

# lmdeploy/cli/utils.py and serve.py; vllm/engine/arg_utils.py; sglang/srt/server_args.py.
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("--model", "--model-path", "--served-model-name", "--model-name"),
    "backend": ("--backend", "--attention-backend", "--device"),
    "tensor_parallel": ("--tp", "--tp-size", "--tensor-parallel-size", "-tp"),
    "data_parallel": ("--dp", "--dp-size", "--data-parallel-size", "-dp"),
    "expert_parallel": ("--ep", "--ep-size", "--expert-parallel-size", "--enable-expert-parallel"),
    "pipeline_parallel": ("--pp-size", "--pipeline-parallel-size", "-pp"),
    "nodes": ("--nnodes", "--node-rank"),
    "executor": ("--distributed-executor-backend",),
    "batch": ("--max-batch-size", "--max-num-seqs", "--max-running-requests"),
    "tokens_per_step": (
        *("--max-prefill-token-num", "--num-tokens-per-iter", "--max-num-batched-tokens"),
        *("--chunked-prefill-size", "--max-prefill-tokens", "--enable-chunked-prefill"),
    ),
    "context": ("--session-len", "--max-model-len", "--context-length"),
    "cache_ratio": (
        *("--cache-max-entry-count", "--gpu-memory-utilization", "--mem-fraction-static"),
    ),
    "cache_block": ("--cache-block-seq-len", "--block-size", "--page-size"),
    "cache_blocks": ("--num-gpu-blocks", "--num-gpu-blocks-override", "--max-total-tokens"),
    "cache_type": ("--quant-policy", "--kv-cache-dtype"),
    "prefix_caching": (
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--disable-radix-cache"),
    ),
    "weights": ("--model-format", "--quantization", "--dtype", "--load-format"),
    "eager": ("--eager-mode", "--enforce-eager", "--disable-cuda-graph"),
    "speculation": (
        *("--speculative-algorithm", "--speculative-config", "--speculative-num-draft-tokens"),
        *("--speculative-num-steps", "--speculative-draft-model", "--speculative-eagle-topk"),
        "--speculative-draft-model-path",
    ),
    "disaggregation": ("--role", "--migration-backend", "--disaggregation-mode"),
    "overlap": ("--enable-microbatch", "--disable-overlap-schedule", "--async-scheduling"),
    "log_level": ("--log-level", "--uvicorn-log-level"),
}
_NAMES: Final = {option: name for name, options in _OPTIONS.items() for option in options}

_PLAIN: Final = re.compile(rf"[\w.,:+@-]{{1,{MAX_VALUE}}}")
_SERVE: Final = ("serve", "api_server")
_INFO: Final = re.compile(r"(?:lmdeploy|vllm|sglang)[:_]\w+_info")


def configuration(arguments: Iterable[str], metrics: bytes = b"") -> dict[str, Any]:
    """Return what is known of an engine's configuration; empty parts mean that nothing is.

    Args:
        arguments: Its command line.
        metrics: What its ``/metrics`` answered.
    """
    return {
        "schema": "hangwatch.engine_config/1",
        "settings": settings(tuple(arguments)),
        "info": info(metrics),
    }


def settings(arguments: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the settings among the arguments: name to option to value.

    Of a path the last part is kept, of what is no plain word nothing: ``set`` says that it was set.
    """
    found: dict[str, dict[str, Any]] = {}
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        option = option.replace("_", "-")
        name = _NAMES.get(option)
        if name is not None:
            if not equals:
                following = arguments[place + 1 : place + 2]
                value = following[0] if following and not _is_option(following[0]) else ""
            found.setdefault(name, {})[option] = _kept(value) if value else True
        elif _is_model(arguments, place):
            found.setdefault("model", {})["argument"] = _kept(argument)
    return found


def _is_option(text: str) -> bool:
    return text.startswith("-") and not re.fullmatch(r"-\d+(?:\.\d+)?", text)


def _is_model(arguments: tuple[str, ...], place: int) -> bool:
    """Say whether it is the model's place: right behind ``vllm serve``, ``serve api_server``."""
    return (
        place > 0
        and arguments[place - 1] in _SERVE
        and arguments[place] not in _SERVE
        and not _is_option(arguments[place])
    )


def _kept(value: str) -> Any:
    if value.startswith("{"):
        try:
            parts = json.loads(value)
        except (ValueError, RecursionError):
            return "set"
        return {
            str(key): _kept(part) if isinstance(part, str) else part
            for key, part in parts.items()
            if isinstance(part, str | int | float | bool)
        }
    if "/" in value:
        value = value.rstrip("/").rpartition("/")[2]
    return value if _PLAIN.fullmatch(value) else "set"


def info(metrics: bytes) -> dict[str, list[dict[str, str]]]:
    """Return the labels of an engine's info series by name; one for each engine of a server.

    ``lmdeploy:backend_config_info`` (lmdeploy/metrics/loggers.py), ``vllm:cache_config_info``
    (vllm/v1/metrics/loggers.py), ``sglang:cache_config_info`` (until 0.5.10).
    """
    found: dict[str, list[dict[str, str]]] = {}
    for _, sample in endpoints.samples(metrics.decode("utf-8", "replace")):
        if _INFO.fullmatch(sample.name) and "lora" not in sample.name and sample.labels:
            labels = {key: str(_kept(value)) for key, value in sample.labels.items() if value}
            found.setdefault(sample.name, []).append(labels)
    return found
