"""Engine numbers from outside: counts and lengths that hang on suspended coroutines.

A task's chain says where an engine stands; a few numbers say in which state: how many sequences
wait, how many blocks are free, at which draft step it is. They are plain attributes of objects
that a suspended coroutine holds in its locals. A ``Table`` names the coroutine, the way from there
to an object (or to many), and what to read of each; ``Probes`` reads it.

What the language has, and nothing else:

- *Where*: ``Engine.async_loop:self.scheduler`` is the attribute ``scheduler`` of the local ``self``
  of any frame of that qualified name, in a task's chain or on a thread's stack. Locals that live
  in closure cells are followed. Without a colon it is the frame: the first name of each probe is
  then a local. ``*`` goes to every value of a dict or item of a list, tuple or set: one row each.
- *Path*: attribute names with dots between, in an instance's ``__dict__`` or its slots. Nothing is
  called, so there are no properties; nothing is looked up by key.
- *Kind*: a number, a length, whether it is ``None``, the name of a type, the name of an enum
  member. No string, byte or key of a dict is ever read, but for the names of attributes, types
  and enum members, which are words of the program and must be identifiers.

An object that is not exactly of the kind that the probe expects is not read. ``None`` is a value.
What is not there is ``absent``, with the reason: engines change, and a probe that broke costs its
own number.

The target runs. So everything is read in looks: a number that two looks in succession agree on is
believed; three are taken at most, and what still differs is given as it was last seen, and named
in ``moved``. A coroutine that ended in between, and whose frame is stale, is noticed by reading
its link of the chain again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal, TypeAlias, get_args

from hangwatch.remote.coroutines import Steps
from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.frames import FrameView
from hangwatch.remote.layouts import schema
from hangwatch.remote.objects import DICT, HEAP_TYPE, LIST, TUPLE, TypeInfo
from hangwatch.remote.results import StateRow, StateTable, StateValue

ProbeKind: TypeAlias = Literal[
    "int", "float", "bool", "length", "lengths", "is_none", "type", "enum", "age"
]
"""``length``: of a dict, list, tuple, set or deque. ``lengths``: of each value of a dict whose keys
are enum members, by their names. ``is_none``: a bool. ``type``: name of the object's type.
``enum``: name of a member. ``age``: seconds since a float on the monotonic clock."""

LOOKS: Final = 3
MAX_ROWS: Final = 256
"""Rows of one table; the rest is counted."""
MAX_MANY: Final = 100_000
"""Objects that ``*`` goes to."""
MAX_KEYS: Final = 64
MAX_NAME: Final = 128
GENERATOR_OWNER: Final = 1
"""``FRAME_OWNED_BY_GENERATOR``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One number of each row.

    Attributes:
        name: What it is called: ``KV blocks free``.
        kind: See ``ProbeKind``.
        path: Attributes from the table's object on, with dots between; ``""`` is the object.
        minus: Another probe of the table, before this one, that is subtracted; ``""`` for none.
    """

    name: str
    kind: ProbeKind
    path: str = ""
    minus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers of one object, or of many of a kind.

    Attributes:
        name: ``scheduler``, ``sequences``.
        where: Places in order of preference; the first that leads to an object counts.
        probes: What is read there.
    """

    name: str
    where: tuple[str, ...]
    probes: tuple[Probe, ...]

    @property
    def functions(self) -> frozenset[str]:
        """The qualified names that it hangs on."""
        return frozenset(each.partition(":")[0] for each in self.where)


def tables(plain: Iterable[Mapping[str, Any]]) -> tuple[Table, ...]:
    """Return the tables that plain data (as of JSON) stands for.

    Raises:
        ValueError: A probe is of a kind that is not known here.
    """
    found = tuple(
        Table(
            name=table["name"],
            where=tuple(table["where"]),
            probes=tuple(
                Probe(
                    name=probe["name"],
                    kind=probe["kind"],
                    path=probe.get("path", ""),
                    minus=probe.get("minus", ""),
                )
                for probe in table["probes"]
            ),
        )
        for table in plain
    )
    for probe in (probe for table in found for probe in table.probes):
        if probe.kind not in get_args(ProbeKind):
            raise ValueError(f"the probe {probe.name!r} is of the unknown kind {probe.kind!r}")
    return found


