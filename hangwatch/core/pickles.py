"""Reads plain data out of a pickle without executing it.

A pickle is a program, and who writes one may let its reader call anything. PyTorch's flight
recorder writes numbers, text, lists and dictionaries in protocol 2
(``torch/csrc/jit/serialization/pickler.cpp``), for which some thirty instructions suffice; this
knows those and refuses every other one, above all those that import and call.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_VALUES: Final = 2_000_000
"""Instructions that are followed: 2,000 collectives with 50 frames each take a tenth."""

_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS: Final = re.compile(
    r"INT|BININT[12]?|LONG[14]?|(?:BIN)?FLOAT|(?:SHORT_)?BIN(?:UNICODE|STRING)8?"
)
_KEEP: Final = frozenset(("BINPUT", "LONG_BINPUT"))
_FETCH: Final = frozenset(("BINGET", "LONG_BINGET"))


class NotPlainDataError(Exception):
    """It is no pickle, cut off, or holds more than data."""


class _Mark:
    """What ``MARK`` leaves on the stack."""


def loads(data: bytes) -> Any:
    """Return the value that a pickle of plain data holds.

    Raises:
        NotPlainDataError: See there.
    """
    try:
        return _follow(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise NotPlainDataError(f"it is no pickle of plain data: {error}") from error


def _follow(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[object, Any] = {}
    for count, (code, argument, _) in enumerate(pickletools.genops(data)):
        name = code.name
        if count > MAX_VALUES:
            raise NotPlainDataError("it holds too much")
        if _LITERALS.fullmatch(name):
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_Mark)
        elif name in _KEEP:
            memo[argument] = stack[-1]
        elif name in _FETCH:
            stack.append(memo[argument])
        elif name in _BUILDERS:
            _BUILDERS[name](stack)
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise NotPlainDataError(f"it holds more than data: {name}")
    raise NotPlainDataError("it is cut off")


def _since_mark(stack: list[Any]) -> list[Any]:
    taken: list[Any] = []
    while (value := stack.pop()) is not _Mark:
        taken.append(value)
    return taken[::-1]


def _append(stack: list[Any]) -> None:
    value = stack.pop()
    stack[-1].append(value)


def _appends(stack: list[Any]) -> None:
    values = _since_mark(stack)
    stack[-1].extend(values)


def _set_item(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][key] = value


def _set_items(stack: list[Any]) -> None:
    values = _since_mark(stack)
    stack[-1].update(zip(values[::2], values[1::2], strict=True))


def _tuple_of(length: int, stack: list[Any]) -> None:
    values = tuple(stack[len(stack) - length :])
    del stack[len(stack) - length :]
    stack.append(values)


_BUILDERS: Final[Mapping[str, Callable[[list[Any]], object]]] = {
    "EMPTY_LIST": lambda stack: stack.append([]),
    "EMPTY_DICT": lambda stack: stack.append({}),
    "EMPTY_TUPLE": lambda stack: stack.append(()),
    "LIST": lambda stack: stack.append(_since_mark(stack)),
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": lambda stack: _tuple_of(1, stack),
    "TUPLE2": lambda stack: _tuple_of(2, stack),
    "TUPLE3": lambda stack: _tuple_of(3, stack),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "POP": lambda stack: stack.pop(),
}
