"""What the black box says: when each process ceased to run as it used to, and in which order.

Theory of operation
===================

Beats come every ten seconds, so servers that stop "together" cannot be put in order by them. The
black box knows for each thread how often it was put on a CPU in each quarter of a second. A
process is compared with its own past alone: an engine that decodes runs a hundred times a second,
a store that is asked once a second runs once, and both may tick on when they are stuck, because
timers do.

1. *Before* are the five minutes up to the last sign of progress, where the detector knows it, else
   all but the end; *after* is the end. A thread is *active* in a look when it ran more than half
   way between what is usual after and what was usual before.
2. How often it was active before and after are two probabilities; the change is where they explain
   all looks best. A single burst afterwards (our own question to ``/health``) moves nothing.
3. Every place that explains them almost as well is possible, too: one look, a quarter of a second,
   where the thread was active all the time until then, more where it used to pause. No order is
   told that is finer than this.

Looks that nobody made (our own gaps) are no looks, and never a sign of silence.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

from hangwatch.core import contracts
from hangwatch.core.objects import integer, word
from hangwatch.model.capture import Target
from hangwatch.model.dossier import Citation, ProcessStop
from hangwatch.model.identity import ProcessId
from hangwatch.model.recording import UNSEEN, Change, Recording, Stop, Track
from hangwatch.model.time import Epoch, Instant

RING: Final = "blackbox.ring"
"""Name of the file in the state directory."""

COUNTERS: Final = "counters.csv"
STOPS: Final = "stops.json"

BEFORE: Final = 300.0
"""Seconds of a process's own past that are looked at."""

LEAST_BEFORE: Final = 8.0
"""Seconds of past without which nothing is said."""

AFTER: Final = 5.0
"""Seconds at the end that say how it is now."""

LEAST_AFTER: Final = 2.0
"""Seconds since a change without which it may be a pause."""

SHARE_OF_SPIN: Final = 0.5
"""Share of a core from which on a thread computes without a pause."""

TIMES_LESS: Final = 2.0
"""How many times less a thread runs afterwards, at least, to count as quiet."""

TIMES_RARER: Final = 3.0
"""How many times more seldom it is active, at least."""

ROUNDING: Final = 0.0015
"""Seconds by which two stamps of one instant differ when they are written in milliseconds."""

DOUBT: Final = 3.0
"""How much worse a place may explain the looks to be possible still: twenty times, as a power."""

