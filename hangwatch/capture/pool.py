"""A few workers, one step each at a time, every step with a deadline and exactly one evidence.

Theory of operation. Tools of a capture cost CPU, so more workers than cores only make each
target's turn longer: steps that compute run in ``width`` workers, at most four. Steps that wait
for others (a server that does not answer, a driver) run beside them in workers of their own, so
that they delay nothing. Workers start when they are first needed and are used again: for the
second sample of a process best the one that took the first, because it knows the process by then.

A step's time counts from when its worker was ready for it. At its deadline the worker is killed
with its group and the groups of its children, and another takes its place; what the step had
written is kept. A worker that does not end even then is in D state: it is abandoned, counted, and
never waited for. A collector that keeps failing is left alone for a while: see ``core.breaker``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hangwatch.capture.rooms import Rooms
from hangwatch.core.breaker import REST, Breaker
from hangwatch.core.codec import CodecError, from_plain, to_plain
from hangwatch.model.capture import Evidence, Failure, FailureKind, Means, Phase, Settled, Step
from hangwatch.model.identity import ProcessId
from hangwatch.model.time import Clock, Instant
from hangwatch.system import procfs
from hangwatch.system.attaching import explained, settle_left
from hangwatch.system.channel import ChannelClosedError
from hangwatch.system.spawn import Child, message_kind

WORKER: Final = "hangwatch.capture.worker"

MAX_WIDTH: Final = 4

WAITING_WIDTH: Final = 3
"""Servers, the GPU driver's library and a program that asks the driver too may all be mute."""

START_TIMEOUT: Final = 20.0
"""Seconds for a worker to start: an interpreter takes 0.05 s, a machine under load far more."""

STOP_GRACE: Final = 2.0
"""Seconds that running steps are left when the capture is asked to end."""

LOOK_INTERVAL: Final = 0.2
"""Seconds between two looks at deadlines, and at whether we are asked to stop."""


def width() -> int:
    """Return how many steps may compute at once here."""
    return min(MAX_WIDTH, len(os.sched_getaffinity(0)))


@dataclass(slots=True, eq=False)
class _Worker:
    child: Child
    waits: bool
    started_at: Instant
    ready: bool = False
    job: _Job | None = None
    did: set[tuple[str, ProcessId]] = field(default_factory=set)
    """Collectors that ran in it, and of which processes."""


@dataclass(slots=True)
class _Job:
    step: Step
    phase: Phase
    room: Path
    given_at: Instant
    started_at: Instant | None = None
    """When the worker was ready for it."""

    def ends_at(self) -> float:
        if self.started_at is None:
            return self.given_at + START_TIMEOUT
        return self.started_at + self.step.timeout


@dataclass(slots=True)
class _Waiting:
    step: Step
    phase: Phase
    not_before: float


