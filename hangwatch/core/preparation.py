"""What an engine's environment must hold before it starts, so that it can be asked for dumps.

None of it changes what an engine computes. Everything that a variable costs is said beside it, for
people who must decide.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

RECORDED: Final = 2000
"""Collectives that the flight recorder keeps: PyTorch's own number, in its newer versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable of the environment.

    Attributes:
        name: It.
        value: What it is to be.
        gives: What it makes possible.
        costs: What it costs while nothing hangs.
    """

    name: str
    value: str
    gives: str
    costs: str


def variables(folder: str, *, gpu_core: bool = False) -> tuple[Variable, ...]:
    """Return the variables, with named pipes and dumps in *folder*.

    Args:
        folder: It must be there when the engine starts: PyTorch ends a process whose pipe it cannot
            make.
        gpu_core: Whether to prepare GPU core dumps too, which leaves no way to attach a debugger.
    """
    return (*_always(folder), *(_gpu_core(folder) if gpu_core else ()))


def _always(folder: str) -> tuple[Variable, ...]:
    return (
        # The older of its two names, which every PyTorch understands.
        Variable(
            name="TORCH_NCCL_TRACE_BUFFER_SIZE",
            value=str(RECORDED),
            gives="PyTorch remembers its last collectives with their Python stacks",
            costs="some microseconds for each collective, some megabytes",
        ),
        Variable(
            name="TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
            value=f"{folder}/hangwatch-nccl-",
            gives="a named pipe for each rank, by which --collect flight_recorder asks for them",
            costs="nothing",
        ),
        Variable(
            name="TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
            value=f"{folder}/hangwatch-nccl-trace-",
            gives="where they are written, one file for each rank",
            costs="nothing",
        ),
        Variable(
            name="TORCH_NCCL_DUMP_ON_TIMEOUT",
            value="1",
            gives="the pipe is looked at once a second instead of once in several minutes",
            costs="a rank that times out in a collective writes them before it ends",
        ),
        Variable(
            name="PYTHONFAULTHANDLER",
            value="1",
            gives="the Python stacks of an engine that dies of a signal, in its log",
            costs="nothing",
        ),
    )


def _gpu_core(folder: str) -> tuple[Variable, ...]:
    return (
        Variable(
            name="CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
            value="1",
            gives="--collect gpu_core can ask for a dump of the GPU, which ends the CUDA context",
            costs="no debugger can be attached to the GPU any more (--collect cuda_gdb)",
        ),
        Variable(
            name="CUDA_COREDUMP_PIPE",
            value=f"{folder}/hangwatch-gpu-%p.pipe",
            gives="a named pipe for each process, by which it is asked",
            costs="a thread of the driver that waits",
        ),
        Variable(
            name="CUDA_COREDUMP_FILE",
            value=f"{folder}/hangwatch-gpu-%p.nvcudmp",
            gives="where the dump is written: 200 MB for LMDeploy",
            costs="nothing",
        ),
        Variable(
            name="CUDA_COREDUMP_GENERATION_FLAGS",
            value=(
                "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,"
                "skip_local_memory,skip_constbank_memory,skip_abort"
            ),
            gives="no memory of the GPU in the dump, and a process that lives on without its GPU",
            costs="nothing",
        ),
    )


def as_shell(found: Iterable[Variable], folder: str) -> str:
    """Return lines for ``eval``; the first one makes the folder."""
    lines = [f"mkdir -p -m 700 {shlex.quote(folder)}"]
    lines += [f"export {each.name}={shlex.quote(each.value)}" for each in found]
    return "\n".join(lines)


def as_kubernetes(found: Iterable[Variable]) -> str:
    """Return entries for ``env`` of a container."""
    return "\n".join(f"- name: {each.name}\n  value: {json.dumps(each.value)}" for each in found)
