"""Finds the lines that matter in blocks of bytes, and takes them out of their envelopes.

A log is read in blocks. Whole blocks are searched for *needles*, literals that every line of
interest contains, and a line is cut out only around a hit: that is what makes hundreds of megabytes
a second affordable.

A line ends at LF. Inside a line, CR and NUL separate *parts*: a progress bar rewrites itself behind
a CR without ever ending its line, and a file truncated under a writer that does not append starts
with a run of NULs. Only the part with the needle is kept, behind the head of its line (where
envelopes stand) and a CR. So a heartbeat behind fourteen minutes of progress bar counts, and the
bar costs no memory.

Docker's files hold one JSON object a line, the text in it escaped; needles are searched for in both
spellings, and the text is decoded once there is a hit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Final

from hangwatch.model.following import Dialect
from hangwatch.model.heartbeat import Peeled

MAX_LINE: Final = 64 << 10
"""Bytes of a part, and of a line joined from CRI parts; a longer one is skipped."""

MAX_HEAD: Final = 512
"""Bytes of a line's beginning that are kept in front of a later part: room for every envelope."""

MIN_KEY: Final = 7
"""Bytes that needles must have in common to be searched as one; less would hit too often."""

_COMMON: Final = b" etoainrsl0123456789dcum.phg:/-,fby_=w()kv[]x'\"qzj"

_SEPARATORS: Final = re.compile(rb"[\r\x00]+")

# CSI sequences (colours), OSC sequences (titles, links), and two-byte escapes.
_ANSI: Final = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
)

_STAMP: Final = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)"

# `STAMP stdout F text` in a container runtime's file, where the flag may carry further tags
# behind a colon; `STAMP text` from `kubectl logs --timestamps`.
_RUNTIME: Final = re.compile(
    rb"(?P<stamp>" + _STAMP + rb")(?: (?P<stream>stdout|stderr) (?P<flag>[FP])(?::[^ ]*)?)?(?: |$)"
)

_PIECE: Final = re.compile(rb" (?:stdout|stderr) P")

# daemon/logger/jsonfilelog, one record a line; the text of a piece does not end in a newline. In
# the text itself quotes are escaped, so this cannot stand there. Who copies the records writes
# them anew, with spaces perhaps.
_DOCKER: Final = re.compile(rb'\{ ?"log": ?"')
_DOCKER_PIECE: Final = re.compile(rb'(?<!\\n)", ?"stream": ?"')

# kubectl/pkg/cmd/logs, addPrefixIfNeeded
_POD: Final = re.compile(rb"\[pod/(?P<pod>[^/\]\s]{1,253})/[^/\]\s]{1,253}\] ")

# ray/_private/worker.py, print_to_stdstream: `(name pid=1, ip=192.0.2.1) text`; the name may be
# missing. vLLM prefixes its own lines in the same shape.
_RAY: Final = re.compile(
    rb"\((?:(?P<actor>[^()]*?) )?pid=(?P<pid>\d{1,10})(?:, ip=(?P<host>[^()\s]+))?\) ?"
)

# ray/_private/ray_logging: the count closes the line; the first one also explains itself.
_REPEATED: Final = re.compile(
    rb" ?\[repeated (?P<count>\d{1,9})x across cluster\](?: \(Ray deduplicates logs[^\n]*\))?\s*$"
)

# tqdm leaves its cursor behind the bar, so the next line of another writer is glued to it.
_BAR: Final = re.compile(rb"[^\n]{0,200}?\d%\|[^\n]{0,300}?(?:it/s|s/it)[^\]\n]{0,100}\] *(?=\S)")


def peel(line: bytes) -> Peeled:
    """Return what the engine itself wrote, and what the envelopes around it say.

    Never fails: what is no envelope is body.
    """
    peeled = _docker(line.strip(b"\x00\r\n"))
    if b"\x1b" in peeled.body:
        peeled = replace(peeled, body=_ANSI.sub(b"", peeled.body))
    peeled = _envelopes(peeled)
    parts = [part for part in _SEPARATORS.split(peeled.body) if part and not part.isspace()]
    last = parts[-1] if parts else b""
    if b"%|" in last:
        last = _BAR.sub(b"", last, count=1)
    if last != peeled.body:
        # Behind a bar that the driver itself drew stands a worker's whole line, prefix and all.
        peeled = _envelopes(replace(peeled, body=last))
    if repeated := _REPEATED.search(peeled.body):
        return replace(
            peeled,
            body=peeled.body[: repeated.start()],
            repeated=max(1, int(repeated["count"])),
        )
    return peeled


