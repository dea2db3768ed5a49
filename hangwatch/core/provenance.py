"""Which code ran: installed files against the record of their package, and libraries by name.

A wheel brings ``RECORD``: path, hash and size of each file as it was published (PEP 427). A file
that differs was changed by hand since. Code that runs from a working tree has no such record; of it
the name that git gives to a file's content is noted, which tells with the commit at hand whether it
was changed, without showing it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

ENGINES: Final = frozenset({"lmdeploy", "vllm", "sglang", "xtuner"})
"""Packages of engines, by the name under which they are imported; no other code is looked at."""

CONTEXT: Final = 3
"""Lines of source kept on each side of one that stands in a stack."""

MAX_LINE: Final = 300

_LIBRARY: Final = re.compile(
    r"/(?P<name>libcuda|libcudart|libnccl|libcudnn|libcublas|libnvidia-ml|libnvidia-ptxjitcompiler|"
    r"libtorch_cuda|libc10_cuda|libibverbs|libmlx5|libnvshmem_host|libcupti)"
    r"(?:[.-][\w.+-]*)?\.so[\w.]*$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One file of a package as it was published.

    Attributes:
        path: Relative to the folder that the package is installed in.
        digest: SHA-256 in hexadecimal, or ``""`` where none was recorded.
        size: Bytes; ``None`` where not recorded.
    """

    path: str
    digest: str
    size: int | None


def record(text: str) -> Iterator[Recorded]:
    """Yield what a ``RECORD`` says; lines that make no sense are passed over."""
    for row in csv.reader(text.splitlines()):
        if not row or not row[0] or row[0].startswith(("/", "../")):
            continue
        algorithm, _, encoded = (row[1] if len(row) > 1 else "").partition("=")
        try:
            raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        except ValueError:
            raw = b""
        size = row[2] if len(row) > 2 else ""
        yield Recorded(
            path=row[0],
            digest=raw.hex() if algorithm == "sha256" and len(raw) == 32 else "",
            size=int(size) if size.isdigit() else None,
        )


def differs(known: Recorded, data: bytes) -> bool | None:
    """Say whether a file is not what was published; ``None`` where no hash was recorded."""
    if not known.digest:
        return None if known.size in (None, len(data)) else True
    return hashlib.sha256(data).hexdigest() != known.digest


def git_blob(data: bytes) -> str:
    """Return the name that git gives to this content, as ``git ls-tree`` shows it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def places(documents: Iterable[bytes]) -> dict[str, set[int]]:
    """Return the lines, by file, that stand in stacks and await chains.

    Args:
        documents: ``threads.json`` and ``tasks.json``; one that is cut short is passed over.
    """
    found: dict[str, set[int]] = {}
    for data in documents:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            continue
        for frame in _frames(document):
            path, line = frame.get("filename") or frame.get("file"), frame.get("line")
            if isinstance(path, str) and isinstance(line, int) and line > 0:
                found.setdefault(path, set()).add(line)
    return found


def _frames(document: Any) -> Iterator[Mapping[str, Any]]:
    owners = document.get("tasks", ()) if isinstance(document, dict) else document
    for owner in owners if isinstance(owners, list | tuple) else ():
        if isinstance(owner, dict):
            for frame in owner.get("frames") or owner.get("chain") or ():
                if isinstance(frame, dict):
                    yield frame


def roots(path: str) -> tuple[str, ...]:
    """Return the folders that could be the engine's package that a file belongs to.

    The outermost first: a repository often has the name of the package in it.
    """
    parts = PurePosixPath(path).parts
    return tuple(
        str(PurePosixPath(*parts[: place + 1]))
        for place, part in enumerate(parts[:-1])
        if part in ENGINES
    )


def excerpts(
    path: str, text: str, lines: Iterable[int], *, context: int = CONTEXT
) -> Iterator[dict[str, Any]]:
    """Yield the source around each of some lines: those that touch are given as one piece."""
    source = text.splitlines()
    pieces: list[list[int]] = []
    for line in sorted(line for line in lines if line <= len(source)):
        first, last = max(1, line - context), min(len(source), line + context)
        if pieces and first <= pieces[-1][1] + 1:
            pieces[-1][1] = last
        else:
            pieces.append([first, last])
    for first, last in pieces:
        yield {
            "file": path,
            "first": first,
            "text": [line[:MAX_LINE] for line in source[first - 1 : last]],
        }


def libraries(maps: str) -> dict[str, list[str]]:
    """Return the files of the driver's and CUDA's libraries that a process has mapped.

    The names have their versions: ``libcuda.so.580.65.06``. Of a library that is mapped from two
    places both are there.
    """
    found: dict[str, list[str]] = {}
    for path in dict.fromkeys(re.findall(r"(/\S+)", maps)):
        match = _LIBRARY.search(path)
        if match is not None:
            found.setdefault(match["name"], []).append(path)
    return found
