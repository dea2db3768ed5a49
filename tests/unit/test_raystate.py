"""What Ray says of itself, without what a job was given besides. The answers are those of 2.60."""

import json

import pytest

from hangwatch.core import raystate
from hangwatch.core.objects import lines
from hangwatch.core.redaction import Redactor

STORE = "bb49053170043c1ee1815d9301000000"
ENGINE = "36ada29511fa623bb696304001000000"
SECRET = "planted-secret-value-123"

ACTORS = [
    {
        "actor_id": ENGINE,
        "class_name": "Engine",
        "state": "ALIVE",
        "job_id": "01000000",
        "name": "",
        "node_id": "b90b",
        "pid": 18311,
        "ray_namespace": "lmdeploy",
        "serialized_runtime_env": json.dumps(
            {"env_vars": {"HF_TOKEN": SECRET, "A": SECRET}, "working_dir": f"s3://{SECRET}"}
        ),
        "required_resources": {"GPU": 1.0},
        "death_cause": None,
        "num_restarts": "0",
        "a_field_of_a_later_version": SECRET,
    },
    {
        "actor_id": STORE,
        "class_name": "Store",
        "state": "DEAD",
        "name": "shared_store",
        "pid": 18213,
        "death_cause": {
            "actor_died_error_context": {"error_message": f"it died\nof this: {SECRET}"}
        },
    },
]
TASKS = [
    {"task_id": "1", "name": "Store.put", "state": "RUNNING", "actor_id": STORE},
    {"task_id": "2", "name": "Store.put", "state": "SUBMITTED_TO_WORKER", "actor_id": STORE},
    {"task_id": "3", "name": "Store.put", "state": "PENDING_ARGS_AVAIL", "actor_id": STORE},
    {"task_id": "4", "name": "run_server", "state": "RUNNING", "actor_id": None},
]
NODES = [
    {
        "hostname": "node-1",
        "ip": "192.0.2.2",
        "cmdline": ["raylet", f"--redis_password={SECRET}"],
        "raylet": {
            "nodeId": "b90b",
            "state": "ALIVE",
            "coreWorkersStats": [
                {"pid": 18213, "actorId": STORE, "taskQueueLength": 7, "numRunningTasks": "1"},
                {"pid": 17518, "actorId": "f" * 32, "numPendingTasks": 5, "workerType": "DRIVER"},
            ],
        },
    }
]


def answer(rows, **more):
    return json.dumps({"result": True, "data": {"result": {"result": rows}}, **more}).encode()


def nodes(rows):
    return json.dumps({"result": True, "data": {"summary": rows}}).encode()


def test_an_actor_has_its_names_its_state_and_its_process():
    engine, store = raystate.rows("actors", answer(ACTORS))

    assert ("Engine", "ALIVE", 18311) == (engine["class_name"], engine["state"], engine["pid"])
    assert "shared_store" == store["name"]


def test_of_a_runtime_environment_the_names_are_kept_and_no_value():
    engine, _ = raystate.rows("actors", answer(ACTORS))

    assert ["A", "HF_TOKEN"] == engine["env_vars"]
    assert ["env_vars", "working_dir"] == engine["runtime_env"]
    assert SECRET not in json.dumps(engine)


def test_of_a_death_the_kind_and_the_first_line_are_kept():
    _, store = raystate.rows("actors", answer(ACTORS))

    assert "actor_died_error_context" == store["death"]
    assert "it died" == store["death_message"]


def test_the_calls_that_wait_at_an_actor_are_counted_from_the_tasks():
    actors = raystate.rows("actors", answer(ACTORS))
    tasks = raystate.rows("ray_tasks", answer(TASKS))

    engine, store = raystate.with_calls(actors, tasks=tasks)

    assert (0, 0) == (engine["pending_calls"], engine["running_calls"])
    assert (2, 1) == (store["pending_calls"], store["running_calls"])


