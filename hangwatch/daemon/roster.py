"""Who is who: which process is behind an instance, and where its server answers.

A log names instances; captures and probes need processes. Under Ray the log's file name says the
pid, and a beat that arrives now proves it; a beat of long ago does not, for pids are reused. Then,
and where the name says nothing, whoever has the log open for writing is the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hangwatch.core.naming import is_named_after
from hangwatch.model.discovery import LogOwner
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey


@dataclass(slots=True)
class _Entry:
    fresh: bool = False
    sources: dict[str, bool] = field(default_factory=dict)  # to whether it was relayed
    pid: int | None = None
    claimed: bool = False
    profile: str = ""
    url: str = ""
    kin: tuple[int, ...] = ()


class Roster:
    """All instances, with what is known of their processes.

    Attributes:
        asked: Logs whose owner was asked for and is not known yet.
    """

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self._entries: dict[InstanceKey, _Entry] = {}
        self._owners: dict[str, int | None] = {}
        self._orphans: dict[str, int] = {}
        self._company: dict[int, int] = {}

    def attach(self, pid: int, profile: str = "") -> InstanceKey:
        """Take in the server *pid*, named by the user; its identity was checked."""
        key = InstanceKey(pid=pid)
        entry = self._entries.setdefault(key, _Entry())
        entry.pid, entry.profile = pid, profile
        return key

    def see(self, beat: Heartbeat, *, fresh: bool) -> None:
        """Take note of a beat."""
        for key, other in self._entries.items():
            if is_named_after(beat.instance, key):
                other.sources.pop(beat.source, None)
        entry = self._entries.setdefault(beat.instance, _Entry())
        entry.fresh = entry.fresh or fresh
        entry.profile = beat.profile or entry.profile
        entry.sources.setdefault(beat.source, beat.relayed)
        entry.claimed = beat.claimed
        proven = fresh and beat.instance.pid is not None and not beat.claimed
        if beat.relayed or proven or self._owners.get(beat.source) is not None:
            self.asked.discard(beat.source)
            return
        # Nobody who can be seen writes it, yet beats arrive: ask again, ever less often, for
        # the answer costs a look at every process.
        self._orphans[beat.source] = count = self._orphans.get(beat.source, 0) + 1
        if count & (count - 1) == 0:
            self.asked.add(beat.source)

    def own(self, owners: Iterable[LogOwner]) -> None:
        """Take note of who writes which log."""
        for owner in owners:
            self.asked.discard(owner.log)
            self._owners[owner.log] = owner.pid

    def find(self, instance: InstanceKey, *, url: str, kin: Iterable[int]) -> None:
        """Take note of where a server answers, and of its processes."""
        entry = self._entries.get(instance)
        if entry is not None:  # it may have been retired meanwhile
            entry.url = url or entry.url
            entry.kin = tuple(kin) or entry.kin

    def pid_of(self, instance: InstanceKey) -> int | None:
        """Return the process behind *instance* on this machine, where that is sure."""
        entry = self._entries.get(instance)
        if entry is None or instance.host:
            return None
        if entry.pid is not None:
            return entry.pid
        own = [source for source, relayed in entry.sources.items() if not relayed]
        owners = {self._owners[s] for s in own if self._owners.get(s) is not None}
        if instance.pid in owners or (
            instance.pid is not None and entry.fresh and not entry.claimed
        ):
            return instance.pid
        if instance.pid is not None and not (entry.claimed and self._is_alone(instance, own)):
            return None
        return owners.pop() if len(owners) == 1 else None

    def _is_alone(self, instance: InstanceKey, logs: Iterable[str]) -> bool:
        """Say whether no other process calls itself by another number in the same logs."""
        return not any(
            other.pid != instance.pid
            for log in logs
            for other, entry in self._entries.items()
            if log in entry.sources
        )

    def profile_of(self, instance: InstanceKey) -> str:
        """Return the name of its engine's profile, or ``""``."""
        entry = self._entries.get(instance)
        return entry.profile if entry is not None else ""

    def url_of(self, instance: InstanceKey) -> str:
        """Return where its server answers, or ``""``."""
        entry = self._entries.get(instance)
        return entry.url if entry is not None else ""

    def processes(self) -> Mapping[InstanceKey, int]:
        """Return every instance whose process is known.

        A server that was named by its pid alone is left out once its beats say what its engines
        are called.
        """
        known = {key: self.pid_of(key) for key in self._entries}
        called = {pid for key, pid in known.items() if key.tag}
        return {
            key: pid
            for key, pid in known.items()
            if pid is not None and (key.tag or pid not in called)
        }

    def kin_of(self, instances: Iterable[InstanceKey]) -> tuple[int, ...]:
        """Return the processes that were found to belong to *instances*."""
        found: dict[int, None] = {}
        for instance in instances:
            entry = self._entries.get(instance)
            if entry is not None:
                found.update(dict.fromkeys(entry.kin))
        return tuple(found)

    def accompany(self, processes: Mapping[int, int]) -> None:
        """Take note of every process around the instances: pid to start, in ticks after boot."""
        self._company = dict(processes)

    def everyone(self) -> Mapping[int, int]:
        """Return every process that is known: pid to start in ticks after boot, 0 if unknown.

        The instances' own come first, then what belongs to one of them, then what they share.
        """
        own = (*self.processes().values(), *self.kin_of(self._entries))
        return dict.fromkeys(own, 0) | self._company

    def drop(self, instance: InstanceKey) -> None:
        """Forget an instance that was retired."""
        self._entries.pop(instance, None)
        carried = {source for entry in self._entries.values() for source in entry.sources}
        for log in self._owners.keys() | self._orphans.keys():
            if log not in carried:
                self._owners.pop(log, None)
                self._orphans.pop(log, None)
                self.asked.discard(log)

    def forget(self, gone: Iterable[int]) -> None:
        """Take note that processes ended: logs of theirs may have other owners now."""
        ended = set(gone)
        for log, pid in tuple(self._owners.items()):
            if pid in ended:
                del self._owners[log]
                if any(log in entry.sources for entry in self._entries.values()):
                    self.asked.add(log)
