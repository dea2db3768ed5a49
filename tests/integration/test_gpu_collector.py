"""The GPU collector against a driver that is played: rows, series, links, a lost GPU, no driver."""

import csv
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from hangwatch.capture.rooms import StepRoom
from hangwatch.collectors import gpu
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


CODES = (
    "NVML_ERROR_NOT_SUPPORTED NVML_ERROR_DRIVER_NOT_LOADED NVML_ERROR_LIBRARY_NOT_FOUND "
    "NVML_ERROR_FUNCTION_NOT_FOUND NVML_ERROR_GPU_IS_LOST NVML_CLOCK_SM NVML_CLOCK_MEM "
    "NVML_TEMPERATURE_GPU NVML_MEMORY_ERROR_TYPE_CORRECTED NVML_MEMORY_ERROR_TYPE_UNCORRECTED "
    "NVML_VOLATILE_ECC NVML_AGGREGATE_ECC NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR "
    "NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS NVML_NVLINK_ERROR_DL_CRC_FLIT "
    "NVML_NVLINK_ERROR_DL_CRC_DATA NVML_NVLINK_ERROR_DL_REPLAY NVML_NVLINK_ERROR_DL_RECOVERY "
    "nvmlMemory_v2"
)


def driver(monkeypatch, *, lost=(), vanishes=(), absent=False, links=0, users=(42,)):
    """Play a driver with two H200s.

    Those in *lost* cannot be named, those in *vanishes* answer nothing any more.
    """
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.NVML_NVLINK_MAX_LINKS = 18
    for number, name in enumerate(CODES.split()):
        setattr(nvml, name, number)

    def init():
        if absent:
            raise NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found")

    def fail(code, text):
        def answer(*_):
            raise NVMLError(getattr(nvml, f"NVML_ERROR_{code}"), text)

        return answer

    gone, unsupported = fail("GPU_IS_LOST", "GPU is lost"), fail("NOT_SUPPORTED", "Not Supported")

    def handle(index):
        return gone() if index in lost else index

    def link(answer):
        return lambda _, number, *rest: answer if number < links else unsupported()

    answers = {
        "DeviceGetName": "NVIDIA H200",
        "DeviceGetUtilizationRates": types.SimpleNamespace(gpu=100, memory=0),
        "DeviceGetPowerUsage": 131_200,
        "DeviceGetEnforcedPowerLimit": 700_000,
        "DeviceGetClockInfo": 1980,
        "DeviceGetCurrentClocksEventReasons": 4,
        "DeviceGetTemperature": 38,
        "DeviceGetRetiredPages": unsupported,
        "DeviceGetRemappedRows": (3, 1, 0, 1),
        "DeviceGetCurrPcieLinkGeneration": 5,
        "DeviceGetMaxPcieLinkGeneration": 5,
        "DeviceGetCurrPcieLinkWidth": 8,
        "DeviceGetMaxPcieLinkWidth": 16,
        "DeviceGetPcieReplayCounter": 7,
        "DeviceGetPerformanceState": 0,
        "DeviceGetPersistenceMode": 1,
        "DeviceGetComputeMode": 3,
        "DeviceGetMigMode": [0, 0],
        "DeviceGetPciInfo": types.SimpleNamespace(busId=b"00000000:4A:00.0"),
        "DeviceGetUUID": "GPU-01234567-89ab-cdef-0123-456789abcdef",
        "DeviceGetGraphicsRunningProcesses": [],
        "DeviceGetComputeRunningProcesses": [
            types.SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in users
        ],
        "DeviceGetProcessUtilization": [
            types.SimpleNamespace(pid=users[0], timeStamp=at, smUtil=sm, memUtil=0)
            for at, sm in ((1, 3), (3, 99), (2, 50))
        ],
    }
    played = {
        "Init": init,
        "Shutdown": lambda: None,
        "SystemGetDriverVersion": lambda: b"580.159.04",
        "DeviceGetCount": lambda: 2,
        "DeviceGetHandleByIndex": handle,
        "DeviceGetMinorNumber": lambda index: index + 4,
        "DeviceGetTotalEccErrors": lambda _, kind, counter: 10 * kind + counter,
        "DeviceGetMemoryInfo": lambda _, version: types.SimpleNamespace(
            used=121034 << 20, total=143771 << 20
        ),
        "DeviceGetNvLinkState": link(1),
        "DeviceGetNvLinkVersion": link(7),
        "DeviceGetNvLinkErrorCounter": lambda _, number, counter: 100 * number + counter,
        "DeviceGetNvLinkRemotePciInfo": link(types.SimpleNamespace(busId="00000000:85:00.0")),
        **{
            name: answer if callable(answer) else (lambda *_, given=answer: given)
            for name, answer in answers.items()
        },
    }
    for name, answer in played.items():
        setattr(nvml, f"nvml{name}", answer)
        if name.startswith("DeviceGet") and "Handle" not in name and "Count" not in name:
            setattr(
                nvml,
                f"nvml{name}",
                lambda index, *rest, given=answer, **more: (
                    gone() if index in vanishes else given(index, *rest, **more)
                ),
            )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def collected(folder, step=STEP):
    COLLECTOR.collect(step, StepRoom(folder, folder))
    return folder / "gpu"


