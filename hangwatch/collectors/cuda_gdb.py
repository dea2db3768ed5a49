"""Which kernel is on the GPU and in which line of source it stands, by ``cuda-gdb``, upon request.

Attaching takes it about 15 seconds, in which the process and its GPU stand still; afterwards both
go on where they were. That is no price for an engine that is served from, and a small one for an
engine that is about to be restarted: so it runs by request only, behind every gate, of the one most
suspicious holder of a GPU. It is watched from outside as every tool that attaches.

It cannot attach to a process that was started for GPU core dumps, and is not even started there.
"""

from __future__ import annotations

import json
from typing import Final

from hangwatch.core import cudagdb
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Gate,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.system import procfs
from hangwatch.system.attaching import Attached, Tool, run_attached
from hangwatch.system.cudagdb import MAX_OUTPUT, MEMORY, arguments, find

TIMEOUT: Final = 60.0

BUDGET_MS: Final = 55_000.0
"""Milliseconds that the process may stand still: 11,000 to 16,500 were measured with PyTorch."""

CORE_DUMPS: Final = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    process = step.target.process
    program = find(step.options)
    if procfs.read_environment(process.pid).get(CORE_DUMPS, "0") not in ("", "0"):
        raise CollectorError(
            FailureKind.NOT_AVAILABLE,
            "the process was started for GPU core dumps, which leaves no way to attach",
            "--collect gpu_core takes such a dump, and the engine does not survive it",
        )
    tool = Tool(
        arguments=arguments(program, (*cudagdb.QUESTIONS, "detach"), process.pid),
        timeout=step.timeout - 2.0,
        limit=MAX_OUTPUT,
        budget=(step.budget_ms or BUDGET_MS) / 1000,
        memory=MEMORY // 4,
    )
    try:
        run = run_attached(tool, room.note)
    except OSError as error:
        raise CollectorError(
            FailureKind.TOOL_FAILED, f"cuda-gdb cannot be started: {error.strerror}"
        ) from error
    room.paused(run.pause_ms)
    text = cudagdb.tidy(run.result.output.decode("utf-8", "replace"))
    said = run.result.errors.decode("utf-8", "replace")
    if text or said:
        room.write("cuda_gdb.txt", f"{text}{said}".encode())
    kernels = cudagdb.kernels(text)
    if kernels:
        document = json.dumps({"kernels": kernels}, indent=1, ensure_ascii=False)
        room.write("cuda_gdb.json", f"{document}\n".encode())
    _raise_failure(run, text + said, found=bool(kernels))


def _raise_failure(run: Attached, text: str, *, found: bool) -> None:
    if run.over_budget:
        raise CollectorError(
            FailureKind.OVER_BUDGET,
            f"the process stood still for {run.pause_ms / 1000:.0f} s, and cuda-gdb was killed",
        )
    if run.result.ended_by_us:
        raise CollectorError(FailureKind.TIMED_OUT, "cuda-gdb did not end in time and was killed")
    if found:
        return
    if (reason := cudagdb.refusal(text)) is not None:
        raise CollectorError(*reason)
    if run.result.code != 0:
        last = text.strip().splitlines()[-1][:300] if text.strip() else ""
        raise CollectorError(
            FailureKind.TOOL_FAILED, f"cuda-gdb ended with {run.result.code}: {last}"
        )
    raise CollectorError(FailureKind.NOT_AVAILABLE, "there is no kernel of the process on a GPU")


COLLECTOR: Final = Collector(
    name="cuda_gdb",
    title="Name and source line of the kernels on the GPU; stops the engine for about 15 s",
    scope=Scope.PROCESS,
    rung=10,
    stage=Stage.B,
    timeout=TIMEOUT,
    needs="cuda-gdb on hangwatch's own path, and the right to attach (SYS_PTRACE)",
    opt_in=True,
    gpu_only=True,
    most=1,
    attaches=True,
    budget_ms=BUDGET_MS,
    gates=(Gate.HUNG, Gate.NO_D_STATE, Gate.NOT_STOPPED, Gate.NO_TRACER),
    memory=MEMORY,
    options={
        "program": "path of another cuda-gdb than the one on the path",
        "any_verdict": "yes: also where the verdict is not hung",
        "budget_ms": "milliseconds that the process may stand still (55000)",
    },
    collect=_collect,
    waits=True,
)
