"""Runs ``hangwatch`` on a terminal, and reads its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, Self

from running import LIMIT, wait_for

JOB = Path(__file__).parent / "programs" / "job.py"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_PICTURE = re.compile(r"\x1b\[H((?:(?!\x1b\[H).)*?)\x1b\[J", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``hangwatch`` in the foreground of a terminal of its own; it asks servers every second.

    Attributes:
        written: All that came to the screen so far.
    """

    def __init__(
        self,
        *arguments: str,
        width: int = 120,
        height: int = 30,
        environment: dict[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self._end, slave = os.openpty()
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.resize(width, height)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HANGWATCH_")}
        clean.pop("NO_COLOR", None)
        fixed = {"TERM": "xterm-256color", "PYTHONUTF8": "1", "HANGWATCH_PROBE_INTERVAL": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), "-m", "hangwatch", *arguments],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            env=clean | fixed | (environment or {}),
        )
        os.close(slave)
        os.set_blocking(self._end, False)

    @property
    def pid(self) -> int:
        """The process of ``hangwatch``."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_for(children.read_text, "the job").split()[0])

    def resize(self, width: int, height: int) -> None:
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, size)

    @property
    def settings(self) -> list[Any]:
        """How the terminal is set: echo, signals, flow control and so on."""
        return termios.tcgetattr(self._end)

    def read(self, timeout: float = 0.0) -> bool:
        """Take in what came to the screen; say whether anything did."""
        if select.select([self._end], [], [], timeout)[0]:
            try:
                block = os.read(self._end, 1 << 16)
            except OSError:  # EIO: the last one who had it open has ended
                time.sleep(timeout)
                return False
            self.written += self._decoder.decode(block)
            return bool(block)
        return False

    def press(self, key: bytes) -> None:
        os.write(self._end, key)

    @property
    def pages(self) -> list[str]:
        """Every whole picture so far, as plain text."""
        return [_ESCAPE.sub("", found).replace("\r", "") for found in
                _PICTURE.findall(self.written)]  # fmt: skip

    @property
    def page(self) -> str:
        return (self.pages or [""])[-1]

    def wait(self, *words: str, skip: int = 0, seconds: float = LIMIT) -> str:
        """Return the first picture after the first *skip* ones that has all *words* on it."""
        deadline = time.monotonic() + seconds
        while True:
            for page in self.pages[skip:]:
                if all(word in page for word in words):
                    return page
            assert time.monotonic() < deadline, f"no {words} on:\n{self.written[-4000:]}"
            assert self.process.poll() is None, self.written[-4000:]
            self.read(0.1)

    def finish(self) -> int:
        """Return the exit code when it has ended."""
        deadline = time.monotonic() + LIMIT
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end:\n{self.written[-4000:]}"
            self.read(0.05)
        while self.read():
            pass
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        os.close(self._end)
