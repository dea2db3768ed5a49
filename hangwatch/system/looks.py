"""The files of the baseline ring, in the state directory.

```
baseline/<pid>-<start_ticks>.<milliseconds>.<ok|idle>.json.gz    one look at one process
baseline/boot                                                    the boot that they belong to
known/<pid>-<start_ticks>.known                                  what a reader knows of a process
```

Everything of an earlier boot is dropped when the ring is opened, and processes that are gone when
it is pruned, which is after the next look: until then a capture still finds them. Nobody but us can
read any of it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hangwatch.core import baseline
from hangwatch.core.baseline import NODE, Look
from hangwatch.system import procfs

MAX_LOOK: Final = 1 << 20
"""Bytes of one look, packed; 48 threads and 300 tasks take 5 kB."""

MAX_UNPACKED: Final = 16 << 20

MAX_RING: Final = 64 << 20
"""Bytes of all looks; the oldest go first."""


class Ring:
    """The looks that are kept.

    Attributes:
        folder: Where they are.
        known: Where is kept what readers know.
    """

    def __init__(self, state: Path) -> None:
        """Take the ring of a state directory; nothing is made yet."""
        self.folder = state / baseline.FOLDER
        self.known = state / baseline.KNOWN

    def open(self, boot_id: str) -> None:
        """Make the folders; what another boot left in them goes, for its numbers mean nothing.

        Raises:
            OSError: They cannot be made.
        """
        mark = self.folder / "boot"
        with contextlib.suppress(OSError):
            if mark.read_text(encoding="ascii") == boot_id:
                return
        for folder in (self.folder, self.known):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(0o600)
        mark.write_text(boot_id, encoding="ascii")

    @property
    def looks(self) -> tuple[Look, ...]:
        """The looks that there are, newest first."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return ()
        found = (baseline.look_of(name) for name in names)
        return tuple(sorted((look for look in found if look), key=lambda look: -look.at))

    def read(self, look: Look) -> dict[str, Any]:
        """Return what was seen, ``{}`` if it cannot be read."""
        try:
            with gzip.open(self.folder / look.file) as file:
                found = json.loads(file.read(MAX_UNPACKED))
        except (OSError, ValueError, EOFError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, look: Look, document: Mapping[str, Any]) -> bool:
        """Keep what was seen, unless it is too large; say whether it is kept.

        Raises:
            OSError: The disk is full or gone.
        """
        data = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 6, mtime=0)
        if len(data) > MAX_LOOK:
            return False
        fresh = self.folder / f".{look.file}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        fresh.replace(self.folder / look.file)
        return True

    def prune(self) -> int:
        """Drop what is no longer wanted; return how many files."""
        looks = self.looks
        living = {NODE, *(p for p in {look.process for look in looks} if procfs.is_same(p))}
        going = {*baseline.surplus(looks), *(look for look in looks if look.process not in living)}
        left = MAX_RING
        for look in looks:
            left -= _size(self.folder / look.file) if look not in going else 0
            if left < 0:
                going.add(look)
        wanted = {baseline.known_name(process) for process in living}
        gone = [self.folder / look.file for look in going]
        with contextlib.suppress(OSError):
            gone += [path for path in self.known.iterdir() if path.name not in wanted]
        for path in gone:
            with contextlib.suppress(OSError):
                path.unlink()
        return len(gone)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