def _docker(line: bytes) -> Peeled:
    record = _record(line) if _DOCKER.match(line) else None
    if record is None:
        return Peeled(body=line)
    return Peeled(
        body=record.text.strip(b"\x00\r\n"), stamp=_moment(record.time), complete=record.is_whole
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """One line of a file of Docker's."""

    text: bytes
    stream: str
    time: bytes

    @property
    def is_whole(self) -> bool:
        return self.text.endswith(b"\n")

    def written(self, text: bytes) -> bytes:
        """Return the record as Docker would have written it with another text."""
        log = text.decode("utf-8", "replace") + "\n"
        record = {"log": log, "stream": self.stream, "time": self.time.decode("ascii", "replace")}
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )


def _record(line: bytes) -> _Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None  # cut short, or no record of Docker's after all
    text, stream, time = (found.get(key, "") for key in ("log", "stream", "time"))
    if not (isinstance(text, str) and isinstance(stream, str) and isinstance(time, str)):
        return None
    return _Record(text.encode("utf-8", "replace"), stream, time.encode("ascii", "replace"))


def _envelopes(peeled: Peeled) -> Peeled:
    if pod := _POD.match(peeled.body):
        peeled = replace(
            peeled, body=peeled.body[pod.end() :], host=pod["pod"].decode("utf-8", "replace")
        )
    if runtime := _RUNTIME.match(peeled.body):
        peeled = replace(
            peeled,
            body=peeled.body[runtime.end() :],
            stamp=_moment(runtime["stamp"]),
            complete=peeled.complete and runtime["flag"] != b"P",
        )
    if ray := _RAY.match(peeled.body):
        peeled = replace(
            peeled,
            body=peeled.body[ray.end() :],
            host=(ray["host"] or b"").decode("ascii", "replace") or peeled.host,
            pid=int(ray["pid"]),
            actor=(ray["actor"] or b"").decode("utf-8", "replace"),
        )
    return peeled


def _moment(stamp: bytes) -> datetime | None:
    try:
        return datetime.fromisoformat(stamp.decode("ascii"))
    except ValueError:
        return None  # month 13: right shape, no moment