def table(path):
    """Return the rows of a table, each by the names of its columns without units."""
    head, *rows = csv.reader(path.read_text().splitlines(), skipinitialspace=True)
    names = [name.split(" [")[0] for name in head]
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_a_row_reads_like_the_table_of_nvidia_smi(tmp_path, monkeypatch):
    driver(monkeypatch)

    folder = collected(tmp_path)

    head, first, _ = (folder / "gpu.csv").read_text().splitlines()
    assert head.startswith(
        "index, name, utilization.gpu [%], utilization.memory [%], memory.used [MiB], "
        "memory.total [MiB], power.draw [W], power.limit [W], clocks.sm [MHz], clocks.mem [MHz], "
        "clocks_event_reasons.active, temperature.gpu, ecc.errors.corrected.volatile.total, "
    )
    assert first.startswith(
        "0, NVIDIA H200, 100 %, 0 %, 121034 MiB, 143771 MiB, 131.20 W, 700.00 W, 1980 MHz, "
        "1980 MHz, 0x0000000000000004, 38, "
    )
    assert not (folder / "gpu.err").exists()


def test_what_wears_out_and_what_a_gpu_is_called_stands_in_its_row(tmp_path, monkeypatch):
    nvml = driver(monkeypatch)

    row = table(collected(tmp_path) / "gpu.csv")[0]

    volatile = 10 * nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED + nvml.NVML_VOLATILE_ECC
    aggregate = 10 * nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED + nvml.NVML_AGGREGATE_ECC
    expected = {
        "ecc.errors.uncorrected.volatile.total": str(volatile),
        "ecc.errors.corrected.aggregate.total": str(aggregate),
        "retired_pages.double_bit.count": "[N/A]",
        "remapped_rows.correctable": "3",
        "remapped_rows.uncorrectable": "1",
        "remapped_rows.pending": "No",
        "remapped_rows.failure": "Yes",
        "pcie.link.width.current": "8",
        "pcie.link.width.max": "16",
        "pcie.replays": "7",
        "persistence_mode": "Enabled",
        "compute_mode": "Exclusive_Process",
        "mig.mode.current": "Disabled",
        "minor_number": "4",
        "pci.bus_id": "00000000:4A:00.0",
        "driver_version": "580.159.04",
    }
    assert expected == {name: row[name] for name in expected}


def test_a_question_that_the_library_does_not_know_is_not_available(tmp_path, monkeypatch):
    nvml = driver(monkeypatch)
    del nvml.nvmlDeviceGetCurrentClocksEventReasons

    assert "[N/A]" == table(collected(tmp_path) / "gpu.csv")[0]["clocks_event_reasons.active"]


