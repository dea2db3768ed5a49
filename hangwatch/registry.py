"""Finds the plug-ins: every module of the four packages that holds one.

A plug-in is a module-level constant of the right name: ``PROFILE``, ``COLLECTOR``, ``RULE`` or
``RENDERER``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import hangwatch.collectors
import hangwatch.profiles
import hangwatch.renderers
import hangwatch.rules
from hangwatch.errors import ConfigError
from hangwatch.model.capture import CaptureRequest, Collector
from hangwatch.model.dossier import Renderer, Rule
from hangwatch.model.profile import EngineProfile

AUTO: Final = "auto"
"""Stands for every profile that is known."""


def _built_in(package: Any, constant: str) -> dict[str, Any]:
    found = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda item: item.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        plugin = getattr(module, constant, None)
        if plugin is not None:
            found[plugin.name] = plugin
    return found


@cache
def _profiles() -> dict[str, EngineProfile]:
    return _built_in(hangwatch.profiles, "PROFILE")


def profiles(defined: Iterable[EngineProfile] = ()) -> dict[str, EngineProfile]:
    """Return every engine profile by name: the built-in ones, then those *defined* elsewhere."""
    return _profiles() | {each.name: each for each in defined}


def profile(name: str, defined: Iterable[EngineProfile] = ()) -> EngineProfile:
    """Return the engine profile *name*, one of ``profiles(defined)``.

    Raises:
        ConfigError: There is none.
    """
    known = profiles(defined)
    if name not in known:
        raise ConfigError(f"there is no profile {name!r}: choose one of {', '.join(known)}")
    return known[name]


def chosen(name: str = "", defined: Iterable[EngineProfile] = ()) -> dict[str, EngineProfile]:
    """Return the engines to look for: *name* alone, or all for ``auto`` and ``""``.

    Raises:
        ConfigError: There is none of that name.
    """
    defined = tuple(defined)
    return profiles(defined) if name in ("", AUTO) else {name: profile(name, defined)}


def profiles_of(request: CaptureRequest) -> tuple[EngineProfile, ...]:
    """Return the engines that a capture may meet: those that it names, else all built-in ones."""
    return request.profiles or tuple(_profiles().values())


@cache
def collectors() -> dict[str, Collector]:
    """Return every built-in collector by name."""
    return _built_in(hangwatch.collectors, "COLLECTOR")


@cache
def rules() -> dict[str, Rule]:
    """Return every built-in rule by name."""
    return _built_in(hangwatch.rules, "RULE")


@cache
def renderers() -> dict[str, Renderer]:
    """Return every built-in renderer by name."""
    return _built_in(hangwatch.renderers, "RENDERER")
