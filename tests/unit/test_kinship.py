"""Who belongs to an engine."""

import re
from dataclasses import replace

from hangwatch.core.kinship import related
from hangwatch.model.capture import CapturedInstance
from hangwatch.model.identity import InstanceKey, ProcessId, Role
from hangwatch.model.process import Listener, ProcessRow
from hangwatch.model.profile import EngineProfile, RolePattern

PROFILE = EngineProfile(
    name="test",
    title="Test",
    alive=re.compile(b"alive"),
    needles=(b"alive",),
    families=(),
    interval=10.0,
    roles=(
        RolePattern(role=Role.ENGINE, pattern=re.compile(r"^ZMQMPEngine$|^ray::RayEngineWorker")),
        RolePattern(role=Role.ENGINE_WORKER, pattern=re.compile(r"^ray::RayWorkerWrapper")),
        RolePattern(role=Role.STORE, pattern=re.compile(r"^ray::SharedStore")),
        RolePattern(
            role=Role.API_SERVER,
            pattern=re.compile(r"serve api_server|^ray::run_lmdeploy_server_wrapper"),
        ),
        RolePattern(role=Role.DRIVER, pattern=re.compile(r"cli/rl\.py")),
    ),
)


def row(pid, ppid=1, title="", comm="python", **more):
    return ProcessRow(
        process=ProcessId(pid, pid * 10), ppid=ppid, comm=comm, state="S", title=title, **more
    )


def by_pid(targets):
    return {target.process.pid: target for target in targets}


INIT = row(1, ppid=0, comm="init")
STANDALONE = (
    INIT,
    row(40, title="bash start.sh", comm="bash"),
    row(42, ppid=40, title="python lmdeploy serve api_server internlm"),
    row(43, ppid=42, title="python -c from multiprocessing.resource_tracker import main;main(5)"),
    row(44, ppid=42, title="python -c spawn_main()", comm="ZMQMPEngine", gpus=(0,)),
    row(45, ppid=44, title="python -c spawn_main()"),
    row(90, title="python unrelated.py"),
)
RAY = (
    INIT,
    row(9, comm="gcs_server", title="gcs_server"),
    row(10, comm="raylet", title="raylet --session-dir /tmp/ray"),
    row(11, ppid=10, title="ray::run_lmdeploy_server_wrapper", comm="ray::run_lmdepl"),
    row(12, ppid=10, title="ray::RayEngineWorker.step", comm="ray::RayEngineW"),
    row(13, ppid=10, title="ray::RayWorkerWrapper", comm="ray::RayWorkerW", gpus=(3,)),
    row(14, ppid=10, title="ray::SharedStore", comm="ray::SharedStor"),
    row(15, ppid=10, title="ray::IDLE", comm="ray::IDLE"),
    row(16, ppid=10, title="ray::IDLE", comm="ray::IDLE", gpus=(4,)),
    row(17, ppid=10, title="python /x/ray/dashboard/agent.py"),
    row(20, title="python xtuner/v1/train/cli/rl.py"),
    row(21, title="python unrelated.py"),
)
SERVER_11 = CapturedInstance(instance=InstanceKey(pid=11), pid=11)


def test_a_standalone_server_brings_its_engine_and_workers():
    found = by_pid(related(STANDALONE, seeds=(42,), profiles=(PROFILE,)))

    assert {42: Role.API_SERVER, 44: Role.ENGINE, 45: Role.OTHER} == {
        pid: target.role for pid, target in found.items()
    }


def test_an_engine_brings_the_server_that_started_it():
    found = by_pid(related(STANDALONE, seeds=(44,), profiles=(PROFILE,)))

    assert {42, 44, 45} == set(found)
    assert found[42].why == "parent of 44"


def test_under_ray_every_sibling_of_the_same_raylet_is_kin():
    found = by_pid(related(RAY, seeds=(), profiles=(PROFILE,), instances=(SERVER_11,)))

    assert {
        9: Role.RAY_SYSTEM,
        10: Role.RAY_SYSTEM,
        11: Role.API_SERVER,
        12: Role.ENGINE,
        13: Role.ENGINE_WORKER,
        14: Role.STORE,
        16: Role.RAY_WORKER,
        20: Role.DRIVER,
    } == {pid: target.role for pid, target in found.items()}


def listener(port, host="::1"):
    return Listener(host=host, port=port, inode=port)


SESSION = "/tmp/ray/session_1/logs"
FLEET = (
    INIT,
    row(10, comm="raylet", title="raylet --session-dir /tmp/ray"),
    row(11, 10, "ray::run_lmdeploy_server_wrapper", called=("::1:121", "10.0.0.1:9000")),
    row(12, 10, "ray::run_lmdeploy_server_wrapper", called=("::1:122",)),
    row(21, 10, "ray::RayEngineWorker", listeners=(listener(121),), called=("::1:131", "::1:140")),
    row(22, 10, "ray::RayEngineWorker", listeners=(listener(122, "::"),), called=("::1:140",)),
    row(31, 10, "ray::RayWorkerWrapper", listeners=(listener(131),)),
    row(40, 10, "ray::SharedStore", listeners=(listener(140),)),
    row(41, 10, "ray::task", logs=(f"{SESSION}/python-core-worker-0a_41.log",)),
    row(50, 1, "python train.py", logs=(f"{SESSION}/python-core-driver-01ff_50.log",)),
    row(51, 1, "python x.py", logs=("/tmp/ray/session_2/logs/python-core-driver-01ff_51.log",)),
)
SERVERS = tuple(CapturedInstance(instance=InstanceKey(pid=pid), pid=pid) for pid in (11, 12))


