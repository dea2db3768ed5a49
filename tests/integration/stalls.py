"""Volumes that have stalled, for programs that are run under ``programs/stalled.py``."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "stalled.py"


def stalled(folder: Path) -> tuple[str, ...]:
    """Return the command under which *folder* is a volume that has stalled."""
    return (sys.executable, str(PROGRAM), str(folder))


@functools.cache
def _trouble() -> str:
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            [*stalled(Path(folder)), "true"], check=False, capture_output=True, text=True
        )
    return tried.stderr.strip() if tried.returncode else ""


needs_stalls = pytest.mark.skipif(
    bool(_trouble()), reason=f"no volume can be stalled here: {_trouble()[-200:]}"
)
