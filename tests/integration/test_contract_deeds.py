"""The safety contract: all that reaches a target, as the kernel, itself and its server see it."""

import base64
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from captures import CLOCK, program, request_for
from processes import PATIENCE, eventually, is_as_before, python, skip_unless_it_works

from hangwatch import registry
from hangwatch.capture.conductor import capture_and_bundle
from hangwatch.model.capture import FailureKind
from hangwatch.system import procfs

CAPTURER = """
import sys
sys.path[:0] = [{tests!r}]
from captures import CLOCK, request_for
from hangwatch.capture.conductor import capture_and_bundle
request = request_for({pid}, output={output!r}, profile={profile!r})
capture_and_bundle(request, clock=CLOCK)
"""


def capturer(pid, output, profile="lmdeploy"):
    """Return a command that captures a process, and bundles, in a process of its own."""
    tests = str(Path(__file__).parent)
    script = CAPTURER.format(tests=tests, pid=pid, output=str(output), profile=profile)
    return [sys.executable, "-c", script]


# ---------------------------------------------------------------------- seen by the kernel

CALLS = (
    "ptrace,kill,tkill,tgkill,pidfd_send_signal,rt_sigqueueinfo,rt_tgsigqueueinfo,"
    "process_vm_writev,process_madvise,pidfd_getfd,prlimit64,sched_setaffinity,setpriority,"
    "open,openat,openat2"
)


HOLDING = """
import socket
held = [*os.pipe(), *socket.socketpair(), *(os.open(path, os.O_RDWR) for path in {paths!r})]
"""


def calls(log):
    """Return name and text of each call of a trace; one that was interrupted is made whole."""
    begun, found = {}, []
    for line in log.read_text().splitlines():
        pid, text = line.split(maxsplit=1)
        if text.endswith(" <unfinished ...>"):
            begun[pid] = text.removesuffix(" <unfinished ...>")
            continue
        if match := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            text = begun.pop(pid) + match[1]
        if match := re.match(r"(\w+)\((.*)", text):
            found.append((match[1], match[2]))
    return found


@pytest.mark.slow
@pytest.mark.needs_ptrace
def test_a_capture_attaches_and_sends_and_writes_nothing_and_opens_what_is_harmless(tmp_path):
    trace = ["strace", "-f", "-y", "-qq", "--seccomp-bpf", "-e", f"trace={CALLS}"]
    skip_unless_it_works(*trace, "-o", os.devnull, "true")
    log, fifo = tmp_path / "trace", tmp_path / "fifo.log"
    os.mkfifo(fifo)
    with python(HOLDING.format(paths=[str(fifo), "/dev/ptmx"])) as it:
        command = [*trace, "-o", str(log), *capturer(it.pid, tmp_path / "output")]
        subprocess.run(command, check=True, timeout=PATIENCE)
    made = calls(log)

    assert {"openat", "prlimit64"} <= {name for name, _ in made}
    assert [] == [call for call in made if call[0] in ("ptrace", "process_vm_writev")]
    assert [] == [call for call in made if re.match(rf"-?{it.pid}\b", call[1])]
    opened = [text for name, text in made if name.startswith("open")]
    theirs = [text for text in opened if f'"/proc/{it.pid}/' in text]
    assert theirs
    assert [] == [text for text in theirs if re.search(r"O_(WRONLY|RDWR)", text)]
    # With O_PATH a name is looked up and nothing opened.
    special = rf"= \d+<({re.escape(str(fifo))}|pipe:|socket:|/dev/pt)"
    looked_at = [text for text in opened if re.search(special, text)]
    assert looked_at
    assert [] == [text for text in looked_at if "O_PATH" not in text]


LISTENING = """
import signal
heard = os.open({file!r}, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}}:
    signal.signal(number, lambda *_: None)
signal.set_wakeup_fd(heard)
"""


