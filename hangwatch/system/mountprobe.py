"""The child that asks file systems whether they are there; it may never end, and is left then.

    python -m hangwatch.system.mountprobe PATH…

Each is asked in a thread of its own, so that one that does not answer hides no other. Says a line
of JSON for each that answered: its number, milliseconds, and what was wrong. Opens nothing: only
how much room there is, and the attributes of the folder that it is mounted on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hangwatch.system.spawn import run_tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a file system said.

    Attributes:
        milliseconds: How long it took.
        error: What was wrong, or ``""``.
        refused: Whether it was not asked at all, because we may not.
    """

    milliseconds: float
    error: str = ""
    refused: bool = False


def ask(paths: Sequence[str], timeout: float) -> tuple[Mapping[int, Answer], bool]:
    """Ask the file systems at *paths*.

    Args:
        paths: Where they are mounted.
        timeout: Seconds after which those that have not answered will not be waited for.

    Returns:
        The answers by the number of the path, and whether the child has ended.

    Raises:
        OSError: No child can be started.
    """
    result = run_tool(
        [sys.executable, "-P", "-m", __name__, *paths],
        timeout=timeout,
        limit=1 << 20,
        environment=os.environ,
    )
    answers = {}
    for line in result.output.splitlines():
        with contextlib.suppress(ValueError):  # the last one may be cut short
            said = json.loads(line)
            answers[said.pop("number")] = Answer(**said)
    return answers, result.code is not None


def _look(number: int, path: str) -> None:
    began = time.monotonic()
    error, refused = "", False
    try:
        os.statvfs(path)
        os.lstat(path)
    except OSError as problem:
        error = problem.strerror or str(problem)
        refused = isinstance(problem, PermissionError)
    said = {
        "number": number,
        "milliseconds": round(1000 * (time.monotonic() - began), 2),
        "error": error,
        "refused": refused,
    }
    os.write(1, json.dumps(said).encode() + b"\n")


def _main() -> None:
    threads = [
        threading.Thread(target=_look, args=each, daemon=True) for each in enumerate(sys.argv[1:])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


if __name__ == "__main__":
    _main()
