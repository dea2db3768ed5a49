"""What two samples of Python stacks say: who moved, who waits, who sits in a call.

Theory of operation
-------------------

An engine that is merely idle and one that is stuck show mostly the same frames: worker threads
in a queue, event loops in ``select``, Ray's main thread in ``main_loop``. Those are *idle waits*,
and they say nothing. What does say something is a thread that runs a loop and is **not** back in
its loop: between the loop's own frame and the innermost one lies a call.

1. *The loop's frame* is known by name and file (``LOOPS``). An event loop that runs in compiled
   code (uvloop) leaves no frame, so a thread that is named after its loop counts from
   ``Thread.run`` on.
2. *In a call* means that frames lie above the loop's own and above its machinery. A synchronous
   loop that waits for its input in a queue is idle there; a coroutine loop whose callback waits
   in a queue is blocked, because nothing else on that loop can run meanwhile.
3. *Moved* means that the frames differ between the samples. A stack that is the same twice is
   frozen as far as two looks can tell; a thread on CPU may be busy in one long frame and is
   never called frozen, unless it spins in a known wait for the GPU.

Two freezes need no loop. A thread that holds the interpreter's lock off the CPU while others want
it stops every one of them. And a thread that waits for a module's import lock waits for another one
that imports; where both stand still, each waits for the other.

A process that has not come to its loop yet is starting. What its main thread stands in tells of a
start that does not end (``stuck``), and of nothing else: many a helper sleeps like that for ever.

One sample alone proves no freeze.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from hangwatch.core.objects import integer, objects
from hangwatch.model.dossier import Citation, Frame, ThreadMotion, ThreadStack
from hangwatch.model.profile import EngineProfile
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Motion, StackVital

# File (end of the path), then function: where a thread with nothing to do sits. The names are
# plain, because py-spy qualifies them only since 0.4.3.
IDLE_WAITS: Final = tuple(
    (re.compile(file), frozenset(functions.split()))
    for file, functions in (
        (r"(^|/)selectors\.py$", "select poll"),
        (r"(^|/)threading\.py$", "wait join _wait_for_tstate_lock _shutdown run"),
        (r"(^|/)queue\.py$", "get"),
        (r"(^|/)concurrent/futures/thread\.py$", "_worker"),
        (r"(^|/)concurrent/futures/process\.py$", "wait_result_broken_or_wakeup"),
        (r"(^|/)multiprocessing/connection\.py$", "wait _recv poll accept _poll"),
        (r"(^|/)multiprocessing/(queues|synchronize|popen_\w+)\.py$", "get _feed wait poll"),
        (r"(^|/)multiprocessing/resource_tracker\.py$", "main"),
        (r"(^|/)multiprocessing/(spawn|forkserver)\.py$", "main"),
        (r"(^|/)socketserver\.py$", "serve_forever"),
        (r"(^|/)socket\.py$", "accept"),
        (r"(^|/)subprocess\.py$", "_try_wait wait"),
        (r"(^|/)asyncio/runners\.py$", "run"),
        (r"(^|/)uvloop/__init__\.py$", "run"),
        (r"(^|/)zmq/sugar/poll\.py$", "poll"),
        (r"(^|/)zmq/utils/garbage\.py$", "run"),
        (r"(^|/)ray/_private/worker\.py$", "main_loop listen_error_messages print_logs"),
        (r"(^|/)ray/_private/workers/default_worker\.py$", "<module>"),
        (r"(^|/)tqdm/_monitor\.py$", "run"),
        (r"(^|/)torch/_inductor/compile_worker/", "_read_thread main _recv_msg"),
    )
)

IDLE_NATIVE: Final = re.compile(
    r"^_*(GI_+)?(libc_)?(epoll_p?wait2?|p?poll|p?select|futex\w*|pthread_cond_\w*wait\w*|"
    r"sem_(timed|clock)?wait|do_sem_wait|nanosleep|clock_nanosleep|accept4?|read|recv(from|msg)?|"
    r"uv__io_poll|syscall)$"
)

# A thread that wants the interpreter's lock has something to do, wherever it is.
WANTS_GIL: Final = re.compile(r"^(take_gil|PyEval_RestoreThread|PyEval_AcquireThread)$")

# importlib/_bootstrap.py is frozen: its frames name it so in every version.
IMPORT_LOCK: Final = re.compile(r"^(acquire|_lock_unlock_module|__enter__)$")
IMPORTLIB: Final = re.compile(r"importlib\._bootstrap\b|(^|/)importlib/_bootstrap\.py$")

# Path, then function, then what it is: work that blocks a loop as planned, and ends by itself.
# The names are those of LMDeploy (pytorch/engine/engine.py, mp_engine/base_worker.py), of vLLM
# (v1/worker/gpu_worker.py) and of SGLang (srt/managers/scheduler_update_weights_mixin.py).
PLANNED: Final = (
    (re.compile(r""), re.compile(r"^(update_(params|weights?\w*)|load_weights)$"), "new weights"),
    (re.compile(r""), re.compile(r"^(wakeup|wake_up|resume_memory_occupation)$"), "waking up"),
    (re.compile(r""), re.compile(r"^(warmup\w*|capture_model|capture_graphs?)$"), "warming up"),
    (
        re.compile(r"(^|/)torch/cuda/graphs\.py$"),
        re.compile(r"^(capture_\w+|__exit__)$"),
        "a graph",
    ),
    (re.compile(r"(^|/)triton/(compiler|runtime/(jit|autotuner))"), re.compile(r""), "compiling"),
    (re.compile(r"(^|/)torch/(_inductor|_dynamo)/"), re.compile(r""), "compiling"),
)

MAIN_THREAD: Final = "MainThread"

# File, then function: the frame of a loop itself. ``coroutine`` loops may never wait inside.
LOOPS: Final = (
    (re.compile(r"(^|/)asyncio/base_events\.py$"), re.compile(r"^_run_once$"), True),
    (re.compile(r"(^|/)uvloop/__init__\.py$"), re.compile(r"^run$"), True),
    (re.compile(r"(^|/)asyncio/(runners|base_events)\.py$"), re.compile(r"^run"), True),
    # vLLM's and SGLang's schedulers and workers run plain loops on the main thread.
    (re.compile(r""), re.compile(r"^(run_busy_loop|worker_busy_loop|event_loop_\w+)$"), False),
)

# Ray runs the methods of an ordinary actor, and tasks, on the main thread above ``main_loop``.
RAY_WORKER: Final = re.compile(r"(^|/)ray/_private/worker\.py$")

# What people call, where the innermost frame has another name.
PUBLIC_NAMES: Final = ((RAY_WORKER, "get_objects", "ray.get"), (RAY_WORKER, "wait", "ray.wait"))

# Ray runs each concurrency group of an async actor on a thread of this name, under uvloop.
LOOP_THREAD: Final = re.compile(r"^AsyncIO Thread: ")
THREAD_RUN: Final = re.compile(r"(^|/)threading\.py$")

# Between the loop's frame and the callback it runs.
MACHINERY: Final = re.compile(r"(^|/)(asyncio/[a-z_]+|selectors)\.py$")

STANDARD_LIBRARY: Final = re.compile(r"/lib(64)?/python3\.\d+t?/(?!site-packages/|dist-packages/)")

# These burn CPU while they wait for the GPU; on CPU does not mean busy there.
SPINS: Final = re.compile(
    r"^(cu(da)?(Event|Stream|Ctx|Device)Synchronize|synchronize|item|_local_scalar_dense)$"
)


def parse_threads(
    data: bytes, pid: int | None, sample: int, path: str = ""
) -> tuple[ThreadStack, ...]:
    """Return the threads of a ``py-spy dump --json`` list, or of several behind each other.

    Args:
        data: The file; one that was cut short gives the threads that are whole.
        pid: Process, for threads that do not name theirs.
        sample: 1 or 2.
        path: Where the file lies, for citations.

    Raises:
        ValueError: There is something, and none of it is a thread.
    """
    found = []
    for raw, line in objects(data):
        if isinstance(raw.get("frames"), list):
            citation = Citation(path=path, line=line) if path else None
            found.append(_thread(raw, pid, sample, citation))
    if not found and data.strip(b" \t\r\n[],"):
        raise ValueError("no thread of the form that py-spy dump --json writes")
    return tuple(found)


def _thread(
    raw: Mapping[str, Any], pid: int | None, sample: int, citation: Citation | None
) -> ThreadStack:
    frames = tuple(
        Frame(
            function=str(frame.get("name") or "?"),
            file=str(frame.get("filename") or frame.get("short_filename") or ""),
            line=integer(frame.get("line")) or 0,
            module=str(frame.get("module") or ""),
        )
        for frame in raw["frames"]
        if isinstance(frame, Mapping)
    )
    own = integer(raw.get("pid"))
    return ThreadStack(
        pid=own if own is not None else (pid or 0),
        sample=sample,
        frames=frames,
        tid=integer(raw.get("os_thread_id")),
        name=str(raw.get("thread_name") or ""),
        active=raw.get("active") is True,
        owns_gil=raw.get("owns_gil") is True,
        citation=citation,
    )


def threads(stacks: Iterable[ThreadStack]) -> tuple[ThreadMotion, ...]:
    """Return each thread over its samples, in the order of their first appearance.

    A thread is known by its kernel id; where that is missing, by its name and the how-manieth of
    that name it is in its process. One that is in a single sample has ``moved=None``.
    """
    by_thread: dict[tuple[int, object], list[ThreadStack]] = {}
    seen: dict[tuple[int, int, str], int] = {}
    for stack in stacks:
        key: object = stack.tid
        if key is None:
            ordinal = seen.get((stack.pid, stack.sample, stack.name), 0)
            seen[stack.pid, stack.sample, stack.name] = ordinal + 1
            key = (stack.name, ordinal)
        by_thread.setdefault((stack.pid, key), []).append(stack)
    return tuple(_over_samples(samples) for samples in by_thread.values())


def _over_samples(samples: list[ThreadStack]) -> ThreadMotion:
    ordered = sorted(samples, key=lambda stack: stack.sample)
    first, last = ordered[0], ordered[-1]
    moved = None if first.sample == last.sample else first.frames != last.frames
    return ThreadMotion(
        pid=last.pid,
        tid=last.tid,
        name=last.name or first.name,
        frames=last.frames,
        moved=moved,
        idle=is_idle(last),
        rested=any(is_idle(stack) for stack in ordered),
        active=any(stack.active for stack in ordered),
        owns_gil=any(stack.owns_gil for stack in ordered),
        citation=last.citation,
    )


def is_idle(thread: ThreadStack | ThreadMotion) -> bool:
    """Say whether the thread sits in a wait where idle engines sit too."""
    if any(WANTS_GIL.match(frame.name) for frame in thread.frames if frame.module):
        return False
    call, coroutine = _call(thread)
    if call and coroutine:
        return False
    for frame in thread.frames:
        if not frame.module:
            return _waits(frame)
    return not thread.frames or IDLE_NATIVE.match(thread.frames[0].name) is not None


def _waits(frame: Frame) -> bool:
    return any(
        frame.name in functions and file.search(frame.file) for file, functions in IDLE_WAITS
    )


def call_in_loop(thread: ThreadStack | ThreadMotion) -> tuple[Frame, ...]:
    """Return the frames that a loop's thread has above its loop, innermost first.

    Empty for a thread that runs no loop, and for one that is back in its loop.
    """
    return _call(thread)[0]


def call_served(thread: ThreadStack | ThreadMotion) -> tuple[Frame, ...]:
    """Return the frames of the method that a Ray process runs on its main thread, innermost first.

    Empty for one that waits for its next call, and for any other thread. The method may wait for
    good: whoever called it does so, too.
    """
    for i, frame in enumerate(thread.frames):
        if frame.name == "main_loop" and RAY_WORKER.search(frame.file):
            return thread.frames[:i]
    return ()


def _call(thread: ThreadStack | ThreadMotion) -> tuple[tuple[Frame, ...], bool]:
    for i, frame in enumerate(thread.frames):
        for file, function, coroutine in LOOPS:
            if function.match(frame.name) and file.search(frame.file):
                return _above(thread.frames[:i]), coroutine
        if LOOP_THREAD.match(thread.name) and frame.name == "run" and THREAD_RUN.search(frame.file):
            return _above(thread.frames[:i]), True
    return (), False


def _above(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Drop the loop's machinery from both ends; what is left was called."""
    own = [not frame.module and not MACHINERY.search(frame.file) for frame in frames]
    if True not in own:
        return ()
    return frames[: len(own) - own[::-1].index(True)]