def test_under_ray_connections_say_which_server_an_engine_and_its_worker_serve():
    found = by_pid(related(FLEET, seeds=(), profiles=(PROFILE,), instances=SERVERS))

    assert {11: "11", 12: "12", 21: "11", 22: "12", 31: "11", 40: ""} == {
        pid: found[pid].instance for pid in (11, 12, 21, 22, 31, 40)
    }


def test_an_engine_that_two_servers_call_is_nobodys():
    both = tuple(replace(r, called=("::1:121",)) if r.pid == 12 else r for r in FLEET)

    found = by_pid(related(both, seeds=(), profiles=(PROFILE,), instances=SERVERS))

    assert "" == found[21].instance


def test_the_driver_is_whoever_drives_the_same_ray_session():
    found = by_pid(related(FLEET, seeds=(11,), profiles=(PROFILE,)))

    assert Role.DRIVER is found[50].role
    assert 51 not in found


def test_a_worker_whose_parent_is_hidden_is_found_by_its_raylet_variable():
    orphans = tuple(
        replace(item, ppid=0, raylet=10) if item.pid in (11, 12) else item for item in RAY
    )

    found = by_pid(related(orphans, seeds=(11,), profiles=(PROFILE,)))

    assert found[12].why == "same raylet as 11"


def test_with_one_server_the_engines_under_ray_are_its_own():
    found = by_pid(related(RAY, seeds=(), profiles=(PROFILE,), instances=(SERVER_11,)))

    assert found[12].instance == found[13].instance == "11"
    assert found[14].instance == ""


def test_with_several_servers_an_engine_under_ray_is_not_guessed_to_belong_to_one():
    other = CapturedInstance(instance=InstanceKey(pid=99), pid=99)

    found = by_pid(related(RAY, seeds=(), profiles=(PROFILE,), instances=(SERVER_11, other)))

    assert found[11].instance == "11"
    assert found[12].instance == ""


def test_the_engine_of_a_stopped_instance_is_captured_first():
    table = (
        *STANDALONE,
        row(52, title="python lmdeploy serve api_server other"),
        row(54, ppid=52, comm="ZMQMPEngine"),
    )
    instances = (
        CapturedInstance(instance=InstanceKey(pid=42), pid=42, stopped=False),
        CapturedInstance(instance=InstanceKey(pid=52), pid=52),
    )

    order = [
        target.process.pid
        for target in related(table, seeds=(), profiles=(PROFILE,), instances=instances)
    ]

    assert [54, 52, 44, 42, 45] == order


def test_a_stopped_process_comes_before_its_equals():
    table = tuple(replace(item, state="T") if item.pid == 45 else item for item in STANDALONE)

    first = related(table, seeds=(42,), profiles=(PROFILE,))[0]

    assert first.process.pid == 45


def test_whoever_writes_the_log_is_kin():
    table = tuple(
        replace(item, logs=("/logs/server.log",)) if item.pid in (40, 42) else item
        for item in STANDALONE
    )

    found = by_pid(related(table, seeds=(), profiles=(PROFILE,), logs=("/logs/server.log",)))

    assert found[42].why == "writes /logs/server.log"
    assert 40 not in found


def test_the_topmost_writer_of_the_log_is_the_server_and_its_children_are_not():
    log = ("/logs/server.log",)
    table = (
        INIT,
        row(60, title="python serve.py", logs=log),
        row(61, ppid=60, title="python -c spawn_main()", logs=log),
    )

    found = by_pid(related(table, seeds=(), profiles=(PROFILE,), logs=log))

    assert {60: Role.API_SERVER, 61: Role.OTHER} == {p: t.role for p, t in found.items()}


def test_the_server_behind_tee_is_kin():
    table = (
        INIT,
        row(60, title="python serve.py", stdio=("/dev/null", "pipe:[7]", "pipe:[7]")),
        row(
            61,
            title="tee server.log",
            comm="tee",
            stdio=("pipe:[7]", "/dev/null", "/dev/null"),
            logs=("/logs/server.log",),
        ),
    )

    found = by_pid(related(table, seeds=(), profiles=(PROFILE,), logs=("/logs/server.log",)))

    assert {60} == set(found)


def test_our_own_processes_are_not_kin():
    table = (
        *STANDALONE,
        row(70, title="python -I -m hangwatch.capture.worker 69", gpus=(0,)),
        row(71, title="/venv/bin/python /venv/bin/hangwatch watch", gpus=(0,)),
    )

    assert {42, 44, 45} == set(by_pid(related(table, seeds=(42,), profiles=(PROFILE,))))


def test_what_was_named_is_kept_even_if_it_looks_boring():
    assert {40, 42, 44, 45} == set(by_pid(related(STANDALONE, seeds=(40,), profiles=(PROFILE,))))


def test_the_process_that_prints_the_beats_is_the_server_whatever_its_title():
    instance = CapturedInstance(instance=InstanceKey(pid=90), pid=90)

    found = related(STANDALONE, seeds=(), profiles=(PROFILE,), instances=(instance,))

    assert (90, Role.API_SERVER) in {(item.process.pid, item.role) for item in found}


def test_a_nameless_child_of_a_server_that_holds_a_gpu_is_its_engine():
    table = tuple(replace(item, comm="python") if item.pid == 44 else item for item in STANDALONE)

    assert by_pid(related(table, seeds=(42,), profiles=(PROFILE,)))[44].role is Role.ENGINE


def test_seeds_that_are_gone_find_nobody():
    assert () == related((INIT, row(90)), seeds=(4242,), profiles=(PROFILE,))
