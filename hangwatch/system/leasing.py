"""Announcing a pause to the daemon of this machine, from a training script or a shell.

```
with hangwatch.lease(minutes=20, reason="weight sync"):
    push_weights()
```

The daemon listens at a socket in its state directory; one line of JSON goes there, one comes back.
Of a script this needs the standard library alone, and a second at most. A script that announces is
never stopped by a watchdog that is not there: unless it insists, a failure is a line in its log.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

from hangwatch.errors import LeaseError

SOCKET: Final = "lease.sock"
"""Name in the state directory."""

PATIENCE: Final = 1.0
"""Seconds that an announcement may take."""

MAX_ANSWER: Final = 4096
_MAX_ADDRESS: Final = 107
"""Bytes of a path that fit into the address of a socket: ``sun_path``, see ``unix(7)``."""

_told: set[str] = set()
"""Failures that were logged: a script that syncs every minute need not say so every time."""


def default_state(environment: Mapping[str, str] | None = None) -> Path:
    """Return where the daemon's state lies unless told otherwise."""
    variables = os.environ if environment is None else environment
    # systemd gives a colon-separated list when the unit names several.
    given = variables.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    home = variables.get("XDG_STATE_HOME", "")
    return (Path(home) if home else Path.home() / ".local" / "state") / "hangwatch"


