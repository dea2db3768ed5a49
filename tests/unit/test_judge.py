"""What the vitals of one instance support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import KEY, POLICY, beat

from hangwatch.core import vitals as fold
from hangwatch.core.endpoints import health_of_answer
from hangwatch.core.judge import due, judge, stop_window
from hangwatch.model.heartbeat import SignalSeen
from hangwatch.model.identity import InstanceKey, Role
from hangwatch.model.lease import Lease
from hangwatch.model.observation import GpusSeen, ProcessesSeen
from hangwatch.model.policy import Policy
from hangwatch.model.profile import HealthMeaning, Signal
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, StopWindow, Verdict
from hangwatch.model.vitals import (
    Counters,
    GpuVital,
    Health,
    Motion,
    Outcome,
    ProcessVital,
    SourceVital,
    StackVital,
    Vitals,
)
from hangwatch.profiles.lmdeploy import PROFILE

LAST = 200.0


def busy(last: float = LAST, *, running: int = 6, tps: float = 5000.0) -> Vitals:
    found = Vitals(
        instance=KEY, interval=10.0, listening_since=Instant(0.0), healthy_is_proof_after=102.0
    )
    at = last - 190.0
    while at < last:
        found = fold.beat(found, beat(at).beat, fresh=True)
        at += 10.0
    return fold.beat(found, beat(last, running=running, tps=tps).beat, fresh=True)


def health(
    meaning: HealthMeaning | None, at: float, message: str = "its words", status: str = "healthy"
) -> Health:
    return Health(
        at=Instant(at),
        outcome=Outcome.ANSWERED,
        http=200,
        status=status,
        message=message,
        meaning=meaning,
    )


def process(state: str, **facts: object) -> ProcessVital:
    values = {"pid": 7, "role": Role.ENGINE, "since": Instant(0.0), "at": Instant(LAST + 60)}
    return ProcessVital(state=state, **{**values, **facts})  # type: ignore[arg-type]


def signal(kind: Signal, at: float) -> SignalSeen:
    return SignalSeen(instance=InstanceKey(), signal=kind, at=Instant(at), text="words")


def word(vitals: Vitals, now: float) -> str:
    return judge(vitals, POLICY, Instant(now)).word


def test_tokens_within_the_last_interval_are_well():
    assert "ok" == word(busy(), LAST + 14.9)


def test_silence_with_work_is_suspected_when_the_limit_is_reached_and_not_before():
    assert "ok" == word(busy(), LAST + 119.9)
    assert "suspected_hang" == word(busy(), LAST + 120.0)


def test_the_first_sentence_of_a_stall_says_what_is_missing():
    told = judge(busy(), POLICY, Instant(LAST + 120)).because

    assert ("no heartbeat for 120 s", "its last heartbeat") == (told[0][:22], told[1][:18])


def test_silence_without_work_is_idleness_for_an_hour():
    vitals = busy(running=0)

    assert {"idle"} == {word(vitals, LAST + 15 + minute * 60) for minute in range(60)}


def test_unknown_work_is_suspected_with_low_confidence():
    vitals = busy()
    last = vitals.last
    assert last is not None
    blank = replace(last, running=None, waiting=None, routed=None, api_waiting=None)
    vitals = replace(vitals, last=blank, last_progress=blank)

    verdict = judge(vitals, POLICY, Instant(LAST + 130))

    assert ("suspected_hang", Confidence.LOW) == (verdict.word, verdict.confidence)


def test_a_later_line_of_a_sibling_on_the_same_log_makes_it_hung():
    vitals = replace(busy(), siblings_at=Instant(LAST + 20))

    verdict = judge(vitals, POLICY, Instant(LAST + 120))

    assert ("hung", Confidence.MEDIUM) == (verdict.word, verdict.confidence)


def test_a_line_of_a_sibling_before_the_next_beat_was_due_proves_nothing():
    vitals = replace(busy(), siblings_at=Instant(LAST + 9))

    assert "suspected_hang" == word(vitals, LAST + 120)


def test_growth_of_its_own_log_makes_it_hung():
    grown = SourceVital(name="server.log", grew_at=Instant(LAST + 60))

    assert "hung" == word(replace(busy(), sources=(grown,)), LAST + 120)


def test_growth_of_a_drivers_stream_proves_nothing():
    grown = SourceVital(name="driver.log", grew_at=Instant(LAST + 60), relayed=True)

    assert "suspected_hang" == word(replace(busy(), sources=(grown,)), LAST + 120)


def test_a_probe_that_timed_out_needs_three_intervals_only():
    vitals = fold.health(busy(), health(HealthMeaning.LOOP_BLOCKED, LAST + 22))

    assert "ok" == word(vitals, LAST + 29.9)
    verdict = judge(vitals, POLICY, Instant(LAST + 30))
    assert ("hung", Confidence.HIGH) == (verdict.word, verdict.confidence)


def test_a_scheduler_that_does_not_advance_is_hung_whatever_streams_began():
    vitals = fold.health(busy(), health(HealthMeaning.NO_PROGRESS, LAST + 100))
    vitals = fold.signal(vitals, signal(Signal.COMPLETED, LAST + 99), ())

    assert "hung" == word(vitals, LAST + 101)


def test_fresh_beats_outrank_whatever_health_says():
    vitals = fold.health(busy(), health(HealthMeaning.LOOP_BLOCKED, LAST - 5))

    assert "ok" == word(vitals, LAST + 14)


def test_healthy_long_after_the_last_beat_excludes_a_hang():
    vitals = fold.health(busy(), health(HealthMeaning.HEALTHY, LAST + 110))

    assert "idle" == word(vitals, LAST + 150)


def test_healthy_soon_after_the_last_beat_excludes_nothing():
    vitals = fold.health(busy(), health(HealthMeaning.HEALTHY, LAST + 60))

    assert "suspected_hang" == word(vitals, LAST + 150)


def test_healthy_without_words_proves_only_that_http_lives():
    vitals = fold.health(busy(), health(HealthMeaning.HEALTHY, LAST + 600, message=""))

    assert "suspected_hang" == word(vitals, LAST + 610)


def test_a_mere_ok_of_whoever_serves_health_hides_no_hang():
    answer = health_of_answer(200, b"OK", PROFILE, at=Instant(LAST + 600))
    vitals = fold.health(busy(), answer)

    assert "suspected_hang" == word(vitals, LAST + 610)


def test_sleep_needs_every_part_woken():
    vitals = fold.signal(busy(), signal(Signal.SLEEP, LAST + 1), ("weights", "kv_cache"))
    woken = replace(signal(Signal.WAKE, LAST + 300), parts=("weights",))
    half = fold.signal(vitals, woken, ("weights", "kv_cache"))
    whole = fold.signal(half, replace(woken, parts=("kv_cache",)), ("weights", "kv_cache"))

    assert "paused" == word(vitals, LAST + 3000)
    assert "paused" == word(half, LAST + 3000)
    assert "idle" == word(whole, LAST + 3000)


def test_a_wakeup_without_parts_wakes_all():
    vitals = fold.signal(busy(), signal(Signal.SLEEP, LAST + 1), ("weights", "kv_cache"))
    vitals = fold.signal(vitals, signal(Signal.WAKE, LAST + 300), ("weights", "kv_cache"))

    assert () == vitals.asleep


def test_one_late_beat_does_not_wake_a_sleeper_but_a_second_does():
    vitals = fold.signal(busy(), signal(Signal.SLEEP, LAST + 1), ("weights",))
    late = fold.beat(vitals, beat(LAST + 9).beat, fresh=True)
    awake = fold.beat(late, beat(LAST + 19).beat, fresh=True)

    assert ("weights",) == late.asleep
    assert () == awake.asleep


def test_sleeping_by_health_is_paused():
    vitals = fold.health(busy(), health(HealthMeaning.SLEEPING, LAST + 60))

    assert "paused" == word(vitals, LAST + 900)


def test_requests_that_were_given_up_are_no_work():
    vitals = fold.signal(busy(), signal(Signal.ABORTED, LAST + 1), ())

    assert "idle" == word(vitals, LAST + 900)


def test_answered_requests_are_progress_and_later_mean_that_the_heartbeat_is_lost():
    vitals = busy()
    for second in range(10, 600, 20):
        vitals = fold.signal(vitals, signal(Signal.COMPLETED, LAST + second), ())
        assert "ok" == word(vitals, LAST + second + 19)

    assert "not-a-hang:heartbeat-lost" == judge(vitals, POLICY, Instant(LAST + 5000)).cause


def test_a_dead_heartbeat_task_makes_silence_mean_nothing():
    vitals = fold.signal(busy(), signal(Signal.BEAT_LOST, LAST + 10), ())

    assert "not-a-hang:heartbeat-lost" == judge(vitals, POLICY, Instant(LAST + 900)).cause


def counted(vitals: Vitals, tokens: float, at: float, running: int = 6) -> Vitals:
    return fold.counters(
        vitals,
        Counters(at=Instant(at), since=Instant(at), tokens=tokens, running=running, waiting=0),
    )


def test_moving_token_counters_without_a_beat_mean_that_the_heartbeat_is_lost():
    vitals = busy()
    for second in range(10, 50, 10):
        vitals = counted(vitals, 100.0 * second, LAST + second)

    verdict = judge(vitals, POLICY, Instant(LAST + 400))

    assert ("ok", "not-a-hang:heartbeat-lost") == (verdict.word, verdict.cause)


def test_a_lost_heartbeat_stays_lost_when_the_engine_goes_idle():
    vitals = busy()
    for second in range(10, 50, 10):
        vitals = counted(vitals, 100.0 * second, LAST + second)
    for second in range(50, 900, 10):
        vitals = counted(vitals, 4000.0, LAST + second)

    assert "not-a-hang:heartbeat-lost" == judge(vitals, POLICY, Instant(LAST + 900)).cause


def test_tokens_that_move_once_after_an_idle_time_do_not_mean_that_the_heartbeat_is_lost():
    vitals = counted(counted(busy(running=0), 100.0, LAST + 600), 200.0, LAST + 610)

    verdict = judge(vitals, POLICY, Instant(LAST + 611))

    assert ("ok", "not-a-hang:busy") == (verdict.word, verdict.cause)


def test_flat_token_counters_with_work_are_hung_although_only_the_log_is_silent():
    vitals = counted(counted(busy(), 100.0, LAST + 5), 100.0, LAST + 130)

    assert "hung" == word(vitals, LAST + 130)


def test_gauges_at_zero_after_the_last_beat_are_idleness():
    vitals = counted(busy(), 100.0, LAST + 20, running=0)

    assert "idle" == word(vitals, LAST + 900)


def test_a_stopped_process_is_hung_and_says_who_traces_it():
    vitals = replace(busy(), processes=(process("T", tracer_pid=0),))

    verdict = judge(vitals, POLICY, Instant(LAST + 60))

    assert ("hung", "stopped-by-tracer") == (verdict.word, verdict.cause)
    assert "traced by nobody" in verdict.because[0]


def test_a_process_in_uninterruptible_sleep_is_hung_once_it_stays_there():
    there = process("D", since=Instant(LAST + 10), wchan="rpc_wait_bit_killable")

    verdict = judge(replace(busy(), processes=(there,)), POLICY, Instant(LAST + 60))

    assert ("hung", "storage-d-state") == (verdict.word, verdict.cause)
    assert "rpc_wait_bit_killable" in verdict.because[0]


def test_a_moment_of_disk_sleep_is_not_enough_before_the_limit():
    passing = process("D", since=Instant(LAST + 60))

    assert "ok" == word(replace(busy(), processes=(passing,)), LAST + 60)


def test_slow_storage_that_still_delivers_is_loading():
    loading = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))
    reading = process("D", since=Instant(0.0), read_bytes_per_s=91e6)

    assert "loading" == word(replace(loading, processes=(reading,)), 4000)


@pytest.mark.parametrize("state", ["Z", ""])
def test_a_needed_process_that_ended_with_work_is_dead(state: str):
    rest = process("S", pid=8)

    verdict = judge(replace(busy(), processes=(process(state), rest)), POLICY, Instant(LAST + 20))

    assert ("dead", "child-dead") == (verdict.word, verdict.cause)


def test_an_instance_that_ended_without_work_is_gone():
    assert "gone" == word(replace(busy(running=0), processes=(process(""),)), LAST + 20)


def test_an_instance_that_ended_together_with_its_ray_is_gone():
    raylet = replace(process("", pid=9), role=Role.RAY_SYSTEM, needed=False)

    verdict = judge(replace(busy(), processes=(process("Z"), raylet)), POLICY, Instant(LAST + 20))

    assert ("gone", "ended") == (verdict.word, verdict.cause)
    assert "raylet 9" in verdict.because[0]


def test_an_orderly_shutdown_is_gone():
    assert "gone" == word(fold.signal(busy(), signal(Signal.STOPPED, LAST + 1), ()), LAST + 500)


def test_a_retired_log_is_gone():
    retired = SourceVital(name="old", retired_at=Instant(LAST + 5))

    assert "gone" == word(replace(busy(), sources=(retired,)), LAST + 500)


def test_a_failed_task_is_dead_once_the_next_beat_is_missing():
    vitals = fold.signal(busy(), signal(Signal.ENGINE_DEAD, LAST + 4), ())

    assert "ok" == word(vitals, LAST + 14)
    assert "dead" == word(vitals, LAST + 15)


def test_a_failed_task_that_beats_outlive_was_not_needed():
    vitals = fold.signal(busy(), signal(Signal.ENGINE_DEAD, LAST + 4), ())
    vitals = fold.beat(vitals, beat(LAST + 10).beat, fresh=True)

    assert "ok" == word(vitals, LAST + 20)


def stacks(motion: Motion) -> StackVital:
    return StackVital(at=Instant(LAST + 130), motion=motion, frame="get (store.py:153)")


def test_frozen_stacks_make_it_hung_and_name_the_frame():
    verdict = judge(replace(busy(), stacks=stacks(Motion.FROZEN)), POLICY, Instant(LAST + 131))

    assert ("hung", Confidence.HIGH) == (verdict.word, verdict.confidence)
    assert any("get (store.py:153)" in sentence for sentence in verdict.because)


def test_two_witnesses_of_a_blocked_loop_need_no_further_patience():
    accused = fold.health(busy(), health(HealthMeaning.LOOP_BLOCKED, LAST + 16))
    frozen = replace(accused, stacks=replace(stacks(Motion.FROZEN), at=Instant(LAST + 17)))

    assert "ok" == word(accused, LAST + 18)
    assert "hung" == word(frozen, LAST + 18)


def test_moving_stacks_are_blocked_for_it_may_end_by_itself():
    assert "blocked" == word(replace(busy(), stacks=stacks(Motion.BUSY)), LAST + 131)


def test_stacks_that_wait_where_idle_engines_wait_say_nothing():
    assert "suspected_hang" == word(replace(busy(), stacks=stacks(Motion.WAITING)), LAST + 131)


SUSPENDED = replace(stacks(Motion.WAITING), suspended="forward (agent.py:120)", frame="")
QUIET = process("S", cpu_pct=2.0, vol_ctxt_per_s=40.0)


def suspended(vitals: Vitals, *processes: ProcessVital) -> Vitals:
    return replace(
        vitals,
        stacks=replace(SUSPENDED, at=Instant(LAST + 36)),
        processes=processes or (QUIET,),
    )


def test_an_await_that_did_not_move_while_nothing_computes_needs_three_intervals_only():
    verdict = judge(suspended(busy()), POLICY, Instant(LAST + 37))

    assert ("hung", "await-never-completes", Confidence.MEDIUM) == (
        verdict.word,
        verdict.cause,
        verdict.confidence,
    )
    assert any("forward (agent.py:120)" in sentence for sentence in verdict.because)


@pytest.mark.parametrize(
    "facts",
    [
        {"cpu_pct": 95.0, "vol_ctxt_per_s": 40.0},
        {"cpu_pct": 5.0, "vol_ctxt_per_s": 900.0},
        {"cpu_pct": None, "vol_ctxt_per_s": None},
    ],
    ids=["computes", "polls", "not known"],
)
def test_an_await_that_did_not_move_may_be_a_prefill_as_long_as_something_may_compute(
    facts: dict[str, float | None],
):
    worker = process("S", pid=8, **facts)

    assert "ok" == word(suspended(busy(), QUIET, worker), LAST + 37)


def test_awaits_that_did_not_move_are_idleness_where_no_work_is_in_flight():
    assert "idle" == word(suspended(busy(running=0)), LAST + 3600)


def test_awaits_that_did_not_move_prove_nothing_where_work_is_unknown():
    last = busy().last
    assert last is not None
    unknown = replace(last, running=None, waiting=None, routed=None)

    assert "hung" != word(suspended(replace(busy(), last=unknown)), LAST + 3600)


def test_fresh_beats_outrank_awaits_that_did_not_move():
    assert "ok" == word(fold.beat(suspended(busy()), beat(LAST + 40).beat, fresh=True), LAST + 41)


def zeros(**numbers: int) -> Vitals:
    vitals = busy()
    for second in range(10, 200, 10):
        zero = replace(beat(LAST + second, tps=0.0).beat, routed=None, api_waiting=None, **numbers)
        vitals = fold.beat(vitals, zero, fresh=True)
    return vitals


def test_beats_that_go_on_with_zero_tokens_and_only_waiting_requests_are_a_stuck_scheduler():
    verdict = judge(zeros(running=0, waiting=5), POLICY, Instant(LAST + 191))

    assert ("hung", "scheduler-stuck") == (verdict.word, verdict.cause)


def test_zero_tokens_with_running_requests_are_no_fault_of_the_scheduler():
    verdict = judge(zeros(running=5, waiting=0), POLICY, Instant(LAST + 191))

    assert ("hung", "one-instance-silent") == (verdict.word, verdict.cause)


def test_beats_that_go_on_with_zero_tokens_and_no_work_are_idle():
    vitals = busy()
    for second in range(10, 200, 10):
        vitals = fold.beat(vitals, beat(LAST + second, tps=0.0, running=0).beat, fresh=True)

    assert "idle" == word(vitals, LAST + 900)


def test_nothing_fires_before_the_first_beat():
    vitals = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))

    assert "loading" == word(vitals, 1e6)


def test_old_beats_alone_start_no_clock():
    vitals = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))
    vitals = fold.beat(vitals, beat(1.0).beat, fresh=False)

    assert "ok" == word(vitals, 1e6)


def test_an_old_beat_of_a_process_that_lives_starts_the_clock():
    vitals = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))
    vitals = fold.beat(vitals, beat(1.0).beat, fresh=False)

    assert "suspected_hang" == word(replace(vitals, processes=(process("S"),)), 121.0)


def test_a_log_that_cannot_be_read_is_blind_and_never_an_alarm():
    closed = SourceVital(
        name="log", unreadable_since=Instant(LAST + 1), unreadable_reason="stale handle"
    )

    verdict = judge(replace(busy(), sources=(closed,)), POLICY, Instant(LAST + 500))

    assert ("blind", ("stale handle",)) == (verdict.word, verdict.because)


def test_time_in_which_nobody_listened_is_no_silence():
    vitals = fold.relisten(busy(), Instant(LAST + 1000))

    assert "ok" == word(vitals, LAST + 1119)
    assert "suspected_hang" == word(vitals, LAST + 1120)


def test_output_that_comes_in_blocks_stretches_the_limit():
    vitals = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))
    for number in range(40):
        clump = beat(LAST).beat
        printed = None if clump.printed is None else clump.printed
        assert printed is None
        vitals = fold.beat(vitals, replace(clump, printed=_printed(number * 10)), fresh=True)

    assert 390.0 == vitals.buffered
    assert "ok" == word(vitals, LAST + 500)
    assert "suspected_hang" == word(vitals, LAST + 510)


def _printed(seconds: float):  # type: ignore[no-untyped-def]
    from datetime import timedelta

    from hangwatch.testing import START

    return START + timedelta(seconds=seconds)


def test_the_stop_lies_within_one_interval_after_the_last_beat():
    expected = StopWindow(earliest=Instant(LAST), latest=Instant(LAST + 10))

    assert expected == stop_window(busy(), POLICY)


def test_a_residual_last_beat_moves_the_window_back_by_one_interval():
    expected = StopWindow(earliest=Instant(LAST - 10), latest=Instant(LAST), residual=True)

    assert expected == stop_window(busy(tps=2000.0), POLICY)


def test_tokens_that_a_look_finds_after_the_last_beat_may_be_older_than_the_look():
    vitals = counted(counted(busy(), 100.0, LAST - 4), 200.0, LAST + 6)
    expected = StopWindow(earliest=Instant(LAST), latest=Instant(LAST + 10))

    assert expected == stop_window(vitals, POLICY)


def test_a_look_between_the_last_beat_and_the_stop_narrows_the_window():
    vitals = counted(counted(counted(busy(), 100.0, LAST - 4), 200.0, LAST + 2), 300.0, LAST + 6)
    expected = StopWindow(earliest=Instant(LAST + 2), latest=Instant(LAST + 10))

    assert expected == stop_window(vitals, POLICY)


def test_without_beats_the_window_begins_at_the_look_before_the_last_growth():
    vitals = counted(counted(busy(), 100.0, LAST + 100), 200.0, LAST + 110)
    expected = StopWindow(earliest=Instant(LAST + 100), latest=Instant(LAST + 120))

    assert expected == stop_window(vitals, POLICY)


MOMENTS = st.floats(min_value=0.0, max_value=900.0).map(lambda x: round(x, 1))


PERCENTS = st.sampled_from([None, 0.0, 15.0, 40.0, 95.0])
WCHANS = st.sampled_from(["", "ep_poll", "pipe_write", "futex_do_wait", "os_acquire_rwlock"])


@st.composite
def any_process(draw: st.DrawFn, pid: int) -> ProcessVital:
    since = LAST + draw(MOMENTS)
    return ProcessVital(
        pid=pid,
        role=draw(st.sampled_from(list(Role))),
        state=draw(st.sampled_from(["S", "R", "D", "T", "Z", ""])),
        since=Instant(since),
        at=Instant(since + draw(MOMENTS)),
        wchan=draw(WCHANS),
        cpu_pct=draw(PERCENTS),
        vol_ctxt_per_s=draw(st.sampled_from([None, 9.0, 900.0])),
        switches_per_s=draw(st.sampled_from([None, 96.0, 900.0])),
        busiest_cpu_pct=draw(PERCENTS),
        waits_since=draw(st.none() | st.just(Instant(since))),
        polled_at=draw(st.none() | st.just(Instant(since))),
        unsent_bytes=draw(st.sampled_from([None, 0, 9_000])),
        read_bytes_per_s=draw(st.sampled_from([None, 91e6])),
        context=draw(st.sampled_from([None, 1_000_000])),
        needed=draw(st.booleans()),
    )


@st.composite
def any_stacks(draw: st.DrawFn) -> StackVital:
    words = st.sampled_from(["", "forward (agent.py:120)"])
    return StackVital(
        at=Instant(LAST + draw(MOMENTS)),
        motion=draw(st.sampled_from(list(Motion))),
        frame=draw(words),
        suspended=draw(words),
        stuck=draw(words),
        planned=draw(words),
    )


@st.composite
def any_health(draw: st.DrawFn) -> tuple[Health, ...]:
    """One answer, or two of the same kind, so that it has lasted."""
    outcome = draw(st.sampled_from(list(Outcome)))
    meaning = draw(st.sampled_from(list(HealthMeaning))) if outcome is Outcome.ANSWERED else None
    moments = sorted(draw(st.lists(MOMENTS, min_size=1, max_size=2)))
    return tuple(
        Health(at=Instant(LAST + at), outcome=outcome, message="its words", meaning=meaning)
        for at in moments
    )


def unbeaten(*, started: bool) -> Vitals:
    """An engine that has not printed a beat yet."""
    vitals = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))
    return fold.signal(vitals, signal(Signal.STARTING, 5.0), ()) if started else vitals


@st.composite
def any_vitals(draw: st.DrawFn) -> Vitals:
    """Vitals of many kinds, the last observation at most 1,800 s after the last beat."""
    vitals = busy(running=draw(st.sampled_from([0, 6])), tps=draw(st.sampled_from([0.0, 9e3])))
    if not draw(st.integers(0, 4)):
        vitals = unbeaten(started=draw(st.booleans()))
    vitals = replace(
        vitals,
        step_driven=draw(st.booleans()),
        says_idle=draw(st.booleans()),
        polls_gpu=draw(st.booleans()),
        patience=draw(st.sampled_from([None, 90.0, 300.0])),
        buffered=draw(st.sampled_from([0.0, 390.0])),
    )
    if draw(st.booleans()):
        for answer in draw(any_health()):
            vitals = fold.health(vitals, answer)
    for at in sorted(draw(st.lists(MOMENTS, max_size=2))):
        kind = draw(st.sampled_from(list(Signal)))
        vitals = fold.signal(vitals, signal(kind, LAST + at), ("weights",))
    if draw(st.booleans()):
        vitals = counted(vitals, 1.0, LAST + draw(MOMENTS), running=draw(st.integers(0, 2)))
        vitals = counted(vitals, draw(st.sampled_from([1.0, 2.0])), LAST + 900, running=1)
    if draw(st.booleans()):
        pids = range(draw(st.integers(1, 2)))
        vitals = replace(vitals, processes=tuple(draw(any_process(pid)) for pid in pids))
    if draw(st.booleans()):
        percents = PERCENTS.filter(lambda x: x is not None)
        looks = [gpu(LAST + at, draw(percents), draw(percents), draw(percents)) for at in (16, 28)]
        vitals = with_gpus(vitals, *looks)
    if draw(st.booleans()):
        vitals = replace(vitals, stacks=draw(any_stacks()))
    if draw(st.booleans()):
        vitals = replace(vitals, siblings_at=Instant(LAST + draw(MOMENTS)))
    if draw(st.booleans()):
        at = LAST + draw(MOMENTS)
        vitals = replace(vitals, lease=lease(at, at + draw(MOMENTS)))
    if draw(st.booleans()):
        source = SourceVital(
            name="log",
            grew_at=draw(st.none() | MOMENTS.map(lambda x: Instant(LAST + x))),
            unreadable_since=draw(st.none() | MOMENTS.map(lambda x: Instant(LAST + x))),
            last_line_at=draw(st.none() | MOMENTS.map(lambda x: Instant(LAST + x))),
            merged=draw(st.booleans()),
            in_flight=draw(st.sampled_from([None, 0, 6])),
        )
        vitals = replace(vitals, sources=(source,))
    if draw(st.booleans()):
        vitals = fold.relisten(vitals, Instant(LAST + draw(MOMENTS)))
    return vitals


POLICIES = st.sampled_from([POLICY, replace(POLICY, calibrate=True)])


@given(vitals=any_vitals(), policy=POLICIES, share=st.floats(0.0, 0.999))
@settings(max_examples=300, deadline=None)
def test_judge_does_not_change_before_it_is_due(vitals: Vitals, policy: Policy, share: float):
    now: Instant | None = Instant(LAST)
    while now is not None:
        moment = due(vitals, policy, now)
        left = 1e6 if moment is None else moment - now

        assert judge(vitals, policy, now) == judge(vitals, policy, Instant(now + share * left))
        now = moment


@given(vitals=any_vitals(), now=st.floats(-1e6, 1e9))
@settings(max_examples=300, deadline=None)
def test_judge_is_total(vitals: Vitals, now: float):
    assert judge(vitals, POLICY, Instant(now)).because


@given(vitals=any_vitals(), wait=st.floats(0.0, 2000.0))
@settings(max_examples=300, deadline=None)
def test_an_alarm_names_a_reason_to_believe_in_work_or_in_an_end(vitals: Vitals, wait: float):
    verdict = judge(vitals, POLICY, Instant(LAST + wait))
    accused = vitals.health is not None and vitals.health.meaning not in (
        HealthMeaning.HEALTHY,
        HealthMeaning.SLEEPING,
    )
    state = {p.state for p in vitals.processes} & {"T", "D", "Z", ""}
    worked = vitals.last is not None and bool(vitals.last.in_flight)
    printed = any(source.in_flight for source in vitals.sources)
    endless = verdict.cause in ("pause-outlived", "startup-hang", "stdout-pipe-full")

    if verdict.word in ("suspected_hang", "hung", "blocked"):
        assert worked or printed or accused or state or endless or vitals.counters is not None


# --- GPUs, threads, pipes, clients ---------------------------------------------------------------


def gpu(at: float, utilization: float, memory: float, power: float, *, index: int = 0) -> GpuVital:
    return GpuVital(
        index=index,
        at=Instant(at),
        utilization_pct=utilization,
        memory_activity_pct=memory,
        power_w=power,
        power_limit_w=700.0,
    )


def with_gpus(vitals: Vitals, *looks: GpuVital) -> Vitals:
    for look in looks:
        vitals = fold.gpus(vitals, GpusSeen(instance=KEY, gpus=(look,), at=look.at))
    return vitals


def in_flight(at: float = LAST + 25) -> Vitals:
    """Return an engine whose gauges say after the last beat that there is work."""
    return counted(busy(), 100.0, at)


def test_resting_gpus_exclude_a_long_prefill_where_work_is_known_to_be_in_flight():
    vitals = with_gpus(in_flight(), gpu(LAST + 16, 0, 0, 120), gpu(LAST + 28, 0, 0, 120))

    assert "ok" == word(vitals, LAST + 29.9)
    assert "hung" == word(vitals, LAST + 30)


def test_resting_gpus_prove_nothing_where_the_last_heartbeat_alone_speaks_of_work():
    vitals = with_gpus(busy(), gpu(LAST + 16, 0, 0, 120), gpu(LAST + 28, 0, 0, 120))

    assert "ok" == word(vitals, LAST + 119)
    assert "suspected_hang" == word(vitals, LAST + 120)


def test_one_look_at_a_resting_gpu_is_not_enough_to_hurry():
    vitals = with_gpus(in_flight(), gpu(LAST + 28, 0, 0, 120))

    assert "ok" == word(vitals, LAST + 60)


def test_a_gpu_that_spins_at_low_power_without_memory_traffic_is_a_stuck_kernel():
    looks = (gpu(LAST + 16, 100, 0, 131), gpu(LAST + 28, 100, 0, 131))

    verdict = judge(with_gpus(in_flight(), *looks), POLICY, Instant(LAST + 30))

    assert ("hung", "gpu-kernel-stuck") == (verdict.word, verdict.cause)
    assert "131 W of 700 W" in " ".join(verdict.because)


def test_a_gpu_that_computes_earns_a_long_prefill_three_times_the_patience():
    vitals = with_gpus(in_flight(), gpu(LAST + 100, 100, 40, 500))

    assert "ok" == word(vitals, LAST + 359)
    assert "suspected_hang" == word(vitals, LAST + 360)


# Read on an H200 (driver 580, limit 700 W) beside loads that were known.
MEASURED = {
    "memory held, nothing runs": ((0, 0, 118), False),
    "one kernel that spins": ((100, 0, 118), False),
    "matrix products": ((99, 23, 690), True),
    "copies within its memory": ((100, 100, 466), True),
    "small kernels, a hundred times a second": ((4, 0, 122), None),
}


@pytest.mark.parametrize("load", MEASURED)
def test_what_a_gpu_does_is_known_by_its_numbers(load: str):
    numbers, expected = MEASURED[load]

    assert expected is fold.computes(gpu(0, *numbers))
    assert (load == "one kernel that spins") is fold.spins(gpu(0, *numbers))


def quiet(**facts: object) -> ProcessVital:
    values = {"cpu_pct": 3.0, "vol_ctxt_per_s": 9.0, "switches_per_s": 96.0} | facts
    return process("S", at=Instant(LAST + 28), **values)


def seen(vitals: Vitals, *processes: ProcessVital) -> Vitals:
    at = processes[0].at
    return fold.processes(vitals, ProcessesSeen(instance=KEY, processes=processes, at=at))


def test_processes_that_neither_compute_nor_poll_exclude_a_prefill_of_an_engine_that_polls():
    polls = replace(in_flight(), polls_gpu=True)

    verdict = judge(seen(polls, quiet()), POLICY, Instant(LAST + 30))

    assert ("hung", "await-never-completes") == (verdict.word, verdict.cause)


@pytest.mark.parametrize("facts", [{"switches_per_s": 900.0}, {"cpu_pct": 98.0}])
def test_an_engine_that_polls_or_computes_may_be_in_a_long_prefill(facts: dict[str, float]):
    polls = replace(in_flight(), polls_gpu=True)

    assert "ok" == word(seen(polls, quiet(**facts)), LAST + 119)


def test_the_silence_of_an_engine_that_does_not_poll_says_nothing_of_its_gpu():
    assert "ok" == word(seen(in_flight(), quiet()), LAST + 119)


def server(wchan: str, at: float, **facts: object) -> ProcessVital:
    values = {"role": Role.API_SERVER, "wchan": wchan, "at": Instant(at)} | facts
    return process("S", **values)


@pytest.mark.parametrize("wchan", ["pipe_write", "anon_pipe_write"])
def test_a_server_that_waits_for_room_in_its_output_pipe_is_hung_whatever_it_printed_last(
    wchan: str,
):
    held = busy(running=0)
    for second in (20, 30):
        held = seen(held, server(wchan, LAST + second, stdout_pipe=True))

    verdict = judge(held, POLICY, Instant(LAST + 30))

    assert ("hung", "stdout-pipe-full") == (verdict.word, verdict.cause)


def test_a_line_that_is_just_being_written_is_no_full_pipe():
    held = seen(busy(running=0), server("pipe_write", LAST + 5000, stdout_pipe=True))

    assert "idle" == word(held, LAST + 5000)


def mute(at: float, since: float) -> Health:
    return Health(
        at=Instant(at), outcome=Outcome.TIMED_OUT, since=Instant(since), message="timeout"
    )


def test_a_server_that_answers_nothing_was_not_seen_at_a_pipe_in_passing():
    held = seen(fold.health(busy(), mute(LAST + 40, 0)), server("pipe_write", LAST + 40))

    assert ("hung", "stdout-pipe-full") == _told(judge(held, POLICY, Instant(LAST + 40)))


def test_a_server_without_work_that_answers_nobody_for_long_is_hung():
    vitals = fold.health(fold.health(busy(running=0), mute(LAST + 40, 0)), mute(LAST + 170, 0))

    assert "hung" == word(vitals, LAST + 170)


def test_a_server_whose_loop_waits_for_events_and_answers_nobody_has_no_slot_left():
    vitals = fold.health(fold.health(busy(running=0), mute(LAST + 40, 0)), mute(LAST + 170, 0))
    turns = seen(vitals, server("ep_poll", LAST + 160))
    works = seen(turns, server("", LAST + 170))
    blocked = seen(vitals, server("futex_do_wait", LAST + 170))

    assert ("hung", "concurrency-limit") == _told(judge(works, POLICY, Instant(LAST + 170)))
    assert ("hung", "event-loop-blocked") == _told(judge(blocked, POLICY, Instant(LAST + 170)))


def test_a_request_that_waits_for_a_client_who_does_not_read_is_not_lost():
    lost = fold.health(busy(), health(HealthMeaning.LOST_REQUEST, LAST + 95))
    client = seen(lost, server("ep_poll", LAST + 95, unsent_bytes=2_500_000))

    assert ("hung", "lost-request") == _told(judge(lost, POLICY, Instant(LAST + 95)))
    assert ("idle", "stalled-client") == _told(judge(client, POLICY, Instant(LAST + 95)))


def _told(verdict: Verdict) -> tuple[str, str]:
    return verdict.word, verdict.cause


def test_requests_that_only_the_server_knows_are_lost_whatever_health_says():
    gauges = Counters(
        at=Instant(LAST + 125),
        since=Instant(LAST),
        tokens=100.0,
        running=0,
        waiting=0,
        routed=4,
    )
    vitals = fold.counters(fold.counters(busy(), replace(gauges, at=Instant(LAST))), gauges)

    assert ("hung", "lost-request") == _told(judge(vitals, POLICY, Instant(LAST + 125)))


# --- pauses --------------------------------------------------------------------------------------


def lease(at: float, until: float) -> Lease:
    return Lease(id="1", at=Instant(at), until=Instant(until), reason="weight sync")


def test_a_lease_covers_silence_and_silence_counts_from_its_end():
    vitals = replace(busy(), lease=lease(LAST + 20, LAST + 1220))

    assert ("paused", "not-a-hang:lease") == _told(judge(vitals, POLICY, Instant(LAST + 1219)))
    assert "ok" == word(vitals, LAST + 1339)
    assert "suspected_hang" == word(vitals, LAST + 1340)


def test_a_lease_does_not_cover_a_death():
    vitals = seen(replace(busy(), lease=lease(LAST + 20, LAST + 1220)), process("Z"))

    assert "dead" == word(vitals, LAST + 200)


def test_a_sleep_beyond_its_limit_is_suspicious():
    asleep = fold.signal(busy(), signal(Signal.SLEEP, LAST + 10), ("weights",))

    assert "paused" == word(asleep, LAST + 10 + POLICY.pause_limit - 1)
    assert ("suspected_hang", "pause-outlived") == _told(
        judge(asleep, POLICY, Instant(LAST + 10 + POLICY.pause_limit))
    )


def test_who_slept_long_before_may_do_so_again():
    vitals = fold.signal(busy(), signal(Signal.SLEEP, LAST + 10), ("weights",))
    vitals = fold.signal(vitals, signal(Signal.WAKE, LAST + 20_000), ())
    vitals = fold.signal(vitals, signal(Signal.SLEEP, LAST + 30_000), ("weights",))

    assert "paused" == word(vitals, LAST + 30_000 + 39_000)


def test_a_loop_that_loads_weights_is_a_pause_for_a_quarter_of_an_hour():
    blocked = fold.health(busy(), health(HealthMeaning.LOOP_BLOCKED, LAST + 22))
    update = StackVital(
        at=Instant(LAST + 35), motion=Motion.FROZEN, planned="new weights: f (e.py:1)"
    )
    vitals = replace(blocked, stacks=update)

    assert "paused" == word(vitals, LAST + 899)
    assert ("suspected_hang", "pause-outlived") == _told(judge(vitals, POLICY, Instant(LAST + 900)))


def test_a_blocked_loop_without_work_may_be_an_update_of_the_weights():
    vitals = busy(running=0)
    for second in (300, 360, 590):
        vitals = fold.health(vitals, health(HealthMeaning.LOOP_BLOCKED, LAST + second))

    assert "idle" == word(vitals, LAST + 590)
    assert "hung" == word(fold.health(vitals, health(HealthMeaning.LOOP_BLOCKED, 800)), 800)


def test_a_loop_that_does_not_answer_while_its_process_computes_gets_the_longer_time():
    compiling = seen(
        replace(busy(), polls_gpu=True),
        process("R", at=Instant(LAST + 28), cpu_pct=98.0),
    )
    vitals = fold.health(compiling, health(HealthMeaning.LOOP_BLOCKED, LAST + 25))

    assert "ok" == word(vitals, LAST + 119)
    assert "blocked" == word(vitals, LAST + 120)


def test_an_engine_that_was_just_started_gets_the_longer_time():
    cold = fold.signal(busy(), signal(Signal.READY, LAST - 30), ())
    cold = fold.beat(cold, beat(LAST).beat, fresh=True)
    vitals = fold.health(cold, health(HealthMeaning.LOOP_BLOCKED, LAST + 25))

    assert "ok" == word(vitals, LAST + 119)
    assert "hung" == word(vitals, LAST + 120)


# --- slow, calibrated, started --------------------------------------------------------------------


def test_a_fifth_of_the_usual_tokens_for_as_many_requests_is_slow():
    vitals = busy()
    for second in (10, 20, 30):
        vitals = fold.beat(vitals, beat(LAST + second, tps=500.0).beat, fresh=True)

    assert ("slow", "not-a-hang:slow") == _told(judge(vitals, POLICY, Instant(LAST + 31)))
    assert "ok" == word(fold.beat(vitals, beat(LAST + 40).beat, fresh=True), LAST + 41)


def test_an_engine_that_stays_slow_stays_slow_however_its_prompts_come():
    vitals = busy()
    for step in range(1, 100):
        slow = replace(beat(LAST + 10 * step, tps=500.0).beat, in_tps=(4400.0, 4700.0)[step % 2])
        vitals = fold.beat(vitals, slow, fresh=True)

    assert "slow" == word(vitals, LAST + 991)
    assert LAST + 30 == judge(vitals, POLICY, Instant(LAST + 991)).since


def test_few_tokens_of_few_requests_are_not_slow():
    vitals = busy()
    for second in (10, 20, 30):
        vitals = fold.beat(vitals, beat(LAST + second, tps=500.0, running=1).beat, fresh=True)

    assert "ok" == word(vitals, LAST + 31)


def test_a_phase_of_prefills_is_not_slow():
    vitals = busy()
    for second in (10, 20, 30):
        prefill = replace(beat(LAST + second).beat, in_tps=25_000.0, out_tps=10.0)
        vitals = fold.beat(vitals, prefill, fresh=True)

    assert "ok" == word(vitals, LAST + 31)


def test_the_limit_is_the_calibrated_one_unless_somebody_set_it():
    vitals = replace(busy(), patience=300.0)
    calibrated = replace(POLICY, calibrate=True)

    assert "ok" == judge(vitals, calibrated, Instant(LAST + 299)).word
    assert "suspected_hang" == judge(vitals, calibrated, Instant(LAST + 300)).word
    assert "suspected_hang" == judge(vitals, POLICY, Instant(LAST + 120)).word


def test_the_limit_is_no_less_than_the_longest_prefill_that_the_context_allows():
    million = seen(busy(), process("S", at=Instant(LAST), context=1_000_000))
    calibrated = replace(POLICY, calibrate=True)

    # 1,000,000 tokens at 4,500 a second, half as much again, and an interval
    assert "ok" == judge(million, calibrated, Instant(LAST + 343)).word
    assert "suspected_hang" == judge(million, calibrated, Instant(LAST + 344)).word


def starting(**facts: Any) -> Vitals:
    stacks = StackVital(at=Instant(500.0), motion=Motion.WAITING, **facts)
    return Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0), stacks=stacks)


def test_a_start_in_which_nothing_moves_is_hung_once_it_has_taken_long():
    stuck = starting(stuck="wait (file_baton.py:50)")

    assert "loading" == word(stuck, 119)
    assert ("hung", "startup-hang") == _told(judge(stuck, POLICY, Instant(120)))


def test_a_start_that_computes_or_reads_or_prints_goes_on():
    stuck = starting(stuck="load (loader.py:1)")
    prints = replace(stuck, sources=(SourceVital(name="log", grew_at=Instant(495.0)),))

    assert "loading" == word(seen(stuck, process("R", cpu_pct=99.0)), 500)
    assert "loading" == word(seen(stuck, process("S", read_bytes_per_s=9e7)), 500)
    assert "loading" == word(prints, 500)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        (Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0)), "loading"),
        (fold.signal(busy(), signal(Signal.STARTING, LAST + 20), ()), "loading"),
        (fold.signal(busy(running=0), signal(Signal.READY, LAST + 20), ()), "gone"),
        (busy(), "dead"),
    ],
)
def test_a_port_that_refuses_is_missed_only_where_it_was_open(loads: Vitals, expected: str):
    refused = Health(at=Instant(LAST + 300), outcome=Outcome.REFUSED)

    assert expected == word(fold.health(loads, refused), LAST + 300)


def test_a_process_that_ended_and_beats_on_was_never_the_one_that_beats():
    gone = process("", role=Role.API_SERVER, since=Instant(LAST - 30), at=Instant(LAST))
    died = process("", role=Role.API_SERVER, since=Instant(LAST + 3), at=Instant(LAST + 4))

    assert "ok" == word(seen(busy(), gone), LAST + 14)
    assert "dead" == word(seen(busy(), died), LAST + 23)


def test_a_server_that_ended_as_a_whole_may_still_have_something_to_say():
    ended = {"role": Role.API_SERVER, "since": Instant(LAST + 3), "at": Instant(LAST + 8)}
    whole = seen(busy(), process("", **ended))
    late = replace(whole, buffered=60.0)

    assert ("ok", "dead") == (word(whole, LAST + 22.9), word(whole, LAST + 23))
    assert ("ok", "dead") == (word(late, LAST + 82.9), word(late, LAST + 83))


def test_an_engine_that_ended_beside_its_server_is_missed_at_once():
    ended = process("", since=Instant(LAST + 3), at=Instant(LAST + 8), pid=8)
    alive = process("S", role=Role.API_SERVER, at=Instant(LAST + 8))

    assert "dead" == word(seen(busy(), ended, alive), LAST + 8)


def test_a_step_driven_engine_is_idle_when_all_that_it_ran_was_answered():
    steps = replace(busy(running=2), step_driven=True)
    for second in (1, 2):
        steps = fold.signal(steps, signal(Signal.COMPLETED, LAST + second), ())

    assert "idle" == word(steps, LAST + 500)


def test_a_step_driven_engine_is_as_slow_as_its_steps():
    steps = replace(busy(), step_driven=True, recent_gaps=(40.0, 40.0, 40.0))
    vitals = fold.health(steps, health(HealthMeaning.LOOP_BLOCKED, LAST + 25))

    assert "ok" == word(vitals, LAST + 119)


def test_silence_of_an_engine_that_says_when_it_goes_idle_is_firm():
    says = replace(busy(), says_idle=True)
    vitals = with_gpus(says, gpu(LAST + 16, 0, 0, 120), gpu(LAST + 28, 0, 0, 120))

    assert "hung" == word(vitals, LAST + 30)


def test_a_process_that_computes_while_its_gpu_rests_may_compile():
    working = seen(in_flight(), process("R", at=Instant(LAST + 28), cpu_pct=98.0))
    vitals = with_gpus(working, gpu(LAST + 16, 0, 0, 120), gpu(LAST + 28, 0, 0, 120))

    assert "ok" == word(vitals, LAST + 119)
    assert ("blocked", "event-loop-blocked-by-cpu") == _told(
        judge(vitals, POLICY, Instant(LAST + 120))
    )


def test_an_engine_that_has_never_beaten_is_accused_only_by_a_word_that_lasts():
    ready = Vitals(instance=KEY, interval=10.0, listening_since=Instant(0.0))
    ready = fold.signal(ready, signal(Signal.READY, 10), ())
    for second in (500, 512, 524):
        ready = fold.health(ready, health(HealthMeaning.LOOP_BLOCKED, second))

    assert "loading" == word(ready, 530)
    assert "hung" == word(fold.health(ready, health(HealthMeaning.LOOP_BLOCKED, 621)), 621)


def test_gauges_freeze_with_the_loop_so_tokens_that_moved_before_tell_of_work():
    vitals = counted(counted(busy(running=0), 100.0, LAST + 600, 0), 900.0, LAST + 605, 0)
    vitals = fold.health(vitals, health(HealthMeaning.LOOP_BLOCKED, LAST + 627))

    assert "hung" == word(vitals, LAST + 636)


def test_work_that_comes_after_an_idle_hour_is_not_silent_since_then():
    vitals = busy(running=1)
    for second, running in ((20, 0), (3600, 6), (3610, 6)):
        vitals = counted(vitals, 100.0, LAST + second, running)

    assert "ok" == word(vitals, LAST + 3611)
    assert "ok" == word(vitals, LAST + 3719)
    assert "suspected_hang" == word(vitals, LAST + 3720)
