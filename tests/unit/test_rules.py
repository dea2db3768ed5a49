"""Each rule: what it says, upon what, and when it keeps silent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from dossiers import BLOCKED, EPOCH, PARKED, SILENT, WORKING, diagnosed, dump, instance, thread
from task_files import FORWARD, IDLE, LOOP, MAIN, STUCK, reading, task

from hangwatch import registry
from hangwatch.core.diagnosis import diagnose, rivals
from hangwatch.core.story import tell
from hangwatch.model.dossier import Culprit, Diagnosis, Dossier, Finding, Rule
from hangwatch.model.observation import RecordStall
from hangwatch.model.time import Instant
from hangwatch.model.verdict import Confidence, Dead, Hung, Idle, LogStalled, Ok

H2 = json.dumps(
    {"http": 503, "status": "unhealthy", "message": "Backend health probe timed out after 10.0s."}
).encode()


def because(cause: str, kind: Any = Hung, *words: str) -> Any:
    return kind(since=Instant(100.0), cause=cause, confidence=Confidence.HIGH, because=words)


def said(diagnosis: Diagnosis, rule: str) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.rule == rule]


def table(*rows: dict[str, Any]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def frozen(*pids: int) -> dict[str, bytes]:
    threads = dump(*(thread(pid) for pid in pids))
    return {"threads.json": threads, "threads2.json": threads}


# --- charter: what holds for every rule ----------------------------------------------------------


@pytest.mark.parametrize("rule", registry.rules().values(), ids=lambda rule: rule.name)
def test_a_rule_has_nothing_to_say_of_nothing(rule: Rule):
    assert () == rule.examine(diagnosed().dossier)


@pytest.mark.parametrize("rule", registry.rules().values(), ids=lambda rule: rule.name)
def test_a_rule_names_itself_in_its_findings(rule: Rule):
    rich = diagnosed(instance(10), instance(20), files={**frozen(10, 20), "health.json": H2})

    assert {rule.name} >= {finding.rule for finding in rule.examine(rich.dossier)}


@pytest.mark.parametrize("rule", registry.rules().values(), ids=lambda rule: rule.name)
def test_working_engines_are_not_accused(rule: Rule):
    well = diagnosed(instance(10, WORKING), instance(20, WORKING), files=frozen(10, 20)).dossier

    assert not [f for f in rule.examine(well) if f.verdict not in ("", "ok")]


def test_a_rule_that_raises_costs_only_its_own_findings():
    def examine(_dossier: Dossier) -> tuple[Finding, ...]:
        raise KeyError("oops")

    broken = Rule(name="broken", title="", examine=examine)
    dossier = diagnosed(instance(10)).dossier

    found = diagnose(dossier, (broken, *registry.rules().values()))

    assert ("rule broken failed: KeyError: 'oops'",) == found.problems
    assert found.findings


def test_every_citation_leads_to_a_file_of_the_evidence():
    files = {**frozen(10, 20), "procs.json": table({"pid": 10, "state": "S"}), "health.json": H2}
    rich = diagnosed(instance(10), instance(20), files=files)

    paths = {c.path for finding in rich.findings for c in finding.citations}

    assert paths <= {*files, "log.txt"}


# --- together, or one of many --------------------------------------------------------------------


def test_servers_that_stop_together_are_searched_for_a_shared_cause():
    found = diagnosed(*(instance(pid) for pid in (1, 2, 3)))

    [finding] = [f for f in said(found, "simultaneous-silence") if f.cause]
    assert "All 3 instances stopped within one interval" in finding.sentence
    assert "shared cause" in finding.sentence
    assert "worker-*.out" in finding.next_step


def test_rivals_have_the_facts_against_them():
    found = diagnosed(*(instance(pid) for pid in (1, 2)), files=frozen(1, 2))

    no_work, log_path = rivals(found)[1:3]
    assert "16 requests in flight" in no_work.con
    assert "stood still in a call" in log_path.con


def stops(*rows: tuple[int, str, str, float, float]) -> bytes:
    """Make ``stops.json`` of pid, role, instance, and seconds between which it fell quiet."""
    return table(
        *(
            {
                "pid": pid,
                "role": role,
                "instance": whose,
                "change": "quiet",
                "earliest": EPOCH.wall_of(Instant(earliest)).isoformat(),
                "latest": EPOCH.wall_of(Instant(latest)).isoformat(),
            }
            for pid, role, whose, earliest, latest in rows
        )
    )


STORE_FIRST = (
    (9, "store", "", 101.0, 101.25),
    (11, "engine", "10", 101.5, 101.75),
    (21, "engine", "20", 102.0, 102.25),
)


def ordered(*rows: tuple[int, str, str, float, float]) -> Diagnosis:
    outside = because("simultaneous-silence")
    return diagnosed(
        instance(10, outside), instance(20, outside), files={"blackbox/stops.json": stops(*rows)}
    )


def test_a_shared_process_that_stopped_before_all_who_wait_for_it_is_accused():
    found = ordered(*STORE_FIRST)

    (finding,) = said(found, "first-to-stop")
    assert finding.sentence.startswith(
        "Store 9, which they share, fell quiet 0.25 to 1.25 s before 2 other processes"
    )
    assert Culprit(pid=9) == finding.culprit == found.culprit
    assert [("blackbox/stops.json", 2), ("blackbox/stops.json", 10)] == [
        (citation.path, citation.line) for citation in finding.citations
    ]
    assert any("store 9 stopped 0.25 to 1.25 s before them" in rival.pro for rival in rivals(found))


def test_no_order_is_told_that_is_finer_than_what_was_recorded():
    blurred = ordered(
        (9, "store", "", 101.0, 101.6), (11, "engine", "10", 101.5, 101.75),
        (21, "engine", "20", 101.25, 101.5),
    )  # fmt: skip

    assert [] == said(blurred, "first-to-stop")
    assert not any("store 9" in rival.pro for rival in rivals(blurred))


def test_an_order_that_holds_for_most_says_for_how_many_it_does_not():
    (finding,) = said(ordered(*STORE_FIRST, (31, "engine", "10", 101.1, 101.3)), "first-to-stop")

    assert "before 2 of 3 others; with 1 other no order can be told" in finding.sentence


def test_who_fell_quiet_long_before_had_no_part_in_it():
    found = ordered((9, "store", "", 20.0, 20.25), *STORE_FIRST[1:])

    (finding,) = said(found, "first-to-stop")
    assert "engine 11 fell quiet" in finding.sentence
    assert finding.culprit is None


def test_servers_that_stop_far_apart_are_no_simultaneous_silence():
    found = diagnosed(instance(1), instance(2, stopped=400.0))

    assert [] == said(found, "simultaneous-silence")


def test_one_server_of_many_is_named():
    found = diagnosed(instance(51039), *(instance(pid, WORKING) for pid in (1, 2)))

    [finding] = said(found, "one-instance-silent")
    assert "Server 51039 stopped with 8 requests in flight while 2 of 3 go on" in finding.sentence


def test_a_server_without_siblings_is_not_one_of_many():
    assert [] == said(diagnosed(instance(1)), "one-instance-silent")


# --- event loops ---------------------------------------------------------------------------------


def test_a_frozen_call_is_the_cause_and_its_process_the_culprit():
    rows = table({"pid": 11, "ppid": 1, "role": "engine", "rank": 3})

    found = diagnosed(instance(1), files={**frozen(11), "procs.json": rows})

    assert ("hung", "event-loop-blocked", Confidence.HIGH) == (
        found.verdict,
        found.cause,
        found.confidence,
    )
    assert Culprit(pid=11, rank=3, thread="MainThread", frame="Worker.get_objects") == found.culprit


def test_the_caller_of_a_librarys_frame_is_named_too():
    [finding] = said(diagnosed(instance(1), files=frozen(1)), "event-loop-blocked")

    assert (
        "Worker.get_objects (ray/_private/worker.py:967), called from EngineInstance._fetch "
        "(lmdeploy/pytorch/engine/engine_instance.py:153)"
    ) in finding.sentence


def test_the_same_call_in_several_servers_is_one_finding():
    [finding] = said(
        diagnosed(*(instance(pid) for pid in (1, 2, 3)), files=frozen(1, 2, 3)),
        "event-loop-blocked",
    )

    assert finding.sentence.startswith(
        "The event loops of all 3 stopped engines are blocked in the same call"
    )
    assert 3 == len(finding.citations)


def test_a_loop_whose_frames_move_is_blocked_and_may_end():
    moved = (("/x/lmdeploy/guided.py", "compile_grammar", 7), *BLOCKED[2:])
    files = {
        "threads.json": dump(thread(1)),
        "threads2.json": dump(thread(1, moved, active=True, owns_gil=True)),
    }

    found = diagnosed(instance(1), files=files)

    assert ("blocked", "event-loop-blocked-by-cpu") == (found.verdict, found.cause)
    assert "owns the GIL and is running" in found.findings[0].sentence


def test_a_parked_loop_accuses_nobody():
    parked = dump(thread(1, PARKED))

    found = diagnosed(instance(1), files={"threads.json": parked, "threads2.json": parked})

    assert [] == said(found, "event-loop-blocked")


def test_a_stopped_process_is_not_taken_for_a_blocked_loop():
    rows = table({"pid": 1, "role": "engine", "state": "T", "tracer_pid": 0})

    found = diagnosed(
        instance(1, because("stopped-by-tracer")), files={**frozen(1), "procs.json": rows}
    )

    assert "stopped-by-tracer" == found.cause
    assert [] == said(found, "event-loop-blocked")
    [finding] = said(found, "process-stopped")
    assert "state T" in finding.sentence
    assert "SIGCONT" in finding.sentence


def test_an_idle_loop_with_work_awaits_what_never_comes():
    parked = dump(thread(11, PARKED))
    files = {
        "threads.json": parked,
        "threads2.json": parked,
        "procs.json": table({"pid": 11, "ppid": 1, "role": "engine_worker", "rank": 0}),
    }

    found = diagnosed(instance(1, because("await-never-completes")), files=files)

    assert Culprit(pid=11, rank=0, thread="MainThread", frame="EpollSelector.select") == (
        found.culprit
    )
    assert "does not show pending asyncio tasks" in found.findings[0].sentence


# --- tasks ---------------------------------------------------------------------------------------


def awaiting_files(*tasks: dict[str, Any], **more: Any) -> dict[str, bytes]:
    """Two samples of one engine whose threads wait, and its tasks."""
    row = {"pid": 11, "ppid": 1, "role": "engine", "rank": 0, "cpu_pct": 2, "vol_ctxt_per_s": 40}
    read = reading(*tasks, **more)
    parked = dump(thread(11, PARKED))
    return {
        "tasks.json": read,
        "tasks2.json": read,
        "threads.json": parked,
        "threads2.json": parked,
        "procs.json": table(row),
    }


def test_the_await_that_never_completes_is_named_with_its_line_and_what_it_waits_for():
    found = diagnosed(
        instance(1, because("await-never-completes")), files=awaiting_files(IDLE, STUCK)
    )
    (finding,) = said(found, "await-never-completes")

    assert Culprit(pid=11, rank=0, thread="MainThread", frame="ModelAgent.forward") == found.culprit
    assert Confidence.HIGH == finding.confidence
    assert "ModelAgent.forward (lmdeploy/pytorch/engine/model_agent.py:120)" in finding.sentence
    assert "task ModelAgentLoop" in finding.sentence
    assert "an event that nobody sets (Event.wait: not set, 1 waiter)" in finding.sentence
    assert "ModelAgentLoop" in finding.citations[0].text


def test_an_await_is_less_sure_where_something_may_be_computed():
    poll = task("poll", kind="sleep", detail="sleep(0.001)", due_in_s=0.0005, number=3)

    found = diagnosed(
        instance(1, because("await-never-completes")), files=awaiting_files(poll, STUCK)
    )

    assert Confidence.MEDIUM == said(found, "await-never-completes")[0].confidence


def test_unmoved_awaits_explain_silence_that_nothing_else_explains():
    found = diagnosed(instance(1), files=awaiting_files(IDLE, STUCK))

    assert ("hung", "await-never-completes") == (found.verdict, found.cause)
    assert not said(found, "cannot-tell")


@pytest.mark.parametrize(
    "changes",
    [
        {"threads2.json": dump(thread(11, BLOCKED))},
        {"procs.json": table({"pid": 11, "ppid": 1, "role": "engine", "cpu_pct": 98})},
        {"tasks2.json": reading(IDLE, task("ModelAgentLoop", waiter=6))},
        {"tasks.json": reading(IDLE), "tasks2.json": reading(IDLE)},
    ],
    ids=["a thread is in a call", "it computes", "it moved", "all wait for input"],
)
def test_awaits_explain_nothing_where_something_else_may(changes: dict[str, bytes]):
    found = diagnosed(instance(1), files=awaiting_files(IDLE, STUCK) | changes)

    assert not said(found, "await-never-completes")


def test_a_working_engine_whose_tasks_stand_still_is_not_accused():
    found = diagnosed(instance(1, WORKING), files=awaiting_files(IDLE, STUCK))

    assert not said(found, "await-never-completes")


LOCKED = "Lock.acquire: locked, 1 waiter"


def test_locks_that_tasks_take_in_different_orders_are_a_deadlock():
    first = task("pull", (LOOP, FORWARD), kind="lock", detail=LOCKED, number=3, on=[4])
    second = task("push", (MAIN, MAIN), kind="lock", detail=LOCKED, number=4, on=[3])

    found = diagnosed(instance(1), files=awaiting_files(IDLE, first, second, cycles=[[3, 4]]))

    assert ("hung", "lock-order-deadlock", Confidence.HIGH) == (
        found.verdict,
        found.cause,
        found.confidence,
    )
    assert (
        "pull stands at ModelAgent.forward (lmdeploy/pytorch/engine/model_agent.py:120) and waits "
        "for the lock that push holds"
    ) in found.findings[0].sentence


def test_tasks_that_await_each_other_are_a_deadlock_without_locks():
    first = task("a", kind="task", detail="a task", number=3, on=[4])
    second = task("b", (MAIN, MAIN), kind="task", detail="a task", number=4, on=[3])

    found = diagnosed(instance(1), files=awaiting_files(first, second, cycles=[[3, 4]]))

    assert "await-never-completes" == found.cause
    assert "deadlock" in found.findings[0].sentence


def test_a_lock_is_told_with_the_task_that_holds_it_and_the_holder_is_accused():
    holder = task("holder", (MAIN, FORWARD), number=3)
    waiter = task("waiter", (LOOP, LOOP), kind="lock", detail=LOCKED, number=4, on=[3])

    found = diagnosed(
        instance(1, because("await-never-completes")), files=awaiting_files(waiter, holder)
    )

    assert "task holder never gets past" in found.findings[0].sentence


@pytest.mark.parametrize("known_from", ["its memory", "the table of processes"])
def test_an_awaited_actor_is_followed_into_its_process(known_from):
    actor = "f2" * 16
    detail = f"Ray ObjectRef {'ab' * 28}, a call on actor {actor}, pending"
    files = awaiting_files(task("get", kind="ray", detail=detail))
    store = {"pid": 99, "ppid": 1, "role": "store"}
    if known_from == "its memory":
        files["processes/store-99/tasks.json"] = reading(pid=99, actors=[actor])
    else:
        store["actor_id"] = actor
    files["procs.json"] = table(
        {"pid": 11, "ppid": 1, "role": "engine", "cpu_pct": 2, "vol_ctxt_per_s": 40}, store
    )

    found = diagnosed(instance(1, because("await-never-completes")), files=files)

    assert "in process 99 (store)" in found.findings[0].sentence
    assert "look at process 99" in found.findings[0].next_step
    assert f"Ray actor {actor} (process 99, store): 1 task waits for its answer, in 1 process" in (
        tell(found).shared
    )


def test_the_same_await_in_several_servers_is_one_finding():
    rows = [
        {"pid": pid, "ppid": server, "role": "engine", "cpu_pct": 2, "vol_ctxt_per_s": 40}
        for server, pid in ((1, 11), (2, 12))
    ]
    files = {"procs.json": table(*rows)}
    for pid in (11, 12):
        for sample in ("", "2"):
            files[f"processes/engine-{pid}/tasks{sample}.json"] = reading(STUCK, pid=pid)
    why = because("await-never-completes")

    found = diagnosed(instance(1, why), instance(2, why), files=files)
    (finding,) = said(found, "await-never-completes")

    assert "The event loops of both stopped engines" in finding.sentence


# --- processes and the kernel --------------------------------------------------------------------


def test_a_dead_child_is_named_with_what_killed_it():
    files = {
        "procs.json": table(
            {"pid": 1, "role": "api_server", "state": "S"},
            {"pid": 85, "ppid": 1, "role": "engine_worker", "rank": 5, "state": "Z"},
        ),
        "kmsg.txt": b"x\n[1.0] Out of memory: Killed process 85 (python3)\n",
    }

    found = diagnosed(instance(1, because("child-dead", Dead)), files=files)

    [finding] = said(found, "child-dead")
    assert "process 85 (engine_worker, rank 5) is a zombie, killed by the kernel" in (
        finding.sentence
    )
    assert ("procs.json", "kmsg.txt") == tuple(c.path for c in finding.citations)


def test_uninterruptible_sleep_is_read_off_the_kernels_stack():
    files = {
        "procs.json": table({"pid": 1, "role": "engine", "state": "D", "wchan": "rpc_wait_bit"}),
        "stack_1.txt": b"[<0>] rpc_wait_bit_killable\n[<0>] nfs4_read\n",
    }

    [finding] = said(
        diagnosed(instance(1, because("storage-d-state")), files=files), "uninterruptible-sleep"
    )

    assert "uninterruptible sleep in rpc_wait_bit" in finding.sentence
    assert "NFS" in finding.sentence


def test_a_lost_gpu_is_a_fault_of_the_node():
    files = {
        "gpu.err": b"Unable to determine the device handle for GPU3: 0000:B3:00.0: GPU is lost.",
        "procs.json": table({"pid": 7, "role": "engine_worker", "rank": 3, "gpu": 3}),
    }

    found = diagnosed(instance(1), files=files)

    assert ("node-fault", 7) == (found.cause, found.culprit.pid)
    assert "GPU 0000:b3:00.0 has fallen off the bus" in found.findings[0].sentence


def test_a_failed_task_is_quoted():
    verdict = because("engine-task-dead", Dead, "its log says “Task <ModelAgentLoop> failed”")

    [finding] = said(diagnosed(instance(1, verdict)), "engine-task-dead")

    assert "Task <ModelAgentLoop> failed" in finding.sentence


# --- what is no hang -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cause", "rule", "words"),
    [
        (Idle, "not-a-hang:idle", "idle", "is idle"),
        (Ok, "not-a-hang:heartbeat-lost", "heartbeat-lost", "requests still complete"),
        (LogStalled, "not-a-hang:log-pipeline", "log-pipeline", "worker files still advance"),
    ],
)
def test_an_innocent_silence_is_explained(kind: Any, cause: str, rule: str, words: str):
    found = diagnosed(instance(1, because(cause, kind)))

    [finding] = said(found, rule)
    assert words in finding.sentence
    assert (kind.word, cause) == (found.verdict, found.cause)


def test_a_stall_that_ended_is_remembered():
    stall = RecordStall(instance=instance(1).instance, since=Instant(100.0), seconds=97.0)

    [finding] = said(diagnosed(instance(1, WORKING), stalls=(stall,)), "recovered-stall")

    assert "1 stalled for 97 s from 05:41:40 and went on by itself." == finding.sentence


def test_health_is_quoted_once_for_all_who_say_it():
    files = {
        f"processes/api_server-{pid}/health.json": H2.replace(b"10.0", f"1{pid}.0".encode())
        for pid in (1, 2)
    }

    [finding] = said(diagnosed(instance(1), instance(2), files=files), "health-says")

    assert finding.sentence.startswith("/health of 1 and 2 says “Backend health probe timed out")
    assert finding.sentence.endswith("the engine's event loop does not run.")


# --- what cannot be told -------------------------------------------------------------------------


def test_missing_evidence_is_named_with_how_to_get_it():
    [finding] = said(diagnosed(instance(4242)), "cannot-tell")

    assert "what their threads are doing" in finding.sentence
    assert "hangwatch attach --pid 4242 --now" in finding.next_step


def test_a_frozen_call_leaves_nothing_untold():
    assert [] == said(diagnosed(instance(1), files=frozen(1)), "cannot-tell")


def test_a_finding_never_weakens_a_surer_verdict():
    sure = replace(SILENT, confidence=Confidence.HIGH)

    found = diagnosed(instance(1, sure), instance(2, WORKING))

    assert (Confidence.HIGH, "hung") == (found.confidence, found.verdict)
