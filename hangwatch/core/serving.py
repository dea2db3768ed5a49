"""What engines have in common that serve HTTP through uvicorn, and what their clients print.

Profiles take from here what is no fact of theirs.
"""

from __future__ import annotations

import re
from typing import Final

from hangwatch.model.profile import Signal, SignalPattern

NUMBER: Final = rb"(?:-?\d+(?:\.\d+)?|nan|-?inf)"
INTEGER: Final = rb"-?\d+"


def posts(signal: Signal, *paths: str, source: str) -> tuple[SignalPattern, ...]:
    """Return what finds uvicorn's access lines of POST requests that succeeded.

    Args:
        signal: What they say.
        paths: Paths, by their beginning: ``/update_weights`` also finds
            ``/update_weights_from_disk``. A query is the group ``part``.
        source: Where upstream has the endpoints.
    """
    return tuple(
        SignalPattern(
            signal=signal,
            pattern=re.compile(
                rb'"POST %b\w*(?:\?(?P<part>[^ "]*))? HTTP/[\d.]+" 2\d\d' % re.escape(path.encode())
            ),
            needle=b'"POST %b' % path.encode(),
            source=source,
        )
        for path in paths
    )


def says(signal: Signal, text: str, *, source: str) -> SignalPattern:
    """Return what finds lines that contain *text*, word for word.

    Args:
        signal: What they say.
        text: As it is printed.
        source: Where upstream prints it.
    """
    needle = text.encode()
    return SignalPattern(
        signal=signal, pattern=re.compile(re.escape(needle)), needle=needle, source=source
    )


LIFESPAN: Final = (
    says(Signal.READY, "Application startup complete", source="uvicorn/lifespan/on.py"),
    SignalPattern(
        signal=Signal.STARTING,
        pattern=re.compile(rb"Started server process \[\d+\]"),
        needle=b"Started server process",
        source="uvicorn/server.py",
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
)
"""The life of a server, as uvicorn tells it."""

CLIENT_TROUBLE: Final = (
    # openai/_base_client.py, _sleep_for_retry
    re.compile(rb"Retrying request to /\S+ in [\d.]+ seconds"),
    re.compile(rb"\bopenai\.(?:APITimeoutError|APIConnectionError|InternalServerError)\b"),
    re.compile(
        rb"\bhttp(?:x|core)\.(?:(?:Read|Write|Connect|Pool)(?:Timeout|Error)|\w+ProtocolError)\b"
    ),
    re.compile(
        rb"\baiohttp\.client_exceptions\.\w+|\b(?:ServerDisconnected|ServerTimeout|ClientConnector)Error\b"
        rb"|Cannot connect to host \S+"
    ),
    # urllib3/connectionpool.py and util/retry.py, which requests is built on
    re.compile(rb"\bRetrying \(Retry\(total=\d+|Max retries exceeded with url"),
    re.compile(rb"\bread timeout=\d|Read timed out\.|\[Errno 111\]|Connection refused"),
    # ray/exceptions.py
    re.compile(
        rb"\bray\.exceptions\.(?:GetTimeout|ActorDied|ActorUnavailable|RayTask|RayActor)Error\b"
    ),
)
"""Lines of a program that sends requests and gets no answer, by the library that prints them."""

FORCE_LOG: Final = SignalPattern(
    signal=Signal.BEAT_LOST,
    pattern=re.compile(rb"_force_log\(\) done|, in _force_log\b"),
    needle=b"_force_log",
    source="lifespan in (serve|entrypoints)/openai/api_server.py: the loop has no try/except",
)
"""The task that prints the heartbeat has died; LMDeploy has its name from vLLM."""

CHECKPOINT_SHARDS: Final = SignalPattern(
    signal=Signal.STARTING,
    pattern=re.compile(rb"Loading \w+ checkpoint shards:"),
    needle=b" checkpoint shards:",
    source="model_loader/weight_utils.py of vLLM and SGLang, the progress bar's title",
)
"""The weights are being read."""

BORING_THREADS: Final = (
    re.compile(r"^ZMQbg/"),
    re.compile(r"^pt_(?:nccl|autograd|gloo)"),
    re.compile(r"^NCCL "),
    re.compile(r"^tqdm_monitor|^Thread-\d+ \(tqdm"),
    re.compile(r"^ray_(?:import|listen|print)|^raylet_client|_RayGrpc|^grpc_"),
)
"""Threads of the libraries that every engine is built on; they tell nothing of a hang."""