A_STRIP: Final = 40
"""Looks in one line of ``counters.csv``: ten seconds."""


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at one thread: between which instants, and what it did a second."""

    since: float
    at: float
    rate: float
    share: float


def stops(recording: Recording, *, progress_at: Instant | None = None) -> tuple[Stop, ...]:
    """Return what became of each process, those whose pattern changed first, in their order.

    Args:
        recording: What was recorded.
        progress_at: The last sign of progress that the detector knows of.
    """
    tracks: dict[ProcessId, list[Track]] = {}
    for track in recording.tracks:
        tracks.setdefault(track.process, []).append(track)
    found = [_of_process(own, recording, progress_at) for own in tracks.values()]
    return tuple(sorted(found, key=_order))


def _order(stop: Stop) -> tuple[float, float, int]:
    if stop.earliest is None or stop.latest is None:
        return math.inf, math.inf, stop.process.pid
    return stop.latest, stop.earliest, stop.process.pid


def _of_process(tracks: Sequence[Track], recording: Recording, progress_at: Instant | None) -> Stop:
    found = [_of_thread(track, recording, progress_at) for track in tracks]
    for stop in found:
        if stop.change is Change.ENDED and stop.tid == stop.process.pid:
            return stop
    order = (Change.SPINNING, Change.QUIET, Change.UNCHANGED, Change.INACTIVE, Change.UNKNOWN)
    return min(
        (stop for stop in found if stop.change in order),
        key=lambda stop: (order.index(stop.change), -(stop.before or 0.0)),
        default=found[0],
    )


def _of_thread(track: Track, recording: Recording, progress_at: Instant | None) -> Stop:
    looks = tuple(_looks(track, recording))
    told = Stop(process=track.process, tid=track.tid, name=track.name, change=Change.UNKNOWN)
    if track.ended_at is not None:
        seen_at = Instant(looks[-1].at) if looks else track.ended_at
        return replace(told, change=Change.ENDED, earliest=seen_at, latest=track.ended_at)
    if not looks:
        return told
    until = looks[-1].at - AFTER if progress_at is None else progress_at
    before = [look for look in looks if until - BEFORE < look.at <= until]
    after = [look for look in looks if look.at > looks[-1].at - AFTER and look.since >= until]
    if len(before) < LEAST_BEFORE / recording.period or not after:
        return told
    told = replace(
        told,
        before=round(_middle([look.rate for look in before]), 1),
        after=round(_middle([look.rate for look in after]), 1),
        run_before=round(_middle([look.share for look in before]), 3),
        run_after=round(_middle([look.share for look in after]), 3),
    )
    scope = looks[looks.index(before[0]) :]
    if (spin := _spins(scope, before, after)) is not None:
        change, window = Change.SPINNING, spin
    elif _quantile([look.rate for look in before], 0.9) == 0.0:
        return replace(told, change=Change.INACTIVE)
    elif (quiet := _falls_quiet(scope, before, after)) is not None:
        change, window = Change.QUIET, quiet
    else:
        return replace(told, change=Change.UNCHANGED)
    return replace(told, change=change, earliest=window[0], latest=window[1])


def _looks(track: Track, recording: Recording) -> Iterator[_Look]:
    for i in range(1, len(recording.at)):
        if track.slices[i] != UNSEEN:
            since, at = recording.at[i - 1], recording.at[i]
            yield _Look(
                since,
                at,
                track.slices[i] / (at - since),
                track.run_us[i] / 1e6 / (at - since),
            )


def _falls_quiet(
    scope: Sequence[_Look], before: Sequence[_Look], after: Sequence[_Look]
) -> tuple[Instant, Instant] | None:
    """Return between which instants a thread ceased to run as it used to."""
    now = _quantile([look.rate for look in after], 0.9)
    usual = _middle([look.rate for look in before])
    if usual <= TIMES_LESS * now:
        usual = _quantile([look.rate for look in before], 0.9)
    if usual <= TIMES_LESS * now:
        return None
    level = (usual + now) / 2
    return _change(scope, before, after, lambda look: look.rate > level)


def _spins(
    scope: Sequence[_Look], before: Sequence[_Look], after: Sequence[_Look]
) -> tuple[Instant, Instant] | None:
    """Return between which instants a thread began to compute without a pause."""
    now = _middle([look.share for look in after])
    usual = _quantile([look.share for look in before], 0.9)
    if now < SHARE_OF_SPIN or now < TIMES_LESS * usual:
        return None
    level = (usual + now) / 2
    return _change(scope, before, after, lambda look: look.share <= level)


def _change(
    scope: Sequence[_Look],
    before: Sequence[_Look],
    after: Sequence[_Look],
    as_before: Callable[[_Look], bool],
) -> tuple[Instant, Instant] | None:
    """Return between which instants looks that are as before gave way to others.

    ``None`` if they did not, or may only pause.
    """
    share_before = sum(map(as_before, before)) / len(before)
    share_after = sum(map(as_before, after)) / len(after)
    if share_before < TIMES_RARER * share_after:
        return None
    # Never quite certain, so that one odd look is no proof.
    share_before, share_after = (min(max(p, 0.02), 0.98) for p in (share_before, share_after))
    gain = math.log(share_before / share_after)
    loss = math.log((1 - share_before) / (1 - share_after))
    alike = [as_before(look) for look in scope]
    scores = list(accumulate((gain if each else loss for each in alike), initial=0.0))
    best = max(scores)
    likely = [i for i, score in enumerate(scores) if score >= best - DOUBT]
    first, last = likely[0], likely[-1]
    pause = int(_pause(alike[:first]))
    if not any(alike[last:]) and any(alike[:last]):
        # Nothing is left of the pattern, so it ended with its last look, or in the pause after it.
        latest = max(i for i in range(last) if alike[i])
        first, last = max(first, latest + 1), min(last, latest + 1 + pause)
    rest = scope[-1].at - scope[min(last, len(scope) - 1)].at
    longest = pause * (scope[-1].at - scope[0].since) / len(scope)
    if first == 0 or last == len(scope) or rest < max(LEAST_AFTER, 2 * longest):
        return None
    return _middle_of(scope[first - 1]), _middle_of(scope[last])


def _pause(active: Sequence[bool]) -> float:
    """Return for how many looks a thread pauses between two active ones, rare cases left out."""
    lengths: list[int] = []
    run = 0
    for each in active:
        if each:
            lengths.append(run)
            run = 0
        else:
            run += 1
    return _quantile(lengths[1:] or [0], 0.99)


def _middle_of(look: _Look) -> Instant:
    return Instant((look.since + look.at) / 2)


def _middle(values: Sequence[float]) -> float:
    return _quantile(values, 0.5)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---------------------------------------------------------------------- documents


def stops_document(
    found: Iterable[Stop], *, targets: Mapping[ProcessId, Target], epoch: Epoch
) -> bytes:
    """Return ``stops.json``: one object a line, so that each can be cited."""
    rows = [_row(stop, targets.get(stop.process), epoch) for stop in found]
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f"[\n {lines}\n]\n".encode("utf-8", "surrogateescape")


def _row(stop: Stop, target: Target | None, epoch: Epoch) -> dict[str, Any]:
    earliest, latest = stop.earliest, stop.latest
    row = {
        "pid": stop.process.pid,
        "start_ticks": stop.process.start_ticks,
        "role": str(target.role) if target is not None else "",
        "instance": target.instance if target is not None else "",
        "change": str(stop.change),
        "earliest": None if earliest is None else contracts.instant(epoch, earliest),
        "latest": None if latest is None else contracts.instant(epoch, latest),
        "tid": stop.tid,
        "name": stop.name,
        "slices_per_s": stop.before,
        "slices_per_s_after": stop.after,
        "cpu_pct": _percent(stop.run_before),
        "cpu_pct_after": _percent(stop.run_after),
    }
    return {key: value for key, value in row.items() if value not in (None, "")}


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def recorded(
    rows: Iterable[tuple[Mapping[str, Any], Citation]], epoch: Epoch
) -> tuple[ProcessStop, ...]:
    """Return what ``stops.json`` says, those whose pattern changed first before the others.

    Rows without a process, and changes that are not known here, are left out.
    """
    found = []
    for raw, citation in rows:
        pid, change = integer(raw.get("pid")), word(raw.get("change"))
        if pid is None or change not in set(Change):
            continue
        earliest, latest = (_instant(raw.get(key), epoch) for key in ("earliest", "latest"))
        found.append(
            ProcessStop(
                pid=pid,
                change=Change(change),
                role=word(raw.get("role")),
                instance=word(raw.get("instance")),
                earliest=earliest,
                latest=latest,
                citation=citation,
            )
        )
    return tuple(sorted(found, key=_position))


def _instant(text: object, epoch: Epoch) -> Instant | None:
    try:
        moment = datetime.fromisoformat(word(text))
    except ValueError:
        return None
    return epoch.instant_of(moment if moment.tzinfo else moment.replace(tzinfo=epoch.wall.tzinfo))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Who stopped before others, and by how much.

    Attributes:
        first: Who; several where no order among them can be told.
        later: Whoever certainly changed later, in order.
        unsure: Whoever may have changed earlier or later.
        least: Seconds to those who came later, at least; 0 where it may be one look.
        most: The same at most, to the last of them.
    """

    first: tuple[ProcessStop, ...]
    later: tuple[ProcessStop, ...]
    unsure: tuple[ProcessStop, ...] = ()
    least: float = 0.0
    most: float = 0.0


