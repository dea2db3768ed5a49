"""A fleet of laboratory servers whose engines fetch what they need from one shared process.

Run it as ``hangwatch/lab/fleet.py`` is run. The store is a child of the fleet and a real process of
its own; its pid stands in ``store.pid`` in the fleet's folder. Engines tell it of each step without
waiting, as ``store.put.remote()`` does, and now and then they wait for its answer in their event
loop, as ``ray.get()`` does: each at an instant of its own in the first ``SPREAD`` seconds of every
``EVERY`` of the monotonic clock. Whoever stops the store stops all engines, each a little later.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "hangwatch" / "lab"))

import engine
import fleet
import server

EVERY = 4.0
SPREAD = 1.4

ADDRESS = "LAB_STORE"


def serve(address: str) -> None:
    """Answer each ``?``, take in all else."""
    server.set_title("ray::SharedStore", "ray::SharedStore")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    while asked := connection.recv(64):
        connection.sendall(b"!" * asked.count(b"?"))


class Store:
    """An engine's connection to the store."""

    def __init__(self) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(os.environ[ADDRESS])
        self.offset = random.uniform(0.0, SPREAD)
        self.round = self.now()

    def now(self) -> int:
        return int((time.monotonic() - self.offset) / EVERY)

    def tell(self) -> None:
        if self.now() == self.round:
            self.connection.sendall(b".")
        else:
            self.round = self.now()
            self.get_objects()

    def get_objects(self) -> None:
        self.connection.sendall(b"?")
        self.connection.recv(1)


def _get_extra_outputs(self: engine.EngineLoop) -> None:
    if not hasattr(self, "shared_store"):
        self.shared_store = Store()
    self.shared_store.tell()


engine.EngineLoop._get_extra_outputs = _get_extra_outputs


def main() -> None:
    if sys.argv[1] == "store":
        server.die_with_parent(os.getppid())
        serve(sys.argv[2])
    elif sys.argv[1] == "serve":
        server.main()
    else:
        folder = Path(fleet.parse_arguments(sys.argv[1:]).folder)
        os.environ[ADDRESS] = str(folder / "store")
        store = subprocess.Popen([sys.executable, __file__, "store", str(folder / "store")])
        (folder / "store.pid").write_text(str(store.pid))
        fleet.SERVER = Path(__file__)
        try:
            fleet.main()
        finally:
            store.kill()


if __name__ == "__main__":
    main()