class AbsentError(Exception):
    """The way of a probe does not lead to a value; the message says where it breaks off."""


@dataclass(frozen=True, slots=True)
class Place:
    """A frame that a table hangs on, and the task that it belongs to, 0 for none."""

    task: int
    view: FrameView


@dataclass(frozen=True, slots=True)
class Subject:
    """What one row is about: an object, or a frame."""

    task: int
    address: int
    view: FrameView | None = None


@dataclass(slots=True)
class Places:
    """Collects the frames that tables hang on while tasks are read."""

    wanted: frozenset[str]
    found: dict[str, list[Place]] = field(default_factory=dict)

    def note(self, task: int, views: Iterable[FrameView | None]) -> None:
        """Keep those frames of a task's chain that are wanted."""
        for view in views:
            # Plain functions are on a thread's stack, and looked for there anew in each look.
            if view is None or view.code.kind == "function":
                continue
            function = view.shown().function
            if function in self.wanted and len(self.found.setdefault(function, [])) <= MAX_ROWS:
                self.found[function].append(Place(task, view))


class Probes:
    """Reads tables in looks at the target, within the limits of the reading."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.frames = steps.frames
        self.objects = steps.objects
        self.memory = steps.memory
        self._attributes: dict[int, dict[str, int]] = {}

    def forget(self) -> None:
        """Drop what the last look has read."""
        self.memory.forget()
        self._attributes.clear()

    def read(
        self,
        wanted: Sequence[Table],
        places: Mapping[str, Sequence[Place]],
        stacks: Callable[[], Iterable[FrameView]],
        on_stacks: frozenset[str] | None = None,
    ) -> tuple[tuple[StateTable, ...], str]:
        """Read the tables whose functions are there.

        Args:
            wanted: The tables.
            places: Frames of tasks, by qualified name.
            stacks: Returns the frames of all threads, as they are now.
            on_stacks: Functions that were seen on them in this reading, the others need not be
                looked for; ``None`` if nobody looked.

        Returns:
            The tables, and why they are not complete or not certain, ``""`` if they are.
        """
        now = time.monotonic()
        seen: tuple[StateTable, ...] = ()
        shown: tuple[StateTable, ...] = ()
        for look in range(LOOKS):
            self.forget()
            try:
                found = tuple(self._look(wanted, places, stacks, on_stacks, now))
            except ExhaustedError as error:
                return shown, f"{error} in look {look + 1} at the numbers"
            if look and found == seen:
                return found, ""
            shown = _compared(seen, found) if look else found
            seen = found
        return shown, ""

    def _look(
        self,
        wanted: Sequence[Table],
        places: Mapping[str, Sequence[Place]],
        stacks: Callable[[], Iterable[FrameView]],
        on_stacks: frozenset[str] | None,
        now: float,
    ) -> Iterator[StateTable]:
        known = dict(places)
        missing = frozenset[str]().union(*(table.functions for table in wanted)) - known.keys()
        if on_stacks is not None:
            # Functions of 3.10 know their plain name only.
            missing = frozenset(
                name for name in missing if {name, name.rpartition(".")[2]} & on_stacks
            )
        for view in stacks() if missing else ():
            for function in missing:
                if self._is(view, function):
                    known[function] = [*known.get(function, ()), Place(0, view)]
        for table in wanted:
            found = self._table(table, known, now)
            if found is not None:
                yield found

    def _is(self, view: FrameView, function: str) -> bool:
        """Whether a frame on a thread's stack is one of the function of that qualified name."""
        qualified = view.code.qualified_name or view.qualified_name
        if qualified:
            return qualified == function
        # Functions of 3.10 know their plain name only: the class of ``self`` has to do.
        outer, _, name = function.rpartition(".")
        if view.code.name != name:
            return False
        try:
            at = self.frames.locals(view, {"self"}).get("self", 0)
            lineage = self.objects.type_of(at).lineage if at else ()
        except ExhaustedError:
            raise
        except UnreadableError:
            return False
        return outer.rpartition(".")[2] in lineage if outer else True

    def _table(
        self, table: Table, places: Mapping[str, Sequence[Place]], now: float
    ) -> StateTable | None:
        """Return one table; ``None`` if no function that it hangs on is there."""
        absent = ""
        for where in table.where:
            function, _, path = where.partition(":")
            if function not in places:
                continue
            try:
                subjects = self._subjects(places[function], path)
            except AbsentError as error:
                absent = absent or str(error)
                continue
            return StateTable(
                name=table.name,
                where=where,
                rows=tuple(self._row(table, each, now) for each in subjects[:MAX_ROWS]),
                left_out=max(0, len(subjects) - MAX_ROWS),
            )
        return StateTable(name=table.name, absent=absent) if absent else None

    # ------------------------------------------------------------------ where

    def _subjects(self, places: Sequence[Place], path: str) -> list[Subject]:
        """Return what a path leads to from each frame, each object once.

        Raises:
            AbsentError: From none of them it leads anywhere.
        """
        found: dict[int, Subject] = {}
        reason = ""
        led = False
        for place in places:
            try:
                view = self._still(place.view)
                if path:
                    reached = self._walk(view, 0, path)
                    for at in reached:
                        found.setdefault(at, Subject(place.task, at))
                else:
                    found.setdefault(view.address, Subject(place.task, view.address, view))
                led = True
            except AbsentError as error:
                reason = reason or str(error)
        if not led:
            raise AbsentError(reason)
        return list(found.values())

    def _still(self, view: FrameView) -> FrameView:
        """Return the frame as it is now.

        Raises:
            AbsentError: It is over, or something else is there by now.
        """
        try:
            owner = self._owner(view)
            if owner:
                step = self.steps.take(owner)
                fresh = step.view
                over = step.end is not None and step.end.kind in ("created", "finished")
            else:
                fresh, over = self.frames.frame(view.address), False
        except ExhaustedError:
            raise
        except UnreadableError:
            fresh, over = None, True
        if (
            over
            or fresh is None
            or (fresh.address, fresh.code.address)
            != (
                view.address,
                view.code.address,
            )
        ):
            raise AbsentError("it ended while it was read")
        return fresh

    def _owner(self, view: FrameView) -> int:
        """Return the coroutine or generator that a frame belongs to, 0 for none."""
        layout = self.frames.layout
        if layout.frame_object is not None:
            return self.memory.word(view.address + layout.frame_object.generator)
        assert layout.frame is not None
        assert layout.generator.frame is not None
        start, data = view.witness
        owned = data[view.address - start + layout.frame.owner] == GENERATOR_OWNER
        return view.address - layout.generator.frame if owned else 0

    def _walk(self, view: FrameView | None, address: int, path: str) -> list[int]:
        """Return the objects that a path leads to, from a frame's locals or an object on."""
        reached = [address]
        for i, name in enumerate(path.split(".") if path else ()):
            if name == "*":
                reached = list(
                    islice((at for each in reached for at in self._each(each)), MAX_MANY)
                )
            elif i == 0 and view is not None:
                reached = [self._local(view, name)]
            else:
                reached = [self._attribute(at, name) for at in reached]
        return reached

    def _local(self, view: FrameView, name: str) -> int:
        try:
            value = self.frames.locals(view, {name}).get(name, 0)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            raise AbsentError(str(error)) from None
        if not value:
            raise AbsentError(f"{view.shown().function} has no {name} yet")
        return value

    def _attribute(self, address: int, name: str) -> int:
        try:
            kind = self.objects.type_of(address)
            if kind.name == "NoneType":
                raise AbsentError(f"there is None instead of something with {name}")
            attributes = self._attributes.get(address)
            if attributes is None:
                attributes = self._attributes[address] = self.objects.attributes(address)
            value = attributes.get(name) or self.objects.slot(address, name)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            raise AbsentError(str(error)) from None
        if not value:
            raise AbsentError(f"a {_identifier(kind.name)} has no {name}")
        return value

    def _each(self, address: int) -> Sequence[int]:
        try:
            kind = self.objects.type_of(address)
            if kind.flags & DICT:
                return [value for _, value in self.objects.pairs(address)]
            if kind.flags & (LIST | TUPLE):
                return self.objects.items(address)
            return self.objects.members(address)
        except ExhaustedError:
            raise
        except UnreadableError as error:
            raise AbsentError(str(error)) from None

    # ------------------------------------------------------------------ what

    def _row(self, table: Table, subject: Subject, now: float) -> StateRow:
        values: dict[str, StateValue] = {}
        absent: dict[str, str] = {}
        for probe in table.probes:
            try:
                value = self._value(probe, subject, now)
                values[probe.name] = _less(value, values, probe.minus) if probe.minus else value
            except ExhaustedError:
                raise
            except (AbsentError, UnreadableError) as error:
                absent[probe.name] = str(error)
        return StateRow(id=subject.address, task=subject.task, values=values, absent=absent)

    def _value(self, probe: Probe, subject: Subject, now: float) -> StateValue:  # noqa: PLR0911  # one return a kind
        address, *more = self._walk(subject.view, subject.address, probe.path) or (0,)
        if more or not address:
            raise AbsentError("its path leads to many objects, or to none")
        objects = self.objects
        kind = objects.type_of(address)
        none = kind.name == "NoneType"
        if probe.kind == "is_none":
            return none
        if none:
            return None
        if probe.kind == "length":
            return self._length(address, kind)
        if probe.kind == "lengths":
            return {
                self._member(key): self._length(value, objects.type_of(value))
                for key, value in objects.pairs(address, MAX_KEYS)
            }
        if probe.kind == "type":
            return _identifier(kind.name)
        if probe.kind == "enum":
            return self._member(address)
        # Nothing but the exact type: a subclass may mean anything by its number.
        exact = "" if kind.flags & HEAP_TYPE else kind.name
        if probe.kind == "bool" and exact == "bool":
            return bool(objects.integer(address))
        if probe.kind in ("int", "float") and exact == "int":
            return objects.integer(address)
        if probe.kind in ("float", "age") and exact == "float":
            number = objects.real(address)
            if not math.isfinite(number):
                raise AbsentError("it is not finite")
            return number if probe.kind == "float" else round(now - number, 3)
        raise AbsentError(f"it is a {_identifier(kind.name)}")

    def _length(self, address: int, kind: TypeInfo) -> int:
        """Return the length of a container; of nothing else, strings above all."""
        if "set" in kind.lineage or "frozenset" in kind.lineage:
            value = self.memory.word(address + schema.SET_USED)
        elif kind.flags & (DICT | LIST | TUPLE) or "collections.deque" in kind.lineage:
            value = self.memory.word(address + schema.DEQUE_LENGTH)
        else:
            raise AbsentError(f"it is a {_identifier(kind.name)}, no container")
        if value >= 1 << 40:
            raise AbsentError("its length makes no sense")
        return value

    def _member(self, address: int) -> str:
        """Return the name of an enum member."""
        kind = self.objects.type_of(address)
        # An enum that is an int or a str has that as its first base: the metaclass tells.
        if not {"EnumType", "EnumMeta"} & set(self.objects.type_of(kind.address).lineage):
            raise AbsentError(f"it is a {_identifier(kind.name)}, no enum member")
        return _identifier(self.objects.text(self._attribute(address, "_name_"), MAX_NAME))


def _identifier(name: str) -> str:
    """Return a word of the program; anything else might be somebody's text."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise AbsentError("its name is no identifier")
    return name


def _less(value: StateValue, values: Mapping[str, StateValue], minus: str) -> StateValue:
    other = values.get(minus)
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        raise AbsentError(f"{minus} is not known")
    return value - other


def _compared(before: Sequence[StateTable], found: Sequence[StateTable]) -> tuple[StateTable, ...]:
    """Return the tables with what differs from an earlier look marked as moved."""
    rows = {(table.name, row.id): row for table in before for row in table.rows}
    return tuple(table.marked(rows) for table in found)


__all__ = ["Place", "Places", "Probe", "ProbeKind", "Probes", "Table", "tables"]
