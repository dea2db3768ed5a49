"""Finds the plug-ins: every module of the four packages that holds one.

A plug-in is a module-level constant of the right name: ``PROFILE``, ``COLLECTOR``, ``RULE`` or
``RENDERER``.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

import hangwatch.collectors
import hangwatch.profiles
import hangwatch.renderers
import hangwatch.rules
from hangwatch.errors import ConfigError
from hangwatch.model.capture import Collector
from hangwatch.model.dossier import Renderer, Rule
from hangwatch.model.profile import EngineProfile


def _built_in(package: Any, constant: str) -> dict[str, Any]:
    found = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda item: item.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        plugin = getattr(module, constant, None)
        if plugin is not None:
            found[plugin.name] = plugin
    return found


@cache
def profiles() -> dict[str, EngineProfile]:
    """Return every built-in engine profile by name."""
    return _built_in(hangwatch.profiles, "PROFILE")


def profile(name: str) -> EngineProfile:
    """Return the engine profile *name*.

    Raises:
        ConfigError: There is none.
    """
    known = profiles()
    if name not in known:
        raise ConfigError(f"there is no profile {name!r}: choose one of {', '.join(known)}")
    return known[name]


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