def state_of_daemon(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the state directory in which a client looks: the given one, else the usual one.

    Raises:
        LeaseError: There is none.
    """
    try:
        return Path(given or os.environ.get("HANGWATCH_STATE") or default_state())
    except RuntimeError:  # no home, as in a container under a number that has no name
        raise LeaseError(
            "there is no home directory to look for hangwatch in: name the state directory of the "
            "one that runs (--state, HANGWATCH_STATE)"
        ) from None


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """Give an address under which the socket *path* can be bound or reached, however long it is.

    Raises:
        OSError: There is no such folder.
    """
    if len(os.fsencode(path)) <= _MAX_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def take(
    seconds: float, *, ident: str, reason: str = "", state: Path, timeout: float = PATIENCE
) -> float:
    """Announce a pause; return for how many seconds it was granted.

    Args:
        seconds: For how long.
        ident: Tells it from others; the same one again renews it.
        reason: For people.
        state: The daemon's state directory.
        timeout: Seconds that this may take.

    Raises:
        LeaseError: It is of no duration, or nobody granted it.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise LeaseError(f"a lease lasts some seconds, not {seconds:g}")
    wish = {"take": ident, "seconds": seconds, "reason": reason}
    return float(_ask(state, wish, timeout).get("seconds", 0.0))


def give_back(ident: str, *, state: Path, timeout: float = PATIENCE) -> None:
    """End an announced pause before its time.

    Raises:
        LeaseError: There is no such pause, or nobody who knows.
    """
    _ask(state, {"return": ident}, timeout)


def new_id() -> str:
    """Return an id that no other announcement has."""
    return os.urandom(6).hex()


def _ask(state: Path, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
            _connect(wire, state / SOCKET, deadline)
            wire.sendall(json.dumps(question).encode() + b"\n")
            answer = json.loads(_line(wire, deadline))
    except TimeoutError:
        raise LeaseError(
            f"the hangwatch of {state} did not answer within {timeout:g} s: "
            "see its log, or announce through a file (--lease-file)"
        ) from None
    except (FileNotFoundError, ConnectionError, NotADirectoryError, ValueError):
        raise LeaseError(
            f"no hangwatch watches with the state directory {state}: start `hangwatch watch`, "
            "or name the state directory of the one that runs (--state, HANGWATCH_STATE)"
        ) from None
    except PermissionError:
        raise LeaseError(
            f"{state / SOCKET} belongs to another user: announce as that user, "
            "or through a file on a shared volume (--lease-file)"
        ) from None
    except OSError as error:
        raise LeaseError(f"cannot ask hangwatch at {state / SOCKET}: {error}") from error
    if not isinstance(answer, dict) or answer.get("error") is not None:
        text = answer["error"] if isinstance(answer, dict) else "an answer that makes no sense"
        raise LeaseError(str(text))
    return answer


def _connect(wire: socket.socket, path: Path, deadline: float) -> None:
    with address(path) as where:
        while True:
            wire.settimeout(_left(deadline))
            try:
                wire.connect(where)
            except BlockingIOError:  # many ask at once, and the queue of the socket is full
                time.sleep(min(0.01, _left(deadline)))
            else:
                return


def _line(wire: socket.socket, deadline: float) -> bytes:
    line = b""
    while b"\n" not in line and len(line) < MAX_ANSWER:
        wire.settimeout(_left(deadline))
        block = wire.recv(MAX_ANSWER)
        if not block:
            raise ConnectionResetError
        line += block
    return line


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class Pause:
    """An announced pause; ends with the ``with`` block, with ``end()``, or when its time is over.

    One that was ended can be entered again, and is then announced anew.

    Attributes:
        id: Tells it from others: ``hangwatch lease --return ID`` ends it, too.
        seconds: For how long it was granted; 0 if it was not.
        until: When it ends by itself, or ``None`` if it was not granted.
        problem: Why it was not granted, or ``""``.
    """

    def __init__(
        self,
        seconds: float,
        *,
        minutes: float,
        reason: str,
        state: str | os.PathLike[str] | None,
        required: bool,
        timeout: float,
    ) -> None:
        """Announce it; see ``lease``."""
        self._seconds = seconds
        self._minutes = minutes
        self._reason = reason
        self._given = state
        self._required = required
        self._timeout = timeout
        self._depth = 0
        self._take()

    def _take(self) -> None:
        self.id = new_id()
        self.seconds = 0.0
        self.until: datetime | None = None
        self.problem = ""
        self._process = os.getpid()
        self._open = True
        self._state: Path | None = None
        try:
            self._state = state_of_daemon(self._given)
            self.seconds = take(
                float(self._seconds) + 60.0 * float(self._minutes),
                ident=self.id,
                reason=str(self._reason),
                state=self._state,
                timeout=self._timeout,
            )
        except (LeaseError, TypeError, ValueError) as error:
            if self._required:
                raise
            self.problem = str(error)
            _warn(f"this pause is not announced: {error}")
        else:
            self.until = datetime.now().astimezone() + timedelta(seconds=self.seconds)

    def end(self) -> None:
        """Say that the pause is over; once more does no harm, and nothing here raises."""
        # One that seemed to fail may have been granted by a daemon that answered too late. A fork
        # of us does not own it.
        if self._open and self._process == os.getpid() and self._state is not None:
            self._open = False
            try:
                give_back(self.id, state=self._state, timeout=self._timeout)
            except LeaseError as error:
                if not self.problem:
                    _warn(f"the end of this pause is not announced: {error}")

    def __enter__(self) -> Self:
        if not self._open:
            self._take()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.end()


def lease(
    seconds: float = 0.0,
    *,
    minutes: float = 0.0,
    reason: str = "",
    state: str | os.PathLike[str] | None = None,
    required: bool = False,
    timeout: float = PATIENCE,
) -> Pause:
    """Announce that the engines will stand still for a while, so that no alarm is raised.

    ```
    with hangwatch.lease(minutes=20, reason="weight sync"):
        push_weights()

    pause = hangwatch.lease(1200)  # or without a block
    ...
    pause.end()
    ```

    Every call is an announcement of its own: many ranks may announce at once, and the engines are
    expected to move again when the last of them is over. The daemon cuts what is longer than its
    ``lease_limit``.

    Args:
        seconds: For how long, together with *minutes*.
        minutes: For how long, together with *seconds*.
        reason: For people; a short line.
        state: The daemon's state directory; by default ``HANGWATCH_STATE``, else the usual one.
        required: Raise where the announcement fails, instead of logging a warning.
        timeout: Seconds that the announcement, and its end, may take.

    Raises:
        LeaseError: With *required*, it was not granted.
    """
    return Pause(
        seconds,
        minutes=minutes,
        reason=reason,
        state=state,
        required=required,
        timeout=timeout,
    )


def _warn(text: str) -> None:
    if text not in _told:
        _told.add(text)
        import logging

        logging.getLogger("hangwatch").warning("%s", text)
