"""Frozen values to plain JSON data and back, for pipes, state files and bundles.

Children must start in a few megabytes, so this is a small recursion over dataclass fields and not
a validation library. It knows what ``hangwatch.model`` is made of: dataclasses, tuples, mappings
with string keys, enums, ``datetime``, pure paths, compiled patterns, and unions. A dataclass
is written with a ``"type"`` key (its class name), which is what tells the members of a union apart.
Unknown keys are ignored, so that an older reader survives a newer writer.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import cache
from pathlib import PurePath, PurePosixPath
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class CodecError(ValueError):
    """The data does not have the shape of the type."""


def to_plain(value: object) -> Any:  # noqa: PLR0911  # one return a kind
    """Return *value* as data that ``json.dumps`` takes.

    Raises:
        CodecError: It holds something that has no plain form.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {"type": type(value).__name__}
        for name in _names(type(value)):
            plain[name] = to_plain(getattr(value, name))
        return plain
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, re.Pattern):
        # What ``(?i)`` within it says is among the flags, and may be said twice.
        return {"pattern": to_plain(value.pattern), "flags": value.flags}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [to_plain(item) for item in value]
    raise CodecError(f"{type(value).__name__} has no plain form")


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def from_plain(kind: type[T] | Any, data: Any) -> T:
    """Return the value of type *kind* that *data* stands for.

    Raises:
        CodecError: The data does not have the shape of the type.
    """
    return cast("T", _reader(cast("Hashable", kind))(data))


Reader = Callable[[Any], Any]


@cache
def _reader(kind: Any) -> Reader:  # noqa: C901, PLR0911, PLR0912  # one branch a kind
    """Return what reads a value of type *kind*; made once, for messages are many."""
    while hasattr(kind, "__supertype__"):  # NewType
        kind = kind.__supertype__
    if kind is Any or kind is object:
        return lambda data: data
    origin = get_origin(kind)
    if origin is Union or origin is types.UnionType:
        return _union_reader(get_args(kind))
    if kind is type(None):
        return _read_none
    if origin is tuple:
        return _tuple_reader(get_args(kind))
    if origin is re.Pattern:
        return _pattern_reader(get_args(kind)[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(get_args(kind)[1])
    if isinstance(kind, type):
        if dataclasses.is_dataclass(kind):
            return _dataclass_reader(kind)
        if issubclass(kind, Enum):
            return _enum_reader(kind)
        if issubclass(kind, datetime):
            return _read_datetime
        if issubclass(kind, PurePath):
            return lambda data: PurePosixPath(_expect(str, data))
        if issubclass(kind, bytes):
            return lambda data: _expect(str, data).encode("latin-1")
        if kind is float:
            return lambda data: float(_expect((int, float), data))
        if kind is int:
            return _read_int
        return lambda data: _expect(kind, data)
    raise CodecError(f"do not know how to read {kind!r}")


def _expect(kind: Any, data: Any) -> Any:
    if not isinstance(data, kind):
        name = getattr(kind, "__name__", "number")
        raise CodecError(f"expected {name}, got {type(data).__name__}")
    return data


def _read_none(data: Any) -> None:
    if data is not None:
        raise CodecError(f"expected null, got {type(data).__name__}")


def _read_int(data: Any) -> int:
    if isinstance(data, bool):
        raise CodecError("expected int, got bool")
    return int(_expect(int, data))


def _read_datetime(data: Any) -> datetime:
    try:
        return datetime.fromisoformat(_expect(str, data))
    except ValueError as error:
        raise CodecError(str(error)) from error


def _enum_reader(kind: type[Enum]) -> Reader:
    def read(data: Any) -> Any:
        try:
            return kind(data)
        except ValueError as error:
            raise CodecError(str(error)) from error

    return read


def _pattern_reader(text: Any) -> Reader:
    read_text = _reader(text)

    def read(data: Any) -> Any:
        try:
            return re.compile(read_text(data["pattern"]), data["flags"])
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise CodecError(f"expected a pattern and its flags: {error}") from error

    return read


def _mapping_reader(item: Any) -> Reader:
    read_item = _reader(item)

    def read(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise CodecError(f"expected an object, got {type(data).__name__}")
        return {str(key): read_item(entry) for key, entry in data.items()}

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> Reader:
    every = len(arguments) == 2 and arguments[1] is Ellipsis
    readers = [_reader(kind) for kind in (arguments[:1] if every else arguments)]

    def read(data: Any) -> Any:
        if isinstance(data, str) or not isinstance(data, Sequence):
            raise CodecError(f"expected an array, got {type(data).__name__}")
        if every:
            return tuple(map(readers[0], data))
        if len(readers) != len(data):
            raise CodecError(f"expected {len(readers)} items, got {len(data)}")
        return tuple(item(entry) for item, entry in zip(readers, data, strict=True))

    return read


def _union_reader(members: tuple[Any, ...]) -> Reader:
    optional = type(None) in members
    readers = [_reader(member) for member in members if member is not type(None)]
    named = {
        member.__name__: _reader(member)
        for member in members
        if isinstance(member, type) and dataclasses.is_dataclass(member)
    }

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        if isinstance(data, Mapping) and data.get("type") in named:
            return named[data["type"]](data)
        problems = []
        for item in readers:
            try:
                return item(data)
            except CodecError as error:
                problems.append(str(error))
        raise CodecError("; ".join(problems))

    return read


def _dataclass_reader(kind: type) -> Reader:
    name = kind.__name__
    readers: dict[str, Reader] = {}

    def read(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise CodecError(f"expected an object for {name}, got {type(data).__name__}")
        if data.get("type", name) != name:
            raise CodecError(f"expected {name}, got {data['type']}")
        if not readers:  # not before now: a type may hold itself
            hints = get_type_hints(kind)
            readers.update(
                (field.name, _reader(hints[field.name]))
                for field in dataclasses.fields(kind)
                if field.init
            )
        arguments = {}
        for key, item in readers.items():
            if key in data:
                try:
                    arguments[key] = item(data[key])
                except CodecError as error:
                    raise CodecError(f"{name}.{key}: {error}") from error
        try:
            return kind(**arguments)
        except TypeError as error:
            raise CodecError(f"{name}: {error}") from error

    return read
