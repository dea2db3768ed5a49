"""The layouts of CPython's structures: one file per minor version, each one constant.

A layout is believed only after the target itself has confirmed it: ``hangwatch.remote.runtime``.
"""

from __future__ import annotations

from typing import Final

from hangwatch.remote.layouts import py310, py311, py312, py313, py314, py315
from hangwatch.remote.layouts.schema import Layout

LAYOUTS: Final[dict[tuple[int, int], Layout]] = {
    module.LAYOUT.version: module.LAYOUT for module in (py310, py311, py312, py313, py314, py315)
}
