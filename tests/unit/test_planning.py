"""Who is asked what, in which order."""

from dataclasses import replace
from pathlib import PurePosixPath

from hangwatch.core.planning import file_name, plan, spared, turns
from hangwatch.model.capture import (
    CapturedInstance,
    CaptureKind,
    Collector,
    Gate,
    Means,
    Scope,
    Stage,
    Target,
)
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.policy import Policy
from hangwatch.model.process import Listener


def collector(name, *, rung, scope=Scope.PROCESS, stage=Stage.A, samples=1, **more):
    return Collector(
        name=name,
        title=name,
        scope=scope,
        rung=rung,
        stage=stage,
        samples=samples,
        timeout=10.0,
        collect=lambda _step, _room: None,
        **more,
    )


def target(pid, role=Role.ENGINE, **more):
    return Target(process=ProcessId(pid, pid), role=role, **more)


KERNEL = collector("kernel", rung=1, samples=2)
STACKS = collector("stacks", rung=5, samples=2, python_only=True)
NATIVE = collector("native", rung=6, stage=Stage.B, gates=(Gate.HUNG, Gate.NO_D_STATE))
LOGS = collector("logs", rung=8, scope=Scope.LOG, stage=Stage.B)
ENDPOINTS = collector("endpoints", rung=2, scope=Scope.ENDPOINT, samples=2, waits=True)
GPU = collector("gpu", rung=3, scope=Scope.NODE, samples=2)
SERVER = target(
    7,
    Role.API_SERVER,
    listeners=(Listener(host="10.0.0.1", port=8000, inode=1),),
)


def ids(*targets, collectors=(STACKS, KERNEL), **more):
    made = plan(targets, collectors=collectors, policy=Policy(), paths={}, **more)
    return [step.id for step in made.steps]


def urls_of(made):
    options = made.steps[0].options
    return [value for key, value in options.items() if key.startswith("url.")]


def test_the_most_volatile_comes_first_and_within_it_the_most_suspicious():
    assert [
        "kernel/2/1",
        "kernel/1/1",
        "stacks/2/1",
        "stacks/1/1",
        "kernel/2/2",
        "kernel/1/2",
        "stacks/2/2",
        "stacks/1/2",
    ] == ids(target(2), target(1))


def test_what_takes_time_stands_between_the_samples_and_is_about_the_most_suspicious():
    slow = collector("slow", rung=5, stage=Stage.PAUSE, most=2, roles=frozenset({Role.ENGINE}))

    assert [
        *("stacks/1/1", "stacks/2/1", "stacks/3/1", "stacks/4/1"),
        *("slow/2", "slow/3"),
        *("stacks/1/2", "stacks/2/2", "stacks/3/2", "stacks/4/2"),
    ] == ids(target(1, Role.STORE), target(2), target(3), target(4), collectors=[STACKS, slow])


def test_those_that_share_a_pause_end_with_it_whatever_their_number():
    assert (4.0,) == turns(1, at_once=2, now=0.0, end=4.0)
    assert (12.0, 12.0, 14.0) == turns(3, at_once=2, now=10.0, end=14.0)
    assert () == turns(0, at_once=2, now=10.0, end=14.0)


def test_without_a_second_sample_there_is_no_pause_to_be_used():
    slow = collector("slow", rung=5, stage=Stage.PAUSE)
    single = collector("single", rung=1)

    assert ["single/1"] == ids(target(1), collectors=[single, slow])


def test_stage_b_follows_both_samples_and_brings_its_gates():
    made = plan([target(1)], collectors=[NATIVE, STACKS], policy=Policy(), paths={})

    assert ["stacks/1/1", "stacks/1/2", "native/1"] == [step.id for step in made.steps]
    assert (Gate.HUNG, Gate.NO_D_STATE) == made.steps[-1].gates


def test_a_program_without_python_gets_no_python_stacks_and_a_note_says_so():
    made = plan([target(1, python=False)], collectors=[KERNEL, STACKS], policy=Policy(), paths={})

    assert {"kernel"} == {step.collector for step in made.steps}
    assert ("no Python stacks of 1: no Python there",) == made.notes


def test_all_servers_are_asked_in_one_step_that_waits_beside_the_others():
    made = plan(
        [SERVER, target(8)],
        collectors=[ENDPOINTS],
        policy=Policy(),
        paths={"health": "/health"},
    )

    assert ["endpoints/1", "endpoints/2"] == [step.id for step in made.steps]
    assert made.steps[0].waits
    assert (SERVER,) == made.steps[0].targets
    assert {"path.7.health": "/health", "url.7.0": "http://10.0.0.1:8000"} == made.steps[0].options


