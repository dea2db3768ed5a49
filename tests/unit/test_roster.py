"""Which process is behind an instance, and how sure that is."""

from hangwatch.daemon.roster import Roster
from hangwatch.model.discovery import LogOwner
from hangwatch.model.heartbeat import Heartbeat
from hangwatch.model.identity import InstanceKey
from hangwatch.model.time import Instant

LOG = "/logs/worker-1-01-4242.out"
RAY = InstanceKey(pid=4242, tag="DP0")
PLAIN = InstanceKey(tag="DP0")


def beat(instance, source=LOG, *, relayed=False):
    return Heartbeat(instance=instance, at=Instant(1.0), source=source, relayed=relayed)


def test_a_beat_that_arrives_now_proves_the_pid_in_its_logs_name():
    roster = Roster()
    roster.see(beat(RAY), fresh=True)

    assert 4242 == roster.pid_of(RAY)
    assert set() == roster.asked


def test_an_old_beat_does_not_for_pids_are_reused():
    roster = Roster()
    roster.see(beat(RAY), fresh=False)

    assert None is roster.pid_of(RAY)
    assert {LOG} == roster.asked


def test_an_old_beat_counts_where_the_process_still_has_the_log_open():
    roster = Roster()
    roster.see(beat(RAY), fresh=False)
    roster.own([LogOwner(log=LOG, pid=4242)])

    assert 4242 == roster.pid_of(RAY)


def test_whoever_writes_a_log_without_a_pid_is_the_process():
    roster = Roster()
    roster.see(beat(PLAIN, "server.log"), fresh=True)
    roster.own([LogOwner(log="server.log", pid=7)])

    assert 7 == roster.pid_of(PLAIN)


def test_a_driver_that_relays_beats_is_not_their_process():
    roster = Roster()
    roster.see(beat(RAY, "driver.log", relayed=True), fresh=True)

    assert 4242 == roster.pid_of(RAY)
    assert set() == roster.asked


def test_a_pid_on_another_node_is_none_of_ours():
    roster = Roster()
    far = InstanceKey(host="198.51.100.2", pid=4242, tag="DP0")
    roster.see(beat(far, "driver.log", relayed=True), fresh=True)

    assert None is roster.pid_of(far)


def test_a_log_without_a_visible_writer_is_asked_about_ever_less_often():
    roster = Roster()
    questions = 0
    for _ in range(1000):
        roster.see(beat(PLAIN, "server.log"), fresh=True)
        if roster.asked:
            questions += 1
            roster.own([LogOwner(log="server.log")])

    assert 10 == questions


def test_a_log_whose_writer_ended_is_asked_about_again():
    roster = Roster()
    roster.see(beat(PLAIN, "server.log"), fresh=True)
    roster.own([LogOwner(log="server.log", pid=7)])
    roster.forget([7])

    assert {"server.log"} == roster.asked
    assert None is roster.pid_of(PLAIN)


def test_a_server_named_by_its_pid_gives_way_to_what_its_beats_call_it():
    roster = Roster()
    roster.attach(4242)
    before = dict(roster.processes())
    roster.see(beat(RAY), fresh=True)

    assert {InstanceKey(pid=4242): 4242} == before
    assert {RAY: 4242} == roster.processes()


def test_addresses_and_kin_are_remembered():
    roster = Roster()
    roster.see(beat(RAY), fresh=True)
    roster.find(RAY, url="http://192.0.2.1:23333", kin=(4242, 4243))
    roster.find(RAY, url="", kin=())

    assert "http://192.0.2.1:23333" == roster.url_of(RAY)
    assert (4242, 4243) == roster.kin_of([RAY])


def test_a_retired_instance_leaves_nothing_behind():
    roster = Roster()
    roster.see(beat(PLAIN, "server.log"), fresh=True)
    roster.drop(PLAIN)

    assert set() == roster.asked
    assert {} == roster.processes()
    assert {} == roster._orphans
