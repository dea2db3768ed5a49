"""A process whose GPU kernel never ends, for tools that are given a pid, and for the laboratory.

Run it by path, under any Python from 3.10 on, where there is an NVIDIA GPU::

    python hangwatch/lab/gpu_kernel.py              # the loop lives and asks every millisecond
    python hangwatch/lab/gpu_kernel.py --wait sync  # the loop's thread is blocked in the driver

It needs the driver's ``libcuda.so.1`` and nothing else: the kernel is PTX text that the driver
compiles. Until the fault it works: short kernels, one after the other, each waited for as
LMDeploy does it (``BaseModelAgent.get_output_async``: query an event, sleep a millisecond). Then
one kernel spins until a flag in host memory is set, or for ``--limit`` seconds: no lost GPU, no
reset, no other program of that GPU is disturbed, and the clocks stay as they are.

On standard output stand JSON lines: ``ready`` when it works, ``truth`` when the fault has begun,
``over`` when the kernel ended. SIGUSR2 starts the fault, like ``--after``; SIGTERM ends the kernel
and then the process. Where there is no GPU it says why and ends with 2.

For a fault of ``lab/faults``: ``unavailable`` says why it cannot happen here; ``Gpu`` is to be made
in ``prepare``, for its first start takes a second; ``strike`` awaits ``gpu.spin(limit)`` and then
``get_output_async(gpu)``, in a task of its own, or calls ``gpu.synchronize()`` for the kind that
blocks the loop; ``gpu.release()`` ends it. Right are the verdict ``hung`` and the cause
``gpu-kernel-stuck``; the culprit is ``get_output_async``, or ``synchronize``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

LIMIT = 120.0
"""Seconds after which the kernel ends by itself."""

STEP = 0.005
"""Seconds that a kernel takes while all is well."""

KERNEL = "hangwatch_lab_spin"

# Each instruction is said to stand in the line of this file where it is written.
PTX = """\
.visible .entry hangwatch_lab_spin(.param .u64 flag, .param .u64 limit)
{
    .reg .pred %p<3>;
    .reg .u32 %r<2>;
    .reg .u64 %t<6>;
    ld.param.u64 %t1, [flag];
    ld.param.u64 %t2, [limit];
    mov.u64 %t3, %globaltimer;
SPIN:
    ld.volatile.global.u32 %r1, [%t1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra OVER;
    mov.u64 %t4, %globaltimer;
    sub.u64 %t5, %t4, %t3;
    setp.lt.u64 %p2, %t5, %t2;
    @%p2 bra SPIN;
OVER:
    ret;
}
"""

_NOT_READY = 600
_NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_LINE_INFO = 13  # CU_JIT_GENERATE_LINE_INFO


class GpuError(Exception):
    """The driver refused."""


class Gpu:
    """One GPU, a kernel on it that can spin, and the flag that ends it."""

    def __init__(self, device: int = 0) -> None:
        """Open the GPU and compile the kernel; takes a second.

        Raises:
            GpuError: There is no driver or no such GPU.
        """
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GpuError("there is no libcuda.so.1 here") from error
        self._call("cuInit", 0)
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self._function = self._compile(handle)
        self._flag, self._flag_on_device = self._shared_word()
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), 1)
        self._call("cuEventCreate", ctypes.byref(self._event), 2)

    def spin(self, seconds: float) -> None:
        """Let the kernel run until ``release``, *seconds* at most; do not wait for it."""
        address = ctypes.c_uint64(self._flag_on_device)
        limit = ctypes.c_uint64(int(seconds * 1e9))
        arguments = (ctypes.c_void_p * 2)(
            ctypes.cast(ctypes.byref(address), ctypes.c_void_p),
            ctypes.cast(ctypes.byref(limit), ctypes.c_void_p),
        )
        self._call(
            "cuLaunchKernel", self._function, 1, 1, 1, 32, 1, 1, 0, self._stream, arguments, None
        )
        self._call("cuEventRecord", self._event, self._stream)

    def is_done(self) -> bool:
        """Say whether the kernel has ended."""
        return self._call("cuEventQuery", self._event, accept=_NOT_READY) == 0

    def synchronize(self) -> None:
        """Wait for the kernel inside the driver."""
        self._call("cuStreamSynchronize", self._stream)

    def release(self) -> None:
        """End the kernel."""
        self._flag.value = 1

    def _compile(self, device: ctypes.c_int) -> ctypes.c_void_p:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        # The oldest that the driver of CUDA 13 compiles; older GPUs have older drivers.
        newer = (major.value, minor.value) >= (7, 5)
        head = ".version 6.3\n.target sm_75\n" if newer else ".version 6.0\n.target sm_50\n"
        text = head + ".address_size 64\n" + _with_lines(PTX)
        options = (ctypes.c_int * 1)(_LINE_INFO)
        values = (ctypes.c_void_p * 1)(1)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call(
            "cuModuleLoadDataEx", ctypes.byref(module), text.encode() + b"\0", 1, options, values
        )
        self._call("cuModuleGetFunction", ctypes.byref(function), module, KERNEL.encode())
        return function

    def _shared_word(self) -> tuple[ctypes.c_uint32, int]:
        host, device = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(4), 2)
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, 0)
        assert host.value is not None
        word = ctypes.c_uint32.from_address(host.value)
        word.value = 0
        return word, device.value

    def _call(self, name: str, *arguments: Any, accept: int = 0) -> int:
        code: int = getattr(self._cuda, name)(*arguments)
        if code not in (0, accept):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            if code == _NO_DEVICE:
                raise GpuError("there is no NVIDIA GPU here")
            raise GpuError(f"{name} failed: {said}")
        return code


def unavailable() -> str | None:
    """Return why no kernel can spin here, or ``None``.

    Asks the driver nothing: a process that did could not be forked any more.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no libcuda.so.1 here"
    return None if any(Path("/dev").glob("nvidia[0-9]*")) else "there is no NVIDIA GPU here"


async def get_output_async(gpu: Gpu) -> None:
    """Wait for a kernel as LMDeploy's model agent does: ask, sleep for a millisecond, ask again."""
    while not gpu.is_done():
        await asyncio.sleep(0.001)


def _with_lines(text: str) -> str:
    """Return PTX whose instructions name their lines in this file."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = source.index('PTX = """\\') + 2
    lines = [f'.file 1 "{__file__}"']
    for number, line in enumerate(text.splitlines(), start=first):
        if line.endswith(";") and ".reg" not in line:
            lines.append(f"    .loc 1 {number} 0")
        lines.append(line)
    return "\n".join(lines) + "\n"


async def _work(gpu: Gpu, options: argparse.Namespace, due: asyncio.Event) -> None:
    steps = 0
    while not due.is_set():
        gpu.spin(STEP)
        await get_output_async(gpu)
        steps += 1
        if steps % 100 == 0:
            _say({"kind": "step", "steps": steps})
    gpu.spin(options.limit)
    _tell(options)
    if options.wait == "sync":
        gpu.synchronize()
    else:
        await get_output_async(gpu)
    _say({"kind": "over"})


async def _main(gpu: Gpu, options: argparse.Namespace) -> None:
    due = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, due.set)
    if options.after is not None:
        loop.call_later(options.after, due.set)
    _say({"kind": "ready", "pid": os.getpid()})
    await asyncio.create_task(_work(gpu, options, due), name="ModelAgentLoop")


