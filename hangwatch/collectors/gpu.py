"""The state of every GPU by NVML, in the columns that ``nvidia-smi --query-gpu`` would print.

Utilisation is a mean over the last sixth of a second to second, so that one look says little: the
first sample goes on looking, twice a second, until the second sample is due. A kernel that never
ends shows 100 % with no memory activity all the while; an engine at work does not.

The driver's library can block for ever on a wedged GPU, therefore this waits beside the others
and is killed at its deadline; what was read of the GPUs before is kept. Opens the driver's control
device and creates no CUDA context: nothing runs on the GPU for it.

The driver knows processes by the numbers of a pid namespace that need not be ours: ``ours`` says
whether a process of that number here has this GPU open.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from hangwatch.core.planning import file_name
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Sink,
    Stage,
    Step,
)
from hangwatch.system import procfs

FOLDER: Final = "gpu"

INTERVAL: Final = 0.5
"""Seconds between two readings of the series; the driver itself takes five samples a second."""

MAX_READINGS: Final = 10

RECENT: Final = 2.0
"""Seconds over which the share of each process is taken."""

_NOT_AVAILABLE: Final = "[N/A]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    index: int
    handle: Any


class _Driver:
    """The driver's library, asked about one thing after the other.

    Attributes:
        problems: What it said of the GPUs that it lost.
    """

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.problems: dict[int, str] = {}

    def gpus(self) -> Iterator[_Gpu | int]:
        """Yield every GPU; for one that cannot even be named, its number."""
        for index in range(self.nvml.nvmlDeviceGetCount()):
            try:
                yield _Gpu(index=index, handle=self.nvml.nvmlDeviceGetHandleByIndex(index))
            except self.nvml.NVMLError as error:
                self.problems[index] = (
                    f"Unable to determine the device handle for GPU{index}: {error}"
                )
                yield index

    def cell(self, gpu: _Gpu, read: Callable[[Any, Any], str]) -> str:
        """Return what *read* says of a GPU, as ``nvidia-smi`` would print it."""
        try:
            return read(self.nvml, gpu.handle)
        except AttributeError:  # a question that an older nvidia-ml-py does not know
            return _NOT_AVAILABLE
        except self.nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code == self.nvml.NVML_ERROR_GPU_IS_LOST:
                self.problems.setdefault(gpu.index, f"GPU{gpu.index}: {error}")
            if code in (
                self.nvml.NVML_ERROR_NOT_SUPPORTED,
                self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            ):
                return _NOT_AVAILABLE
            return f"[{error}]"

    def answer(self, question: str, gpu: _Gpu, *arguments: Any) -> Any:
        """Return what the library answers, or ``None`` where it does not."""
        try:
            return getattr(self.nvml, question)(gpu.handle, *arguments)
        except (AttributeError, self.nvml.NVMLError):
            return None


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
    driver = _Driver(nvml)
    try:
        _read(driver, step, room)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


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


def _read(driver: _Driver, step: Step, room: Room) -> None:
    began = time.monotonic()
    gpus = []
    with room.create(_name("gpu", ".csv", step)) as out:
        _write(out, (name for name, _ in _COLUMNS))
        for gpu in driver.gpus():
            if isinstance(gpu, int):
                said = driver.problems[gpu].partition(": ")[2]
                _write(out, (str(gpu), *(f"[{said}]" for _ in _COLUMNS[1:])))
                continue
            gpus.append(gpu)
            cells = (driver.cell(gpu, read) for _, read in _COLUMNS[1:])
            _write(out, (str(gpu.index), *cells))
    if driver.problems:
        problems = "\n".join(driver.problems.values())
        room.write(_name("gpu", ".err", step), f"{problems}\n".encode())
    _processes(driver, gpus, step, room)
    _links(driver, gpus, step, room)
    if step.sample == 1:
        _series(driver, gpus, step, room, began)


def _name(stem: str, suffix: str, step: Step) -> str:
    return f"{FOLDER}/{file_name(stem, suffix, step.sample)}"


def _write(out: Sink, cells: Iterable[str]) -> None:
    out.write((", ".join(cells) + "\n").encode())


def _processes(driver: _Driver, gpus: Iterable[_Gpu], step: Step, room: Room) -> None:
    """Write who has memory on which GPU, and how busy the driver found each of them."""
    lines = ",\n ".join(json.dumps(user) for gpu in gpus for user in _users(driver, gpu))
    room.write(_name("gpu_processes", ".json", step), f"[\n {lines}\n]\n".encode())


def _users(driver: _Driver, gpu: _Gpu) -> Iterator[dict[str, Any]]:
    minor = driver.answer("nvmlDeviceGetMinorNumber", gpu)
    # One row a process, or several of different instants; the driver's stamps are wall time.
    busy: dict[int, Any] = {}
    since = int((time.time() - RECENT) * 1e6)
    for each in driver.answer("nvmlDeviceGetProcessUtilization", gpu, since) or ():
        if each.pid not in busy or busy[each.pid].timeStamp < each.timeStamp:
            busy[each.pid] = each
    for kind in ("Compute", "Graphics"):
        for user in driver.answer(f"nvmlDeviceGet{kind}RunningProcesses", gpu) or ():
            rates = busy.get(user.pid)
            yield {
                "gpu": gpu.index,
                "pid": user.pid,
                "kind": kind.lower(),
                "used_mib": None if user.usedGpuMemory is None else user.usedGpuMemory >> 20,
                "sm_pct": None if rates is None else rates.smUtil,
                "memory_pct": None if rates is None else rates.memUtil,
                "ours": _is_ours(user.pid, gpu.index if minor is None else minor),
            }


def _is_ours(pid: int, minor: int) -> bool | None:
    """Say whether the process of that number here has the GPU open; ``None`` if it may not be told.

    In another pid namespace the number is somebody else's, or nobody's.
    """
    try:
        opened = procfs.links(pid)
    except OSError:
        return False
    return f"/dev/nvidia{minor}" in opened.values() if opened else None


def _links(driver: _Driver, gpus: Iterable[_Gpu], step: Step, room: Room) -> None:
    """Write the state and the error counters of each NVLink; nothing where there are none."""
    nvml = driver.nvml
    rows = []
    for gpu in gpus:
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = driver.answer("nvmlDeviceGetNvLinkState", gpu, link)
            if state is None:
                break
            errors = (
                driver.answer("nvmlDeviceGetNvLinkErrorCounter", gpu, link, counter)
                for counter in (
                    nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
                    nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
                    nvml.NVML_NVLINK_ERROR_DL_REPLAY,
                    nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                )
            )
            remote = driver.answer("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link)
            cells = (
                gpu.index,
                link,
                "Active" if state else "Inactive",
                driver.answer("nvmlDeviceGetNvLinkVersion", gpu, link),
                None if remote is None else _text(remote.busId),
                *errors,
            )
            rows.append([_NOT_AVAILABLE if cell is None else str(cell) for cell in cells])
    if rows:
        with room.create(_name("gpu_links", ".csv", step)) as out:
            _write(out, _LINK_COLUMNS)
            for row in rows:
                _write(out, row)


def _series(driver: _Driver, gpus: Iterable[_Gpu], step: Step, room: Room, began: float) -> None:
    """Look at what changes until the second sample is due, if there will be one."""
    gap = float(step.options.get("gap", "0"))
    readings = min(MAX_READINGS, int(gap / INTERVAL))
    if not readings or not (gpus := tuple(gpus)):
        return
    with room.create(f"{FOLDER}/gpu_series.csv") as out:
        _write(out, ("elapsed [s]", "index", *(name for name, _ in _SERIES)))
        for number in range(readings):
            time.sleep(max(0.0, began + number * INTERVAL - time.monotonic()))
            for gpu in gpus:
                at = f"{time.monotonic() - began:.2f}"
                _write(out, (at, str(gpu.index), *(driver.cell(gpu, read) for _, read in _SERIES)))


def _text(name: bytes | str) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _memory(nvml: Any, device: Any) -> Any:
    try:
        # The second version does not count the driver's own reserve as used; nor does nvidia-smi.
        return nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # a driver older than 510
        return nvml.nvmlDeviceGetMemoryInfo(device)


def _ecc(kind: str, counter: str) -> Callable[[Any, Any], str]:
    def read(nvml: Any, device: Any) -> str:
        return str(
            nvml.nvmlDeviceGetTotalEccErrors(
                device,
                getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"),
                getattr(nvml, f"NVML_{counter}_ECC"),
            )
        )

    return read


def _retired(cause: str) -> Callable[[Any, Any], str]:
    def read(nvml: Any, device: Any) -> str:
        cause_code = getattr(nvml, f"NVML_PAGE_RETIREMENT_CAUSE_{cause}")
        return str(len(nvml.nvmlDeviceGetRetiredPages(device, cause_code)))

    return read


def _remapped(number: int, words: tuple[str, ...] = ()) -> Callable[[Any, Any], str]:
    def read(nvml: Any, device: Any) -> str:
        value = nvml.nvmlDeviceGetRemappedRows(device)[number]
        return words[bool(value)] if words else str(value)

    return read


def _word(question: str, *words: str) -> Callable[[Any, Any], str]:
    """Return what reads a number that stands for one of *words*."""

    def read(nvml: Any, device: Any) -> str:
        value = getattr(nvml, question)(device)
        value = value[0] if isinstance(value, list | tuple) else value
        return words[value] if 0 <= value < len(words) else str(value)

    return read


def _number(question: str, unit: str = "") -> Callable[[Any, Any], str]:
    def read(nvml: Any, device: Any) -> str:
        return f"{getattr(nvml, question)(device)}{unit}"

    return read


def _event_reasons(nvml: Any, device: Any) -> str:
    return f"0x{nvml.nvmlDeviceGetCurrentClocksEventReasons(device):016x}"


_UTILIZATION: Final[tuple[tuple[str, Callable[[Any, Any], str]], ...]] = (
    ("utilization.gpu [%]", lambda n, d: f"{n.nvmlDeviceGetUtilizationRates(d).gpu} %"),
    ("utilization.memory [%]", lambda n, d: f"{n.nvmlDeviceGetUtilizationRates(d).memory} %"),
)
_POWER: Final = ("power.draw [W]", lambda n, d: f"{n.nvmlDeviceGetPowerUsage(d) / 1000:.2f} W")
_CLOCKS: Final = (
    ("clocks.sm [MHz]", lambda n, d: f"{n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_SM)} MHz"),
    ("clocks.mem [MHz]", lambda n, d: f"{n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_MEM)} MHz"),
)
_SERIES: Final[tuple[tuple[str, Callable[[Any, Any], str]], ...]] = (
    *_UTILIZATION,
    _POWER,
    *_CLOCKS,
    ("clocks_event_reasons.active", _event_reasons),
)
_COLUMNS: Final[tuple[tuple[str, Callable[[Any, Any], str]], ...]] = (
    ("index", lambda _nvml, _device: ""),
    ("name", lambda n, d: _text(n.nvmlDeviceGetName(d))),
    *_UTILIZATION,
    ("memory.used [MiB]", lambda n, d: f"{_memory(n, d).used >> 20} MiB"),
    ("memory.total [MiB]", lambda n, d: f"{_memory(n, d).total >> 20} MiB"),
    _POWER,
    ("power.limit [W]", lambda n, d: f"{n.nvmlDeviceGetEnforcedPowerLimit(d) / 1000:.2f} W"),
    *_CLOCKS,
    ("clocks_event_reasons.active", _event_reasons),
    (
        "temperature.gpu",
        lambda n, d: str(n.nvmlDeviceGetTemperature(d, n.NVML_TEMPERATURE_GPU)),
    ),
    ("ecc.errors.corrected.volatile.total", _ecc("CORRECTED", "VOLATILE")),
    ("ecc.errors.uncorrected.volatile.total", _ecc("UNCORRECTED", "VOLATILE")),
    ("ecc.errors.corrected.aggregate.total", _ecc("CORRECTED", "AGGREGATE")),
    ("ecc.errors.uncorrected.aggregate.total", _ecc("UNCORRECTED", "AGGREGATE")),
    (
        "retired_pages.single_bit_ecc.count",
        _retired("MULTIPLE_SINGLE_BIT_ECC_ERRORS"),
    ),
    ("retired_pages.double_bit.count", _retired("DOUBLE_BIT_ECC_ERROR")),
    ("remapped_rows.correctable", _remapped(0)),
    ("remapped_rows.uncorrectable", _remapped(1)),
    ("remapped_rows.pending", _remapped(2, ("No", "Yes"))),
    ("remapped_rows.failure", _remapped(3, ("No", "Yes"))),
    ("pcie.link.gen.current", _number("nvmlDeviceGetCurrPcieLinkGeneration")),
    ("pcie.link.gen.max", _number("nvmlDeviceGetMaxPcieLinkGeneration")),
    ("pcie.link.width.current", _number("nvmlDeviceGetCurrPcieLinkWidth")),
    ("pcie.link.width.max", _number("nvmlDeviceGetMaxPcieLinkWidth")),
    ("pcie.replays", _number("nvmlDeviceGetPcieReplayCounter")),
    ("pstate", lambda n, d: f"P{n.nvmlDeviceGetPerformanceState(d)}"),
    ("persistence_mode", _word("nvmlDeviceGetPersistenceMode", "Disabled", "Enabled")),
    (
        "compute_mode",
        _word(
            "nvmlDeviceGetComputeMode",
            "Default",
            "Exclusive_Thread",
            "Prohibited",
            "Exclusive_Process",
        ),
    ),
    ("mig.mode.current", _word("nvmlDeviceGetMigMode", "Disabled", "Enabled")),
    ("minor_number", _number("nvmlDeviceGetMinorNumber")),
    ("pci.bus_id", lambda n, d: _text(n.nvmlDeviceGetPciInfo(d).busId)),
    ("uuid", lambda n, d: _text(n.nvmlDeviceGetUUID(d))),
    ("driver_version", lambda n, _: _text(n.nvmlSystemGetDriverVersion())),
)
_LINK_COLUMNS: Final = (
    "index",
    "link",
    "state",
    "version",
    "remote.bus_id",
    "errors.crc_flit",
    "errors.crc_data",
    "errors.replay",
    "errors.recovery",
)


COLLECTOR: Final = Collector(
    name="gpu",
    title="Utilisation, memory, power, clocks, links, errors and processes of every GPU",
    scope=Scope.NODE,
    rung=3,
    stage=Stage.A,
    samples=2,
    timeout=10.0,
    needs="the driver's library (NVML)",
    collect=_collect,
    waits=True,
)
