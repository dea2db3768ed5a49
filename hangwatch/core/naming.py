"""Tells engines apart that call themselves alike, each in a log of its own.

Theory of operation
===================

Standalone servers print no process id, and each calls itself ``DP0``. Two of them in two logs would
be one engine, and the beats of one would hide the silence of the other.

One engine may well be in two logs: its output is copied, or its log goes on under tomorrow's name.
A copy carries the same numbers. A log that was followed by another one beats no more. So two logs
hold two engines if a beat on one comes between two of the other and is a copy of neither. From then
on the log that was heard of later names its engine: ``DP0 (server-b.log)``. The few beats before
that are the other one's; that costs nothing, for it beats as well.

Lines that carry a pid, and those of a driver, need none of this.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import BeatSeen, SignalArrived


class Names:
    """The names that logs gave to their engines so far."""

    def __init__(self) -> None:
        self._own: dict[str, InstanceKey] = {}
        self._heard: dict[InstanceKey, dict[str, Heartbeat]] = {}

    def told(self, seen: BeatSeen | SignalArrived) -> BeatSeen | SignalArrived:
        """Return what was seen, under the name of the engine whose log it stood in."""
        if isinstance(seen, SignalArrived):
            name = self._own.get(seen.signal.source)
            if name is None or seen.signal.instance.pid is not None:
                return seen
            return replace(seen, signal=replace(seen.signal, instance=name))
        beat = seen.beat
        if beat.instance.pid is not None or beat.relayed:
            return seen
        if beat.source not in self._own:
            self._compare(beat)
        name = self._own.get(beat.source)
        return seen if name is None else replace(seen, beat=replace(beat, instance=name))

    def forget(self, source: str) -> None:
        """Forget a log that was retired."""
        self._own.pop(source, None)
        for heard in self._heard.values():
            heard.pop(source, None)

    def _compare(self, beat: Heartbeat) -> None:
        heard = self._heard.setdefault(beat.instance, {})
        before = heard.get(beat.source)
        heard[beat.source] = beat
        if before is None:
            return
        order = list(heard)
        for source, other in tuple(heard.items()):
            between = before.at < other.at <= beat.at
            if source == beat.source or not between or _copies(other, beat, before):
                continue
            later = max(source, beat.source, key=order.index)
            self._own[later] = _of_log(beat.instance, later, order)
            del heard[later]
            if later == beat.source:
                return


def _copies(beat: Heartbeat, *others: Heartbeat) -> bool:
    return any(
        (beat.printed, beat.in_tps, beat.out_tps, beat.finished)
        == (other.printed, other.in_tps, other.out_tps, other.finished)
        for other in others
    )


def _of_log(key: InstanceKey, source: str, order: list[str]) -> InstanceKey:
    path = PurePosixPath(source)
    alike = [other for other in order if PurePosixPath(other).name == path.name]
    name = path.name if len(alike) == 1 else "/".join(path.parts[-2:])
    return replace(key, tag=f"{key.tag} ({name})")


def is_named_after(key: InstanceKey, other: InstanceKey) -> bool:
    """Say whether *key* is the name that a log gave to an engine which calls itself *other*."""
    return key.pid is None and key.tag.startswith(f"{other.tag} (")
