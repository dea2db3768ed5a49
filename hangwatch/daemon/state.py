"""The state directory: what a daemon remembers beyond its own death.

```
lock             flock of the running daemon, with its pid for people
format           version of this layout
offsets.json     how far each log was read
memory.json      the last judgement, with the boot it belongs to
pseudonym.key    key of the redaction's pseudonyms; never leaves this directory
bundles.jsonl    index of the bundles written, oldest first
shadow.jsonl     captures that were withheld by observe_only, oldest first
blackbox.ring    how often each process ran in the last ten minutes: see ``system.ring``
baseline/        how processes looked while they were well: see ``system.looks``
known/           what readers know of processes: see ``remote.known``
lease.sock       where pauses are announced, while a daemon runs
```

Small files on a local disk, replaced as a whole by rename; one that was cut short counts as
absent. Losing any of them costs comfort (a log read again, a second bundle), never evidence. Links
are not followed: others may be able to write here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from hangwatch.errors import ConfigError, StateLockedError

FORMAT: Final = "hangwatch-state 1"

KEY_SIZE: Final = 32
"""Bytes of the pseudonym key."""

_CREATE: Final = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StateDirectory:
    """A state directory that nobody else uses while we do.

    Attributes:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        """Create it if need be, and lock it.

        Raises:
            StateLockedError: Another daemon uses it.
            ConfigError: It cannot be used, or a newer hangwatch wrote it.
        """
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | _CREATE, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use the state directory {path}: {error.strerror}; "
                "choose one that can be written with --state"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._lock, 32).decode("ascii", "replace").strip()
            os.close(self._lock)
            who = f" (pid {holder})" if holder.isdigit() else ""
            raise StateLockedError(
                f"another hangwatch{who} uses the state directory {path}; "
                "stop it, or choose another with --state"
            ) from error
        try:
            self._check_format()
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except ConfigError:
            os.close(self._lock)
            raise
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"cannot write to the state directory {path}: {error.strerror}; "
                "make room there, or choose another with --state"
            ) from error

    def _check_format(self) -> None:
        marker = self.path / "format"
        try:
            found = marker.read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            found = ""
        if not found:
            self._replace("format", (FORMAT + "\n").encode())
        elif found != FORMAT:
            raise ConfigError(
                f"the state directory {self.path} is of another version ({found[:60]}); "
                "upgrade hangwatch, or choose another with --state"
            )

    def load(self, name: str) -> dict[str, Any]:
        """Return what was saved under *name* (``offsets``, ``memory``), ``{}`` if nothing was."""
        try:
            found = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def save(self, name: str, data: Mapping[str, Any]) -> None:
        """Remember *data* under *name*.

        Raises:
            OSError: The disk is full or gone; what was saved before is still there.
        """
        self._replace(f"{name}.json", json.dumps(data, separators=(",", ":")).encode())

    def add_bundle(self, record: Mapping[str, Any]) -> None:
        """Append *record* to the index of bundles.

        Raises:
            OSError: The disk is full or gone.
        """
        self._append("bundles.jsonl", record)

    def add_withheld(self, record: Mapping[str, Any]) -> Path:
        """Append *record* to the captures that were withheld; return where they are.

        Raises:
            OSError: The disk is full or gone.
        """
        return self._append("shadow.jsonl", record)

    def _append(self, name: str, record: Mapping[str, Any]) -> Path:
        path = self.path / name
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | _CREATE, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return path

    def bundles(self) -> tuple[dict[str, Any], ...]:
        """Return the index of bundles, oldest first; a torn line is left out."""
        try:
            text = (self.path / "bundles.jsonl").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
        records = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return tuple(records)

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self.path / f".{name}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_TRUNC | _CREATE, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        temporary.replace(self.path / name)

    def close(self) -> None:
        """Let another daemon use it."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ensure_key(folder: Path, key: bytes | None = None) -> bytes:
    """Return the pseudonym key of a state directory; made, or taken from *key*, at first use.

    Needs no lock: whoever is first wins.

    Raises:
        OSError: It can be neither read nor made.
    """
    path = folder / "pseudonym.key"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / f".pseudonym.key.{os.getpid()}"
    with contextlib.suppress(FileExistsError):
        if not path.exists():
            fd = os.open(temporary, os.O_WRONLY | os.O_TRUNC | _CREATE, 0o600)
            try:
                os.write(fd, key or secrets.token_bytes(KEY_SIZE))
                os.fsync(fd)
                os.link(temporary, path)
            finally:
                os.close(fd)
                temporary.unlink()
    return path.read_bytes()
