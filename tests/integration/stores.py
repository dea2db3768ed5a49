"""A fleet whose engines wait for one shared store, watched until the store is stopped."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from pathlib import Path

from running import Hangwatch, wait_for

from hangwatch.lab.launch import Fleet
from hangwatch.model.recording import Recording
from hangwatch.system import ring
from hangwatch.system.clock import boot_id


class StoreFleet(Fleet):
    """Servers whose engines ask one store."""

    program = Path(__file__).parent / "programs" / "store.py"

    @property
    def store(self) -> int:
        return int((self.folder / "store.pid").read_text())

    @property
    def engines(self) -> set[int]:
        return {server["engine_pid"] for server in self.servers}

    def stop_store(self) -> datetime:
        """Stop the store, and return when."""
        # None of them waits for an answer then, and each will, a second or more later.
        wait_for(lambda: 2.0 < time.monotonic() % 4.0 < 2.4, "a quiet moment")
        now = datetime.now().astimezone()
        os.kill(self.store, signal.SIGSTOP)
        return now

    def resume_store(self) -> None:
        os.kill(self.store, signal.SIGCONT)


def watch(fleet: StoreFleet, folder: Path, *more: str) -> Hangwatch:
    return Hangwatch(
        *("watch", "--json", "--log", fleet.logs, "--heartbeat-interval", "1"),
        *("--stall-after", "8", "--output", str(folder / "out"), "--state", str(folder / "state")),
        *more,
    )


def recorded(folder: Path) -> Recording:
    """Return what the black box of a watch in this folder holds."""
    try:
        found = ring.read(folder / "state" / "blackbox.ring", boot_id())
    except (OSError, ValueError):
        found = None
    return found or Recording(period=0.25)


def wait_recorded(fleet: StoreFleet, folder: Path, seconds: float) -> None:
    """Return when a loop of the store and of every engine was seen at work for so long."""

    def shortest() -> float:
        worked: dict[int, float] = dict.fromkeys((fleet.store, *fleet.engines), 0.0)
        recording = recorded(folder)
        for track in recording.tracks:
            pid = track.process.pid
            if pid in worked and track.tid != pid:
                seen = recording.period * sum(count > 0 for count in track.slices)
                worked[pid] = max(worked[pid], seen)
        return min(worked.values())

    wait_for(lambda: shortest() > seconds, "a record of every loop", seconds=120)