def lead(stops: Iterable[ProcessStop]) -> Lead | None:
    """Return who changed its pattern before all others; ``None`` where no order can be told.

    An order is told where what is known of the one ends before what is known of the other begins.
    """
    known = sorted((s for s in stops if s.window is not None), key=_position)
    for i in range(1, len(known)):
        first, later = tuple(known[:i]), tuple(known[i:])
        if all(_precedes(first[-1], other) for other in later):
            return _lead(first, later, ())
    return None


def ahead(stop: ProcessStop, stops: Iterable[ProcessStop]) -> Lead | None:
    """Return whom one process precedes; ``None`` if somebody precedes it, or it nobody."""
    others = sorted((s for s in stops if s.window and s is not stop), key=_position)
    later = tuple(other for other in others if _precedes(stop, other))
    if stop.window is None or not later or any(_precedes(other, stop) for other in others):
        return None
    return _lead((stop,), later, tuple(other for other in others if other not in later))


def _lead(
    first: tuple[ProcessStop, ...],
    later: tuple[ProcessStop, ...],
    unsure: tuple[ProcessStop, ...],
) -> Lead:
    (_, begun), (end, _) = _hull(first), _hull(later)
    return Lead(
        first=first,
        later=later,
        unsure=unsure,
        least=max(0.0, end - begun),
        most=_hull(later)[1] - _hull(first)[0],
    )


