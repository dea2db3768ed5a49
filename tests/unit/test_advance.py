"""The whole decision, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import HOUR, KEY, POLICY, PROFILES, Run, beat, beats, key, line

from hangwatch.core.advance import advance
from hangwatch.core.codec import from_plain, to_plain
from hangwatch.core.fleet import Memory, begin, due, overall, remember
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import IncidentState
from hangwatch.model.lease import Lease
from hangwatch.model.observation import (
    CaptureEnded,
    ChildBack,
    ChildSilent,
    CloseIncident,
    HealthSeen,
    LeaseTaken,
    LoopPaused,
    ProcessesSeen,
    RecordStall,
    SourceFound,
    SourceGrew,
    SourceReadable,
    SourceRetired,
    SourceUnreadable,
    StacksSeen,
    StartCapture,
    UpdateCapture,
)
from hangwatch.model.profile import HealthMeaning, Signal
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Blind, SuspectedHang
from hangwatch.model.vitals import Health, Motion, Outcome, StackVital
from hangwatch.profiles.lmdeploy import PROFILE
from hangwatch.testing import START, FakeClock

EIGHT = [key(number) for number in range(8)]


def captures(run: Run) -> list[StartCapture]:
    return [action for action in run.actions if isinstance(action, StartCapture)]


def test_an_hour_of_idleness_raises_nothing():
    run = Run().over(beats(0, 100), [beat(100, running=0)], until=HOUR)

    assert [] == run.alarms()
    assert ["ok", "idle"] == run.words()


def test_an_idle_hour_ends_with_the_next_beat():
    run = Run().over(
        [*beats(0, 100), beat(100, running=0), *beats(HOUR, HOUR + 60)], until=HOUR + 60
    )

    assert ["ok", "idle", "ok"] == run.words()


def test_eight_servers_that_fall_silent_together_are_all_suspected_within_one_poll():
    freeze = int(3.5 * HOUR)
    scripts = [beats(0, freeze + 1, instance=instance) for instance in EIGHT]

    run = Run().over(*scripts, until=4 * HOUR)

    assert {freeze + 120.0} == {t.at for t in run.alarms()}
    assert {"simultaneous-silence"} == {t.after.cause for t in run.alarms()}
    assert set(EIGHT) == {t.instance for t in run.alarms()}


def test_beats_that_come_faster_than_the_profile_says_do_not_look_buffered():
    policy = replace(POLICY, heartbeat_interval=1.0)
    stamped = [
        replace(seen, beat=replace(seen.beat, printed=START + timedelta(seconds=seen.beat.at)))
        for seen in beats(0, 60, every=1.0)
    ]

    run = Run(policy).over(stamped, until=60)

    assert 0.0 == run.state.instances[KEY].vitals.buffered


def test_servers_that_fall_silent_together_are_one_incident_with_one_capture():
    scripts = [beats(i, 1000, instance=instance) for i, instance in enumerate(EIGHT)]

    run = Run().over(*scripts, until=2000)

    assert 1 == len(captures(run))
    assert 1 == len(run.state.incidents)
    assert set(EIGHT) == {member.instance for member in run.state.incidents[0].members}
    assert 7 == len(run.of(UpdateCapture))


def test_the_cause_is_a_common_one_from_the_first_alarm_on():
    scripts = [beats(i, 1000, instance=instance) for i, instance in enumerate(EIGHT)]

    run = Run().over(*scripts, until=2000)

    assert "simultaneous-silence" == run.alarms()[0].after.cause


def test_one_silent_server_of_eight_on_one_stream_is_hung():
    scripts = [
        beats(i, 2000 if i else 1000, instance=instance, source="driver.log", relayed=True)
        for i, instance in enumerate(EIGHT)
    ]

    run = Run().over(*scripts, until=2000)

    assert [(EIGHT[0], "hung", "one-instance-silent")] == [
        (t.instance, t.after.word, t.after.cause) for t in run.alarms()
    ]


def test_one_silent_server_is_hung_while_files_beside_its_own_still_grow():
    scripts = [beats(i, 2000 if i else 1000, instance=k) for i, k in enumerate(EIGHT)]

    run = Run().over(*scripts, until=2000)

    assert [("hung", "one-instance-silent")] == [
        (t.after.word, t.after.cause) for t in run.alarms()
    ]


def test_files_elsewhere_prove_nothing_of_a_silent_servers_own():
    scripts = [
        beats(i, 2000 if i else 1000, instance=k, source=f"node-{i}/worker.out")
        for i, k in enumerate(EIGHT)
    ]

    run = Run().over(*scripts, until=2000)

    assert [("suspected_hang", "one-instance-silent")] == [
        (t.after.word, t.after.cause) for t in run.alarms()
    ]


def test_servers_that_stop_minutes_apart_are_two_incidents():
    run = Run().over(beats(0, 1000), beats(0, 1300, instance=key(1)), until=2000)

    assert 2 == len(run.state.incidents)
    assert 2 == len(captures(run))


def test_an_incident_closes_when_its_last_member_beats_again():
    script = [*beats(0, 1000), *beats(1500, 1600)]
    run = Run().over(script, beats(0, 1000, instance=key(1)), until=1600)

    assert IncidentState.CLOSED is not run.state.incidents[0].state
    run.over(beats(1700, 1800, instance=key(1)), until=1700)
    assert IncidentState.CLOSED is run.state.incidents[0].state
    assert 1 == len(run.of(CloseIncident))


def test_a_closed_incident_keeps_the_verdict_that_it_reached():
    run = Run().over([*beats(0, 1000), *beats(1500, 1600)], until=1600)

    assert isinstance(run.state.incidents[0].verdict, SuspectedHang)
    assert 1500.0 == run.state.incidents[0].closed_at


def test_a_short_stall_is_recorded_with_its_length_and_is_no_incident():
    run = Run().over([*beats(0, 101), *beats(197, 300)], until=300)

    assert [] == run.alarms()
    assert [(100.0, 97.0)] == [(s.since, s.seconds) for s in run.of(RecordStall)]  # type: ignore[attr-defined]


def test_silence_between_two_requests_is_no_stall():
    run = Run().over([*beats(0, 100), beat(100, running=0), *beats(180, 300)], until=300)

    assert [] == run.of(RecordStall)


def test_after_a_capture_the_same_instance_starts_no_second_one_while_it_cools_down():
    run = Run().over(beats(0, 1000), until=1200)
    incident = captures(run)[0].incident
    ended = CaptureEnded(incident=incident.id, at=Instant(1200), bundle="b.tar.gz")
    run.over([ended], beats(1210, 1300), until=1790)

    assert 2 == len(run.state.incidents)
    assert 1 == len(captures(run))
    assert "b.tar.gz" == run.state.incidents[0].bundle


def test_after_the_cool_down_a_new_stall_is_captured():
    run = Run().over(beats(0, 1000), until=1200)
    ended = CaptureEnded(incident=captures(run)[0].incident.id, at=Instant(1200))
    run.over([ended], beats(1210, 4000), until=5000)

    assert 2 == len(captures(run))


def test_a_restarted_daemon_makes_no_second_bundle_of_the_same_incident():
    first = Run().over(beats(0, 1000), until=1200)
    ended = CaptureEnded(incident=captures(first)[0].incident.id, at=Instant(1205), bundle="b")
    first.over([ended], until=1210)
    memory = from_plain(Memory, to_plain(remember(first.state)))

    state = begin(POLICY, PROFILES, FakeClock().epoch(), Instant(1300), memory=memory)
    alive = ProcessesSeen(instance=KEY, processes=(_alive(),), at=Instant(1302))
    second = Run(state=state).over([beat(1301, fresh=False), alive], until=1500)

    assert ["suspected_hang"] == [t.after.word for t in second.alarms()]
    assert [] == captures(second)
    assert 1 == len(second.state.incidents)


def _alive():  # type: ignore[no-untyped-def]
    from hangwatch.model.identity import Role
    from hangwatch.model.vitals import ProcessVital

    return ProcessVital(
        pid=100, role=Role.API_SERVER, state="S", since=Instant(1302), at=Instant(1302)
    )


def test_a_lease_outlives_a_restart_and_ends_when_it_would_have():
    running, over = (
        Lease(id=name, at=Instant(100), until=Instant(until), reason="weights", holder="pid 7")
        for name, until in (("running", 1500), ("over", 1200))
    )
    first = Run().over([LeaseTaken(lease=running), LeaseTaken(lease=over)], until=1000)
    memory = from_plain(Memory, to_plain(remember(first.state)))

    state = begin(POLICY, PROFILES, FakeClock().epoch(), Instant(1300), memory=memory)

    assert {"running": running} == state.leases


def test_a_capture_that_was_cut_off_by_a_restart_is_started_anew():
    first = Run().over(beats(0, 1000), until=1200)

    state = begin(
        POLICY, PROFILES, FakeClock().epoch(), Instant(1300), memory=remember(first.state)
    )
    alive = ProcessesSeen(instance=KEY, processes=(_alive(),), at=Instant(1302))
    second = Run(state=state).over([beat(1301, fresh=False), alive], until=1500)

    assert 1 == len(captures(second))


def test_stage_a_makes_the_running_incident_stronger():
    run = Run().over(beats(0, 1000), until=1115)
    stacks = StackVital(at=Instant(1130), motion=Motion.FROZEN, frame="get (store.py:1)")
    run.over([StacksSeen(instance=KEY, stacks=stacks)], until=1140)

    assert "hung" == run.state.incidents[0].verdict.word
    assert "hung" == run.of(UpdateCapture)[-1].incident.verdict.word  # type: ignore[attr-defined]


def test_log_only_incidents_are_unconfirmed_and_others_confirmed():
    health = Health(
        at=Instant(1022),
        outcome=Outcome.ANSWERED,
        message="probe timed out",
        meaning=HealthMeaning.LOOP_BLOCKED,
    )
    plain = Run().over(beats(0, 1000), until=1200)
    asked = Run().over(beats(0, 1000), [HealthSeen(instance=KEY, health=health)], until=1200)

    assert not plain.state.incidents[0].confirmed
    assert asked.state.incidents[0].confirmed


def test_suspicion_comes_within_twenty_five_seconds_of_the_first_missed_beat_with_a_witness():
    health = Health(
        at=Instant(1012),
        outcome=Outcome.ANSWERED,
        message="probe timed out",
        meaning=HealthMeaning.LOOP_BLOCKED,
    )

    run = Run().over(beats(0, 991), [HealthSeen(instance=KEY, health=health)], until=1200)

    assert 1000.0 + 25.0 >= run.alarms()[0].at


# --- logs and instances --------------------------------------------------------------------------


def test_a_drivers_dead_stream_is_a_stalled_log_and_no_hang():
    own = [beats(i, 3000, instance=k) for i, k in enumerate(EIGHT)]
    relayed = [
        beats(i + 0.5, 1000, instance=k, source="driver.log", relayed=True)
        for i, k in enumerate(EIGHT)
    ]

    run = Run().over(*own, *relayed, until=3000)

    assert [] == run.alarms()
    assert "log_stalled" == overall(run.state, Instant(3000)).word


def test_a_drivers_stream_that_goes_on_is_well_again():
    own = beats(0, 3000)
    relayed = [
        *beats(0.5, 1000, source="driver.log", relayed=True),
        *beats(2000, 3000, source="driver.log", relayed=True),
    ]

    run = Run().over(own, relayed, until=3000)

    assert ["log_stalled", "ok"] == run.words(InstanceKey(tag="driver.log"))
    assert "ok" == overall(run.state, Instant(3000)).word


def test_a_file_that_is_replaced_by_another_is_no_stalled_log():
    run = Run().over(beats(0, 1000, source="a.out"), beats(1000, 3000, source="b.out"), until=3000)

    assert "ok" == overall(run.state, Instant(3000)).word


def test_in_a_merged_stream_one_silent_engine_cannot_be_told_and_raises_nothing():
    script = [
        beat(
            at,
            instance=EIGHT[at // 10 % 8 if at < 500 else 0],
            source="d",
            relayed=True,
            repeated=7,
        )
        for at in range(0, 3000, 10)
    ]

    run = Run().over(script, until=3000)

    assert [] == run.alarms()


def test_a_merged_stream_that_ends_suspects_all():
    script = [
        beat(at, instance=EIGHT[at // 10 % 8], source="d", relayed=True, repeated=7)
        for at in range(0, 3000, 10)
    ]

    run = Run().over(script, until=4000)

    assert set(EIGHT) == {t.instance for t in run.alarms()}
    assert 1 == len(captures(run))


def test_a_merged_stream_does_not_hide_an_engine_whose_own_file_is_silent():
    merged = [
        beat(at, instance=EIGHT[at // 10 % 8], source="d", relayed=True, repeated=7)
        for at in range(0, 2000, 10)
    ]
    own = [beats(i, 1000 if i == 3 else 2000, instance=k) for i, k in enumerate(EIGHT)]
    quiet = [b for b in merged if b.beat.instance != EIGHT[3] or b.beat.at < 1000]

    run = Run().over(quiet, *own, until=2000)

    assert {EIGHT[3]} == {t.instance for t in run.alarms()}


def test_a_node_in_a_drivers_prefix_makes_no_second_instance():
    remote = replace(KEY, host="192.0.2.7")
    relayed = beats(0.5, 1000, instance=remote, source="driver.log", relayed=True)

    for scripts in ((beats(0, 3000), relayed), (beats(1, 3000), relayed)):
        run = Run().over(*scripts, until=3000)
        assert [] == run.alarms()
        assert 1 == len(run.state.instances)


def test_equal_pids_on_two_nodes_are_two_instances():
    here = beats(0, 3000, source="d", relayed=True)
    there = beats(5, 1000, instance=replace(KEY, host="192.0.2.7"), source="d", relayed=True)

    run = Run().over(here, there, until=3000)

    assert [replace(KEY, host="192.0.2.7")] == [t.instance for t in run.alarms()]


def test_an_instance_whose_link_moved_on_is_gone_and_its_successor_is_well():
    old = beats(0, 100, source="a/worker-100.out")
    moved = [SourceRetired(source="a/worker-100.out", at=Instant(105))]
    new = beats(300, 400, instance=key(9))

    run = Run().over(old, moved, new, until=400)

    assert ["ok", "gone"] == run.words()
    assert "ok" == overall(run.state, Instant(400)).word


def test_a_log_that_cannot_be_read_makes_its_instances_blind_and_no_others():
    closed = [SourceUnreadable(source="worker-100.out", at=Instant(101), reason="stale handle")]
    run = Run().over(beats(0, 100), closed, beats(0, 1000, instance=key(1)), until=1000)

    assert [] == run.alarms()
    assert ["ok", "blind"] == run.words()
    assert ["ok"] == run.words(key(1))


def test_after_blindness_silence_counts_from_the_first_look():
    script = [
        SourceUnreadable(source="worker-100.out", at=Instant(101), reason="stale handle"),
        SourceReadable(source="worker-100.out", at=Instant(1000)),
    ]
    run = Run().over(beats(0, 100), script, until=1130)

    assert [1120.0] == [t.at for t in run.alarms()]


def test_a_silent_follower_makes_its_instances_blind_until_it_is_back():
    script = [
        ChildSilent(at=Instant(101), reason="follower: no answer", sources=("worker-100.out",)),
        ChildBack(at=Instant(500), sources=("worker-100.out",)),
    ]
    run = Run().over(beats(0, 100), script, beats(505, 600), until=600)

    assert [] == run.alarms()
    assert ["ok", "blind", "ok"] == run.words()


def test_a_pause_of_our_own_is_no_silence_of_theirs():
    run = Run().over(beats(0, 100), until=95)
    paused = LoopPaused(at=Instant(1000), seconds=905.0)
    run.state, actions = advance(run.state, [paused], Instant(1000))
    run.over(beats(1010, 1100), until=1100)

    assert () == actions
    assert [] == run.alarms()


def test_a_line_without_a_label_concerns_the_engine_of_its_process():
    run = Run().over(beats(0, 100), [line(101, Signal.SLEEP)], until=HOUR)

    assert ["ok", "paused"] == run.words()


def test_a_server_is_known_from_its_first_words_and_keeps_them_under_its_label():
    run = Run().over([line(5, Signal.STARTING)], beats(600, 700), until=700)

    assert [KEY] == list(run.state.instances)
    assert ["loading"] == run.words(replace(KEY, tag=""))
    assert ["ok"] == run.words()


def test_completions_on_a_stream_of_several_unnamed_engines_are_nobodys():
    one, two = InstanceKey(tag="DP0"), InstanceKey(tag="DP1")
    shared = {"source": "server.log"}
    answered = [
        replace(s, signal=replace(s.signal, source="server.log", instance=InstanceKey()))
        for s in (line(at, Signal.COMPLETED) for at in range(1000, 2000, 10))
    ]

    run = Run().over(
        beats(0, 1000, instance=one, **shared),
        beats(0, 2000, instance=two, **shared),
        answered,
        until=2000,
    )

    assert [one] == [t.instance for t in run.alarms()]


def test_health_of_a_process_is_that_of_the_engine_that_it_prints_for():
    asleep = Health(
        at=Instant(130), outcome=Outcome.ANSWERED, message="z", meaning=HealthMeaning.SLEEPING
    )
    run = Run().over(
        beats(0, 100), [HealthSeen(instance=replace(KEY, tag=""), health=asleep)], until=HOUR
    )

    assert [] == run.alarms()
    assert [KEY] == list(run.state.instances)


def test_nothing_at_all_is_loading_and_a_log_without_beats_has_none_configured():
    nothing = Run().over([], until=100)
    grown = Run().over(
        [SourceFound(source="x", at=Instant(0)), SourceGrew(source="x", at=Instant(1))], until=HOUR
    )

    assert "loading" == overall(nothing.state, Instant(100)).word
    assert "not-a-hang:no-heartbeat-configured" == overall(grown.state, Instant(HOUR)).cause


def test_growth_after_the_last_beat_on_its_own_log_makes_a_suspicion_certain():
    grown = [SourceGrew(source="worker-100.out", at=Instant(at)) for at in (1130, 1150)]

    run = Run().over(beats(0, 1000), grown, until=1200)

    assert ["ok", "suspected_hang", "hung"] == run.words()


@pytest.mark.parametrize("words", [("hung", "ok"), ("idle", "ok")])
def test_the_strongest_verdict_speaks_for_all(words: tuple[str, str]):
    quiet = (
        [*beats(0, 1000, source="d", relayed=True)]
        if words[0] == "hung"
        else [*beats(0, 990), beat(990, running=0)]
    )
    run = Run().over(quiet, beats(1, 2000, instance=key(1), source="d", relayed=True), until=2000)

    assert sorted(words) == sorted(v.word for v in run.state.verdicts.values())
    assert ("hung" if "hung" in words else "ok") == overall(run.state, Instant(2000)).word


def test_an_instance_that_is_gone_is_forgotten_after_a_day():
    retired = [SourceRetired(source="worker-100.out", at=Instant(101))]
    run = Run().over(beats(0, 100), retired, beats(0, 200, instance=key(1)), until=300)
    run.over([beat(90_000, instance=key(1))], until=90_000)

    assert [key(1)] == list(run.state.instances)


def test_an_engine_met_before_its_first_beat_takes_the_profile_that_the_beat_tells():
    other = replace(PROFILE, name="other", interval=25.0, polls_gpu=False, says_idle=True)
    state = begin(POLICY, {**PROFILES, "other": other}, FakeClock().epoch(), Instant(0.0))
    nameless = InstanceKey(pid=100)
    first = beat(10, instance=nameless)
    told = replace(first, beat=replace(first.beat, profile="other"))
    met = ProcessesSeen(instance=nameless, processes=(_alive(),), at=Instant(2))

    known = Run(state=state).over([met], [told], until=20).state.instances[nameless].vitals

    assert (25.0, False, True) == (known.interval, known.polls_gpu, known.says_idle)


def test_a_log_that_carried_nobody_is_forgotten_a_day_after_it_was_retired():
    found = SourceFound(source="worker-7.out", at=Instant(1), pid=7)
    retired = SourceRetired(source="worker-7.out", at=Instant(50))
    run = Run().over([found, retired], [beat(2, running=0), beat(90_000)], until=90_000)

    assert ["worker-100.out"] == list(run.state.sources)


def test_the_name_by_which_a_driver_called_an_engine_is_forgotten_with_the_engine():
    remote = replace(KEY, host="192.0.2.7")
    relayed = beats(0.5, 100, instance=remote, source="driver.log", relayed=True)
    retired = [
        SourceRetired(source=name, at=Instant(101)) for name in ("driver.log", "worker-100.out")
    ]
    run = Run().over(beats(0, 100), relayed, retired, until=100)
    assert {remote: KEY} == run.state.aliases

    run.over([*retired, beat(90_000, instance=key(1))], until=90_000)

    assert {} == run.state.aliases


def test_an_incident_whose_engines_a_restarted_daemon_never_sees_again_is_closed_after_a_day():
    first = Run().over(beats(0, 1000), until=1200)
    memory = remember(first.state)

    state = begin(POLICY, PROFILES, FakeClock().epoch(), Instant(1300), memory=memory)
    quiet = [beat(at, instance=key(1), running=0) for at in (1301, 90_000)]
    second = Run(state=state).over(quiet, until=90_000)

    assert [IncidentState.CLOSED] == [incident.state for incident in second.state.incidents]
    assert 1 == len(second.of(CloseIncident))


def test_nothing_grows_with_logs_and_instances_that_come_and_go():
    run, day = Run(), 86_400
    for number in range(6):
        at = number * day
        beaten, empty, nameless = (f"{kind}-{number}" for kind in ("worker", "other", "server"))
        run.over(
            [SourceFound(source=name, at=Instant(at)) for name in (beaten, empty, nameless)],
            beats(at + 1, at + 100, instance=key(number), source=beaten),
            beats(at + 1, at + 100, instance=InstanceKey(), source=nameless),
            [
                SourceRetired(source=name, at=Instant(at + 200))
                for name in (beaten, empty, nameless)
            ],
            until=at + 300,
        )

    assert {"worker-5", "other-5", "server-5"} == {*run.state.sources}
    assert {*run.state.sources} == {*run.state.instances[InstanceKey()].carried}
    assert {key(5), InstanceKey()} == {*run.state.instances}


# --- properties ----------------------------------------------------------------------------------


@given(
    gaps=st.lists(st.sampled_from([10.0, 10.0, 10.0, 11.0, 40.0, 119.0, 121.0, 900.0]), max_size=30)
)
@settings(max_examples=60, deadline=None)
def test_a_silence_of_a_busy_server_alarms_exactly_when_it_reaches_the_limit(gaps: list[float]):
    script, at = [], 0.0
    for gap in (*gaps, 0.0):
        script.append(beat(at))
        at += gap

    run = Run().over(script, until=at)

    assert sum(gap >= 120.0 for gap in gaps) == len(run.alarms())


@given(gaps=st.lists(st.integers(10, 500), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_stepping_by_what_is_due_equals_looking_every_second(gaps: list[int]):
    script, at = [], 0
    for gap in gaps:
        script.append(beat(at))
        at += gap
    patient = Run().over(script, until=at)
    eager = Run()
    for moment in range(at + 1):
        eager.over([s for s in script if moment - 1 < s.beat.at <= moment], until=float(moment))

    assert [t.after.word for t in patient.transitions] == [t.after.word for t in eager.transitions]


def test_a_day_of_sixty_four_busy_servers_judges_each_only_when_something_happens():
    run = Run().over(*(beats(i / 64, 1800, instance=key(i)) for i in range(64)), until=1800)

    assert [] == run.alarms()
    assert isinstance(due(run.state), float)
    assert not any(isinstance(v, Blind) for v in run.state.verdicts.values())
