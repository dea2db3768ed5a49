"""From what ``hangwatch-rescue.py`` printed to loose evidence.

The document (``hangwatch.rescue/1``) holds facts and no judgement: which role a process has, and
whose log is whose, is decided here, with the engine's profile. It may come from a stranger, so
nothing in it is taken for granted; what has not the right form is left out and said.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from hangwatch.core import table
from hangwatch.core.kinship import related
from hangwatch.core.material import HeldLog
from hangwatch.core.objects import integer, word
from hangwatch.core.planning import file_name
from hangwatch.model.capture import Target
from hangwatch.model.identity import ProcessId, Role
from hangwatch.model.process import ProcessRow
from hangwatch.model.profile import EngineProfile

MAX_PROCESSES: Final = 1000
MAX_LOGS: Final = 1000

_HEAD: Final = re.compile(rb'\s*\{\s*"schema"\s*:\s*"hangwatch\.rescue/')
_SCHEMA: Final = "hangwatch.rescue/1"
_LOG: Final = re.compile(r".*\.(log|out|err|txt)(\.\d{1,4})?")
_UNSAFE: Final = re.compile(r"[^\w.+-]", re.ASCII)


def is_rescue(head: bytes) -> bool:
    """Say whether a file that begins with *head* is such a document."""
    return _HEAD.match(head) is not None


@dataclass(slots=True)
class Rescued:
    """What a document holds, as loose evidence.

    Attributes:
        files: Contents by path; logs are not among them.
        logs: Ends of logs by path; the server's are said to be its own.
        ended: When it was taken, with the offset of the machine that it was taken on.
        problems: What could not be read there, and here.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    logs: dict[str, HeldLog] = field(default_factory=dict)
    ended: datetime | None = None
    problems: list[str] = field(default_factory=list)


def unpack(data: bytes, profiles: Iterable[EngineProfile]) -> Rescued:
    """Return what *data* holds.

    Raises:
        ValueError: It is cut short, or of a form that is not known; the message says which.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is cut short or damaged ({error}): fetch it again") from None
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise ValueError("it is of a later version of hangwatch: use that one")
    found = Rescued(ended=_instant(document.get("ended")))
    found.problems += [word(each) for each in _list(document, "problems") if word(each)]
    processes = [raw for raw in _objects(document, "processes") if integer(raw.get("pid"))]
    targets = _targets(processes[:MAX_PROCESSES], profiles)
    _unpack_logs(document, targets, found)
    rows: dict[int, list[dict[str, Any]]] = {}
    for raw in processes[:MAX_PROCESSES]:
        target = targets[raw["pid"]]
        before: dict[str, Any] = {}
        for sample, taken in enumerate(_objects(raw, "samples")[:2], start=1):
            before = _row(target, word(raw.get("why")), taken, before)
            rows.setdefault(sample, []).append(before)
            _unpack_sample(target, sample, taken, found)
    for sample, listed in rows.items():
        found.files[file_name("procs", ".json", sample)] = _lines(listed)
    if isinstance(document.get("host"), dict):
        found.files["environment/machine.json"] = _dump(document["host"])
    return found


def _targets(
    processes: list[Mapping[str, Any]], profiles: Iterable[EngineProfile]
) -> dict[int, Target]:
    """Return each process with its role."""
    rows = []
    parents = {raw["pid"]: integer(_first(raw).get("ppid")) or 0 for raw in processes}
    for raw in processes:
        first = _first(raw)
        rows.append(
            ProcessRow(
                process=ProcessId(raw["pid"], integer(raw.get("start_ticks")) or 0),
                ppid=0 if _descends_from_itself(raw["pid"], parents) else parents[raw["pid"]],
                comm=word(first.get("comm")),
                state=word(first.get("state"))[:1] or "S",
                title=word(raw.get("title")),
                gpus=tuple(each for each in _list(raw, "gpus") if integer(each) is not None),
                logs=tuple(filter(None, map(word, _list(raw, "logs")))),
            )
        )
    logs = {path for row in rows for path in row.logs}
    found = related(rows, seeds=[row.pid for row in rows], profiles=profiles, logs=logs)
    return {target.process.pid: target for target in found}


def _first(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return (_objects(raw, "samples") or [{}])[0]


def _descends_from_itself(pid: int, parents: Mapping[int, int]) -> bool:
    """Say whether the parents of a process lead nowhere, which no kernel says."""
    seen = {pid}
    above = parents[pid]
    while above in parents and above not in seen:
        seen.add(above)
        above = parents[above]
    return above in seen


def _row(
    target: Target, why: str, taken: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row of ``procs.json``; with rates if there is one from before."""
    known = table.who(target, why)
    known.update(
        {key: taken[key] for key in taken if key not in ("kernel", "threads", "tasks", "title")}
    )
    if "thread_count" in known:
        known["threads"] = known.pop("thread_count")
    threads = _objects(taken, "kernel")
    if threads:
        known["thread_states"] = dict(Counter(word(each.get("state")) for each in threads))
        known["vol_ctxt"] = sum(integer(each.get("vol_ctxt")) or 0 for each in threads)
    return known | table.rates(before, known)


