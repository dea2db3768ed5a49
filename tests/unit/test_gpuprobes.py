"""The daemon's side of the child that looks at GPUs, in virtual time."""

from __future__ import annotations

from fake_children import Nursery

from hangwatch.core.codec import to_plain
from hangwatch.daemon.gpuprobes import GpuProbes
from hangwatch.daemon.roster import Roster
from hangwatch.model.identity import InstanceKey
from hangwatch.model.observation import GpusSeen
from hangwatch.model.time import Instant
from hangwatch.testing import FakeClock


def probes(nursery: Nursery, clock: FakeClock, *, pid: int = 7) -> tuple[GpuProbes, InstanceKey]:
    roster = Roster()
    key = roster.attach(pid)
    roster.find(key, url="", kin=(pid, pid + 1))
    return GpuProbes(clock=clock, roster=roster, start=nursery), key


def test_a_look_is_handed_on_and_asked_for_more_often_while_a_beat_is_missing():
    nursery, clock = Nursery(), FakeClock()
    gpus, key = probes(nursery, clock)
    gpus.hear()
    look = GpusSeen(instance=key, gpus=(), at=Instant(1.0))
    nursery.last.said = [{"kind": "observations", "items": [to_plain(look)]}]

    assert (look,) == gpus.hear()
    gpus.look_closer({key})
    gpus.look_closer({key})
    gpus.look_closer(set())
    assert [10.0, 5.0, 10.0] == [told["interval"] for told in nursery.last.told]
    assert [[7, 8]] == [entry["pids"] for entry in nursery.last.told[0]["instances"]]


def test_a_machine_without_gpus_is_not_looked_at_again():
    nursery, clock = Nursery(), FakeClock()
    gpus, _ = probes(nursery, clock)
    gpus.hear()
    nursery.last.said = [{"kind": "none", "reason": "there is no driver"}]
    for _ in range(100):
        assert () == gpus.hear()
        clock.sleep(10.0)

    assert 1 == len(nursery.children)
    assert () == tuple(gpus.wires())


def test_a_child_that_ended_for_want_of_gpus_while_it_was_told_something_is_not_lost():
    nursery, clock = Nursery(), FakeClock()
    gpus, key = probes(nursery, clock)
    gpus.hear()
    nursery.last.said = [{"kind": "none", "reason": "there is no driver"}]
    nursery.last.alive = False
    gpus.look_closer({key})
    gpus.hear()
    gpus.hear()

    assert (1, 0) == (len(nursery.children), gpus.losses)


def test_a_child_that_the_driver_holds_blinds_nobody_and_is_not_replaced():
    nursery, clock = Nursery(), FakeClock()
    gpus, _ = probes(nursery, clock)
    gpus.hear()
    nursery.last.immortal = True
    for _ in range(300):
        assert () == gpus.hear()
        clock.sleep(1.0)

    assert 1 == len(nursery.children)