class Scanner:
    """Blocks of one log in, candidate lines out.

    Lines that a container runtime cut into pieces (CRI flag ``P``; in Docker's files, a text
    without a newline) are joined, each stream by itself. Memory is bounded by the block and a few
    times ``MAX_LINE``, whatever is fed.
    """

    def __init__(
        self, needles: Iterable[bytes], *, dialects: Iterable[Dialect] = (), offset: int = 0
    ) -> None:
        """Start at byte *offset* of a file, at the beginning of a line.

        Args:
            needles: Literals; a part that contains one of them is a candidate. None of them
                holds CR, LF or NUL.
            dialects: Whose needles these are, where one log is of one engine: see
                ``FollowRequest``. What no dialect has is always looked for.
            offset: Where the first block lies in its file.
        """
        self._dialects = tuple(dialects)
        literals = {needle for needle in needles if needle}
        self._common = literals.difference(*(dialect.others for dialect in self._dialects))
        self._spoken: set[Dialect] = set()
        self._look_for(literals)
        self._offset = offset
        self._tail = b""
        self._head: bytes | None = None  # beginning of a line whose first parts are behind us
        self._skipping = False
        self._joining: dict[bytes, tuple[int, bytes]] = {}  # stream -> offset, line so far
        self._records: dict[str, tuple[int, _Record]] = {}  # the same for Docker's files

    @property
    def offset(self) -> int:
        """Offset behind the last byte that was fed: where reading goes on."""
        return self._offset

    @property
    def line_offset(self) -> int:
        """Offset of the unfinished part: where a later reader should start to lose nothing."""
        return max(0, self._offset - len(self._tail))

    def feed(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the candidates that *block* completes, in order, with the offset of their line.

        The iterator must be used up before the next call.
        """
        self._offset += len(block)
        if self._skipping:
            block = self._rest(block)
            if self._skipping:
                return iter(())
        data = self._tail + block if self._tail else block
        start = self._offset - len(data)
        line = data.rfind(b"\n") + 1
        if self._records or self._is_dockers(data):
            end = line
            pieces = bool(self._records) or _DOCKER_PIECE.search(data, 0, end) is not None
            found = (self._search_records if pieces else self._search_whole)(data, end, start)
        elif self._is_runtimes(data):
            # Its lines are short, and a CR may stand in any piece of one.
            end = line
            pieces = bool(self._joining) or _PIECE.search(data, 0, end) is not None
            found = (self._search_lines if pieces else self._search)(data, end, start)
        else:
            end = max(line, data.rfind(b"\r", line) + 1, data.rfind(b"\x00", line) + 1)
            found = self._search(data, end, start)
        self._keep(data, line, end)
        if self._dialects:
            self._listen(found)
        return iter(found)

    def _look_for(self, literals: set[bytes]) -> None:
        escaped = {_escaped(needle) for needle in literals}
        escaped = {each for each in escaped if not any(needle in each for needle in literals)}
        self._needles = tuple(sorted(literals | escaped))
        self._searches = _searches(self._needles)

    def _listen(self, found: list[tuple[int, bytes]]) -> None:
        """Look for the lines of those engines alone whose heartbeats are among *found*."""
        for _, line in reversed(found):
            spoken = {d for d in self._dialects if any(beat in line for beat in d.beats)}
            if not spoken <= self._spoken:
                self._spoken |= spoken
                self._look_for(self._common.union(*(dialect.others for dialect in self._spoken)))
            if spoken:
                return

    def finish(self) -> tuple[tuple[int, bytes], ...]:
        """Return the candidates in the unfinished line: nothing will follow it."""
        found = list(self._cut(self._tail, self.line_offset)) if self._tail else []
        for offset, line in self._joining.values():
            self._head = None
            found += self._cut(line, offset)
        for offset, record in self._records.values():
            found += self._cut_record(record, offset)
        self.reset(self._offset)
        return tuple(sorted(found))

    def reset(self, offset: int) -> None:
        """Forget the unfinished line and go on at byte *offset*."""
        self._offset, self._tail, self._head, self._skipping = offset, b"", None, False
        self._joining.clear()
        self._records.clear()

    def skip_line(self) -> None:
        """Skip to the next end of a line or part: reading began somewhere in a line."""
        self._skipping = True

    def continue_in_next_file(self) -> None:
        """Go on at byte 0 of the file that follows this one; the unfinished line goes on there."""
        self._offset = 0

    def _rest(self, block: bytes) -> bytes:
        """Return what follows the part that is too long, if it ends in *block*."""
        match = re.search(rb"[\n\r\x00]", block)
        if match is None:
            return b""
        self._skipping = False
        return block[match.start() :]

    @staticmethod
    def _is_dockers(data: bytes) -> bool:
        """Whether Docker wrote *data*: every line of its files is a record."""
        # The first line may have begun before *data*; the second one is whole.
        return any(_DOCKER.match(data, start) for start in (0, data.find(b"\n") + 1))

    def _is_runtimes(self, data: bytes) -> bool:
        """Whether a container runtime wrote *data*: every line of its files has its envelope."""
        if self._joining:
            return True
        # The first line may have begun before *data*; the second one is whole.
        starts = (0, data.find(b"\n") + 1)
        envelopes = [_RUNTIME.match(data, start) for start in starts]
        return any(envelope and envelope["stream"] for envelope in envelopes)

    def _search(self, data: bytes, end: int, start: int) -> list[tuple[int, bytes]]:
        """Return the candidates in ``data[:end]``: find needles first, lines around them."""
        lines: dict[int, int] = {}
        for search, needles in self._searches:
            last = 0
            for hit in search(data, 0, end):
                at = hit.start()
                if at < last:
                    continue
                first = data.rfind(b"\n", last, at) + 1 or last
                last = data.find(b"\n", at, end)
                last = end if last < 0 else last
                if first not in lines and (
                    not needles or any(data.find(needle, first, last) >= 0 for needle in needles)
                ):
                    lines[first] = last
        # Most blocks hold neither CR nor NUL: a line is its only part then, and needs no look.
        if self._head is None and b"\r" not in data and b"\x00" not in data:
            return [
                (max(0, start + first), data[first:last])
                for first, last in sorted(lines.items())
                if last - first <= MAX_LINE
            ]
        found: list[tuple[int, bytes]] = []
        for first, last in sorted(lines.items()):
            found += self._cut(data[first:last], max(0, start + first), within=first == 0)
        return found

    def _search_lines(self, data: bytes, end: int, start: int) -> list[tuple[int, bytes]]:
        """Return the candidates in ``data[:end]``, line by line: some lines are in pieces."""
        found: list[tuple[int, bytes]] = []
        at = 0
        while at < end:
            last = data.index(b"\n", at)
            line, offset = data[at:last], max(0, start + at)
            envelope = _RUNTIME.match(line)
            stream = envelope["stream"] if envelope else None
            if envelope is None or stream is None:
                found += self._cut(line, offset, within=at == 0)
            else:
                before = self._joining.pop(stream, None)
                if before is not None:
                    offset, line = before[0], before[1] + line[envelope.end() :]
                if len(line) > MAX_LINE:
                    line = line[:MAX_HEAD]
                if envelope["flag"] == b"P":
                    self._joining[stream] = (offset, line)
                else:
                    found += self._cut(line, offset)
            at = last + 1
        return found

    def _search_whole(self, data: bytes, end: int, start: int) -> list[tuple[int, bytes]]:
        """Return the candidates in ``data[:end]``, each record of which is a whole line."""
        found: list[tuple[int, bytes]] = []
        for offset, line in self._search(data, end, start):
            separated = b"\\r" in line or b"\\u0000" in line
            record = _record(line) if separated else None
            found += [(offset, line)] if record is None else self._cut_record(record, offset)
        return found

    def _search_records(self, data: bytes, end: int, start: int) -> list[tuple[int, bytes]]:
        """Return the candidates in ``data[:end]``, record by record: some texts are in pieces."""
        found: list[tuple[int, bytes]] = []
        at = 0
        while at < end:
            last = data.index(b"\n", at)
            line, offset = data[at:last], max(0, start + at)
            at = last + 1
            record = _record(line)
            if record is None:
                found += self._cut(line, offset, within=False)
                continue
            before = self._records.pop(record.stream, None)
            if before is not None:
                offset = before[0]
                record = replace(record, text=before[1].text + record.text)
            if record.is_whole:
                found += self._cut_record(record, offset)
            elif len(record.text) <= MAX_LINE:
                self._records[record.stream] = (offset, record)
            else:
                # Of a bar that rewrites itself without end only the last state may go on.
                drawn, _, rest = record.text.rpartition(b"\r")
                found += self._cut_record(replace(record, text=drawn), offset)
                self._records[record.stream] = (offset, replace(record, text=rest[:MAX_HEAD]))
        return found

    def _cut_record(self, record: _Record, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield a record for each part of a text with a needle."""
        for _, part in self._cut(record.text.rstrip(b"\n"), offset, within=False):
            yield offset, record.written(part)

    def _cut(self, line: bytes, offset: int, *, within: bool = True) -> Iterator[tuple[int, bytes]]:
        """Yield the parts of *line* with a needle; *within* says it may have begun earlier."""
        parts = _SEPARATORS.split(line)
        head = self._head if within else None
        for i, part in enumerate(parts):
            if len(part) <= MAX_LINE and any(needle in part for needle in self._needles):
                if head is None and i == 0:
                    yield offset, part
                else:
                    front = parts[0][:MAX_HEAD] if head is None else head
                    yield offset, front + b"\r" + part

    def _keep(self, data: bytes, line: int, end: int) -> None:
        """Keep what ``data[end:]`` begins; *line* is where the unfinished line starts."""
        if line > 0:
            self._head = None
        self._tail = data[end:]
        if end > line and self._head is None:
            self._head = _SEPARATORS.split(data[line : line + MAX_HEAD], maxsplit=1)[0]
        if len(self._tail) > MAX_LINE:
            if self._head is None:
                self._head = self._tail[:MAX_HEAD]
            self._tail, self._skipping = b"", True


def _escaped(needle: bytes) -> bytes:
    """Return a needle as it stands within Docker's JSON."""
    text = json.dumps(needle.decode("utf-8", "replace"), ensure_ascii=False)[1:-1]
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace")


_Search = Callable[[bytes, int, int], "Iterator[re.Match[bytes]]"]


@lru_cache(64)
def _searches(needles: tuple[bytes, ...]) -> tuple[tuple[_Search, tuple[bytes, ...]], ...]:
    """Return what to search a block for, and the needles to look for around each hit, if any.

    Each search costs a walk over the whole block, so needles that have something in common share
    one: ``"POST /v1/`` and ``"POST /sleep`` are both found by ``"POST /``. And a walk stops at each
    byte that equals its first one, so it looks for the part that begins with the rarest.
    """
    left = [n for n in needles if not any(other in n for other in needles if other != n)]
    searches: list[tuple[_Search, tuple[bytes, ...]]] = []
    while left:
        shared: dict[bytes, list[bytes]] = {}
        for needle in left:
            for size in range(MIN_KEY, len(needle)):
                for part in {needle[i : i + size] for i in range(len(needle) - size + 1)}:
                    shared.setdefault(part, []).append(needle)
        key = max(shared, key=lambda part: (len(shared[part]), len(part), part), default=left[0])
        covered = shared.get(key, [])
        if len(covered) < 2:
            key, covered = left[0], [left[0]]
        start = max(range(max(1, len(key) - 3)), key=lambda i: (_rarity(key[i]), -i))
        exact = start == 0 and [key] == covered
        # A regular expression of plain bytes walks faster than ``bytes.find`` does.
        searches.append((re.compile(re.escape(key[start:])).finditer, () if exact else (*covered,)))
        left = [needle for needle in left if needle not in covered]
    # What needs no second look comes first: a line that is found is not looked at again.
    return tuple(sorted(searches, key=lambda search: len(search[1])))


def _rarity(byte: int) -> int:
    """Return how rare a byte is in logs: its place in a list that begins with the commonest."""
    place = _COMMON.find(byte)
    return place if place >= 0 else len(_COMMON)
