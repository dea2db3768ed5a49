"""Each point at which LMDeploy's engine can deadlock is named by the task that sits there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from remote_targets import interpreters, running

from hangwatch import remote

pytestmark = pytest.mark.needs_ptrace

ONE = next(each for each in interpreters() if each.is_ours)

POINTS = {
    "kernel_never_ends": ("MainLoopMain", "Executor.get_output_async", {"sleep", "ready"}),
    "forward_never_acknowledged": ("MainLoopMain", "Executor.forward_async", {"future"}),
    "guided_decoding": ("MainLoopMain", "Executor.forward_async", {"executor"}),
    "other_ranks_missing": ("MainLoopMain", "gather_ranks", {"sleep", "ready"}),
    "store_call_blocks": ("MainLoopMain", "store_put", {"running"}),
    "nothing_can_be_scheduled": ("MainLoopMain", "EngineLoop.no_running_warning", {"sleep"}),
    "sleep_never_drains": ("sleep", "EngineLoop.drain_for_sleep", {"event"}),
    "sender_loop_dead": ("request", "RequestManager.prepare_send", {"condition"}),
    "reply_lost": ("request", "RpcClient.async_call", {"future"}),
    "handles_leaked": ("request", "Api.generate", {"queue"}),
    "idle": ("MainLoopMain", "EngineLoop.wait_runnable", {"event"}),
}
"""Fault: the task that shows it, the function in its chain, and what its await is about."""


@pytest.mark.parametrize("fault", POINTS)
def test_the_point_of_a_deadlock_is_named(fault: str, tmp_path: Path):
    with running(ONE, "engine", fault, folder=tmp_path) as (process, _):
        target = remote.attach(process.pid)
        name, function, kinds = POINTS[fault]
        # A task that polls is torn, or running, when it happens to be resumed: look again.
        deadline = time.monotonic() + 30
        look: dict[str, remote.Task] = {}

        def settled(task: remote.Task) -> bool:
            moving = task.awaits.kind == "running" and "running" not in kinds
            return not (task.torn or moving) and function in [f.function for f in task.chain]

        while name not in look or not settled(look[name]):
            assert time.monotonic() < deadline, f"{name} is settled in no reading"
            look = {task.name: task for task in target.tasks().tasks}

    assert function in [frame.function for frame in look[name].chain]
    assert look[name].awaits.kind in kinds
    assert ("SenderWaitLoop" in look) == (fault != "sender_loop_dead")
    main = look["EngineMainLoop"]
    assert "wait" == main.awaits.kind
    assert 3 == len(main.awaits.tasks)
