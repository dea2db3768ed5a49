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
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from hangwatch.core.redaction import ALLOWED_ENVIRONMENT
from hangwatch.model.capture import Collector, Room, Scope, Stage, Step
from hangwatch.system import procfs

PACKAGES: Final = frozenset(
    {"lmdeploy", "vllm", "sglang", "sgl-kernel", "xtuner", "torch", "triton", "transformers"}
    | {"ray", "uvloop", "uvicorn", "fastapi", "pyzmq", "numpy", "safetensors", "tokenizers"}
    | {"flash-attn", "flashinfer-python", "deep-ep", "deep-gemm", "dlblas", "dlslime", "mooncake"}
    | {"nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cublas-cu12"}
    | {"nvidia-cuda-runtime-cu12", "xgrammar", "llguidance", "outlines", "pydantic", "aiohttp"}
)
"""Normalised names of what an engine's behaviour can hang on."""

MAX_METADATA: Final = 64 << 10

_LIBRARIES: Final = re.compile(r"(/\S*?/(?:site|dist)-packages)/")
_DISTRIBUTION: Final = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.(?:dist|egg)-info$")
_INTERPRETER: Final = re.compile(r"python(?P<version>3\.\d+)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def _collect(step: Step, room: Room) -> None:
    assert step.target is not None
    pid = step.target.process.pid
    _write(room, "limits.json", _limits(pid))
    variables = procfs.read_environment(pid)
    allowed = {name: text for name, text in variables.items() if ALLOWED_ENVIRONMENT.match(name)}
    _write(room, "environ.json", allowed)
    launch = {
        "arguments": procfs.read_title(pid),
        "exe": _link(pid, "exe"),
        "cwd": _link(pid, "cwd"),
        "namespaces": {name: _link(pid, f"ns/{name}") for name in ("pid", "net", "mnt")},
        "variables": len(variables),
        "variables_kept": len(allowed),
    }
    _write(room, "launch.json", launch)
    if step.target.python:
        _write(room, "versions.json", _versions(pid, variables))


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
        "cgroup": _text(pid, "cgroup").splitlines(),
        "oom_score": _text(pid, "oom_score"),
        "oom_score_adj": _text(pid, "oom_score_adj"),
    }


def _versions(pid: int, variables: dict[str, str]) -> dict[str, Any]:
    packages = {}
    folders = tuple(_folders(pid, variables))
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in procfs.list_inside(pid, folder):
                match = _DISTRIBUTION.match(entry)
                name = re.sub(r"[-_.]+", "-", match["name"]).lower() if match else ""
                if match and name in PACKAGES and name not in packages:
                    packages[name] = {
                        "version": match["version"],
                        "folder": folder,
                        **_origin(pid, PurePosixPath(folder, entry)),
                    }
    return {"packages": packages, "searched": list(folders)}


def _folders(pid: int, variables: dict[str, str]) -> Iterator[str]:
    """Yield where packages lie: where libraries were mapped from, then where they usually are."""
    seen = set()
    exe = _link(pid, "exe")
    maps = _text(pid, "maps")
    for folder in _LIBRARIES.findall(maps):
        if folder not in seen:
            seen.add(folder)
            yield folder
    match = _INTERPRETER.search(exe) or _INTERPRETER.search(maps)
    if match is None:
        return
    started = procfs.read_title(pid).split(" ", 1)[0]
    prefixes = [variables.get("VIRTUAL_ENV", ""), variables.get("CONDA_PREFIX", "")]
    prefixes += [str(PurePosixPath(path).parent.parent) for path in (started, exe)]
    prefixes.append("/usr/local")
    for prefix in prefixes:
        for kind in ("site-packages", "dist-packages"):
            folder = f"{prefix}/lib/python{match['version']}/{kind}"
            if prefix.startswith("/") and folder not in seen:
                seen.add(folder)
                yield folder


def _origin(pid: int, metadata: PurePosixPath) -> dict[str, Any]:
    """Return where a package was installed from, if its metadata says so (PEP 610)."""
    try:
        origin = json.loads(procfs.read_inside(pid, metadata / "direct_url.json", MAX_METADATA))
        url = urlsplit(origin["url"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    found: dict[str, Any] = {"url": origin["url"]}
    commit = origin.get("vcs_info", {}).get("commit_id")
    if commit:
        found["commit"] = commit
    elif url.scheme == "file":
        found["editable"] = bool(origin.get("dir_info", {}).get("editable"))
        found["commit"] = _head(pid, PurePosixPath(unquote(url.path)))
    return found


def _head(pid: int, folder: PurePosixPath) -> str | None:
    """Return the commit that is checked out in a folder, by the files of its repository."""

    def read(path: PurePosixPath) -> str:
        return procfs.read_inside(pid, path, MAX_METADATA).decode("utf-8", "replace").strip()

    with contextlib.suppress(OSError):
        repository = folder / ".git"
        with contextlib.suppress(OSError):
            pointer = read(repository)  # a worktree or submodule: "gitdir: PATH"
            repository = folder / pointer.removeprefix("gitdir:").strip()
        head = read(repository / "HEAD")
        if not head.startswith("ref:"):
            return head if _COMMIT.fullmatch(head) else None
        reference = head.removeprefix("ref:").strip()
        common = repository
        with contextlib.suppress(OSError):
            common = repository / read(repository / "commondir")
        with contextlib.suppress(OSError):
            return read(common / reference)
        for line in read(common / "packed-refs").splitlines():
            if line.endswith(f" {reference}"):
                return line.split(" ", 1)[0]
    return None


COLLECTOR: Final = Collector(
    name="environment",
    title="Arguments, environment, limits, and versions and commits of the engine's packages",
    scope=Scope.PROCESS,
    rung=9,
    stage=Stage.B,
    timeout=10.0,
    needs="the right to read the process; its files through /proc/PID/root (Linux 5.6)",
    collect=_collect,
)
