"""Faults that really happen: one file each, to be read before it is believed.

The file's name, with dashes, is the fault's name. It holds one ``FAULT`` and the few functions that
bring it about: ``prepare`` runs while the program starts, so that nothing but the fault itself
happens later; ``strike`` runs when it is due, at the place that the fault names. The first thing
it does, or the last before it cannot, is ``scene.begin()``, which tells the truth to whoever
injected it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

LOOP = "engine's loop"
"""Called by the engine between two steps, on its event loop, which it may block."""
FORWARD = "model's forward"
"""Awaited by the model agent in a task of its own: the engine's loop lives on."""
SERVER = "API server's loop"
"""Called on the event loop of the API server, which it may block."""
CLIENTS = "clients"
"""Called on the API server's loop; what changes is who asks."""
LOG = "log"
"""Called on the API server's loop; what changes is where its output goes. No log, no fault."""

IN_ENGINE = (LOOP, FORWARD)

ALARMS = ("suspected_hang", "hung", "blocked", "dead")
"""The verdicts that alarm; where none of them is expected, nothing hangs."""


def _nothing() -> str | None:
    return None


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what may rightly be said of it.

    Attributes:
        title: What happens, in one line.
        shows: What of it can be seen from outside.
        place: Where ``strike`` is called.
        strike: Brings it about; a coroutine function where the place is ``FORWARD``.
        verdicts: The words that are right, the best one first.
        causes: The causes that are right, the best one first.
        culprits: The functions in which it shows, the best one first; none where nothing stands.
        needs: What it takes, in words; ``""`` for nothing.
        unavailable: Returns why it cannot happen here, or ``None``.
        prepare: Called while the program starts; its result becomes ``scene.prepared``.
        ends: Whether it can end by itself.
    """

    title: str
    shows: str
    place: str
    strike: Callable[[Scene], Any]
    verdicts: tuple[str, ...]
    causes: tuple[str, ...]
    culprits: tuple[str, ...] = ()
    needs: str = ""
    unavailable: Callable[[], str | None] = _nothing
    prepare: Callable[[Scene], Any] | None = None
    ends: bool = False

    @property
    def hangs(self) -> bool:
        """Whether an alarm must follow; if not, none may."""
        return any(verdict in ALARMS for verdict in self.verdicts)

    @property
    def bare(self) -> bool:
        """Whether it can happen in a process without a log."""
        return self.place != LOG


class Scene:
    """The program that a fault strikes, as far as a fault may touch it.

    Attributes:
        engine: The engine of this process, or ``None``.
        server: The API server of this process, or ``None``.
        clients: Who asks the server, or ``None`` where the engine is a process of its own.
        parent: The API server's process, in its engine; 0 elsewhere.
        lasts: Seconds until the fault shall end by itself; ``None`` for never.
        prepared: What ``prepare`` returned.
    """

    engine: Any = None
    server: Any = None
    clients: Any = None
    parent: int = 0
    prepared: Any = None

    def __init__(
        self,
        name: str | None,
        places: tuple[str, ...],
        truth: str | None = None,
        lasts: float | None = None,
        tell: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Take the fault if it belongs to this process, which offers *places*.

        Args:
            name: Of the fault; ``None`` for a program that nothing happens to.
            places: Where this process lets faults strike.
            truth: A file that gets what was injected, and when.
            lasts: Seconds until it shall end.
            tell: Called with the truth as well.
        """
        fault = load(name) if name else None
        self.fault = fault if fault is not None and fault.place in places else None
        self.lasts = lasts
        self.begun_at: float | None = None
        self._name = name
        self._truth = truth
        self._tell = tell
        self._at = float("inf")
        self._struck = False

    def prepare(self) -> None:
        """Let the fault make ready what it needs."""
        if self.fault is not None and self.fault.prepare is not None:
            self.prepared = self.fault.prepare(self)

    def arm(self, at: float) -> None:
        """Let it strike at the instant *at*, or at the first step thereafter."""
        self._at = min(self._at, at)

    def left(self) -> float:
        """Seconds until it strikes; never negative, infinite once it has."""
        return float("inf") if self._struck else max(0.0, self._at - time.monotonic())

    def due(self, *places: str) -> bool:
        """Say, once, that the fault is to strike now at one of *places*."""
        if self.fault is None or self.fault.place not in places or self.left() > 0.0:
            return False
        self._struck = True
        return True

    def begin(self, pid: int | None = None) -> None:
        """Tell that it begins now; *pid* is who is to blame, if it is not this process."""
        now, wall = time.monotonic(), datetime.now().astimezone()
        if self.begun_at is not None or self.fault is None:
            return
        self.begun_at = now
        note = {
            "fault": self._name,
            "at_monotonic": now,
            "at_wall": wall.isoformat(),
            "pid": os.getpid(),
            "culprit_pid": pid or os.getpid(),
            "frame": next(iter(self.fault.culprits), ""),
        }
        if self._truth:
            write_whole(self._truth, note)
        if self._tell is not None:
            self._tell(note)

    def over(self) -> bool:
        """Say whether its time is over."""
        if self.lasts is None or self.begun_at is None:
            return False
        return time.monotonic() >= self.begun_at + self.lasts

    def folder(self) -> Path:
        """Return where files may be left: beside the truth, else in a new folder."""
        return Path(self._truth).parent if self._truth else Path(tempfile.mkdtemp(prefix="lab-"))


def write_whole(path: str, data: Mapping[str, Any]) -> None:
    """Write a JSON file that is never seen half-written."""
    partial = Path(f"{path}.{os.getpid()}.partial")
    partial.write_text(json.dumps(data) + "\n")
    partial.replace(path)


def load(name: str) -> Fault:
    """Return the fault of that name."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    fault: Fault = module.FAULT
    # A coroutine function that is called and not awaited would do nothing, in silence.
    assert inspect.iscoroutinefunction(fault.strike) == (fault.place == FORWARD)
    return fault


def names() -> tuple[str, ...]:
    """Return the names of all faults, in order."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in found if name[0] != "_"))


def everything() -> dict[str, Fault]:
    """Return all faults by name."""
    return {name: load(name) for name in names()}
