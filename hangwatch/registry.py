"""Finds the plug-ins: every module of the four packages that holds one.

A plug-in is a module-level constant of the right name: ``PROFILE``, ``COLLECTOR``, ``RULE`` or
``RENDERER``. Third-party ones come through the entry points ``hangwatch.<kind>`` and are loaded
only when the configuration names them.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
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


def load_named(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the third-party plug-ins *names* of *kind* (``profiles``, ``collectors`` …).

    Raises:
        ConfigError: One of them is not installed.
    """
    available = {point.name: point for point in entry_points(group=f"hangwatch.{kind}")}
    missing = [name for name in names if name not in available]
    if missing:
        raise ConfigError(
            f"no plug-in named {missing[0]!r} in the entry points hangwatch.{kind}: "
            "install the package that brings it, or remove it from the configuration"
        )
    return {name: available[name].load() for name in names}
