"""The child that makes one capture: what it says, and what is left when it is killed."""

import json
import os
import random
import signal
import tarfile
import time
from pathlib import Path

import pytest
from captures import request_for
from processes import PATIENCE, eventually, python

from hangwatch.capture.rooms import sweep
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.core.layout import is_bundle_name
from hangwatch.model.observation import StacksSeen
from hangwatch.system import procfs
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.spawn import Child

CONDUCTOR = "hangwatch.capture.conductor"


def conversation(child, request, *, answer="hung", stop_at=""):
    """Ask for a capture; return every message until the last one."""
    child.channel.send({"kind": "capture", "request": to_plain(request)})
    messages = []
    deadline = time.monotonic() + PATIENCE
    while not messages or messages[-1]["kind"] not in ("bundle", "failed", "crash"):
        assert time.monotonic() < deadline, messages
        for message in child.channel.wait(1.0):
            messages.append(message)
            if message["kind"] == "stage_a":
                child.channel.send({"kind": "verdict", "word": answer})
            if message["kind"] == "progress" and message["part"] == stop_at:
                child.channel.send({"kind": "stop"})
    return messages


def workers_of(pid):
    return [p for p in procfs.children(pid) if "capture.worker" in procfs.read_title(p)]


def test_a_capture_ends_in_a_bundle_and_nothing_else_is_left(tmp_path):
    with python("") as it, Child(CONDUCTOR, name="conductor") as conductor:
        messages = conversation(conductor, request_for(it.pid, output=tmp_path))

    last = messages[-1]
    assert "bundle" == last["kind"], last
    assert [Path(last["path"])] == list(tmp_path.iterdir())
    with tarfile.open(last["path"]) as bundle:
        (name,) = [name for name in bundle.getnames() if name.endswith("manifest.json")]
        steps = json.load(bundle.extractfile(name))["steps"]
    failed = [step["failure"]["kind"] for step in steps if step["failure"] is not None]
    assert (1, len(failed)) == (last["summary"]["processes"], last["summary"]["failed"])
    assert {"not_available", "gated"} >= {*failed}  # no GPU here, and no pause to sample in


def test_stage_a_is_told_before_the_rest_and_progress_and_life_all_the_while(tmp_path):
    with python("") as it, Child(CONDUCTOR, name="conductor") as conductor:
        messages = conversation(conductor, request_for(it.pid, output=tmp_path, gap=2.0))

    parts = [message["part"] for message in messages if message["kind"] == "progress"]
    assert ["looking", "first sample", "pause", "second sample"] == list(dict.fromkeys(parts))[:4]
    assert any(message["kind"] == "alive" for message in messages)
    (stage_a,) = [message for message in messages if message["kind"] == "stage_a"]
    (seen,) = from_plain(tuple[StacksSeen, ...], stage_a["stacks"])
    assert it.pid == seen.instance.pid


def test_a_capture_that_is_told_to_stop_still_ends_in_a_bundle(tmp_path):
    with python("") as it, Child(CONDUCTOR, name="conductor") as conductor:
        request = request_for(it.pid, output=tmp_path, gap=50.0)
        messages = conversation(conductor, request, stop_at="pause")

    assert "bundle" == messages[-1]["kind"]
    assert messages[-1]["summary"]["stopped"]


def test_an_output_that_cannot_be_written_is_told_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with python("") as it, Child(CONDUCTOR, name="conductor") as conductor:
        messages = conversation(conductor, request_for(it.pid, output=tmp_path / "file"))

    assert "failed" == messages[-1]["kind"]
    assert "--output" in messages[-1]["error"]


@pytest.mark.parametrize("seed", range(4))
def test_killing_a_conductor_at_any_moment_leaves_the_target_running_and_no_bundle(tmp_path, seed):
    with python("") as it:
        with Child(CONDUCTOR, name="conductor") as conductor:
            request = request_for(it.pid, output=tmp_path, gap=0.1)
            conductor.channel.send({"kind": "capture", "request": to_plain(request)})
            eventually(lambda: workers_of(conductor.pid))
            workers = workers_of(conductor.pid)
            # The moment is the point here, not a wait for something.
            time.sleep(random.Random(seed).uniform(0.0, 0.8))
            workers = [*workers, *workers_of(conductor.pid)]
            os.kill(conductor.pid, signal.SIGKILL)
            conductor.process.wait(PATIENCE)

        eventually(lambda: not any(map(procfs.start_ticks, workers)))
        assert procfs.read_row(it.pid).state in ("S", "R")
        assert procfs.read_row(it.pid).tracer_pid == 0
    sweep(tmp_path)
    for path in filter(lambda path: is_bundle_name(path.name), tmp_path.iterdir()):
        with tarfile.open(path) as bundle:
            assert bundle.getnames()
    assert [] == list(tmp_path.glob("*.partial"))


def test_a_conductor_ends_when_whoever_asked_is_gone(tmp_path):
    with python("") as it, Child(CONDUCTOR, name="conductor") as conductor:
        request = request_for(it.pid, output=tmp_path, gap=50.0)
        conductor.channel.send({"kind": "capture", "request": to_plain(request)})
        eventually(lambda: workers_of(conductor.pid))
        conductor.channel.close()

        conductor.process.wait(PATIENCE)
    with pytest.raises(ChannelClosedError):
        conductor.channel.receive()
    assert [] == list(tmp_path.glob("*.tar.gz"))
