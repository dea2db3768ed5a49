"""Two samples of stacks: who moved, who waits, who sits in a call."""

from __future__ import annotations

import json

import pytest

from hangwatch.core.motion import (
    alias,
    call_in_loop,
    call_served,
    is_idle,
    motion,
    parse_threads,
    planned,
    stack_vital,
    stuck_start,
    telling_frame,
    threads,
)
from hangwatch.model.dossier import Frame, ThreadStack
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Motion, StackVital

LIB = "/usr/lib/python3.12/"
SITE = "/opt/venv/lib/python3.12/site-packages/"

SELECT = Frame(function="EpollSelector.select", file=LIB + "selectors.py", line=468)
RUN_ONCE = Frame(function="BaseEventLoop._run_once", file=LIB + "asyncio/base_events.py", line=1954)
HANDLE = Frame(function="Handle._run", file=LIB + "asyncio/events.py", line=88)
FOREVER = Frame(function="run_forever", file=LIB + "asyncio/base_events.py", line=645)
THREAD_RUN = Frame(function="Thread.run", file=LIB + "threading.py", line=1010)
WAIT = Frame(function="Condition.wait", file=LIB + "threading.py", line=355)
QUEUE_GET = Frame(function="Queue.get", file=LIB + "queue.py", line=171)
RAY_GET = Frame(function="get_objects", file=SITE + "ray/_private/worker.py", line=967)
FETCH = Frame(
    function="EngineInstance.fetch", file=SITE + "lmdeploy/pytorch/engine/engine.py", line=153
)

PARKED = (SELECT, RUN_ONCE, FOREVER, THREAD_RUN)
BLOCKED = (WAIT, RAY_GET, FETCH, HANDLE, RUN_ONCE, FOREVER, THREAD_RUN)


def stack(frames: tuple[Frame, ...], sample: int = 1, **changes: object) -> ThreadStack:
    values: dict[str, object] = {
        "pid": 7,
        "tid": 7,
        "name": "MainThread",
        "sample": sample,
        "frames": frames,
    }
    return ThreadStack(**{**values, **changes})  # type: ignore[arg-type]


def twice(frames: tuple[Frame, ...], **changes: object) -> list[ThreadStack]:
    return [stack(frames, 1, **changes), stack(frames, 2, **changes)]


def test_a_loop_that_sits_in_the_same_call_twice_is_frozen_there():
    found = motion(threads(twice(BLOCKED)))

    assert (
        Motion.FROZEN,
        "get_objects (ray/_private/worker.py:967)",
        "MainThread",
    ) == found


def test_a_wait_inside_a_coroutine_loop_is_a_call_and_no_idle_wait():
    assert not is_idle(stack(BLOCKED))


def test_a_parked_loop_waits_and_says_nothing():
    assert (Motion.WAITING, "", "") == motion(threads(twice(PARKED)))


def test_a_loop_whose_frames_move_is_busy():
    elsewhere = (Frame(function="pack", file=SITE + "lmdeploy/x.py", line=9), *BLOCKED[3:])

    found = motion(threads([stack(BLOCKED, 1), stack(elsewhere, 2)]))

    assert (Motion.BUSY, "pack (lmdeploy/x.py:9)", "MainThread") == found


@pytest.mark.parametrize("order", [(PARKED, BLOCKED), (BLOCKED, PARKED)])
def test_a_loop_that_was_back_in_its_wait_takes_its_turns_and_is_not_blocked(order):
    first, second = order

    what, _, _ = motion(threads([stack(first, 1), stack(second, 2)]))

    assert Motion.WAITING == what


def test_a_loop_that_is_on_the_cpu_in_one_long_call_is_busy():
    what, _, _ = motion(threads(twice(BLOCKED, active=True)))

    assert Motion.BUSY == what


def test_spinning_for_the_gpu_is_not_being_busy():
    spin = Frame(function="synchronize", file=SITE + "torch/cuda/streams.py", line=231)

    what, _, _ = motion(threads(twice((spin, *BLOCKED[2:]), active=True)))

    assert Motion.FROZEN == what


def test_one_sample_proves_no_freeze():
    assert Motion.WAITING == motion(threads([stack(BLOCKED)]))[0]


def test_a_synchronous_loop_that_waits_for_its_input_is_idle():
    loop = Frame(function="run_busy_loop", file=SITE + "vllm/v1/engine/core.py", line=1)

    assert is_idle(stack((WAIT, QUEUE_GET, loop)))


def test_a_thread_that_wants_the_interpreters_lock_is_not_idle():
    take_gil = Frame(function="take_gil", module="libpython3.12.so")

    assert not is_idle(stack((take_gil, *PARKED)))


def test_under_uvloop_the_name_of_the_thread_stands_for_the_loops_frame():
    blocked = stack((RAY_GET, FETCH, THREAD_RUN), name="AsyncIO Thread: default")

    assert (RAY_GET, FETCH) == call_in_loop(blocked)


def test_a_ray_actor_that_waits_inside_a_method_serves_a_call():
    method = Frame(function="SharedStore.get", file="/app/store.py", line=9)
    idle = Frame(function="Worker.main_loop", file=SITE + "ray/_private/worker.py", line=1069)

    assert (WAIT, method) == call_served(stack((WAIT, method, idle)))
    assert () == call_served(stack((idle,)))


def test_a_librarys_own_frame_has_the_name_that_people_call():
    assert ("ray.get", "") == (alias(RAY_GET), alias(FETCH))