@pytest.mark.needs_ptrace
def test_a_target_gets_no_signal_from_a_capture_not_even_one_that_nobody_can_catch(tmp_path):
    skip_unless_it_works("strace", "-o", os.devnull, "true")
    heard, log = tmp_path / "heard", tmp_path / "trace"
    with python(LISTENING.format(file=str(heard))) as it:
        command = ["strace", "-f", "-qq", "-e", "trace=none", "-o", str(log), "-p", str(it.pid)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as tracer:
            eventually(lambda: tracer.pid == procfs.read_row(it.pid).tracer_pid)
            subprocess.run(capturer(it.pid, tmp_path / "output"), check=True)
            it.send_signal(signal.SIGSTOP)
            eventually(lambda: "stopped by SIGSTOP" in log.read_text())
            it.send_signal(signal.SIGCONT)
            it.send_signal(signal.SIGUSR1)
            eventually(lambda: signal.SIGUSR1 in heard.read_bytes())
            tracer.terminate()

    said = re.findall(r"--- (SIG\w+) ", log.read_text())
    assert "SIGSTOP" == said[0], "one that we sent is the first"
    assert {"SIGSTOP", "SIGCONT", "SIGUSR1"} == {*said}


# ---------------------------------------------------------------------- seen by its server

SERVER = """
import socket
def serve(door):
    while True:
        caller, _ = door.accept()
        threading.Thread(target=answer, args=(caller,), daemon=True).start()
def answer(caller):
    asked = b""
    while not asked.endswith(b"\\r\\n\\r\\n") and (block := caller.recv(65536)): asked += block
    caller.sendall({answer!r})
    caller.shutdown(socket.SHUT_WR)
    while block := caller.recv(65536): asked += block  # whatever comes behind
    with open({file!r}, "ab") as all: all.write(asked + b"\\0")
    caller.close()
door = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(door,), daemon=True).start()
"""
ELSEWHERE = (
    "HTTP/1.1 307 Temporary Redirect\r\nLocation: {url}/terminate\r\nContent-Length: 0\r\n\r\n"
)
HEADERS = {"host", "user-agent", "accept", "accept-encoding", "connection"}


@pytest.mark.parametrize("profile", ["lmdeploy", "vllm", "sglang"])
def test_every_byte_that_a_server_gets_is_a_get_of_a_path_of_its_profile(tmp_path, profile):
    asked = tmp_path / "asked"
    other = tmp_path / "other"
    with (
        python(SERVER.format(file=str(other), answer=b"HTTP/1.1 200 OK\r\n\r\n")) as elsewhere,
        contextlib.ExitStack() as stack,
    ):
        (door,) = procfs.listeners(elsewhere.pid)
        answer = ELSEWHERE.format(url=door.url).encode()
        it = stack.enter_context(python(SERVER.format(file=str(asked), answer=answer)))
        (own,) = procfs.listeners(it.pid)
        proxied = {f"{name}_proxy": door.url for name in ("http", "https", "all")}
        command = capturer(it.pid, tmp_path / "output", profile)
        subprocess.run(command, check=True, env={**os.environ, **proxied}, timeout=PATIENCE)

    requests = asked.read_bytes().split(b"\0")[:-1]
    paths = registry.profile(profile).endpoints
    lines = []
    for request in requests:
        head, end, body = request.partition(b"\r\n\r\n")
        line, *headers = head.decode().split("\r\n")
        lines.append(line)
        assert ("\r\n\r\n", b"") == (end.decode(), body)
        named = {name.lower(): value for name, value in (each.split(": ") for each in headers)}
        assert HEADERS == {*named}
        assert own.url == f"http://{named['host']}"
    assert {f"GET {paths[purpose]} HTTP/1.1" for purpose in ("health", "metrics")} == {*lines}
    assert not other.exists(), "a redirect was followed, or a proxy used"


# ---------------------------------------------------------------------- seen in the bundle

SECRETIVE = """
import asyncio
secret = open({file!r}).read()
class Holder:
    def __init__(self, given): self.attribute = given
    def method(self, given, *, named): a_local = [given, named]; in_the_middle(given)
def in_the_middle(given):
    kept = {{given: given.encode()}}
    for each in generator(given): pass
def generator(given):
    try: raise ValueError(given)
    except ValueError as error:
        held = error
        for each in (ready(), wait()): yield each
async def outer(given):
    local = given
    async with asyncio.timeout(3600): await inner(local, named=given)
async def inner(given, *, named):
    local = (given, named, [given] * 3)
    await asyncio.Event().wait()
async def main():
    task = asyncio.create_task(outer(secret))
    asyncio.get_running_loop().call_later(0.01, suspended.set)
    await task
suspended = threading.Event()
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
suspended.wait()
"""


def disguises(secret):
    """Return the forms in which a secret could be written, for a search."""
    text = secret.encode()
    found = [text, text[::-1], text.hex().encode(), secret.encode("utf-16-le")]
    for shift in range(3):  # base64 writes three bytes as four letters
        found.append(base64.b64encode(bytes(shift) + text)[4 if shift else 0 : -4])
    return found


@pytest.mark.needs_ptrace
def test_no_local_of_any_frame_is_in_the_bundle_in_any_disguise(tmp_path):
    secret = f"sw0rdfish-{random.randrange(10**18):018}"
    (tmp_path / "secret").write_text(secret)
    body = SECRETIVE.format(file=str(tmp_path / "secret"))
    with python(body, rest="Holder(secret).method(secret, named=secret)") as it:
        request = request_for(it.pid, output=tmp_path / "output")
        _, written = capture_and_bundle(request, clock=CLOCK, rejudge=lambda _: "hung")
    with tarfile.open(written.path) as bundle:
        files = {
            member.name: opened.read()
            for member in bundle
            if (opened := bundle.extractfile(member)) is not None
        }

    threads, tasks = (
        next(text for name, text in files.items() if name.endswith(f"/{file}.json"))
        for file in ("threads", "tasks")
    )
    assert all(name in threads for name in (b"method", b"in_the_middle", b"generator"))
    assert all(name in tasks for name in (b"outer", b"inner"))
    shown = [name for name, text in files.items() if any(d in text for d in disguises(secret))]
    assert [] == shown


# ---------------------------------------------------------------------- done by a tool in its place

IN_ITS_PLACE = {
    "hangs": ("exec sleep 3600", {FailureKind.TIMED_OUT, FailureKind.OVER_BUDGET}),
    "floods its output": ("exec yes", {FailureKind.TOO_LARGE}),
    "crashes": ("kill -SEGV $$", {FailureKind.TOOL_FAILED}),
    "writes nonsense": ("echo nonsense", {FailureKind.TOOL_FAILED}),
    "is missing": (None, {FailureKind.NOT_INSTALLED}),
}


@pytest.mark.slow
@pytest.mark.needs_ptrace
@pytest.mark.parametrize("misdeed", IN_ITS_PLACE)
def test_a_py_spy_that_misbehaves_is_on_record_and_our_reader_stands_in(
    tmp_path, monkeypatch, misdeed
):
    script, expected = IN_ITS_PLACE[misdeed]
    tool = program(tmp_path / "py-spy", script) if script else "/nonexistent/py-spy"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    for name in ("stacks", "native"):  # less than the ten seconds that they have
        quick = replace(registry.collectors()[name], timeout=5.0)
        monkeypatch.setitem(registry.collectors(), name, quick)
    with python("", rest="def here(): ready(); wait()\nhere()", arguments=ENGINE) as it:
        request = request_for(
            it.pid,
            output=tmp_path / "output",
            options={name: {"py_spy": tool} for name in ("stacks", "native", "samples")},
        )
        outcome, written = capture_and_bundle(request, clock=CLOCK, rejudge=lambda _: "hung")
        eventually(lambda: is_as_before(it.pid))

    failed = {evidence.step: evidence.failure for evidence in outcome.evidence}
    about_stacks = [failed[f"{step}/{it.pid}{n}"] for step, n in STEPS_OF_PY_SPY]
    assert expected >= {failure.kind for failure in about_stacks}
    with tarfile.open(written.path) as bundle:
        (name, *_) = [each for each in bundle.getnames() if each.endswith("/threads.json")]
        assert b'"here"' in bundle.extractfile(name).read()


ENGINE = ("mp_engine_proc",)
"""A word of its title, by which a process is taken for an engine."""
STEPS_OF_PY_SPY = (("stacks", "/1"), ("stacks", "/2"), ("native", ""))
