"""Real interpreters to read from outside, and the programs that they run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
MINORS = range(10, 16)
EXTRA = "HANGWATCH_TEST_INTERPRETERS"
"""More interpreters, ``:``-separated commands; ``chroot ROOT PYTHON`` is understood."""


@dataclass(frozen=True)
class Interpreter:
    """A command that runs Python, and the root of the file system that it sees."""

    command: tuple[str, ...]
    version: str
    root: Path = Path("/")

    @property
    def minor(self) -> int:
        return int(self.version.split(".")[1])

    @property
    def is_ours(self) -> bool:
        """Whether it is the one that runs the tests."""
        return self.command[0] == sys.executable

    def __str__(self) -> str:
        return self.version


def interpreters() -> list[Interpreter]:
    """Return every interpreter of a known minor version that is found here."""
    commands = [[sys.executable], ["/usr/bin/python3"]]
    roots = [Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"]
    for root in roots:
        commands += [[str(path)] for path in sorted(root.glob("3.*/bin/python"))]
    for minor in MINORS:
        found = shutil.which(f"python3.{minor}")
        if found and "shims" not in found:
            commands.append([found])
    commands += [shlex.split(each) for each in os.environ.get(EXTRA, "").split(":") if each]
    known: dict[str, Interpreter] = {}
    for command in commands:
        version = _version(command)
        if version and int(version.split(".")[1]) in MINORS:
            root = Path(command[1]) if command[0].endswith("chroot") else Path("/")
            known.setdefault(version, Interpreter(tuple(command), version, root))
    return sorted(known.values(), key=lambda each: each.minor)


def free_threaded() -> list[str]:
    """Return the command of a build without the GIL, or nothing."""
    commands = [shlex.split(each) for each in os.environ.get(EXTRA, "").split(":") if each]
    commands += [[found] for minor in MINORS if (found := shutil.which(f"python3.{minor}t"))]
    return next((each for each in commands if _version(each, "1")), [])


def _version(command: list[str], gil_disabled: str = "0") -> str:
    code = (
        "import sys, sysconfig;"
        f"assert bool(sysconfig.get_config_var('Py_GIL_DISABLED')) == {gil_disabled};"
        "print('%d.%d.%d' % sys.version_info[:3])"
    )
    try:
        done = subprocess.run(
            [*command, "-c", code],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = done.stdout.strip()
    return text if re.fullmatch(r"3\.\d+\.\d+", text) else ""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@contextmanager
def running(
    interpreter: Interpreter,
    program: str,
    *arguments: object,
    folder: Path,
    timeout: float = 60,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """Run a program until it has written the truth; yield the process and that."""
    inner = folder
    programs = PROGRAMS
    if interpreter.root != Path("/"):
        inner = Path("/tmp", folder.name)
        programs = inner / "programs"
        shutil.copytree(PROGRAMS, interpreter.root / programs.relative_to("/"), dirs_exist_ok=True)
    output = inner / f"{program}.json"
    outside = interpreter.root / output.relative_to("/")
    outside.unlink(missing_ok=True)
    errors = folder / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [
                *interpreter.command,
                "-B",
                str(programs / f"{program}.py"),
                *map(str, arguments),
                str(output),
            ],
            stderr=stderr,
            env={**_environment(), **(environment or {})},
        )
    try:
        deadline = time.monotonic() + timeout
        while not outside.exists():
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, f"{program} did not get ready"
            time.sleep(0.02)
        yield process, json.loads(outside.read_text())
    finally:
        process.kill()
        process.wait()