def test_gpus_are_looked_at_until_the_second_sample_is_due(tmp_path, monkeypatch):
    driver(monkeypatch)
    monkeypatch.setattr(gpu, "INTERVAL", 0.01)

    rows = table(collected(tmp_path, replace(STEP, options={"gap": "0.05"})) / "gpu_series.csv")

    assert ["0", "1"] * 5 == [row["index"] for row in rows]
    assert ("100 %", "0 %", "131.20 W") == (
        rows[-1]["utilization.gpu"],
        rows[-1]["utilization.memory"],
        rows[-1]["power.draw"],
    )
    assert float(rows[-1]["elapsed"]) >= 0.04


@pytest.mark.parametrize("step", [STEP, replace(STEP, sample=2, options={"gap": "5"})])
def test_one_look_alone_has_no_series(tmp_path, monkeypatch, step):
    driver(monkeypatch)

    assert not (collected(tmp_path, step) / "gpu_series.csv").exists()


def test_each_link_has_a_row_with_its_errors(tmp_path, monkeypatch):
    driver(monkeypatch, links=2)

    rows = table(collected(tmp_path) / "gpu_links.csv")

    assert [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")] == [
        (row["index"], row["link"]) for row in rows
    ]
    flit, replay = CODES.split().index("NVML_NVLINK_ERROR_DL_CRC_FLIT"), rows[1]["errors.replay"]
    assert ("Active", "7", "00000000:85:00.0", str(100 + flit), str(100 + flit + 2)) == (
        *(rows[1][name] for name in ("state", "version", "remote.bus_id", "errors.crc_flit")),
        replay,
    )


def test_a_gpu_without_links_has_no_table_of_them(tmp_path, monkeypatch):
    driver(monkeypatch)

    assert not (collected(tmp_path) / "gpu_links.csv").exists()


def test_a_process_is_ours_if_it_is_here_and_has_the_gpu_open(tmp_path, monkeypatch):
    driver(monkeypatch, users=(os.getpid(), 1 << 22))
    ours = {os.getpid(): {7: "/dev/nvidia5"}}

    def links(pid):
        if pid not in ours:
            raise FileNotFoundError
        return ours[pid]

    monkeypatch.setattr(gpu.procfs, "links", links)

    users = json.loads((collected(tmp_path) / "gpu_processes.json").read_text())

    assert [(0, False), (0, False), (1, True), (1, False)] == [
        (user["gpu"], user["ours"]) for user in users
    ]
    assert {
        "gpu": 1,
        "pid": os.getpid(),
        "kind": "compute",
        "used_mib": 1024,
        "sm_pct": 99,
        "memory_pct": 0,
        "ours": True,
    } == users[2]


def test_a_lost_gpu_is_a_row_that_says_so_and_does_not_hide_the_others(tmp_path, monkeypatch):
    driver(monkeypatch, lost=(0,))

    folder = collected(tmp_path)

    first, second = table(folder / "gpu.csv")
    assert ("0", "[GPU is lost]", "[GPU is lost]") == (
        first["index"],
        first["name"],
        first["utilization.gpu"],
    )
    assert ("1", "NVIDIA H200") == (second["index"], second["name"])
    assert "GPU0: GPU is lost" in (folder / "gpu.err").read_text()


def test_a_gpu_that_is_lost_while_it_is_asked_is_told_once(tmp_path, monkeypatch):
    driver(monkeypatch, vanishes=(1,))

    folder = collected(tmp_path)

    assert "[GPU is lost]" == table(folder / "gpu.csv")[1]["power.draw"]
    assert "GPU1: GPU is lost\n" == (folder / "gpu.err").read_text()


def test_a_machine_without_a_driver_is_a_clear_answer(tmp_path, monkeypatch):
    driver(monkeypatch, absent=True)

    with pytest.raises(CollectorError, match="no NVIDIA driver here") as caught:
        COLLECTOR.collect(STEP, StepRoom(tmp_path, tmp_path))

    assert FailureKind.NOT_AVAILABLE == caught.value.failure.kind
