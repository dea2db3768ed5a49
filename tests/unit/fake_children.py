"""Children that say what a test puts into their mouths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hangwatch.system.channel import ChannelClosedError


class FakeChild:
    """A child and our end of its channel in one."""

    def __init__(self, pid: int, module: str) -> None:
        self.pid = pid
        self.module = module
        self.alive = True
        self.immortal = False
        self.said: list[dict[str, Any]] = []
        self.told: list[Mapping[str, Any]] = []
        self.pending = 0
        self.write_fd = -1
        self.channel = self

    def fileno(self) -> int:
        return -1

    def send(self, message: Mapping[str, Any]) -> None:
        if not self.alive:
            raise ChannelClosedError("gone")
        self.told.append(message)

    def flush(self) -> None:
        pass

    def receive(self) -> tuple[dict[str, Any], ...]:
        said, self.said = tuple(self.said), []
        if not said and not self.alive:
            raise ChannelClosedError("gone")
        return said

    def kill(self) -> None:
        self.alive = self.immortal

    def close(self, timeout: float = 1.0) -> bool:
        self.kill()
        return not self.alive


class Nursery:
    """Starts fake children and keeps them."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.barren = False

    def __call__(self, module: str, name: str) -> FakeChild:
        if self.barren:
            raise OSError(11, "Resource temporarily unavailable")
        self.children.append(FakeChild(len(self.children) + 1, module))
        return self.children[-1]

    @property
    def last(self) -> FakeChild:
        return self.children[-1]
