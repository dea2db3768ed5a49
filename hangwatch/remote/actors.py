"""Which Ray actors live in a process, by what Ray itself keeps there.

An awaited ``ObjectRef`` names the actor that the call went to (see ``awaits``). A worker keeps its
own actors in ``ray._private.worker.global_worker.actors``, a dictionary from ``ActorID``. The two
together say which process waits for which, without a word to Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hangwatch.remote.errors import UnreadableError
from hangwatch.remote.objects import Objects

MODULE: Final = "ray._private.worker"

ID_OFFSET: Final = 32
"""In every ``BaseID`` of Ray (``ray/includes/unique_ids.pxi``): header, vtable and hash first."""

ID_SIZE: Final = 16
MAX_ACTORS: Final = 64


def actors_of(objects: Objects, modules: Mapping[str, int]) -> tuple[str, ...]:
    """Return the ids of the actors in an interpreter, hexadecimal; none without Ray."""
    if MODULE not in modules:
        return ()
    found = []
    try:
        worker = objects.in_module(modules[MODULE], ("global_worker",)).get("global_worker", 0)
        actors = objects.attribute(worker, "actors") if worker else 0
        for key, _ in objects.pairs(actors, MAX_ACTORS) if actors else ():
            if objects.type_of(key).name.rsplit(".", 1)[-1] == "ActorID":
                found.append(objects.memory.read(key + ID_OFFSET, ID_SIZE).hex())
    except UnreadableError:
        pass  # a dictionary that is being changed: what was read of it stands
    return tuple(found)
