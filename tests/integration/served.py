"""Starts LMDeploy's own API server, as ``programs/serving.py`` runs it, its clients, and a daemon.

What is started dies with the thread that started it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from running import Hangwatch, wait_for

PROGRAMS = Path(__file__).parent / "programs"

INTERVAL = 1.0
"""Seconds between beats; what takes upstream 10 s takes a tenth here."""

STALL_AFTER = 12.0
"""Seconds: a tenth of the default, too."""

WARM = 4
"""Beats after which a server is judged by the shorter limits."""

ALARMED = {"suspected_hang", "hung", "blocked", "dead"}

NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not exist."""


def flags(options: dict[str, object]) -> list[str]:
    """Return options of ``serving.py``; ``True`` stands for one without a value."""
    names = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return [name if value is True else f"{name}={value}" for name, value in names.items()]


class Served:
    """One API server, its engine process, and its clients.

    Attributes:
        folder: Where faults are asked for.
        log: Where its output goes; its name is that of a Ray worker's, unless told otherwise.
        pid: The API server.
        url: Where it listens.
    """

    def __init__(
        self,
        lmdeploy: Path,
        folder: Path,
        name: str,
        *,
        tee: bool = False,
        wait: bool = True,
        ray: bool = True,
        **options: object,
    ) -> None:
        """Start it.

        Args:
            lmdeploy: The unpacked wheel.
            folder: Where its log and its faults lie.
            name: Of these.
            tee: Whether its output goes to the log through a pipe and another process.
            wait: Whether to return only when it serves.
            ray: Whether its log is called as a Ray worker's is.
            options: Of ``serving.py``.
        """
        self.name, self.folder = name, folder / f"{name}.faults"
        self.folder.mkdir()
        self.log = folder / f"{name}.log"
        self.key = options.get("key")
        self._clients: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[bytes]] = []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(PROGRAMS / "serving.py"), str(lmdeploy)),
                    *("serve", "api_server", "internlm/served-7b", "--faults", str(self.folder)),
                    *flags({"interval": INTERVAL, **options}),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if tee else log,
                stderr=log,
            )
            if self.process.stdout is not None:
                self.tee = subprocess.Popen(["cat"], stdin=self.process.stdout, stdout=log)
                self.process.stdout.close()
                self._others.append(self.tee)
        self.pid = self.process.pid
        if ray:
            # Whose log it is, as Ray says it.
            plain, worker = self.log, f"worker-{name.encode().hex():0>56}-01000000-{self.pid}.out"
            self.log = plain.rename(folder / worker)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return when it serves."""
        wait_for(lambda: self.process.poll() is not None or self.url, f"{self.name} ready")
        assert self.url, self.log.read_text()

    @property
    def url(self) -> str:
        """Where it listens, ``""`` before it does; printed to standard error."""
        found = re.search(r"Uvicorn running on (http://[\d.:]+)", self.log.read_text())
        return found[1] if found else ""

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        (engine,) = (int(pid) for pid in children if comm(int(pid)) == "ZMQMPEngine")
        return engine

    @property
    def beats(self) -> int:
        return self.log.read_text().count("Avg thr")

    def begin(self, fault: str) -> None:
        """Ask for a fault, and return when it has begun."""
        (self.folder / fault).touch()
        wait_for((self.folder / f"{fault}.began").exists, f"{fault} at {self.name}")

    def clients(self, **options: object) -> subprocess.Popen[bytes]:
        """Start a process that asks, with ``serving.py``'s options."""
        if self.key:
            options["key"] = self.key
        arguments = [sys.executable, str(PROGRAMS / "serving.py"), "client", self.url]
        process = subprocess.Popen([*arguments, "--faults", str(self.folder), *flags(options)])
        self._clients.append(process)
        return process

    def suspend_clients(self) -> None:
        """Let the clients read nothing more."""
        for client in self._clients:
            client.send_signal(signal.SIGSTOP)

    def rest(self) -> None:
        """Let the clients ask for nothing more."""
        (self.folder / "rest").touch()

    def work(self) -> None:
        """Let the clients ask again."""
        (self.folder / "rest").unlink()

    def post(self, path: str, body: str = "{}") -> int:
        """Call an endpoint that manages the server; return the status code."""
        return self._call("POST", path, body, timeout=60.0)

    def get(self, path: str, timeout: float) -> int:
        """Ask, as anybody may; return the status code.

        Raises:
            TimeoutError: There was no answer within so many seconds.
        """
        return self._call("GET", path, None, timeout=timeout)

    def _call(self, method: str, path: str, body: str | None, timeout: float) -> int:
        url = urllib.parse.urlsplit(self.url)
        with contextlib.closing(
            http.client.HTTPConnection(str(url.hostname), url.port, timeout=timeout)
        ) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._clients, *self._others, self.process):
            process.kill()
            process.wait(60)


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Daemon(Hangwatch):
    """``hangwatch`` with everything a tenth as patient, and a proxy in its environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._instances: dict[int, str] = {}
        super().__init__(
            *(*arguments, "--json", "--log-format", "json"),
            *("--heartbeat-interval", str(INTERVAL), "--stall-after", str(STALL_AFTER)),
            *("--output", str(folder / "bundles"), "--state", str(folder / "state")),
            environment={
                "HANGWATCH_SAMPLE_GAP": "1",
                **dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), NOWHERE),
                **dict.fromkeys(("NO_PROXY", "no_proxy"), ""),
            },
        )

    def instance(self, server: Served) -> str:
        """Return what a server is called here, once its address is known."""

        def found() -> str | None:
            self.read(0.1)
            for line in self.errors.splitlines():
                if line.endswith(b"}") and b"server_found" in line:
                    said = json.loads(line)
                    if said["url"] == server.url:
                        return str(said["instance"])
            return None

        name = self._instances.get(server.pid)
        if name is None:
            name = wait_for(found, f"the address of {server.name}", 30.0)
            self._instances[server.pid] = name
        return name

    def path(self, server: Served) -> list[tuple[str, str]]:
        """Return verdicts and causes of a server, in order."""
        name = self.instance(server)
        return [
            (said["after"], said["cause"])
            for said in self.of("transition")
            if said["instance"] == name
        ]

    def becomes(self, server: Served, verdict: str, **facts: object) -> dict[str, Any]:
        """Return the transition of a server to a verdict, once there is one."""
        return self.wait("transition", instance=self.instance(server), after=verdict, **facts)

    def comes_to(self, server: Served, verdict: str, cause: str, seconds: float = 60.0) -> None:
        """Return when a server's present verdict and cause are these."""
        end = time.monotonic() + seconds
        while self.path(server)[-1:] != [(verdict, cause)]:
            told = f"{server.name} is not {verdict} ({cause}): {self.path(server)}"
            assert self.read(0.2), self.errors[-2000:].decode()
            assert time.monotonic() < end, told

    def listen(self, seconds: float) -> None:
        """Take in what it says for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.read(0.1), self.errors[-2000:].decode()

    def alarms(self, server: Served) -> list[tuple[str, str]]:
        return [step for step in self.path(server) if step[0] in ALARMED]


@contextlib.contextmanager
def watching(folder: Path, *servers: Served, log: str = "*.out") -> Iterator[Daemon]:
    """Watch servers, from when each is warm: seen to work for longer than it takes to compile."""
    with Daemon(folder, "watch", "--log", str(folder / log)) as daemon:
        for server in servers:
            daemon.becomes(server, "ok")
        seen = [server.beats for server in servers]
        for server, beats in zip(servers, seen, strict=True):
            wait_for(
                lambda s=server, b=beats: daemon.read(0.1) and s.beats >= b + WARM,
                f"{WARM} beats of {server.name}",
            )
            assert not daemon.alarms(server)
        yield daemon