def _tell(options: argparse.Namespace) -> None:
    truth = {
        "fault": f"gpu-kernel-{options.wait}",
        "at_monotonic": time.monotonic(),
        "at_wall": datetime.now().astimezone().isoformat(),
        "pid": os.getpid(),
        "frame": "synchronize" if options.wait == "sync" else "get_output_async",
    }
    if options.truth:
        unfinished = Path(options.truth + ".part")
        unfinished.write_text(json.dumps(truth), encoding="utf-8")
        unfinished.replace(options.truth)
    _say({"kind": "truth", **truth})


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _end_upon_sigterm(gpu: Gpu) -> None:
    """End the kernel when told to: the thread that waits in the driver hears no signal."""
    signal.sigwait([signal.SIGTERM])
    gpu.release()
    time.sleep(1.0)  # the kernel's end goes its way, and is told
    os._exit(0)


def main() -> None:
    """Work on the GPU, and hang."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--wait", choices=("poll", "sync"), default="poll", help="how it waits")
    parser.add_argument(
        "--after",
        type=lambda text: None if text == "never" else float(text),
        default=1.0,
        metavar="SECONDS",
        help="from ready to the fault; never: upon SIGUSR2",
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that the kernel spins")
    parser.add_argument("--truth", metavar="FILE", help="where the instant is written as well")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        gpu = Gpu()
    except GpuError as error:
        print(f"no kernel can spin here: {error}", file=sys.stderr)
        sys.exit(2)
    threading.Thread(target=_end_upon_sigterm, args=(gpu,), name="sigterm", daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(gpu, options))


if __name__ == "__main__":
    main()
