"""A GPU kernel that never ends: the host asks every millisecond whether it has.

The kernel is ``lab/gpu_kernel.py``, which is a program of its own as well.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import FORWARD, Fault, Scene

LIMIT = 600.0
"""Seconds after which the kernel ends, if nobody ends it before."""


def _driver() -> Any:
    return importlib.import_module(__name__.rpartition("faults.")[0] + "gpu_kernel")


def prepare(scene: Scene) -> Any:
    """Open the GPU and compile the kernel."""
    del scene
    return _driver().Gpu()


async def strike(scene: Scene) -> None:
    """Start the kernel and wait for it."""
    gpu = scene.prepared
    gpu.spin(scene.lasts or LIMIT)
    scene.begin()
    await _driver().get_output_async(gpu)


def unavailable() -> str | None:
    """Say whether there is no GPU."""
    try:
        reason: str | None = _driver().unavailable()
    except ModuleNotFoundError:
        return "lab/gpu_kernel.py is missing"
    return reason


FAULT = Fault(
    title="a GPU kernel never ends",
    shows="the GPU is busy at low power; the engine's loop wakes up a thousand times a second",
    place=FORWARD,
    strike=strike,
    prepare=prepare,
    unavailable=unavailable,
    needs="an NVIDIA GPU",
    verdicts=("hung", "suspected_hang"),
    causes=("gpu-kernel-stuck",),
    culprits=("get_output_async",),
    ends=True,
)
