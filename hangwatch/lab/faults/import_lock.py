"""An import lock that is waited for in a circle: see ``_plugin.py``, which is what hangs."""

from __future__ import annotations

from . import LOOP, Fault, Scene


def strike(scene: Scene) -> None:
    """Import the module."""
    scene.begin()
    from . import _plugin  # noqa: F401


FAULT = Fault(
    title="an import waits for a thread that imports the same module",
    shows="one thread in Thread.join below an import, another one in the import system's lock",
    place=LOOP,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("lock-order-deadlock", "event-loop-blocked"),
    culprits=("load_plugins", "<module>"),
)
