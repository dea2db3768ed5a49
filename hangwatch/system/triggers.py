"""Named pipes that a process made so that somebody may ask it for a dump, and how to ask.

The one door through which anything is written to a watched process, and only for collectors that
run by request. Whoever knows nothing of a pipe must not open it: opening its writing end lets its
reader go on, closing it ends it. So a pipe counts only if the process's own environment announces
its name, it belongs to the process's user, it is a named pipe indeed, and somebody reads it; it is
named by a descriptor before it is looked at, so that nothing can take its place in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final, Self

from hangwatch.model.capture import CollectorError, FailureKind
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs

_DELETED: Final = " (deleted)"


@contextlib.contextmanager
def opened_by(process: ProcessId, name: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """Give a descriptor of the named pipe that a process has open under a name like *name*.

    It need not have its name any more: of servers that share a folder, each removes the pipe of the
    one before.

    Raises:
        CollectorError: There is none.
    """
    found = procfs.links(process.pid)
    for fd, target in sorted(found.items()):
        match = name.fullmatch(PurePosixPath(target.removesuffix(_DELETED)).name)
        if match is None or not target.startswith("/"):
            continue
        try:
            ours = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # it was closed
        try:
            if stat.S_ISFIFO(os.fstat(ours).st_mode):
                yield ours, match
                return
        finally:
            os.close(ours)
    if not found:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            f"the descriptors of process {process.pid} may not be read",
            procfs.PERMISSION_HINT,
        )
    raise CollectorError(
        FailureKind.NOT_AVAILABLE, f"process {process.pid} has no such named pipe open"
    )


def pull(process: ProcessId, pipe: int) -> None:
    """Write a byte into the named pipe that the descriptor *pipe* names.

    Raises:
        CollectorError: It is none, not the process's own, or nobody reads it.
    """
    about = os.fstat(pipe)
    if not stat.S_ISFIFO(about.st_mode):
        raise CollectorError(FailureKind.NOT_AVAILABLE, "what has its name is no named pipe")
    try:
        if about.st_uid not in procfs.users_of(process.pid) or not procfs.is_same(process):
            raise CollectorError(
                FailureKind.NOT_AVAILABLE, "the named pipe does not belong to the process's user"
            )
        # By way of the descriptor: the same pipe that was looked at. Without waiting for a reader.
        writer = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CollectorError(FailureKind.TARGET_GONE, "the process ended meanwhile") from error
    except PermissionError as error:
        raise CollectorError(
            FailureKind.NOT_PERMITTED,
            "its named pipe may not be written to",
            "run hangwatch as the user of the engine",
        ) from error
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, "nobody reads the named pipe any more"
        ) from error
    try:
        os.write(writer, b"1")
    except BlockingIOError:
        pass  # full of such requests that nobody took up
    except BrokenPipeError as error:
        raise CollectorError(
            FailureKind.NOT_AVAILABLE, "nobody reads the named pipe any more"
        ) from error
    finally:
        os.close(writer)


def in_root_of(pid: int, path: str) -> PurePosixPath:
    """Return *path* as it stands in the root of a process, whose folder it may be relative to."""
    if path.startswith("/"):
        return PurePosixPath(path)
    return PurePosixPath(procfs.read_link(pid, "cwd"), path)


class Dump:
    """A file that a process will write, looked at from outside; outlives the process.

    Use it as a context. Links are not followed: the process may be told to write where it likes,
    we are not.
    """

    def __init__(self, pid: int, path: PurePosixPath) -> None:
        """Open the folder of *path* in the root of a process.

        Raises:
            OSError: It is not there; see ``procfs.inside``.
        """
        self.path = path
        with procfs.inside(pid, path.parent) as folder:
            self._folder = os.open(f"/proc/self/fd/{folder}", os.O_PATH | os.O_DIRECTORY)

    def state(self) -> tuple[int, int, int] | None:
        """Return inode, time of change and size; ``None`` as long as there is no regular file."""
        try:
            about = os.stat(self.path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(about.st_mode):
            return None
        return about.st_ino, about.st_mtime_ns, about.st_size

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Give a descriptor to read it.

        Raises:
            OSError: It is not there, or no regular file.
        """
        named = os.open(self.path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._folder)
        try:
            if not stat.S_ISREG(os.fstat(named).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path))
            file = os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(named)
        try:
            yield file
        finally:
            os.close(file)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
