"""The state of every GPU by NVML, in the columns that ``nvidia-smi --query-gpu`` would print.

The driver's library can block for ever on a wedged GPU, therefore this waits beside the others
and is killed at its deadline; what was read of the GPUs before is kept. Opens the driver's control
device and creates no CUDA context: nothing runs on the GPU for it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable
from typing import Any, Final

from hangwatch.core.planning import file_name
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)

_NOT_AVAILABLE: Final = "[N/A]"


def _collect(step: Step, room: Room) -> None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise CollectorError(
            FailureKind.NOT_INSTALLED, "nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        ) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _no_driver(nvml, error) from error
    try:
        problems = _read(nvml, step, room)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    if problems:
        room.write(file_name("gpu", ".err", step.sample), "\n".join(problems).encode() + b"\n")


def _no_driver(nvml: Any, error: Exception) -> CollectorError:
    absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
    if getattr(error, "value", None) in absent:
        return CollectorError(
            FailureKind.NOT_AVAILABLE,
            "there is no NVIDIA driver here",
            "in a container: NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility; "
            "a GPU need not be requested",
        )
    return CollectorError(FailureKind.TOOL_FAILED, f"the NVIDIA driver says: {error}")


def _read(nvml: Any, step: Step, room: Room) -> list[str]:
    """Write a row for each GPU as it is read; return what the driver said of those it lost."""
    problems = []
    users: list[dict[str, Any]] = []
    with room.create(file_name("gpu", ".csv", step.sample)) as out:
        out.write((", ".join(name for name, _ in _COLUMNS) + "\n").encode())
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                device = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                problems.append(f"Unable to determine the device handle for GPU{index}: {error}")
                continue
            cells = [str(index), *(_cell(nvml, device, read) for _, read in _COLUMNS[1:])]
            out.write((", ".join(cells) + "\n").encode())
            with contextlib.suppress(nvml.NVMLError):
                users += [
                    {"gpu": index, "pid": user.pid, "used_mib": (user.usedGpuMemory or 0) >> 20}
                    for user in nvml.nvmlDeviceGetComputeRunningProcesses(device)
                ]
    lines = ",\n ".join(json.dumps(user) for user in users)
    room.write(file_name("gpu_processes", ".json", step.sample), f"[\n {lines}\n]\n".encode())
    return problems


def _cell(nvml: Any, device: Any, read: Callable[[Any, Any], str]) -> str:
    try:
        return read(nvml, device)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:
            return _NOT_AVAILABLE
        return f"[{error}]"


def _name(nvml: Any, device: Any) -> str:
    name = nvml.nvmlDeviceGetName(device)
    return name.decode() if isinstance(name, bytes) else str(name)


def _memory(nvml: Any, device: Any) -> Any:
    try:
        # The second version does not count the driver's own reserve as used; nor does nvidia-smi.
        return nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # a driver older than 510
        return nvml.nvmlDeviceGetMemoryInfo(device)


def _ecc(nvml: Any, device: Any) -> str:
    return str(
        nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )


_COLUMNS: Final[tuple[tuple[str, Callable[[Any, Any], str]], ...]] = (
    ("index", lambda _nvml, _device: ""),
    ("name", _name),
    ("utilization.gpu [%]", lambda n, d: f"{n.nvmlDeviceGetUtilizationRates(d).gpu} %"),
    ("utilization.memory [%]", lambda n, d: f"{n.nvmlDeviceGetUtilizationRates(d).memory} %"),
    ("memory.used [MiB]", lambda n, d: f"{_memory(n, d).used >> 20} MiB"),
    ("memory.total [MiB]", lambda n, d: f"{_memory(n, d).total >> 20} MiB"),
    ("power.draw [W]", lambda n, d: f"{n.nvmlDeviceGetPowerUsage(d) / 1000:.2f} W"),
    ("power.limit [W]", lambda n, d: f"{n.nvmlDeviceGetEnforcedPowerLimit(d) / 1000:.2f} W"),
    ("clocks.sm [MHz]", lambda n, d: f"{n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_SM)} MHz"),
    ("ecc.errors.uncorrected.volatile.total", _ecc),
    ("pstate", lambda n, d: f"P{n.nvmlDeviceGetPerformanceState(d)}"),
)


COLLECTOR: Final = Collector(
    name="gpu",
    title="Utilisation, memory, power, clocks and errors of every GPU",
    scope=Scope.NODE,
    rung=3,
    stage=Stage.A,
    samples=2,
    timeout=10.0,
    needs="the driver's library (NVML)",
    collect=_collect,
    waits=True,
)
