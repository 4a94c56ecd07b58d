"""Supervisor of the processes of a run: started at once, restarted on failure, stopped in order.

Owns the timing; `restart_policy.py` decides whether to restart, `process.py` starts and stops.
`tick` never waits; `stop` waits at most `timeout_s` for each role.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from .process import Supervised
from .restart_policy import Action, RestartPolicy

STOP_ORDER = ("actor", "learner", "broker", "redis")
"""Actors drain while the broker still takes their leases back; the learner checkpoints while Redis
can still commit."""

POLL_S = 0.05
SUPERVISE_EVERY_S = 0.1  # how late a dead process is noticed; a display has its own pace


class StopRequest(KeyboardInterrupt):
    """SIGTERM; treated as Ctrl-C."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise StopRequest

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    is_finished: bool
    reason: str
    name: str = ""
    """The process that ended it."""
    error: str | None = None
    """The last error in the log of that process."""
    code: int = 0
    """Its exit code."""


class Supervisor:
    """Runs processes until the learner has finished or one of them cannot be kept up."""

    def __init__(
        self,
        processes: Sequence[Supervised],
        policy: RestartPolicy,
        *,
        is_finished: Callable[[], bool],
        log: Callable[[str], None],
        last_error: Callable[[str], str | None] = lambda _name: None,
        on_death: Callable[[Supervised], None] = lambda _process: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._processes = list(processes)
        self._policy = policy
        self._is_finished = is_finished
        self._log = log
        self._last_error = last_error
        self._on_death = on_death
        self._clock = clock
        self._sleep = sleep
        self._due: dict[str, float] = {}
        self._left: set[str] = set()

    def start(self) -> None:
        """Start all processes that do not run yet; `tick` starts those that cannot begin at once.

        None waits for another.
        """
        for process in self._processes:
            if process.poll() is not None:
                self._due[process.name] = self._clock()
        self.tick()

    def tick(self) -> Outcome | None:
        """Look at every process once and start again what is due; an outcome ends the run."""
        for process in self._processes:
            if process.name in self._left or process.poll() is None:
                continue
            outcome = self._look_at(process)
            if outcome is not None:
                return outcome
        return None

    @property
    def is_over(self) -> bool:
        """True once every process has ended and is not to be started again."""
        return len(self._left) == len(self._processes)

    def running(self, role: str) -> int:
        """Count the processes of a role that run now."""
        return sum(p.role == role and p.poll() is None for p in self._processes)

    def waiting(self) -> list[str]:
        """Name the processes that are to start and cannot yet."""
        return [p.name for p in self._processes if p.name in self._due and not p.can_start]

    def stop(self, *, timeout_s: float) -> list[str]:
        """Stop role by role; return the names of processes that had to be killed."""
        killed: list[str] = []
        for role in STOP_ORDER:
            members = [process for process in self._processes if process.role == role]
            for process in members:
                process.ask_to_stop()
            killed += self._wait_or_kill(members, timeout_s)
        return killed

    def kill(self) -> None:
        """End everything at once."""
        for process in self._processes:
            process.kill()

    def _look_at(self, process: Supervised) -> Outcome | None:
        """Decide about a process that has ended, once; start it when its pause is over."""
        due = self._due.get(process.name)
        if due is not None:
            if self._clock() >= due and process.can_start:
                del self._due[process.name]
                process.start()
            return None
        self._on_death(process)
        code = process.poll()
        assert code is not None
        decision = self._policy.decide(
            process.name, process.role, code, is_finished=self._is_finished()
        )
        match decision.action:
            case Action.RESTART:
                self._log(f"{decision.reason} in {decision.delay_s:.1f} s{self._why(process)}")
                self._due[process.name] = self._clock() + decision.delay_s
            case Action.LEAVE:
                self._log(decision.reason)
                self._left.add(process.name)
            case Action.FINISH:
                return Outcome(True, decision.reason, process.name)
            case Action.FAIL:
                error = self._last_error(process.name)
                return Outcome(False, decision.reason, process.name, error, code)
        return None

    def _why(self, process: Supervised) -> str:
        error = self._last_error(process.name)
        return f": {error}" if error else ""

    def _wait_or_kill(self, members: Sequence[Supervised], timeout_s: float) -> list[str]:
        deadline = self._clock() + timeout_s
        while any(p.poll() is None for p in members) and self._clock() < deadline:
            self._sleep(POLL_S)
        late = [process for process in members if process.poll() is None]
        for process in late:
            process.kill()
        return [process.name for process in late]