class Pool:
    """The workers of one capture; close it when done."""

    def __init__(
        self,
        rooms: Rooms,
        clock: Clock,
        *,
        until: float,
        tell: Callable[[Step, Evidence], None] = lambda _step, _evidence: None,
        stopped: Callable[[], bool] = lambda: False,
        last: Callable[[Step], bool] = lambda _step: False,
        held: Callable[[Step], bool] = lambda _step: False,
        touching: Callable[[Step, Means], None] = lambda _step, _means: None,
        workers: int = 0,
    ) -> None:
        """Start no worker yet.

        Args:
            rooms: Where steps write.
            clock: The time.
            until: Instant at which whatever has not ended is given up.
            tell: Called with each step that ended.
            stopped: Whether we are asked to end early; asked several times a second.
            last: Steps that yield to all others; asked again each time one is chosen.
            held: Steps that wait for what another one will say; asked again likewise.
            touching: Called with each step that touches its target, right before it does.
            workers: How many steps may compute at once; 0 for as many as ``width`` says.
        """
        self._rooms = rooms
        self._clock = clock
        self._until = until
        self._tell = tell
        self._stopped = stopped
        self._last = last
        self._held = held
        self._touching = touching
        self._stopping = False
        self._width = workers or width()
        self._workers: list[_Worker] = []
        self._dying: list[Child] = []
        self._pending: list[_Waiting] = []
        self._evidence: dict[str, Evidence] = {}
        self._breakers: dict[str, Breaker] = {}

    @property
    def abandoned(self) -> int:
        """Workers that were killed and have not ended."""
        self._dying = [child for child in self._dying if child.alive]
        return len(self._dying)

    def warm(self) -> None:
        """Start the computing workers now, before there is anything to do."""
        while self._free_place(waits=False) and self._start(waits=False) is not None:
            pass

    def submit(self, steps: Iterable[Step], *, phase: Phase, not_before: float = 0.0) -> None:
        """Take *steps* in, in order of preference; ``wait`` is what runs them.

        Args:
            steps: What to do; their ids are new to this pool.
            phase: Where the evidence stands in the story.
            not_before: Instant before which none of them starts.
        """
        self._pending += [_Waiting(step, phase, not_before) for step in steps]

    def wait(self, steps: Iterable[Step]) -> tuple[Evidence, ...]:
        """Run what was submitted until all of *steps* have ended; others go on meanwhile.

        Returns:
            One evidence for each of *steps*, in their order.
        """
        steps = tuple(steps)
        while any(step.id not in self._evidence for step in steps):
            if self._stopped() and not self._stopping:
                self._stopping = True
                self._until = min(self._until, self._clock.now() + STOP_GRACE)
            if self._stopping or self._clock.now() >= self._until:
                self._give_up_pending()
            else:
                self._give_out()
            self._listen()
            self._enforce()
        return tuple(self._evidence[step.id] for step in steps)

    def close(self) -> None:
        """End every worker; one in D state is abandoned."""
        for worker in self._workers:
            self._end(worker)
        self._workers.clear()
        deadline = self._clock.now() + 1.0
        while self.abandoned and self._clock.now() < deadline:
            self._clock.sleep(0.01)

    # Giving out

    def _give_out(self) -> None:
        for waits in (True, False):
            while (waiting := self._next(waits=waits)) is not None:
                failure = self._breaker(waiting.step)
                worker = None if failure is not None else self._idle(waiting.step)
                if worker is None and failure is None:
                    if any(other.waits == waits for other in self._workers):
                        break
                    failure = _NO_WORKER
                self._pending.remove(waiting)
                if worker is None:
                    self._record(waiting.step, waiting.phase, failure=failure)
                else:
                    self._give(worker, waiting)

    def _next(self, *, waits: bool) -> _Waiting | None:
        now = self._clock.now()
        # A server that has not answered yet is not asked again.
        unanswered = {
            worker.job.step.collector for worker in self._workers if worker.job and worker.waits
        }
        mine = [
            waiting
            for waiting in self._pending
            if waiting.step.waits == waits
            and waiting.not_before <= now
            and waiting.step.collector not in unanswered
            and not self._held(waiting.step)
        ]
        first = next((waiting for waiting in mine if not self._last(waiting.step)), None)
        return first if first is not None or not mine else mine[0]

    def _breaker(self, step: Step) -> Failure | None:
        breaker = self._breakers.get(step.collector, Breaker())
        if not breaker.is_open(self._clock.now()):
            return None
        times = f"{breaker.failures} times in a row ({breaker.kind})"
        return Failure(
            kind=FailureKind.BREAKER_OPEN,
            message=f"{step.collector} failed {times}; it is left alone for {REST:g} s",
        )

    def _idle(self, step: Step) -> _Worker | None:
        """Return a worker that is free: one that knows the process, if there is one."""
        free = [w for w in self._workers if w.waits == step.waits and w.job is None]
        if free:
            return next((worker for worker in free if _known(step) & worker.did), free[0])
        return self._start(waits=step.waits) if self._free_place(waits=step.waits) else None

    def _free_place(self, *, waits: bool) -> bool:
        limit = WAITING_WIDTH if waits else self._width
        return sum(worker.waits == waits for worker in self._workers) < limit

    def _start(self, *, waits: bool) -> _Worker | None:
        try:
            child = Child(WORKER, name="capture worker")
        except OSError:  # no memory, no processes left
            return None
        worker = _Worker(child=child, waits=waits, started_at=self._clock.now())
        self._workers.append(worker)
        return worker

    def _give(self, worker: _Worker, waiting: _Waiting) -> None:
        now = self._clock.now()
        step = waiting.step
        room = self._rooms.open()
        worker.did |= _known(step)
        self._breakers[step.collector] = self._breakers.get(step.collector, Breaker()).tried(now)
        worker.job = _Job(
            step=step,
            phase=waiting.phase,
            room=room,
            given_at=now,
            started_at=now if worker.ready else None,
        )
        message = {
            "kind": "step",
            "step": to_plain(step),
            "room": str(room),
            "earlier": str(self._rooms.place(step.folder)),
            "note": str(self._rooms.note(room)),
        }
        try:
            worker.child.channel.send(message)
        except ChannelClosedError:
            self._lost(worker)

    # Listening

    def _listen(self) -> None:
        by_fd = {worker.child.channel.fileno(): worker for worker in self._workers}
        writers = [w.child.channel.write_fd for w in self._workers if w.child.channel.pending]
        now = self._clock.now()
        ends = [worker.job.ends_at() for worker in self._workers if worker.job]
        begins = [waiting.not_before for waiting in self._pending if waiting.not_before > now]
        timeout = min(LOOK_INTERVAL, *(at - now for at in (self._until, *ends, *begins)))
        ready, _, _ = select.select(list(by_fd), writers, [], max(0.0, timeout))
        for worker in tuple(self._workers):
            if worker.child.channel.pending:
                with contextlib.suppress(ChannelClosedError):
                    worker.child.channel.flush()
        for fd in ready:
            worker = by_fd[fd]
            try:
                for message in worker.child.channel.receive():
                    self._hear(worker, message)
            except ChannelClosedError:
                self._lost(worker)

    def _hear(self, worker: _Worker, message: dict[str, Any]) -> None:
        now = self._clock.now()
        match message_kind(message):
            case "ready":
                worker.ready = True
                if worker.job is not None:
                    worker.job.started_at = now
            case "touching" if worker.job is not None and worker.job.step.means is not None:
                self._touching(worker.job.step, worker.job.step.means)
            case "done" if worker.job is not None and message.get("step") == worker.job.step.id:
                job, worker.job = worker.job, None
                settled: Settled | None
                try:
                    failure: Failure | None = from_plain(Failure | None, message.get("failure"))
                    complete = frozenset(map(str, message.get("complete", ())))
                    pause_ms = float(message.get("pause_ms", 0.0))
                    settled = from_plain(Settled | None, message.get("settled"))
                except (CodecError, TypeError, ValueError):
                    failure, complete, pause_ms, settled = _DIED, frozenset(), 0.0, None
                self._record(
                    job.step,
                    job.phase,
                    job=job,
                    failure=failure,
                    complete=complete,
                    pause_ms=pause_ms,
                    settled=settled,
                )
            case "crash":
                crashed, worker.job = worker.job, None
                if crashed is not None:
                    trace = str(message.get("traceback", ""))[-4000:]
                    failure = Failure(kind=FailureKind.CRASHED, message=trace)
                    self._record_broken(crashed, failure)
            case _:
                pass

    def _lost(self, worker: _Worker) -> None:
        """A worker ended, or wrote nonsense: replace it."""
        self._drop(worker)
        job, worker.job = worker.job, None
        if job is not None:
            self._record_broken(job, _DIED)

    # Deadlines

    def _enforce(self) -> None:
        now = self._clock.now()
        for worker in tuple(self._workers):
            job = worker.job
            if job is None:
                continue
            if now >= job.ends_at():
                failure = _timed_out(job)
            elif now >= self._until:
                failure = _STOPPED if self._stopping else _DEADLINE
            else:
                continue
            self._drop(worker)
            worker.job = None
            self._record_broken(job, failure)

    def _give_up_pending(self) -> None:
        failure = _STOPPED if self._stopping else _DEADLINE
        pending, self._pending = self._pending, []
        for waiting in pending:
            self._record(waiting.step, waiting.phase, failure=failure)

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._end(worker)

    def _end(self, worker: _Worker) -> None:
        # In this order: a worker whose channel is closed ends, and what it started is not to be
        # found any more.
        self._kill(worker.child)
        worker.child.channel.close()

    def _kill(self, child: Child) -> None:
        # Tools, and what watches them, run in sessions of their own; the kernel kills tools when
        # their parent dies, but not what they started. Each is stopped before its children are
        # looked up: it must start and reap none of them while we signal their numbers.
        child.halt()
        for pid in _descendants(child.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        child.kill()
        self._dying.append(child)

    # Recording

    def _record_broken(self, job: _Job, failure: Failure) -> None:
        """Record a step whose worker ended in the middle; its target must not stay stopped."""
        settled = settle_left(self._rooms.note(job.room)) if job.step.attaches else None
        failure = explained(failure, settled)
        self._record(job.step, job.phase, job=job, failure=failure, settled=settled)

    def _record(
        self,
        step: Step,
        phase: Phase,
        *,
        failure: Failure | None,
        job: _Job | None = None,
        complete: frozenset[str] = frozenset(),
        pause_ms: float = 0.0,
        settled: Settled | None = None,
    ) -> None:
        began = None
        if job is not None:
            began = job.started_at if job.started_at is not None else job.given_at
        evidence = Evidence(
            step=step.id,
            collector=step.collector,
            sample=step.sample,
            phase=phase,
            target=step.target.process if step.target is not None else None,
            started_at=began,
            elapsed=self._clock.now() - began if began is not None else 0.0,
            artifacts=self._rooms.keep(step, job.room, complete) if job is not None else (),
            failure=failure,
            pause_ms=pause_ms,
            settled=settled,
        )
        if job is not None:
            breaker = self._breakers.get(step.collector, Breaker())
            self._breakers[step.collector] = breaker.after(failure, self._clock.now())
        if settled is Settled.CONTINUED:
            self._touching(step, Means.SIGCONT)
        self._evidence[step.id] = evidence
        self._tell(step, evidence)


_NO_WORKER: Final = Failure(
    kind=FailureKind.WORKER_DIED,
    message="no worker could be started",
    hint="raise the limits of memory and processes of hangwatch",
)
_DIED: Final = Failure(
    kind=FailureKind.WORKER_DIED, message="the worker that ran it ended in the middle"
)
_DEADLINE: Final = Failure(
    kind=FailureKind.DEADLINE, message="the capture's time was up before it was done"
)
_STOPPED: Final = Failure(
    kind=FailureKind.DEADLINE, message="the capture was asked to end before it was done"
)


def _descendants(pid: int) -> list[int]:
    """Return the children of a process and theirs, each of them stopped."""
    found: list[int] = []
    for child in procfs.children(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGSTOP)
        found += [*_descendants(child), child]
    return found


def _known(step: Step) -> set[tuple[str, ProcessId]]:
    return {(step.collector, step.target.process)} if step.target is not None else set()


def _timed_out(job: _Job) -> Failure:
    if job.started_at is None:
        return Failure(
            kind=FailureKind.WORKER_DIED,
            message=f"its worker did not start within {START_TIMEOUT:g} s",
        )
    return Failure(
        kind=FailureKind.TIMED_OUT, message=f"it did not end within {job.step.timeout:g} s"
    )
