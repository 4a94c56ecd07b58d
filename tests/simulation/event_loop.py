"""An asyncio event loop in virtual time: when no task can run, its clock jumps to the next timer.

An hour of waiting costs nothing, and nothing outside decides the order of callbacks: same
program, same seed, same order. Each simulated process runs in a context of its own, so the loop can
stop it (its callbacks are parked until it continues) or end it.

Invariants: no real sleep and no thread; time never stands still for `MAX_STEPS_AT_ONCE` callbacks;
a moment at which every task waits for ever is an error, not a hang.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS_AT_ONCE = 1_000_000

OUTSIDE = contextvars.Context()
"""The context of the network and of the faults: no process, so nothing can stop or end it."""


@dataclass(eq=False)
class Process:
    """What can be stopped, continued and killed as a whole."""

    name: str
    is_alive: bool = True
    is_stopped: bool = False
    parked: list[asyncio.Handle] = field(default_factory=list)
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process | None:
    """Whose code is running; None for the world's own."""
    return _process.get()


class NumberedFuture(asyncio.Future[Any]):
    """A future that hashes by its number: a set of them has the same order in every run."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class NumberedTask(asyncio.Task[Any]):
    """As NumberedFuture."""

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        self.number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs simulated processes in virtual time, which begins at 0 seconds."""

    # What `asyncio.BaseEventLoop` keeps; its `_run_once` is replaced below.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._steps_at_once = 0
        self._numbers = itertools.count(1)
        self.failures: list[BaseException] = []
        """What escaped from callbacks and forgotten tasks; a simulation must end without any."""
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(lambda _loop, context: self._note(context))

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(next(self._numbers), loop=self)

    def start(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin the main task of a process."""
        context = contextvars.Context()
        context.run(_process.set, process)
        return self.create_task(work, context=context)

    def stop_process(self, process: Process) -> None:
        """As SIGSTOP: nothing of it runs, while its timers and messages pile up."""
        process.is_stopped = True

    def continue_process(self, process: Process) -> None:
        """As SIGCONT: all that piled up happens now."""
        process.is_stopped = False
        self._ready.extend(process.parked)
        process.parked.clear()

    def kill(self, process: Process) -> None:
        """As SIGKILL; what it does while its tasks unwind reaches nobody (see `network.py`)."""
        process.is_alive = False
        for task in list(process.tasks):
            task.cancel()
        if process.is_stopped:
            self.continue_process(process)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = NumberedTask(next(self._numbers), work, loop=loop, context=context)
        process = _process.get() if context is None else context.get(_process)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(lambda done: process.tasks.pop(done, None))
            if not process.is_alive:
                task.cancel()
        return task

    def _note(self, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))

    def _run_once(self) -> None:
        """Run what is ready; with nothing ready, go to the time of the next timer."""
        self._forget_cancelled()
        timers: list[Any] = self._scheduled
        ready: deque[Any] = self._ready
        if not ready:
            if not timers:
                raise RuntimeError(f"everybody waits for ever at {self._now:.3f} s")
            if timers[0].when() > self._now:
                self._now = timers[0].when()
                self._steps_at_once = 0
        while timers and timers[0].when() <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        self._steps_at_once += len(ready)
        if self._steps_at_once > MAX_STEPS_AT_ONCE:
            raise RuntimeError(f"time stands still at {self._now:.3f} s: {ready[0]}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is not None and process.is_stopped:
                process.parked.append(handle)
            else:
                handle._run()

    def _forget_cancelled(self) -> None:
        """As asyncio's own loop: most timers are deadlines that were met."""
        timers: list[Any] = self._scheduled
        if len(timers) > 100 and self._timer_cancelled_count * 2 > len(timers):
            for timer in timers:
                timer._scheduled = not timer._cancelled
            timers[:] = [timer for timer in timers if not timer._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False

    def _process_events(self, event_list: Any) -> None:
        """There is no file descriptor to watch."""

    def _write_to_self(self) -> None:
        """There is no other thread to wake."""
