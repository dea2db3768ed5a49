"""What systemd wants to hear from a service: ready, alive, status, stopping.

The protocol of ``sd_notify(3)``: datagrams to the socket that ``NOTIFY_SOCKET`` names. Nothing
here ever blocks or fails the caller; without a service manager nothing is sent at all.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final, Self

MAX_STATUS: Final = 200
"""Characters of a status line."""


class Notifier:
    """Tells the service manager how we are.

    Attributes:
        watchdog_interval: Seconds within which ``alive`` must be said, or ``None`` if nobody asked.
    """

    def __init__(self, address: str = "", watchdog_interval: float | None = None) -> None:
        self.watchdog_interval = watchdog_interval
        self._socket: socket.socket | None = None
        if address:
            # "@name" is an abstract socket: a NUL stands for the "@" on the wire.
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Return the notifier that the service manager's variables describe."""
        variables = os.environ if environment is None else environment
        interval = None
        microseconds = variables.get("WATCHDOG_USEC", "")
        addressee = variables.get("WATCHDOG_PID", "")
        if microseconds.isdigit() and addressee in {"", str(os.getpid())}:
            interval = int(microseconds) / 1e6
        return cls(variables.get("NOTIFY_SOCKET", ""), interval)

    def ready(self) -> None:
        """Say that we watch from now on."""
        self._send("READY=1")

    def alive(self) -> None:
        """Say that our loop still turns."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Say in one line what we are doing."""
        self._send("STATUS=" + " ".join(text.split())[:MAX_STATUS])

    def stopping(self) -> None:
        """Say that we are about to end."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is not None:
            # A manager that is gone or does not read must not stop a watchdog.
            with contextlib.suppress(OSError):
                self._socket.sendto(message.encode(), self._address)
