"""A bare container out of the kernel alone: its own root, mounts, processes and Python.

    bare.py run SPECIFICATION     start a program as its first process; print that one's pid
    bare.py enter SPECIFICATION   run another program in it, as ``kubectl exec`` does

Both run without any capability, as containers of most pods do but for the harmless ones. The root
is an empty file system in memory with the machine's libraries and one Python in it, read-only.
Needs root, and the right to mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

NEW_MOUNTS, NEW_PIDS = 0x20000, 0x20000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
DROP_FROM_BOUNDING_SET, DIE_WITH_PARENT = 24, 1
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
SECRET = "an-environment-is-nobodys-business"
PYTHON = "/opt/python/bin/python3"

_libc = ctypes.CDLL(None, use_errno=True)


class Container:
    """One that runs.

    Attributes:
        init: The pid of its first process, out here.
        folder: Its ``/tmp``, out here.
    """

    def __init__(self, specification: dict[str, Any], init: int, folder: Path) -> None:
        self._specification = specification
        self.init = init
        self.folder = folder

    def exec(
        self, *arguments: str, stdin: Path, uid: int = 0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run Python with *arguments* in it, and *stdin* piped in."""
        more = {"init": self.init, "uid": uid, "argv": [PYTHON, *arguments]}
        with stdin.open("rb") as file:
            # A pipe, as there is between two machines, and not the file itself.
            return subprocess.run(
                _command("enter", {**self._specification, **more}),
                input=file.read(),
                capture_output=True,
                check=False,
                timeout=120,
            )


@contextlib.contextmanager
def container(
    prefix: Path, program: Sequence[str], *, app: Path, uid: int = 0
) -> Iterator[Container]:
    """Run a Python program in a container.

    Args:
        prefix: Where the Python lies that it shall have.
        program: Arguments of its first process, a Python; its output is ``/tmp/engine.log``.
        app: A folder that becomes ``/app``.
        uid: Whom it runs as.

    Skips the test where none can be made.
    """
    import pytest  # not in the container's programs, which have no packages

    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "root")
        folder = Path(name, "tmp")
        for each in (root, folder):
            each.mkdir()
        folder.chmod(0o777)
        (folder / "engine.log").touch(0o666)
        specification = {
            "root": str(root),
            "binds": {"/opt/python": str(prefix), "/app": str(app)},
            "tmp": str(folder),
            "uid": uid,
            "argv": [PYTHON, *program],
        }
        for library in LIBRARIES:
            if Path(library).is_dir() and not Path(library).is_symlink():
                specification["binds"][library] = library
        process = subprocess.Popen(
            _command("run", specification), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        told = b""
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            told = process.stdout.readline()
            if not told:
                pytest.skip(f"no container here: {process.stderr.read().decode()[-300:]}")
            yield Container(specification, int(told), folder)
        finally:
            # All others die with its first process; a change of user lets that outlive its parent.
            with contextlib.suppress(ProcessLookupError):
                if told:
                    os.kill(int(told), signal.SIGKILL)
            process.kill()
            process.communicate()


def _command(verb: str, specification: dict[str, Any]) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, verb, json.dumps(specification)]


def wait_until_said(running: Container, text: str, seconds: float = 60) -> None:
    """Return as soon as the program has written *text* into its log."""
    log = running.folder / "engine.log"
    _wait(running, lambda: text in log.read_text(errors="replace"), seconds)


def wait_for_file(running: Container, name: str, *, age: float, seconds: float = 60) -> None:
    """Return as soon as a file of the container's ``/tmp`` is there, and *age* seconds old."""
    path = running.folder / name
    _wait(running, lambda: path.exists() and time.time() - path.stat().st_mtime > age, seconds)


def _wait(running: Container, condition: Callable[[], bool], seconds: float) -> None:
    log = running.folder / "engine.log"
    deadline = time.monotonic() + seconds
    while not condition():
        assert Path(f"/proc/{running.init}").exists(), log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)


# --- what runs in a process of its own ----------------------------------------------------------


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    kind_ = kind.encode() if kind else None
    _check(_libc.mount(source.encode(), target.encode(), kind_, flags, None), f"mount {target}")


def _build(specification: dict[str, Any]) -> None:
    root = specification["root"]
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs")
    Path(root).chmod(0o755)
    for inside, outside in (*specification["binds"].items(), ("/tmp", specification["tmp"])):
        Path(root + inside).mkdir(parents=True, exist_ok=True)
        _mount(outside, root + inside, None, BIND | RECURSIVE)
        if inside != "/tmp":
            _mount("none", root + inside, None, BIND | REMOUNT | READ_ONLY)
    for library in map(Path, LIBRARIES):
        if library.is_symlink():
            Path(f"{root}{library}").symlink_to(library.readlink())
    Path(root + "/proc").mkdir()
    _mount("proc", root + "/proc", "proc")


def _become(specification: dict[str, Any]) -> None:
    """Be the program, in the root, without a capability."""
    os.chroot(specification["root"])
    os.chdir("/")
    for number in range(64):
        _libc.prctl(DROP_FROM_BOUNDING_SET, number, 0, 0, 0)
    os.setgroups([])
    os.setresgid(*[specification["uid"]] * 3)
    os.setresuid(*[specification["uid"]] * 3)
    head, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(head, none), "capset")
    # A Python that is moved looks for its library where it was built; ours is not the machine's.
    environment = {"HOME": "/tmp", "LD_LIBRARY_PATH": "/opt/python/lib", "TOKEN": SECRET}
    os.execve(specification["argv"][0], specification["argv"], environment)


def _run(specification: dict[str, Any]) -> None:
    _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    _check(_libc.unshare(NEW_PIDS), "unshare")
    pid = os.fork()
    if pid == 0:
        _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        # Here, for the ``/proc`` that is mounted is that of whoever mounts it.
        _check(_libc.unshare(NEW_MOUNTS), "unshare")
        _build(specification)
        log = os.open(
            specification["root"] + "/tmp/engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
        )
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        _become(specification)
    print(pid, flush=True)
    os.waitpid(pid, 0)


def _enter(specification: dict[str, Any]) -> None:
    # Open all before entering: /proc is another one in there.
    opened = [os.open(f"/proc/{specification['init']}/ns/{name}", 0) for name in ("pid", "mnt")]
    for fd in opened:
        _check(_libc.setns(fd, 0), "setns")
        os.close(fd)
    pid = os.fork()
    if pid == 0:
        _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        _become(specification)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    {"run": _run, "enter": _enter}[sys.argv[1]](json.loads(sys.argv[2]))