def _unpack_sample(target: Target, sample: int, taken: Mapping[str, Any], found: Rescued) -> None:
    pid, folder = target.process.pid, target.folder
    if isinstance(taken.get("kernel"), list):
        head = {
            "schema": "hangwatch.kernel/1",
            "pid": pid,
            "sample": sample,
            "state": taken.get("state"),
        }
        kernel = {**head, "threads": taken["kernel"]}
        found.files[f"{folder}/{file_name('kernel', '.json', sample)}"] = _page(kernel)
        asleep = [each for each in _objects(taken, "kernel") if word(each.get("stack"))]
        if asleep:
            text = "\n".join(
                f"thread {each.get('tid')} {word(each.get('comm'))}\n{each['stack']}"
                for each in asleep
            )
            found.files[f"{folder}/stack_{pid}.txt"] = text.encode("utf-8", "replace")
    if isinstance(taken.get("threads"), list):
        # Whose stacks they are says the folder, whatever stands in them.
        threads = [{**each, "pid": pid} for each in _objects(taken, "threads")]
        found.files[f"{folder}/{file_name('threads', '.json', sample)}"] = _lines(threads)
    if isinstance(taken.get("tasks"), dict):
        tasks = {**taken["tasks"], "pid": pid}
        found.files[f"{folder}/{file_name('tasks', '.json', sample)}"] = _page(tasks)


def _unpack_logs(
    document: Mapping[str, Any], targets: Mapping[int, Target], found: Rescued
) -> None:
    for number_, raw in enumerate(_objects(document, "logs")[:MAX_LOGS]):
        text = raw.get("text")
        if not isinstance(text, str):
            continue
        base = word(raw.get("path")).removesuffix(" (deleted)").rsplit("/", 1)[-1]
        name = _UNSAFE.sub("_", base)[-100:] or "log"
        if not _LOG.fullmatch(name):
            name += ".log"
        writers = {pid for pid in _list(raw, "pids") if integer(pid) in targets}
        servers = [pid for pid in writers if targets[pid].role is Role.API_SERVER]
        found.logs[f"logs/{number_}/{name}"] = HeldLog(
            data=text.encode("utf-8", "surrogateescape"),
            pid=servers[0] if len(servers) == 1 else None,
            written=_instant(raw.get("written")),
        )


def _instant(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(word(value))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _list(raw: Mapping[str, Any], name: str) -> list[Any]:
    value = raw.get(name)
    return value if isinstance(value, list) else []


def _objects(raw: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [each for each in _list(raw, name) if isinstance(each, dict)]


def _page(document: Mapping[str, Any]) -> bytes:
    """Return an object with each item of its lists on a line of its own."""
    fields = [
        _dump(name) + b": " + (_lines(value) if isinstance(value, list) and value else _dump(value))
        for name, value in document.items()
    ]
    return b"{\n" + b",\n".join(fields) + b"}\n"


def _lines(items: list[Any]) -> bytes:
    """Return a list with one item a line, so that a citation of a line names one of them."""
    return b"[\n " + b",\n ".join(map(_dump, items)) + b"\n]\n"


def _dump(value: object) -> bytes:
    return json.dumps(value).encode("ascii")
