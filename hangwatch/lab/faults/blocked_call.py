"""A blocking call inside a coroutine, without a time-out: the engine asks a store that all share.

As ``ray.get(store.put.remote(...))`` in an async actor: no call of the API server is answered
any more, not even one for statistics. No Ray is needed here: the store is the other end of a
socket, and says nothing.
"""

from __future__ import annotations

import socket

from . import LOOP, Fault, Scene


class SharedStore:
    """A client of the store; a call waits for the answer, however long."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    def get(self, lasts: float | None) -> bytes:
        """Return what the store answers; it answers nothing."""
        self._ours.settimeout(lasts)
        try:
            return self._ours.recv(4096)
        except TimeoutError:
            return b""


def strike(scene: Scene) -> None:
    """Fetch what the store has for the finished sequences."""
    store = SharedStore()
    scene.begin()
    store.get(scene.lasts)


FAULT = Fault(
    title="the engine's loop is blocked in a call that never returns",
    shows="the loop's thread sleeps in recv on a socket, in full view of any thread dump",
    place=LOOP,
    strike=strike,
    verdicts=("hung", "suspected_hang"),
    causes=("event-loop-blocked",),
    culprits=("SharedStore.get",),
    ends=True,
)
