"""Plays the driver's library to the child that looks at GPUs; ``PLAYED_GPUS`` says how.

JSON: ``minors`` of the GPUs, ``users`` (a list of pids for each), ``lost`` (indices that answer
nothing), ``absent`` (there is no driver), ``hangs`` (a file: while it is there,
every question waits).
"""

# ruff: noqa: N802  # the names are those of the library

import json
import os
import time
import types

PLAY = json.loads(os.environ["PLAYED_GPUS"])
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED = 12, 9
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 3, 13, 15
NVML_NVLINK_MAX_LINKS = 0


class NVMLError(Exception):
    pass


def _index(handle):
    while os.path.exists(PLAY.get("hangs", "")):
        time.sleep(0.05)
    if handle in PLAY.get("lost", ()):
        raise NVMLError("GPU is lost")
    return handle


def nvmlInit():
    if PLAY.get("absent"):
        raise NVMLError("NVML Shared Library Not Found")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(PLAY["minors"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetMinorNumber(handle):
    return PLAY["minors"][_index(handle)]


def nvmlDeviceGetEnforcedPowerLimit(handle):
    return 700_000 + _index(handle)


def nvmlDeviceGetPowerUsage(handle):
    return 131_500 + _index(handle)


def nvmlDeviceGetUtilizationRates(handle):
    return types.SimpleNamespace(gpu=100, memory=_index(handle))


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [types.SimpleNamespace(pid=pid) for pid in PLAY["users"][_index(handle)]]
