"""JSON objects with the lines they begin on, so that each can be cited; and such pages written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def objects(data: bytes) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield each outermost object of a JSON text and its line, from 1.

    A list of objects, several lists behind each other and one object a line are all the same
    here. Ends quietly at the first object that is broken: a file that was cut short gives what is
    whole.
    """
    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    position, line = 0, 1
    while (start := text.find("{", position)) >= 0:
        line += text.count("\n", position, start)
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            return
        yield value, line
        line += text.count("\n", start, end)
        position = end


def listed(data: bytes, key: str) -> Iterator[tuple[Any, int]]:
    """Yield each item of the list under the first *key* of a JSON text, and its line, from 1.

    Ends quietly where the text was cut short, and yields nothing where there is no such list.
    """
    text = data.decode("utf-8", "replace")
    begin = re.search(rf'"{re.escape(key)}"\s*:\s*\[', text)
    if begin is None:
        return
    decoder = json.JSONDecoder()
    position, line = begin.end(), 1 + text.count("\n", 0, begin.end())
    between = re.compile(r"[\s,]*")
    while (gap := between.match(text, position)) is not None:
        line += text.count("\n", position, gap.end())
        position = gap.end()
        if text[position : position + 1] in ("]", ""):
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        yield value, line
        line += text.count("\n", position, end)
        position = end


def is_whole(data: bytes) -> bool:
    """Say whether *data* is nothing but whole JSON documents."""
    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    position = 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return True
        try:
            _, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return False


def integer(value: object) -> int | None:
    """Return *value* if it is an integer and no truth value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """Return *value* as a float if it is a number and no truth value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def word(value: object) -> str:
    """Return *value* if it is a string, else ``""``."""
    return value if isinstance(value, str) else ""


def page(head: Mapping[str, Any], lists: Mapping[str, Iterable[object]]) -> bytes:
    """Return a document with *head* on its first line, then its *lists*, a record a line."""
    parts = [json.dumps(dict(head), ensure_ascii=False).removesuffix("}")]
    for key, records in lists.items():
        lines = ",\n ".join(json.dumps(record, ensure_ascii=False) for record in records)
        parts.append(f"{json.dumps(key)}: [\n {lines}\n]" if lines else f"{json.dumps(key)}: []")
    return (",\n".join(parts) + "}\n").encode("utf-8", "replace")


def lines(records: Iterable[object]) -> bytes:
    """Return a list with a record a line, so that each can be cited."""
    text = ",\n ".join(json.dumps(record, ensure_ascii=False) for record in records)
    return f"[\n {text}\n]\n".encode("utf-8", "surrogateescape")
