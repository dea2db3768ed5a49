"""The child that looks at GPUs: utilisation, memory activity and power, by the driver's library.

``python -m hangwatch.daemon.gpus`` talks with the daemon:

- in ``{"kind": "watch", "interval": S, "instances": [{"instance": InstanceKey, "pids": [N…]}…]}``:
  from now on these, every so many seconds;
- out ``{"kind": "observations", "items": [GpusSeen…]}``;
- out ``{"kind": "none", "reason": TEXT, "hint": TEXT}`` where there is nothing to look at; then it
  ends, and another one would find nothing either.

A call into the driver can block for ever on a wedged GPU, and in a way that no signal ends. So it
has this process to itself and says nothing while it waits; whoever misses its voice does without.

Which GPUs an instance uses, the device files that its processes hold open say: ``/dev/nvidiaN`` is
the GPU of minor number N, which need not be its index. CUDA opens those of all GPUs, though; then
the driver's list of the processes that have memory on each decides, and where that is silent too
(it knows nobody in another pid namespace) the instance is left out: the state of somebody else's
GPU would be worse than none.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hangwatch.core.codec import from_plain, to_plain
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import GpusSeen
from hangwatch.model.time import Instant
from hangwatch.model.vitals import GpuVital
from hangwatch.system import procfs
from hangwatch.system.channel import Channel
from hangwatch.system.spawn import message_kind, serve

REFRESH: Final = 60.0
"""Seconds between two looks at who uses which GPU: an engine opens its own when it loads."""

ALIVE_EVERY: Final = 1.0

_DEVICE: Final = re.compile(r"/dev/nvidia(\d+)$")


class NoGpusError(Exception):
    """There is nothing to look at, and will not be."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that we may see.

    Attributes:
        index: Its number with the driver's library.
        minor: The N of its ``/dev/nvidiaN``.
        handle: What the library calls it.
        power_limit_w: Watts it may draw, or ``None``.
    """

    index: int
    minor: int
    handle: Any
    power_limit_w: float | None


class Driver:
    """The driver's library, and the GPUs that it shows us."""

    def __init__(self) -> None:
        """Load the library; can block for ever.

        Raises:
            NoGpusError: There is no library, no driver or no GPU.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NoGpusError("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from None
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise NoGpusError(
                f"the NVIDIA driver says: {error}",
                "in a container: NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility",
            ) from None
        found = (self._gpu(index) for index in range(count))
        self.gpus = tuple(gpu for gpu in found if gpu is not None)
        if not self.gpus:
            raise NoGpusError("the NVIDIA driver shows no GPU")

    def look(self, gpu: Gpu, at: Instant) -> GpuVital:
        """Return how *gpu* fares; what the driver does not tell is ``None``."""
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, gpu.handle)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage, gpu.handle)
        return GpuVital(
            index=gpu.index,
            at=at,
            utilization_pct=None if rates is None else float(rates.gpu),
            memory_activity_pct=None if rates is None else float(rates.memory),
            power_w=None if milliwatts is None else milliwatts / 1000,
            power_limit_w=gpu.power_limit_w,
        )

    def users(self, gpu: Gpu) -> frozenset[int]:
        """Return the processes that have memory on *gpu*, as far as the driver tells us."""
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, gpu.handle)
        return frozenset(user.pid for user in found or ())

    def _gpu(self, index: int) -> Gpu | None:
        handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
        minor = None if handle is None else self._ask(self._nvml.nvmlDeviceGetMinorNumber, handle)
        if handle is None:
            return None
        limit = self._ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return Gpu(
            index=index,
            minor=index if minor is None else minor,
            handle=handle,
            power_limit_w=None if limit is None else limit / 1000,
        )

    def _ask(self, question: Callable[[Any], Any], of: Any) -> Any:
        try:
            return question(of)
        except self._nvml.NVMLError:
            return None


def used(
    opened: Collection[int], users: Mapping[int, frozenset[int]], pids: Collection[int]
) -> tuple[int, ...]:
    """Return the indices of the GPUs that processes use; ``()`` where that cannot be told.

    Args:
        opened: Indices of those whose device file one of them holds open.
        users: Index to the processes that have memory on that GPU; the keys are all that we see.
        pids: The processes.
    """
    if opened and (len(opened) < len(users) or len(users) == 1):
        return tuple(sorted(opened))
    return tuple(sorted(index for index, by in users.items() if not by.isdisjoint(pids)))


class Watcher:
    """Everything that is watched."""

    def __init__(self, channel: Channel, driver: Driver) -> None:
        self._channel = channel
        self._driver = driver
        self._pids: dict[InstanceKey, tuple[int, ...]] = {}
        self._used: dict[InstanceKey, tuple[int, ...]] = {}
        self._interval = 10.0
        self._look_at = self._refresh_at = 0.0

    def run(self) -> None:
        """Serve until the channel closes."""
        while True:
            patience = min(ALIVE_EVERY, self._look_at - time.monotonic())
            for message in self._channel.wait(max(0.05, patience)):
                if message_kind(message) == "watch":
                    self._watch(message)
            now = time.monotonic()
            if self._pids and now >= self._look_at:
                self._look(now)
            self._channel.send({"kind": "alive"})

    def _watch(self, message: Mapping[str, Any]) -> None:
        pids: dict[InstanceKey, tuple[int, ...]] = {
            from_plain(InstanceKey, entry["instance"]): tuple(map(int, entry["pids"]))
            for entry in message["instances"]
        }
        if pids != self._pids:
            self._pids, self._refresh_at = pids, 0.0
        self._interval = float(message["interval"])
        self._look_at = min(self._look_at, time.monotonic() + self._interval)

    def _look(self, now: float) -> None:
        self._look_at = now + self._interval
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH
            self._refresh()
        wanted = {index for indices in self._used.values() for index in indices}
        seen = {
            gpu.index: self._driver.look(gpu, Instant(time.monotonic()))
            for gpu in self._driver.gpus
            if gpu.index in wanted
        }
        items = [
            to_plain(
                GpusSeen(
                    instance=instance,
                    gpus=tuple(seen[index] for index in indices),
                    at=Instant(time.monotonic()),
                )
            )
            for instance, indices in self._used.items()
            if indices
        ]
        if items:
            self._channel.send({"kind": "observations", "items": items})

    def _refresh(self) -> None:
        by_minor = {gpu.minor: gpu.index for gpu in self._driver.gpus}
        users = {gpu.index: self._driver.users(gpu) for gpu in self._driver.gpus}
        self._used = {}
        for instance, pids in self._pids.items():
            minors = {minor for pid in pids for minor in _opened(pid)}
            opened = {by_minor[minor] for minor in minors & by_minor.keys()}
            self._used[instance] = used(opened, users, pids)


def _opened(pid: int) -> frozenset[int]:
    """Return the minor numbers of the GPUs that a process has open."""
    try:
        found = procfs.links(pid).values()
    except OSError:
        return frozenset()
    return frozenset(int(match[1]) for path in found if (match := _DEVICE.match(path)))


def body(channel: Channel) -> None:
    """Look at what the daemon names until it closes the channel."""
    try:
        driver = Driver()
    except NoGpusError as error:
        channel.send({"kind": "none", "reason": error.reason, "hint": error.hint})
        return
    Watcher(channel, driver).run()


if __name__ == "__main__":
    serve(body)
