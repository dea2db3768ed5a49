"""Which packages a process has installed, by the files of its own root.

Nothing of the target is imported or executed, and no link leads out of its root. Reads its maps,
which can block for as long as the process does: for expendable processes only.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from hangwatch.system import procfs

MAX_METADATA: Final = 64 << 10

_LIBRARIES: Final = re.compile(r"(/\S*?/(?:site|dist)-packages)/")
_DISTRIBUTION: Final = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.(?:dist|egg)-info$")
_INTERPRETER: Final = re.compile(r"python(?P<version>3\.\d+)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One installed package.

    Attributes:
        name: Normalised: ``flash-attn``.
        version: As its metadata is named.
        folder: Where it lies, in the root of the process.
        metadata: Folder of its metadata.
    """

    name: str
    version: str
    folder: str
    metadata: PurePosixPath


def folders(pid: int, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield where packages lie: where libraries were mapped from, then where they usually are.

    Args:
        pid: The process.
        variables: Its environment.
    """
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


def distributions(
    pid: int, searched: Collection[str], names: Collection[str]
) -> dict[str, Distribution]:
    """Return those of the packages *names* that are installed, the first of each.

    Args:
        pid: The process.
        searched: Folders, see ``folders``.
        names: Normalised names.
    """
    found: dict[str, Distribution] = {}
    for folder in searched:
        with contextlib.suppress(OSError):
            for entry in procfs.list_inside(pid, folder):
                match = _DISTRIBUTION.match(entry)
                name = re.sub(r"[-_.]+", "-", match["name"]).lower() if match else ""
                if match and name in names and name not in found:
                    found[name] = Distribution(
                        name=name,
                        version=match["version"],
                        folder=folder,
                        metadata=PurePosixPath(folder, entry),
                    )
    return found


def origin(pid: int, distribution: Distribution) -> dict[str, Any]:
    """Return where a package was installed from, if its metadata says so (PEP 610)."""
    path = distribution.metadata / "direct_url.json"
    try:
        document = json.loads(procfs.read_inside(pid, path, MAX_METADATA))
        url = urlsplit(document["url"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    found: dict[str, Any] = {"url": document["url"]}
    commit = document.get("vcs_info", {}).get("commit_id")
    if commit:
        found["commit"] = commit
    elif url.scheme == "file":
        found["editable"] = bool(document.get("dir_info", {}).get("editable"))
        found["commit"] = head(pid, PurePosixPath(unquote(url.path)))
    return found


def head(pid: int, folder: PurePosixPath) -> str | None:
    """Return the commit that is checked out in a folder, by the files of its repository."""

    def read(path: PurePosixPath) -> str:
        return procfs.read_inside(pid, path, MAX_METADATA).decode("utf-8", "replace").strip()

    with contextlib.suppress(OSError):
        repository = folder / ".git"
        with contextlib.suppress(OSError):
            pointer = read(repository)  # a worktree or submodule: "gitdir: PATH"
            repository = folder / pointer.removeprefix("gitdir:").strip()
        tip = read(repository / "HEAD")
        if not tip.startswith("ref:"):
            return _commit(tip)
        reference = tip.removeprefix("ref:").strip()
        common = repository
        with contextlib.suppress(OSError):
            common = repository / read(repository / "commondir")
        with contextlib.suppress(OSError):
            return _commit(read(common / reference))
        for line in read(common / "packed-refs").splitlines():
            if line.endswith(f" {reference}"):
                return _commit(line.split(" ", 1)[0])
    return None


def _commit(text: str) -> str | None:
    """Return *text* if it names a commit: a repository can refer to any file of its root."""
    return text if _COMMIT.fullmatch(text) else None


def _link(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return procfs.read_link(pid, name)
    return ""


def _text(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return procfs.read_file(pid, name).decode("utf-8", "replace")
    return ""