def test_where_the_node_says_how_many_calls_wait_it_is_believed():
    actors = raystate.rows("actors", answer(ACTORS))
    seen = raystate.rows("nodes", nodes(NODES))

    _, store = raystate.with_calls(actors, tasks=raystate.rows("ray_tasks", answer([])), nodes=seen)

    assert (7, 1) == (store["pending_calls"], store["running_calls"])


def test_of_a_node_no_command_line_is_kept():
    (node,) = raystate.rows("nodes", nodes(NODES))

    assert ("b90b", "ALIVE") == (node["nodeId"], node["state"])
    assert SECRET not in json.dumps(node)
    assert {"pid": 17518, "actorId": "f" * 32, "numPendingTasks": 5, "workerType": "DRIVER"} == (
        node["workers"][1]
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"data": {"result": {"result": 1}}, "result": true}',
        b"[" * 100_000,
        answer([], result=False, msg="Failed to get a response"),
    ],
)
def test_what_is_no_answer_of_ray_is_an_error_that_is_said(body):
    with pytest.raises(ValueError, match=r"\S"):
        raystate.rows("actors", body)


def test_rows_that_are_no_objects_are_passed_over_and_there_is_an_end_to_them():
    assert [] == raystate.rows("workers", answer([1, None, "x"]))
    assert raystate.MAX_ROWS == len(raystate.rows("workers", answer([{"pid": 1}] * 5000)))


def test_arguments_of_ray_are_kept_by_an_allow_list():
    kept = raystate.flags(
        [
            *("raylet", "--session_dir=/tmp/ray/session_1", "--session-name=session_1", "--head"),
            *(f"--redis_password={SECRET}", f"--config_list={SECRET}"),
            f"--python_worker_command=python --redis-password={SECRET}",
        ]
    )

    assert {"session_dir": "/tmp/ray/session_1", "session_name": "session_1", "head": ""} == kept


def test_a_worker_is_named_by_its_title_and_by_what_its_log_says_last():
    named = raystate.worker(
        "ray::RayEngineWorker.get_schedule_metrics",
        "/tmp/ray/session_1/logs/worker-57df15f5d6be-01000000-42.out",
        b":job_id:01000000\n:actor_name:RayEngineWorker\nhello\n",
    )

    assert {
        "title": "RayEngineWorker.get_schedule_metrics",
        "worker_id": "57df15f5d6be",
        "job_id": "01000000",
        "actor_name": "RayEngineWorker",
    } == named
    assert {"title": "run_server"} == raystate.worker("ray::run_server")
    assert {} == raystate.worker("python train.py")


def test_a_dashboard_is_that_of_its_own_session_alone():
    def line(session):
        return ("python", "/lib/ray/dashboard/dashboard.py", f"--session-dir={session}")

    assert raystate.is_dashboard(line("/tmp/ray/session_1"), "/tmp/ray/session_1")
    assert not raystate.is_dashboard(line("/tmp/ray/session_12"), "/tmp/ray/session_1")
    assert not raystate.is_dashboard(("vim", "--session-dir=/tmp/ray/session_1"), "/tmp/ray/s")


def test_of_the_logs_those_of_ray_and_of_the_captured_processes_are_read_best_first():
    names = [
        "dashboard.log",
        "worker-57df-01000000-42.out",
        "worker-57df-01000000-43.out",
        "python-core-worker-57df_42.log",
        "python-core-worker-57df_7.log",
        "raylet.out",
        "event_GCS.log",
        "old",
    ]

    assert (
        "raylet.out",
        "python-core-worker-57df_42.log",
        "worker-57df-01000000-42.out",
        "dashboard.log",
    ) == raystate.telling_logs(names, [42])


def test_what_users_asked_is_withheld_from_names_of_ray_tasks():
    found = [{"task_id": "1", "name": "prompt='tell me of my illness'", "state": "RUNNING"}]

    shown = Redactor().file("ray/ray_tasks.json", lines(found))

    assert b"illness" not in shown
    assert b'"state": "RUNNING"' in shown
