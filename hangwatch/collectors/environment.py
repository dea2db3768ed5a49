"""How a process was started, within which limits, and from which code.

Versions come from the metadata of installed packages, read as files of the target's own root:
nothing of the target is imported or executed, and no link leads out of its root. For a package
that was installed from a repository the commit is read too, because "0.18.0" may be anything.

Arguments, environment and maps can block for as long as the target does, so the harmless files
come first.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any, Final

from hangwatch.core import engine_config, provenance
from hangwatch.core.redaction import ALLOWED_ENVIRONMENT
from hangwatch.model.capture import (
    Collector,
    CollectorError,
    FailureKind,
    Room,
    Scope,
    Stage,
    Step,
)
from hangwatch.model.identity import NEEDED
from hangwatch.system import packages, procfs

PACKAGES: Final = frozenset(
    {"lmdeploy", "vllm", "sglang", "sgl-kernel", "xtuner", "torch", "triton", "transformers"}
    | {"ray", "uvloop", "uvicorn", "fastapi", "pyzmq", "numpy", "safetensors", "tokenizers"}
    | {"flash-attn", "flashinfer-python", "deep-ep", "deep-gemm", "dlblas", "dlslime", "mooncake"}
    | {"nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cublas-cu12"}
    | {"nvidia-cuda-runtime-cu12", "xgrammar", "llguidance", "outlines", "pydantic", "aiohttp"}
)
"""Normalised names of what an engine's behaviour can hang on."""

_PLACE: Final = re.compile(r"^(Cpus|Mems)_allowed_list:\s*(\S+)", re.MULTILINE)
_TORCH: Final = re.compile(
    r"^(__version__|cuda|hip|git_version)(?::[^=\n]*)? = '([^'\n]*)'", re.MULTILINE
)


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    pid = step.target.process.pid
    _write(room, "limits.json", _limits(pid))
    variables = procfs.read_environment(pid)
    allowed = {name: text for name, text in variables.items() if ALLOWED_ENVIRONMENT.match(name)}
    closed = _is_closed(pid)
    spaces = {name: text for name in ("pid", "net", "mnt") if (text := _link(pid, f"ns/{name}"))}
    launch = {
        "arguments": procfs.read_title(pid),
        **{name: text for name in ("exe", "cwd") if (text := _link(pid, name))},
        "parent": _parent(pid),
        **({"namespaces": spaces} if spaces else {}),
        **({} if closed else {"variables": len(variables), "variables_kept": len(allowed)}),
    }
    _write(room, "launch.json", launch)
    if step.target.role in NEEDED:
        metrics = room.earlier("metrics.prom") or b""
        found = engine_config.configuration(procfs.read_arguments(pid), metrics)
        _write(room, "engine_config.json", found)
    if closed:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            "its environment, packages and libraries may not be read",
            procfs.PERMISSION_HINT,
        )
    _write(room, "environ.json", allowed)
    if step.target.python:
        _write(room, "versions.json", _versions(pid, variables))


def _is_closed(pid: int) -> bool:
    """Say whether a process may not be looked into."""
    try:
        procfs.read_link(pid, "exe")
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _write(room: Room, name: str, document: Any) -> None:
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
    room.write(name, f"{text}\n".encode("utf-8", "surrogateescape"))


def _link(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return procfs.read_link(pid, name)
    return ""


def _text(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return procfs.read_file(pid, name).decode("utf-8", "replace").strip()
    return ""


def _limits(pid: int) -> dict[str, Any]:
    table = {}
    for line in _text(pid, "limits").splitlines()[1:]:
        fields = re.split(r"\s{2,}", line.strip())
        if len(fields) >= 3:
            table[fields[0]] = {"soft": fields[1], "hard": fields[2]}
    return {
        "limits": table,
        "allowed": _place(pid),
        "cgroup": _text(pid, "cgroup").splitlines(),
        "oom_score": _text(pid, "oom_score"),
        "oom_score_adj": _text(pid, "oom_score_adj"),
    }


def _place(pid: int) -> dict[str, Any]:
    """Return on which cores it may run, and of which nodes of memory it may take."""
    found = dict(_PLACE.findall(_text(pid, "status")))
    return {"cpus": found.get("Cpus", ""), "memory_nodes": found.get("Mems", "")}


def _parent(pid: int) -> dict[str, Any]:
    """Return who started it, as far as that one still lives."""
    try:
        parent = procfs.read_row(pid).ppid
        return {"pid": parent, "arguments": procfs.read_title(parent)}
    except (FileNotFoundError, ProcessLookupError):
        return {}


def _versions(pid: int, variables: dict[str, str]) -> dict[str, Any]:
    searched = tuple(packages.folders(pid, variables))
    found = packages.distributions(pid, searched, PACKAGES)
    document: dict[str, Any] = {
        "packages": {
            name: {
                "version": each.version,
                "folder": each.folder,
                **packages.origin(pid, each),
            }
            for name, each in found.items()
        },
        "libraries": provenance.libraries(_text(pid, "maps")),
        "searched": list(searched),
    }
    if "torch" in found:
        document["torch"] = _torch(pid, found["torch"].folder)
    return document


def _torch(pid: int, folder: str) -> dict[str, str]:
    """Return what PyTorch was built for: its file of versions is text, and is not executed."""
    with contextlib.suppress(OSError):
        text = procfs.read_inside(pid, f"{folder}/torch/version.py", packages.MAX_METADATA)
        return dict(_TORCH.findall(text.decode("utf-8", "replace")))
    return {}


COLLECTOR: Final = Collector(
    name="environment",
    title="Arguments, environment, limits, configuration, versions and commits",
    scope=Scope.PROCESS,
    rung=9,
    stage=Stage.B,
    timeout=10.0,
    needs="the right to read the process; its files through /proc/PID/root (Linux 5.6)",
    collect=_collect,
)
