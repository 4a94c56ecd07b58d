"""One fault on a live run: its victim, its beginning and end, and the recovery.

    settle -> choose a victim by its state -> follow its tasks -> inject -> (lift) -> recover

Owns the clock of a row. Every wait has a limit, and during each the tasks are watched.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from buffer import operations
from buffer.operations.values import TaskSeen
from configs.errors import StoreError

from .actor_fleet import Actor
from .live_run import POLL_S, LiveRun
from .task_trace import Observer, TaskTrace

OBSERVE_S = 0.6  # of how tasks grow, before a victim is chosen
VICTIM_TASKS = 6  # a victim holds at least so many unfinished episodes with stored tokens
PROGRESS_STEPS = 2  # batches after the fault that show that training goes on
ROLES = ("redis", "broker", "learner", "publisher")


class FaultCase:
    """The steps that a fault is written with, and its measurements."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.trace = TaskTrace()
        self.remark = ""
        self.is_blind = False
        """Redis is about to be away: the tasks are not looked at."""
        self.detected_s: float | None = None
        self.recovered_s: float | None = None
        self._observer = Observer(run.settings.actors.snapshot_s)
        self._sign: Callable[[], bool] | None = None
        self._began = self._measured_from = 0.0
        self._step = 0

    def settle(self) -> None:
        """Wait until the run is whole and at work, and learn how fast its tasks grow."""
        run = self.run
        run.until(
            lambda: all(run.pids(role) for role in ROLES) and run.fleet.all_serve(), "a whole run"
        )
        step = run.step
        run.until(lambda: run.step >= step + PROGRESS_STEPS, "training")
        self._observe_for(OBSERVE_S)

    def choose(self, among: Iterable[Actor] | None = None) -> Actor:
        """Wait until an actor is in the middle of episodes, and return it."""
        candidates = list(self.run.fleet.actors if among is None else among)
        found: list[Actor] = []

        def is_busy() -> bool:
            tasks = self._leased()
            found[:] = [a for a in candidates if len(_begun(tasks, a)) >= VICTIM_TASKS]
            return bool(found)

        self.run.until(is_busy, f"an actor with {VICTIM_TASKS} unfinished episodes")
        return found[0]

    def freeze(self, pid: int) -> None:
        """Stop a process, so that its state can be read before it is killed."""
        os.kill(pid, signal.SIGSTOP)
        stat = Path("/proc") / str(pid) / "stat"
        self.run.until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "TtZ", "a stop")

    def follow(self, actors: Iterable[Actor] | None = None, *, is_orderly: bool = False) -> None:
        """Watch what these actors, or all, hold now; orderly ones store it before they go."""
        names = None if actors is None else {actor.incarnation for actor in actors}
        held = [t for t in self._leased() if names is None or t.incarnation in names]
        self.trace = TaskTrace.of(held, self._observer, time.monotonic(), is_orderly=is_orderly)

    def inject(self, act: Callable[[], None], sign: Callable[[], bool] | None = None) -> None:
        """Begin the fault.

        Args:
            act: Does it.
            sign: True once the run has reacted; None = that a followed task was taken away.
        """
        self._step = max(self._step, self.run.step)
        self._sign = sign or (lambda: self.trace.any_moved)
        self._began = self._measured_from = time.monotonic()
        act()

    def pause(self, seconds: float) -> None:
        """Let the fault last."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            self.run.sleep(POLL_S)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something while watching the tasks."""
        self.run.until(condition, what, look=self._look)

    def lift(self, act: Callable[[], None]) -> None:
        """End the fault; recovery is measured from here."""
        act()
        self.is_blind = False
        self._measured_from = time.monotonic()

    def recover(self) -> None:
        """Wait until all followed work goes on, everything is up and batches are trained again."""
        run = self.run
        self.until(lambda: not self.trace.open_ids, "work of the victims goes on")
        self.until(lambda: all(run.pids(role) for role in ROLES), "all processes")
        self.until(lambda: run.step >= self._step + PROGRESS_STEPS, "training goes on")
        self.recovered_s = time.monotonic() - self._measured_from

    def restarted(self, role: str) -> Callable[[], bool]:
        """Return a sign: a new process has taken the place of the role's present ones."""
        old = set(self.run.pids(role))
        return lambda: bool(set(self.run.pids(role)) - old)

    def _leased(self) -> list[TaskSeen]:
        try:
            tasks = list(self.run.store.run(operations.inspect()).values())
        except StoreError:
            return []
        self._observer.note(tasks, time.monotonic())
        return tasks

    def _observe_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._leased()
            self.run.sleep(POLL_S)

    def _look(self) -> None:
        self.run.fleet.refill()
        if self.is_blind:
            return
        if self.trace.open_ids:
            try:
                seen = self.run.store.run(operations.inspect(self.trace.open_ids))
            except StoreError:
                return
            self.trace.note_open(seen, time.monotonic())
        if self.detected_s is None and self._sign is not None and self._sign():
            self.detected_s = time.monotonic() - self._began


def _begun(tasks: Iterable[TaskSeen], actor: Actor) -> list[TaskSeen]:
    return [t for t in tasks if t.incarnation == actor.incarnation and t.length > 0]
