"""Stands in for whatever heavy package is not there: torch, ray, transformers and their like.

A module that cannot be found becomes one whose every attribute is a class; classes can be inherited
from, called, indexed, joined with ``|``, entered, iterated (they are empty) and used as decorators,
which return what they decorate. Enough to import an engine and to move its scheduler, and nothing
that computes.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import sys
import types


def _decorated(args):
    return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType | type) else None


class Stubbed(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name)

    def __call__(cls, *args, **kwargs):
        # A class that inherits from a stub is the engine's own, and made as such.
        if "stubbed" in vars(cls):
            return _decorated(args) or type.__call__(cls)
        return type.__call__(cls, *args, **kwargs)

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls


class Stub(metaclass=Stubbed):
    def __init__(self, *args, **kwargs):
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name)()

    def __call__(self, *args, **kwargs):
        return _decorated(args) or self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def __iter__(self):
        return iter(())

    def __getitem__(self, item):
        return self

    def __setitem__(self, item, value):
        pass

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def __int__(self):
        return 0

    __index__ = __int__

    def _same(self, *args):
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        return sys.modules["pydantic_core"].core_schema.any_schema()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = (
        _same
    )
    __mod__ = __neg__ = __invert__ = __and__ = __or__ = __lt__ = __gt__ = __le__ = __ge__ = _same


def made(name):
    return Stubbed(name, (Stub,), {"stubbed": True})


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = made(name)
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, last of all, what nobody else found."""

    def __init__(self, wanted):
        self.wanted = wanted

    def find_spec(self, name, path=None, target=None):
        if not self.wanted(name.partition(".")[0]):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        module.__version__ = "0.0.0"
        if module.__name__ == "pydantic.dataclasses":
            module.dataclass = dataclasses.dataclass


def install(*real):
    """Stand in for everything but the packages *real* and the standard library."""
    kept = {*real, *sys.stdlib_module_names}
    sys.meta_path.append(Finder(lambda top: top not in kept))


def stand_in_for(*absent):
    """Stand in for the packages *absent* alone, as far as they are not there."""
    sys.meta_path.append(Finder(set(absent).__contains__))
