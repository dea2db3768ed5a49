"""API keys of the watched servers: read from a file, held in memory, written nowhere.

The file has one key a line. A folder is a mounted Kubernetes Secret: each file in it holds keys;
names that begin with a dot are the machinery of the mount. An error never quotes what was read.

Nobody waits long for a volume that has stalled: a thread reads, and may be left behind.
"""

from __future__ import annotations

import json
import re
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from hangwatch.errors import ConfigError

MAX_SIZE: Final = 1 << 16
"""Bytes of a file with keys."""

PATIENCE: Final = 3.0
"""Seconds that a look at the file may take."""

MASK: Final = b"[redacted]"

_KEY: Final = re.compile(r"[\x21-\x7e]+")

T = TypeVar("T")


class StalledError(ConfigError):
    """The volume that the keys lie on does not answer; it may do so later."""


class KeyFile:
    """A file, or mounted Secret, with keys; read again only once it has changed."""

    def __init__(self, path: str | Path) -> None:
        """Name the file; nothing is read yet."""
        self._path = Path(path)
        self._seen: object = None
        self._keys: tuple[str, ...] = ()
        self._held: threading.Thread | None = None

    def read(self) -> tuple[str, ...]:
        """Return its keys, in order; takes ``PATIENCE`` seconds at most.

        Raises:
            StalledError: Its volume does not answer.
            ConfigError: It cannot be read, or there is no key in it, or something that is none.
        """
        return self._within_patience(self._read)

    def exposed(self) -> str:
        """Return what is wrong with its mode: ``""`` unless everybody here can read it.

        Raises:
            StalledError: Its volume does not answer.
        """
        return self._within_patience(self._exposed)

    def _within_patience(self, look: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(look())
            except ConfigError as error:
                answer.set_exception(error)

        # A thread that the kernel holds is not joined by another one.
        if self._held is None or not self._held.is_alive():
            thread = threading.Thread(target=run, name="hangwatch-keys", daemon=True)
            thread.start()
            try:
                return answer.result(PATIENCE)
            except TimeoutError:
                self._held = thread
        raise StalledError(
            f"cannot read the API keys in {self._path}: its volume does not answer; "
            "check --api-key-file"
        )

    def _read(self) -> tuple[str, ...]:
        try:
            files = self._files()
            state = [(file, _state(file)) for file in files]
            if state != self._seen:
                self._keys = tuple(dict.fromkeys(key for file in files for key in _keys(file)))
                self._seen = state
        except OSError as error:
            raise ConfigError(
                f"cannot read the API keys in {self._path}: {error.strerror}; check --api-key-file"
            ) from error
        if not self._keys:
            raise ConfigError(f"there is no API key in {self._path}: write one on a line")
        return self._keys

    def _exposed(self) -> str:
        try:
            files = self._files()
            open_to_all = [file for file in files if file.stat().st_mode & stat.S_IROTH]
        except OSError:
            return ""
        if not open_to_all:
            return ""
        return (
            f"everybody on this machine can read {open_to_all[0]}: chmod 600 "
            "(a Kubernetes Secret: defaultMode: 0400)"
        )

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        return [
            file
            for file in sorted(self._path.iterdir())
            if not file.name.startswith(".") and file.is_file()
        ]


def masked(data: bytes, keys: Iterable[str]) -> bytes:
    """Return what a server said without the keys that it echoes, as they are or within JSON."""
    forms = {form.encode("ascii") for key in keys for form in (key, json.dumps(key)[1:-1])}
    if not any(form in data for form in forms):
        return data
    longest_first = sorted(map(re.escape, forms), key=len, reverse=True)
    return re.sub(b"|".join(longest_first), MASK, data)


def _state(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{file} is no regular file: it could not be read again")
    return found.st_ino, found.st_mtime_ns, found.st_size


def _keys(file: Path) -> list[str]:
    with file.open("rb") as opened:
        data = opened.read(MAX_SIZE + 1)
    if len(data) > MAX_SIZE:
        raise ConfigError(f"{file} is too large for a file of API keys: one key a line")
    found = []
    for number, line in enumerate(data.decode("latin-1").splitlines(), 1):
        key = line.strip()
        if key and not _KEY.fullmatch(key):
            raise ConfigError(
                f"{file}:{number}: an API key is one word of visible ASCII characters, one a line"
            )
        if key:
            found.append(key)
    return found