def test_a_server_that_nothing_is_wrong_with_is_asked_once():
    other = target(8, Role.API_SERVER, listeners=(Listener(host="10.0.0.1", port=8001, inode=2),))

    made = plan(
        [SERVER, other],
        collectors=[ENDPOINTS],
        policy=Policy(),
        paths={"health": "/health"},
        well=[8],
    )
    alone = plan(
        [other],
        collectors=[ENDPOINTS],
        policy=Policy(),
        paths={"health": "/health"},
        well=[8],
    )

    assert [(SERVER, other), (SERVER,)] == [step.targets for step in made.steps]
    assert ["endpoints/1"] == [step.id for step in alone.steps]


def test_each_server_is_asked_the_paths_of_its_own_engine():
    made = plan(
        [SERVER],
        collectors=[ENDPOINTS],
        policy=Policy(),
        paths={"health": "/health", "metrics": "/metrics"},
        own_paths={7: {"health": "/v1/models"}},
    )

    asked = {k: v for k, v in made.steps[0].options.items() if k.startswith("path.")}
    assert {"path.7.health": "/v1/models"} == asked


def test_an_address_that_is_known_to_answer_is_the_only_one_asked():
    server = target(
        7,
        Role.API_SERVER,
        listeners=tuple(Listener(host="10.0.0.1", port=p, inode=p) for p in (1, 2)),
    )

    made = plan(
        [server],
        collectors=[ENDPOINTS],
        policy=Policy(),
        paths={"health": "/health"},
        urls={7: "http://10.0.0.1:2"},
    )

    assert ["http://10.0.0.1:2"] == urls_of(made)


def test_an_address_that_the_server_does_not_hold_is_never_asked():
    made = plan(
        [SERVER],
        collectors=[ENDPOINTS],
        policy=Policy(),
        paths={"health": "/health"},
        urls={7: "http://other:1"},
    )

    assert ["http://10.0.0.1:8000"] == urls_of(made)


def test_a_listener_whose_engine_nobody_knows_is_asked_nothing():
    assert [] == ids(SERVER, collectors=[ENDPOINTS])


def test_without_a_server_nobody_is_asked():
    assert [] == ids(target(1), collectors=[ENDPOINTS])


def test_each_log_is_read_once_under_a_name_of_its_own():
    made = plan(
        [target(1, logs=("/a/worker-1.out", "/b/worker-1.out", "/a/data.bin"))],
        collectors=[LOGS],
        policy=Policy(),
        paths={},
        logs=("/a/worker-1.out",),
    )

    assert [("/a/worker-1.out", "worker-1.out"), ("/b/worker-1.out", "2-worker-1.out")] == [
        (step.subject, step.options["name"]) for step in made.steps
    ]
    assert {PurePosixPath("logs")} == {step.folder for step in made.steps}


def test_step_ids_are_unique():
    made = ids(SERVER, target(8), target(9), collectors=[KERNEL, STACKS, NATIVE, ENDPOINTS, GPU])

    assert len(made) == len(set(made))


def test_settings_of_a_collector_reach_its_steps():
    made = plan(
        [target(1)],
        collectors=[STACKS, KERNEL],
        policy=Policy(),
        paths={},
        options={"stacks": {"py_spy": "/opt/py-spy"}},
    )

    assert {"kernel": {}, "stacks": {"py_spy": "/opt/py-spy"}} == {
        step.collector: dict(step.options) for step in made.steps
    }


def test_the_first_sample_of_a_file_has_no_number():
    assert ("threads.json", "threads2.json") == (
        file_name("threads", ".json", 1),
        file_name("threads", ".json", 2),
    )


def test_a_healthy_fleet_is_looked_at_without_tools_that_could_be_felt():
    made = ids(target(1), collectors=(KERNEL, STACKS, LOGS), kind=CaptureKind.BASELINE)

    assert ["kernel/1"] == made


def test_a_collector_with_a_price_runs_only_for_whom_it_is_made_and_only_by_request():
    priced = collector("dump", rung=10, opt_in=True, roles=frozenset({Role.ENGINE}), memory=1 << 30)
    everyone = [target(1), target(2, Role.DRIVER)]
    asked = plan(everyone, collectors=[priced], policy=Policy(), paths={}, collect=("dump",))

    assert [] == ids(*everyone, collectors=[priced])
    assert [("dump/1", 1 << 30)] == [(step.id, step.memory) for step in asked.steps]


