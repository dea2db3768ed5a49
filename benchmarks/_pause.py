"""How long a process stood still, measured inside it by a thread that no GIL holds up.

The thread is C (``_pause.c``), compiled when it is wanted. It takes a core for itself: start it
only for as long as somebody measures.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_suffix(".c")


class NoCompilerError(Exception):
    """There is no C compiler here, or it cannot compile the meter."""


class Meter:
    """The longest pause of one process since the last reset."""

    def __init__(self, folder: Path) -> None:
        """Make the meter; ``code`` run by a process starts it there.

        Raises:
            NoCompilerError: It cannot be compiled.
        """
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise NoCompilerError("no C compiler")
        library, self._file = folder / "meter.so", folder / "meter"
        made = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", library, SOURCE],
            check=False,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise NoCompilerError(made.stderr)
        self._file.write_bytes(bytes(mmap.PAGESIZE))
        with self._file.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        start = f"ctypes.CDLL({str(library)!r}).start_meter({str(self._file).encode()!r})"
        self.code = f"import ctypes; assert 0 == {start}"
        """Python to run in the process that is to be measured."""

    @property
    def longest_ms(self) -> float:
        """The longest pause, milliseconds."""
        (longest,) = struct.unpack_from("=Q", self._page, 0)
        return longest / 1e6

    @property
    def stamps(self) -> int:
        """How often the thread looked at the clock; grows while it runs."""
        (stamps,) = struct.unpack_from("=Q", self._page, 8)
        return int(stamps)

    def reset(self) -> None:
        """Forget the pauses so far."""
        struct.pack_into("=Q", self._page, 0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._page.close()