def telling_frame(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame that belongs to somebody: not native, not standard library."""
    innermost = None
    for frame in frames:
        if innermost is None:
            innermost = frame
        if not frame.module and not STANDARD_LIBRARY.search(frame.file) and frame.file[:1] != "<":
            return frame
    return innermost


def alias(frame: Frame) -> str:
    """Return the public name of the call that a library's own frame belongs to, or ``""``."""
    for file, function, name in PUBLIC_NAMES:
        if frame.name == function and file.search(frame.file):
            return name
    return ""


def caller(frames: Iterable[Frame], called: Frame) -> Frame | None:
    """Return who called a telling frame: the next one of another package, else the next one.

    The innermost frame is often a library's own and says what is waited for; its caller says why.
    """
    behind = list(frames)
    behind = behind[behind.index(called) + 1 :] if called in behind else []
    own = [
        frame
        for frame in behind
        if not frame.module and not STANDARD_LIBRARY.search(frame.file) and frame.file[:1] != "<"
    ]
    package = called.short_file.split("/")[0]
    others = [frame for frame in own if frame.short_file.split("/")[0] != package]
    return next(iter(others or own), None)


def motion(
    motions: Iterable[ThreadMotion], profile: EngineProfile | None = None
) -> tuple[Motion, str, str]:
    """Return what the threads of one process amount to, the frame that says so, and its thread.

    ``FROZEN`` needs both samples of a loop's thread, equal, in a call and off the CPU; a frozen
    thread outweighs a busy one in the same process, because the busy one may be another loop's.
    A loop that was back in its wait in either sample is not ``BUSY``: it takes its turns.
    Frame and thread are ``""`` with ``WAITING``.
    """
    motions = tuple(motions)
    if held := _held(motions):
        return held
    boring = profile.boring_threads if profile is not None else ()
    busy: tuple[Motion, str, str] | None = None
    for thread in motions:
        if any(pattern.search(thread.name) for pattern in boring):
            continue
        call = call_in_loop(thread)
        if (not call and not thread.moved) or (thread.idle and not thread.moved):
            continue
        if not call and not _runs_loop(thread):
            continue
        frame = telling_frame(call or thread.frames)
        told = str(frame) if frame is not None else ""
        if is_frozen(thread):
            return Motion.FROZEN, told, thread.name
        if busy is None and not thread.rested and (thread.moved or thread.active):
            busy = (Motion.BUSY, told, thread.name)
    return busy or (Motion.WAITING, "", "")


def _held(motions: tuple[ThreadMotion, ...]) -> tuple[Motion, str, str] | None:
    """Return the freeze of a process whose threads wait for a lock of the interpreter itself."""
    wanted = [t for t in motions if any(WANTS_GIL.match(f.name) for f in t.frames if f.module)]
    for thread in motions:
        if thread.moved is not False or thread.active:
            continue
        holds = thread.owns_gil and any(other is not thread for other in wanted)
        if holds or _waits_for_import(thread):
            frame = telling_frame(thread.frames)
            return Motion.FROZEN, str(frame) if frame is not None else "", thread.name
    return None


def _waits_for_import(thread: ThreadMotion) -> bool:
    python = [frame for frame in thread.frames if not frame.module]
    return bool(python) and all(
        IMPORT_LOCK.match(frame.name) and IMPORTLIB.search(frame.file) for frame in python[:2]
    )


def planned(thread: ThreadMotion) -> str:
    """Return what its loop's thread does that blocks the loop as planned, in a word or two."""
    for frame in call_in_loop(thread):
        for file, function, words in PLANNED:
            if function.match(frame.name) and file.search(frame.file):
                return f"{words}: {frame}"
    return ""


def stuck_start(motions: Iterable[ThreadMotion]) -> str:
    """Return the call that the main thread of a process without a loop stood in, in both samples.

    ``""`` if it runs a loop, waits as idle ones do, computes, or moved.
    """
    motions = tuple(motions)
    if any(_runs_loop(thread) for thread in motions):
        return ""
    for thread in motions:
        if thread.name != MAIN_THREAD or thread.moved is not False:
            continue
        if thread.idle or thread.active:
            continue
        frame = telling_frame(thread.frames)
        return str(frame) if frame is not None else ""
    return ""


def is_frozen(thread: ThreadMotion) -> bool:
    """Say whether a thread stood still in both samples, off the CPU or spinning for the GPU."""
    return thread.moved is False and (not thread.active or _spins(call_in_loop(thread)))


def _runs_loop(thread: ThreadMotion) -> bool:
    return bool(LOOP_THREAD.match(thread.name)) or any(
        function.match(frame.name) and file.search(frame.file)
        for frame in thread.frames
        for file, function, _ in LOOPS
    )


def _spins(call: tuple[Frame, ...]) -> bool:
    return any(SPINS.match(frame.name) for frame in call[:6])


def stack_vital(
    stacks: Iterable[ThreadStack], *, at: Instant, profile: EngineProfile | None = None
) -> StackVital:
    """Return what the stacks of one instance's processes amount to.

    The most telling process speaks for the instance: a frozen one before a busy one before one
    that waits; among equals the first.
    """
    by_pid: dict[int, list[ThreadMotion]] = {}
    for thread in threads(stacks):
        by_pid.setdefault(thread.pid, []).append(thread)
    stuck = next(filter(None, map(stuck_start, by_pid.values())), "")
    every = (thread for members in by_pid.values() for thread in members)
    said = StackVital(
        at=at,
        motion=Motion.WAITING,
        stuck=stuck,
        planned=next(filter(None, map(planned, every)), ""),
    )
    order = (Motion.WAITING, Motion.BUSY, Motion.FROZEN)
    for pid, members in by_pid.items():
        what, frame, name = motion(members, profile)
        if order.index(what) > order.index(said.motion):
            said = replace(said, motion=what, frame=frame, pid=pid, thread=name)
    return said
