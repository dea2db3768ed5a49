"""The child that asks file systems whether they are there; it may never end, and is left then.

    python -m hangwatch.system.mountprobe SECONDS PATH…

Each is asked in a thread of its own, so that one that does not answer hides no other. Says a line
of JSON when it asks, and one for each that answered: its number, milliseconds, and what was wrong.
Opens nothing: only how much room there is, and the attributes of the folder that it is mounted on.
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
from typing import Final

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


START: Final = 4.0
"""Seconds for the child to start and to end: an interpreter takes 0.05 s, under load far more."""


def ask(paths: Sequence[str], timeout: float) -> tuple[Mapping[int, Answer | None], bool]:
    """Ask the file systems at *paths*.

    Args:
        paths: Where they are mounted.
        timeout: Seconds, from the question, after which an answer is not waited for.

    Returns:
        The answers by the number of the path, ``None`` where none came; those that could not be
        asked in time are left out. And whether the child has ended.

    Raises:
        OSError: No child can be started.
    """
    result = run_tool(
        [sys.executable, "-P", "-m", __name__, str(timeout), *paths],
        timeout=timeout + START,
        limit=1 << 20,
        environment=os.environ,
    )
    answers: dict[int, Answer | None] = {}
    for line in result.output.splitlines():
        with contextlib.suppress(ValueError):  # the last one may be cut short
            said = json.loads(line)
            number = said.pop("number")
            answers[number] = Answer(**said) if said else None
    return answers, result.code is not None


def _look(number: int, path: str) -> None:
    _say(number=number)
    began = time.monotonic()
    error, refused = "", False
    try:
        os.statvfs(path)
        os.lstat(path)
    except OSError as problem:
        error = problem.strerror or str(problem)
        refused = isinstance(problem, PermissionError)
    took = round(1000 * (time.monotonic() - began), 2)
    _say(number=number, milliseconds=took, error=error, refused=refused)


def _say(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")  # at one go: threads do not mix


def _main() -> None:
    timeout, *paths = sys.argv[1:]
    threads = [threading.Thread(target=_look, args=each, daemon=True) for each in enumerate(paths)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + float(timeout)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    os._exit(0)


if __name__ == "__main__":
    _main()
