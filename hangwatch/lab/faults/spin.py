"""CPU work on the event loop: one step computes, and nothing else gets a turn."""

from __future__ import annotations

from . import LOOP, Fault, Scene


def compile_grammar(scene: Scene) -> int:
    """Compile a schema that is too big."""
    states = 0
    while not scene.over():
        states += sum(block * block for block in range(10_000))
    return states


def strike(scene: Scene) -> None:
    """Do it where it must not be done."""
    scene.begin()
    compile_grammar(scene)


FAULT = Fault(
    title="the engine's loop burns CPU in one step and never gets back to its other tasks",
    shows="the loop's thread runs, at 100 % of a core, always below the same function",
    place=LOOP,
    strike=strike,
    verdicts=("blocked",),
    causes=("event-loop-blocked-by-cpu",),
    culprits=("compile_grammar",),
    ends=True,
)
