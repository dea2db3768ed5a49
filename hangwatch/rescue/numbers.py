"""Which numbers of an engine are read; ``single_file`` fills in what the profiles say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLAIN: Sequence[Mapping[str, Any]] = []
