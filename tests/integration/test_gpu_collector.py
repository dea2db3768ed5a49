"""The GPU collector against a driver that is played: rows, a lost GPU, no driver."""

import sys
import types
from pathlib import PurePosixPath

import pytest

from hangwatch.capture.rooms import StepRoom
from hangwatch.collectors.gpu import COLLECTOR
from hangwatch.model.capture import CollectorError, FailureKind, Scope, Stage, Step

STEP = Step(
    id="gpu/1",
    collector="gpu",
    scope=Scope.NODE,
    stage=Stage.A,
    sample=1,
    rung=3,
    folder=PurePosixPath(),
    timeout=10.0,
)


class NVMLError(Exception):
    def __init__(self, value, text):
        super().__init__(text)
        self.value = value


def driver(monkeypatch, *, lost=(), absent=False):
    """Play a driver with two H200s; those in *lost* have fallen off the bus."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    names = (
        "NVML_ERROR_NOT_SUPPORTED NVML_ERROR_DRIVER_NOT_LOADED NVML_ERROR_LIBRARY_NOT_FOUND "
        "NVML_CLOCK_SM NVML_MEMORY_ERROR_TYPE_UNCORRECTED NVML_VOLATILE_ECC nvmlMemory_v2"
    )
    for number, name in enumerate(names.split()):
        setattr(nvml, name, number)

    def init():
        if absent:
            raise NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found")

    def handle(index):
        if index in lost:
            raise NVMLError(15, "GPU is lost")
        return index

    def unsupported(*_):
        raise NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED, "Not Supported")

    answers = {
        "Init": init,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: 2,
        "DeviceGetHandleByIndex": handle,
        "DeviceGetName": lambda _: "NVIDIA H200",
        "DeviceGetUtilizationRates": lambda _: types.SimpleNamespace(gpu=100, memory=0),
        "DeviceGetMemoryInfo": lambda _, version: types.SimpleNamespace(
            used=121034 << 20, total=143771 << 20
        ),
        "DeviceGetPowerUsage": lambda _: 131_200,
        "DeviceGetEnforcedPowerLimit": lambda _: 700_000,
        "DeviceGetClockInfo": lambda *_: 1980,
        "DeviceGetTotalEccErrors": unsupported,
        "DeviceGetPerformanceState": lambda _: 0,
        "DeviceGetComputeRunningProcesses": lambda _: [
            types.SimpleNamespace(pid=42, usedGpuMemory=1 << 30)
        ],
    }
    for name, answer in answers.items():
        setattr(nvml, f"nvml{name}", answer)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_a_row_reads_like_the_table_of_nvidia_smi(tmp_path, monkeypatch):
    driver(monkeypatch)

    COLLECTOR.collect(STEP, StepRoom(tmp_path, tmp_path))

    head, first, _ = (tmp_path / "gpu.csv").read_text().splitlines()
    assert (
        "index, name, utilization.gpu [%], utilization.memory [%], memory.used [MiB], "
        "memory.total [MiB], power.draw [W], power.limit [W], clocks.sm [MHz], "
        "ecc.errors.uncorrected.volatile.total, pstate"
    ) == head
    assert (
        "0, NVIDIA H200, 100 %, 0 %, 121034 MiB, 143771 MiB, 131.20 W, 700.00 W, 1980 MHz, "
        "[N/A], P0"
    ) == first
    assert not (tmp_path / "gpu.err").exists()


def test_a_lost_gpu_is_told_and_does_not_hide_the_others(tmp_path, monkeypatch):
    driver(monkeypatch, lost=(0,))

    COLLECTOR.collect(STEP, StepRoom(tmp_path, tmp_path))

    assert "1, NVIDIA H200" in (tmp_path / "gpu.csv").read_text()
    assert "GPU0: GPU is lost" in (tmp_path / "gpu.err").read_text()


def test_a_machine_without_a_driver_is_a_clear_answer(tmp_path, monkeypatch):
    driver(monkeypatch, absent=True)

    with pytest.raises(CollectorError, match="no NVIDIA driver here") as caught:
        COLLECTOR.collect(STEP, StepRoom(tmp_path, tmp_path))

    assert FailureKind.NOT_AVAILABLE == caught.value.failure.kind