def test_a_collector_of_gpus_leaves_out_who_has_none_open_and_stops_at_its_number():
    priced = collector("attach", rung=10, gpu_only=True, most=1)

    assert ["attach/2"] == ids(
        target(1), target(2, gpus=(0, 1)), target(3, gpus=(2,)), collectors=[priced]
    )


def test_what_breaks_its_target_says_so_in_the_plan():
    (step,) = plan(
        [target(1)], collectors=[collector("core", rung=10, harms=True)], policy=Policy(), paths={}
    ).steps

    assert step.harms


def test_asking_a_process_for_a_dump_is_a_touch_of_the_audit_trail():
    (step,) = plan(
        [target(1)], collectors=[collector("core", rung=10, asks=True)], policy=Policy(), paths={}
    ).steps

    assert Means.ASK == step.means


def test_a_look_at_the_whole_machine_knows_how_long_it_is_until_the_next_one():
    made = plan([], collectors=[GPU], policy=Policy(sample_gap=3.5), paths={})
    owner = replace(target(1), gpus=(0,))
    baseline = plan([owner], collectors=[GPU], policy=Policy(), paths={}, kind=CaptureKind.BASELINE)

    assert ["3.5", "3.5"] == [step.options["gap"] for step in made.steps]
    assert [{}] == [dict(step.options) for step in baseline.steps]


def test_a_look_of_the_baseline_loads_no_driver_where_nobody_has_a_gpu():
    made = plan([target(1)], collectors=[GPU], policy=Policy(), paths={}, kind=CaptureKind.BASELINE)

    assert () == made.steps


def test_what_can_wait_lets_the_stacks_of_its_sample_go_first():
    locks = collector("locks", rung=1, samples=2, unhurried=True)

    assert [
        "kernel/1/1",
        "stacks/1/1",
        "locks/1/1",
        "kernel/1/2",
        "stacks/1/2",
        "locks/1/2",
    ] == ids(target(1), collectors=(locks, STACKS, KERNEL))


def test_a_collector_that_is_for_some_captures_is_left_out_of_the_others():
    locks = collector("locks", rung=1, kinds=frozenset({CaptureKind.INCIDENT}))

    assert ["locks/1"] == ids(target(1), collectors=[locks])
    assert [] == ids(target(1), collectors=[locks], kind=CaptureKind.BASELINE)


def test_steps_that_compute_get_more_time_where_others_take_the_cores_and_the_plan_says_so():
    waiting = replace(KERNEL, name="waiting", waits=True)
    collectors = [replace(STACKS, timeout=10.0), replace(waiting, timeout=10.0)]

    at_rest, loaded = (
        plan([target(1)], collectors=collectors, policy=Policy(), paths={}, load=load)
        for load in (1.9, 2.0)
    )

    assert {10.0} == {step.timeout for step in at_rest.steps}
    assert {("waiting", 10.0), ("stacks", 30.0)} == {
        (step.collector, step.timeout) for step in loaded.steps
    }
    assert (0, 1) == (len(at_rest.notes), len(loaded.notes))


def test_a_collector_that_was_asked_for_and_has_nothing_to_do_is_noted():
    priced = collector("cuda_gdb", rung=10, stage=Stage.B, opt_in=True, gpu_only=True)
    asked = plan([target(1)], collectors=[priced], policy=Policy(), paths={}, collect=("cuda_gdb",))

    record = plan(
        [target(1)],
        collectors=[priced],
        policy=Policy(),
        paths={},
        collect=("cuda_gdb",),
        kind=CaptureKind.RUN,
    )

    expected = "cuda_gdb has nothing to do: none of the processes is seen to have a GPU open"
    assert (expected,) == asked.notes
    assert ("cuda_gdb has nothing to do: this kind of capture touches no process",) == record.notes


def test_of_an_engine_that_may_belong_to_a_server_that_goes_on_nothing_is_sure():
    one, two = (CapturedInstance(instance=InstanceKey(pid=pid), pid=pid) for pid in (1, 2))
    serving = replace(two, stopped=False)
    engines = (target(11, instance="1"), target(12, instance="2"), target(13))

    assert frozenset() == spared((one, two), engines)
    assert {12, 13} == spared((one, serving), engines)