def test_the_telling_frame_is_the_innermost_that_is_not_standard_library():
    assert RAY_GET == telling_frame((WAIT, RAY_GET, FETCH))


def test_threads_are_told_apart_without_kernel_ids():
    pair = [
        stack(PARKED, 1, tid=None, name="w"),
        stack(BLOCKED, 1, tid=None, name="w"),
        stack(PARKED, 2, tid=None, name="w"),
        stack(BLOCKED, 2, tid=None, name="w"),
    ]

    assert [False, False] == [thread.moved for thread in threads(pair)]


def test_a_frozen_process_speaks_for_its_instance():
    stacks = [*twice(PARKED, pid=1), *twice(BLOCKED, pid=2), *twice(BLOCKED, pid=3, active=True)]

    said = stack_vital(stacks, at=Instant(5.0))

    assert (
        StackVital(
            at=Instant(5.0),
            motion=Motion.FROZEN,
            frame="get_objects (ray/_private/worker.py:967)",
            pid=2,
            thread="MainThread",
        )
        == said
    )


DUMP = [
    {
        "pid": 7,
        "thread_id": 1,
        "thread_name": "MainThread",
        "os_thread_id": 7,
        "active": True,
        "owns_gil": False,
        "frames": [{"name": "f", "filename": "/a.py", "line": 3, "module": None}],
    }
]


def test_a_dump_is_cited_by_the_line_its_thread_begins_on():
    data = json.dumps(DUMP + DUMP, indent=1).encode()

    lines = [t.citation.line for t in parse_threads(data, None, 1, "threads.json") if t.citation]

    assert [2, 18] == lines


def test_several_dumps_behind_each_other_are_read_as_one():
    data = json.dumps(DUMP).encode() * 3

    assert 3 == len(parse_threads(data, None, 1))


def test_a_dump_that_was_cut_short_gives_its_whole_threads():
    data = json.dumps(DUMP + DUMP).encode()[:-20]

    assert 1 == len(parse_threads(data, None, 1))


def test_a_dump_without_pid_takes_the_one_of_its_folder():
    [thread] = parse_threads(b'[{"frames": [], "thread_name": "x"}]', 42, 2)

    assert (42, 2) == (thread.pid, thread.sample)


def test_what_is_no_dump_is_an_error():
    with pytest.raises(ValueError, match="py-spy"):
        parse_threads(b"Error: Failed to get process executable name", 1, 1)


def test_no_thread_at_all_is_a_dump_too():
    assert () == parse_threads(b"[]", 1, 1)


GIL_HELD = (
    Frame(function="pthread_cond_wait", file="", module="libc.so.6"),
    Frame(function="CoreWorker.list_actors", file=SITE + "ray/_raylet.py", line=41),
    Frame(function="<module>", file="/app/driver.py", line=7),
)
GIL_WANTED = (
    Frame(function="take_gil", file="", module="libpython3.12.so"),
    Frame(function="pump", file="/app/io.py", line=3),
)


def test_a_thread_that_holds_the_interpreters_lock_off_the_cpu_freezes_all_that_want_it():
    held = twice(GIL_HELD, owns_gil=True)
    wants = twice(GIL_WANTED, tid=8, name="io")

    assert Motion.FROZEN is motion(threads([*held, *wants]))[0]
    assert Motion.WAITING is motion(threads(held))[0]


def test_a_thread_that_holds_the_lock_on_the_cpu_works():
    held = twice(GIL_HELD, owns_gil=True, active=True)
    wants = twice(GIL_WANTED, tid=8, name="io")

    assert Motion.WAITING is motion(threads([*held, *wants]))[0]


def test_a_thread_that_waits_for_an_import_lock_is_frozen():
    bootstrap = "<frozen importlib._bootstrap>"
    waits = (
        Frame(function="_ModuleLock.acquire", file=bootstrap, line=357),
        Frame(function="_ModuleLockManager.__enter__", file=bootstrap, line=417),
        Frame(function="probe", file="/app/probe.py", line=71),
    )

    found = motion(threads(twice(waits, name="Thread-2")))

    assert (Motion.FROZEN, "probe (app/probe.py:71)", "Thread-2") == found


def test_the_main_thread_of_a_process_that_has_no_loop_yet_tells_where_its_start_is_stuck():
    baton = (
        Frame(function="FileBaton.wait", file=SITE + "torch/utils/file_baton.py", line=50),
        Frame(function="load", file=SITE + "torch/utils/cpp_extension.py", line=1681),
    )

    assert "FileBaton.wait (torch/utils/file_baton.py:50)" == stuck_start(threads(twice(baton)))
    assert "" == stuck_start(threads(twice(baton, active=True)))
    assert "" == stuck_start(threads([stack(baton)]))
    assert "" == stuck_start(threads([*twice(baton), *twice(PARKED, tid=8, name="io")]))


def test_new_weights_block_a_loop_as_planned():
    update = Frame(
        function="Engine.update_params", file=SITE + "lmdeploy/pytorch/engine/engine.py", line=9
    )
    loading = threads(twice((FETCH, update, HANDLE, RUN_ONCE, FOREVER)))

    assert "new weights: Engine.update_params (lmdeploy/pytorch/engine/engine.py:9)" == planned(
        loading[0]
    )
    assert "" == planned(threads(twice(BLOCKED))[0])
