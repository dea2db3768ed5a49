import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.spawn import Child, run_tool


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.01)


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    """Install a module that a child can run, beside the real packages."""

    def make(body):
        site = next(p for p in sys.path if p.endswith("site-packages"))
        name = f"hangwatch_test_child_{os.getpid()}"
        path = Path(site, f"{name}.py")
        path.write_text(
            "import os, signal, sys, time\n"
            "from hangwatch.system.spawn import serve\n"
            f"def body(channel):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
            "serve(body)\n"
        )
        made.append(path)
        return name

    made = []
    yield make
    for path in made:
        path.unlink()


def messages(child):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = child.channel.wait(1.0)
        if found:
            return found
    raise AssertionError("no message")


def test_a_child_answers_on_its_channel(child_module):
    name = child_module("""
        while True:
            for message in channel.wait(None):
                channel.send({"echo": message["n"]})
    """)
    with Child(name, name="echo") as child:
        child.channel.send({"n": 5})

        assert ({"echo": 5},) == messages(child)


def test_a_child_ends_when_its_channel_closes(child_module):
    name = child_module("""
        channel.send({"kind": "ready"})
        while True:
            channel.wait(None)
    """)
    child = Child(name, name="echo")
    messages(child)

    assert child.close(timeout=30)
    assert 0 == child.process.returncode


def test_no_signal_goes_to_the_number_of_a_child_once_it_was_reaped(child_module, monkeypatch):
    child = Child(child_module("return"), name="brief")
    wait_for(lambda: not child.alive)
    sent = []
    monkeypatch.setattr(os, "killpg", lambda *to: sent.append(to))
    child.kill()

    assert child.close()
    assert [] == sent


def test_a_group_is_killed_while_its_number_is_still_its_own(child_module, monkeypatch):
    child = Child(child_module("channel.wait(None)"), name="leader")
    kill, there = os.killpg, []

    def watched(group, number):
        there.append(Path(f"/proc/{group}").exists())
        kill(group, number)

    monkeypatch.setattr(os, "killpg", watched)

    assert child.close(timeout=30)
    assert [True] == there


def test_a_crash_of_a_child_is_told_with_its_traceback(child_module):
    name = child_module("raise ValueError('out of cheese')")
    with Child(name, name="crash") as child:
        (message,) = messages(child)

        assert "crash" == message["kind"]
        assert "ValueError: out of cheese" in message["traceback"]


def test_an_ignored_sigchld_is_not_handed_down(child_module):
    # The kernel would reap what a child starts, and its numbers would be anybody's.
    name = child_module("""
        channel.send({"ignored": signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN})
    """)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = Child(name, name="heir")
    finally:
        signal.signal(signal.SIGCHLD, before)
    with child:
        assert ({"ignored": False},) == messages(child)


def test_an_ignored_sigchld_is_undone_before_anything_is_started():
    # A shell that ignores it hands that down to the command line.
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    run = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    tell = (
        "import signal, types, sys; from hangwatch import cli;"
        "told = lambda: print(signal.getsignal(signal.SIGCHLD).name);"
        "sys.modules['hangwatch.cli.main'] = types.SimpleNamespace(command=told);"
        "cli.main()"
    )
    said = subprocess.run(
        [sys.executable, "-c", ignore + run, "-c", tell], capture_output=True, check=True
    ).stdout

    assert b"SIG_DFL\n" == said


def test_a_child_finds_what_its_parent_finds(tmp_path, monkeypatch):
    (tmp_path / "only_by_path.py").write_text(
        "from hangwatch.system.spawn import serve\n"
        "serve(lambda channel: channel.send({'found': True}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Child("only_by_path", name="child") as child:
        assert ({"found": True},) == messages(child)


def test_killing_a_child_kills_what_it_started(child_module):
    name = child_module("""
        import subprocess
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        channel.send({"pid": grandchild.pid})
        time.sleep(600)
    """)
    child = Child(name, name="parent")
    (message,) = messages(child)
    child.kill()

    wait_for(lambda: not runs(message["pid"]))
    assert child.close()


def test_a_child_dies_with_its_parent_even_by_sigkill(child_module):
    name = child_module("""
        channel.send({"kind": "ready"})
        time.sleep(600)
    """)
    code = f"""
        import time
        from hangwatch.system.spawn import Child
        child = Child({name!r}, name="orphan")
        while not child.channel.wait(1.0):
            pass
        print(child.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        orphan = int(parent.stdout.readline())
        assert runs(orphan)
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)

        wait_for(lambda: not runs(orphan))


def test_the_channel_of_a_killed_child_reports_its_end(child_module):
    name = child_module("""
        channel.send({"kind": "ready"})
        time.sleep(600)
    """)
    with Child(name, name="victim") as child:
        messages(child)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChannelClosedError):
            for _ in range(30):
                child.channel.wait(1.0)


def test_a_tool_that_hangs_is_ended_and_what_it_wrote_is_kept():
    result = run_tool(["/bin/sh", "-c", "echo before; sleep 600"], timeout=5.0, limit=1 << 20)

    assert result.ended_by_us
    assert b"before\n" == result.output


def test_a_tool_that_floods_is_ended():
    result = run_tool(["/bin/sh", "-c", "yes"], timeout=60.0, limit=1 << 20)

    assert result.ended_by_us
    assert 1 << 20 < len(result.output) < 1 << 22


def test_a_tool_that_leaves_a_holder_of_its_pipes_is_ended_at_its_deadline():
    result = run_tool(["/bin/sh", "-c", "sleep 600 & echo done"], timeout=5.0, limit=1 << 20)

    assert result.ended_by_us
    assert b"done\n" == result.output


def test_a_tool_that_ends_tells_its_code_and_both_streams():
    result = run_tool(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], timeout=30, limit=1000)

    assert (3, b"out\n", b"err\n", False) == (
        result.code,
        result.output,
        result.errors,
        result.ended_by_us,
    )
