"""The child that looks at GPUs, against a driver that is played."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hangwatch.core.codec import from_plain, to_plain
from hangwatch.daemon.gpus import used
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import GpusSeen
from hangwatch.model.vitals import GpuVital
from hangwatch.system.spawn import Child

LIMIT = 60.0
PLAYER = Path(__file__).parent / "programs" / "nvml"

OURS, OTHER = InstanceKey(pid=os.getpid(), tag="DP0"), InstanceKey(pid=os.getppid())


def child(**play: Any) -> Child:
    """Start the child with a driver that is played like that."""
    environment = {"PYTHONPATH": str(PLAYER), "PLAYED_GPUS": json.dumps(play)}
    return Child("hangwatch.daemon.gpus", name="gpus", environment=environment)


def watch(it: Child, *keys: InstanceKey, interval: float = 0.2) -> None:
    it.channel.send(
        {
            "kind": "watch",
            "interval": interval,
            "instances": [{"instance": to_plain(key), "pids": [key.pid]} for key in keys],
        }
    )


def messages(it: Child, kind: str) -> list[dict[str, Any]]:
    """Return the next messages of this kind, all that come together."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = [message for message in it.channel.wait(1.0) if message["kind"] == kind]
        if found:
            return found
    raise AssertionError(f"no {kind!r} came")


def seen(it: Child) -> dict[InstanceKey, GpusSeen]:
    found = [from_plain(GpusSeen, i) for i in messages(it, "observations")[-1]["items"]]
    return {each.instance: each for each in found}


def test_an_instance_gets_the_gpus_on_which_its_processes_have_memory():
    users = [[OURS.pid], [OTHER.pid], [OURS.pid, OTHER.pid]]
    with child(minors=[0, 1, 2], users=users) as it:
        watch(it, OURS, OTHER)
        found = seen(it)

    assert [0, 2] == [gpu.index for gpu in found[OURS].gpus]
    assert [1, 2] == [gpu.index for gpu in found[OTHER].gpus]
    first = found[OURS].gpus[1]
    assert (
        GpuVital(
            index=2,
            at=first.at,
            utilization_pct=100.0,
            memory_activity_pct=2.0,
            power_w=131.502,
            power_limit_w=700.002,
        )
        == first
    )


def test_an_instance_whose_gpus_cannot_be_told_is_left_out():
    with child(minors=[0, 1], users=[[OURS.pid], []]) as it:
        watch(it, OURS, OTHER)

        assert {OURS} == set(seen(it))


def test_what_a_lost_gpu_does_not_tell_is_not_known():
    with child(minors=[0, 1], users=[[], [OURS.pid]], lost=[0]) as it:
        watch(it, OURS)

        assert [1] == [gpu.index for gpu in seen(it)[OURS].gpus]


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        ({"absent": True}, "the NVIDIA driver says: NVML Shared Library Not Found"),
        ({"minors": []}, "the NVIDIA driver shows no GPU"),
    ],
)
def test_a_machine_without_gpus_is_told_and_the_child_ends(play, reason):
    with child(**play) as it:
        (told,) = messages(it, "none")
        it.process.wait(LIMIT)

    assert reason == told["reason"]


def test_a_driver_that_hangs_silences_the_child_and_a_kill_ends_it(tmp_path):
    hangs = tmp_path / "hangs"
    with child(minors=[0], users=[[OURS.pid]], hangs=str(hangs)) as it:
        watch(it, OURS)
        seen(it)
        hangs.touch()
        deadline = time.monotonic() + LIMIT
        while it.channel.wait(2.5):  # it speaks every second while it can
            assert time.monotonic() < deadline
        it.kill()

        assert -9 == it.process.wait(LIMIT)


@pytest.mark.parametrize(
    ("opened", "users", "expected"),
    [
        ({2}, {0: [], 1: [], 2: []}, (2,)),
        ({1, 2}, {0: [7], 1: [], 2: []}, (1, 2)),
        ({0, 1, 2}, {0: [], 1: [7], 2: [9]}, (1,)),
        ({0, 1, 2}, {0: [], 1: [], 2: [9]}, ()),
        ({0}, {0: []}, (0,)),
        (set(), {0: [], 1: [7]}, (1,)),
        (set(), {0: []}, ()),
    ],
    ids=[
        "its own device",
        "devices before memory",
        "all devices open: by memory",
        "all devices open, nobody known",
        "the only one",
        "descriptors unreadable",
        "no GPU",
    ],
)
def test_device_files_decide_unless_all_are_open(opened, users, expected):
    by_index = {index: frozenset(pids) for index, pids in users.items()}

    assert expected == used(opened, by_index, (7, 8))