def _hull(stops: Iterable[ProcessStop]) -> tuple[float, float]:
    windows = [stop.window for stop in stops if stop.window is not None]
    return min(earliest for earliest, _ in windows), max(latest for _, latest in windows)


def _precedes(one: ProcessStop, other: ProcessStop) -> bool:
    if one.window is None or other.window is None:
        return False
    return other.window[0] - one.window[1] >= -ROUNDING


def _position(stop: ProcessStop) -> tuple[float, float, int]:
    earliest, latest = stop.window or (math.inf, math.inf)
    return latest, earliest, stop.pid


def counters_document(recording: Recording, epoch: Epoch) -> bytes:
    """Return ``counters.csv``: ten seconds of one thread a line.

    ``time`` is the end of the first of the looks, ``slices`` and ``run_ms`` have one number each:
    how often the thread was put on a CPU since the look before, and how many milliseconds it ran.
    ``-`` stands where nobody looked.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("time", "monotonic", "pid", "tid", "name", "period_s", "slices", "run_ms"))
    strips = tuple(_strips(recording))
    for track in recording.tracks:
        for begin, end in strips:
            slices = track.slices[begin:end]
            if all(count == UNSEEN for count in slices):
                continue
            at = recording.at[begin]
            writer.writerow(
                (
                    contracts.instant(epoch, Instant(at)),
                    round(at, 3),
                    track.process.pid,
                    track.tid,
                    track.name,
                    recording.period,
                    _told(slices, lambda count: count),
                    _told(track.run_us[begin:end], lambda us: (us + 500) // 1000),
                )
            )
    return text.getvalue().encode("utf-8", "replace")


def _told(values: Iterable[int], number: Callable[[int], int]) -> str:
    return " ".join("-" if value == UNSEEN else str(number(value)) for value in values)


def _strips(recording: Recording) -> Iterator[tuple[int, int]]:
    """Yield the looks of each line, first and behind the last: as far as they were made in time."""
    begin, at = 0, recording.at
    for i in range(1, len(at) + 1):
        late = i < len(at) and abs(at[i] - at[begin] - (i - begin) * recording.period) > (
            recording.period / 2
        )
        if i == len(at) or late or i - begin == A_STRIP:
            yield begin, i
            begin = i


def only(recording: Recording, targets: Iterable[ProcessId]) -> Recording:
    """Return the part of *recording* that is about these processes, or about any that ended."""
    wanted = frozenset(targets)
    tracks = tuple(
        track
        for track in recording.tracks
        if track.process in wanted or (track.tid == track.process.pid and track.ended_at)
    )
    return Recording(period=recording.period, at=recording.at, tracks=tracks)
