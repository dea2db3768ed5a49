"""Frozen values to plain JSON data and back, for pipes, state files and bundles.

Children must start in a few megabytes, so this is a small recursion over dataclass fields and not
a validation library. It knows what ``hangwatch.model`` is made of: dataclasses, tuples, mappings
with string keys, enums, ``datetime``, pure paths, bytes patterns excluded, and unions. A dataclass
is written with a ``"type"`` key (its class name), which is what tells the members of a union apart.
Unknown keys are ignored, so that an older reader survives a newer writer.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
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
        for field in dataclasses.fields(value):
            plain[field.name] = to_plain(getattr(value, field.name))
        return plain
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [to_plain(item) for item in value]
    raise CodecError(f"{type(value).__name__} has no plain form")


def from_plain(kind: type[T] | Any, data: Any) -> T:
    """Return the value of type *kind* that *data* stands for.

    Raises:
        CodecError: The data does not have the shape of the type.
    """
    return cast("T", _decode(kind, data))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(kind: Any, data: Any) -> Any:  # noqa: C901, PLR0911, PLR0912  # one branch a kind
    while hasattr(kind, "__supertype__"):  # NewType
        kind = kind.__supertype__
    if kind is Any or kind is object:
        return data
    origin = get_origin(kind)
    if origin is Union or origin is types.UnionType:
        return _decode_union(get_args(kind), data)
    if kind is type(None):
        if data is not None:
            raise CodecError(f"expected null, got {type(data).__name__}")
        return None
    if origin is tuple:
        return _decode_tuple(get_args(kind), data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise CodecError(f"expected an object, got {type(data).__name__}")
        _, item = get_args(kind)
        return {str(key): _decode(item, entry) for key, entry in data.items()}
    if isinstance(kind, type):
        if dataclasses.is_dataclass(kind):
            return _decode_dataclass(kind, data)
        if issubclass(kind, Enum):
            try:
                return kind(data)
            except ValueError as error:
                raise CodecError(str(error)) from error
        if issubclass(kind, datetime):
            return datetime.fromisoformat(_expect(str, data))
        if issubclass(kind, PurePath):
            return PurePosixPath(_expect(str, data))
        if issubclass(kind, bytes):
            return _expect(str, data).encode("latin-1")
        if kind is float:
            return float(_expect((int, float), data))
        if kind is int and isinstance(data, bool):
            raise CodecError("expected int, got bool")
        return _expect(kind, data)
    raise CodecError(f"do not know how to read {kind!r}")


def _expect(kind: Any, data: Any) -> Any:
    if not isinstance(data, kind):
        name = getattr(kind, "__name__", "number")
        raise CodecError(f"expected {name}, got {type(data).__name__}")
    return data


def _decode_tuple(arguments: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    if isinstance(data, str) or not isinstance(data, Sequence):
        raise CodecError(f"expected an array, got {type(data).__name__}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item) for item in data)
    if len(arguments) != len(data):
        raise CodecError(f"expected {len(arguments)} items, got {len(data)}")
    return tuple(_decode(kind, item) for kind, item in zip(arguments, data, strict=True))


def _decode_union(members: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in members:
        return None
    if isinstance(data, Mapping) and "type" in data:
        for member in members:
            if getattr(member, "__name__", None) == data["type"]:
                return _decode(member, data)
    problems = []
    for member in members:
        if member is type(None):
            continue
        try:
            return _decode(member, data)
        except CodecError as error:
            problems.append(str(error))
    raise CodecError("; ".join(problems))


def _decode_dataclass(kind: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise CodecError(f"expected an object for {kind.__name__}, got {type(data).__name__}")
    if data.get("type", kind.__name__) != kind.__name__:
        raise CodecError(f"expected {kind.__name__}, got {data['type']}")
    hints = _hints(kind)
    arguments = {}
    for field in dataclasses.fields(kind):
        if field.init and field.name in data:
            try:
                arguments[field.name] = _decode(hints[field.name], data[field.name])
            except CodecError as error:
                raise CodecError(f"{kind.__name__}.{field.name}: {error}") from error
    try:
        return kind(**arguments)
    except TypeError as error:
        raise CodecError(f"{kind.__name__}: {error}") from error
