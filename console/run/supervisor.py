"""Supervisor of the processes of a run: started at once, restarted on failure, stopped in order.

`nyala up` has one for all processes of a run, `nyala actor` with several actors one for these.

This module decides when to restart a process; `process.py` starts and stops it.
`tick` never waits; `stop` waits at most `timeout_s` for each step of its order.
"""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Self

from configs.machine import FREE_SPACE, full_disk

from .process import STOP_SIGNALS, Supervised

# --------------------------------------------------------------------------------------------------
# Restart policy of processes that ended: whether, after which pause. Pure, with an injected clock.
#
# Exit codes of every role: 0 finished or drained (`actors.exit_when_told` for an actor that was
# told to), 2 the user has to change something, 3 another learner owns the run, 4 an actor lost its
# engine, 5 its engine could not start, anything else a crash.
#
#     ended -> RESTART after a growing pause -> running
#     ended -> LEAVE   an actor, teacher or host of agents has drained: the run goes on without it
#     ended -> FINISH  the learner has trained the last batch
#     ended -> FAIL    a restart cannot help, or has not helped: once for an engine that does not
#                      start, `max_restarts` times for anything else

WINDOW_S = 600.0  # older restarts do not count: a crash an hour is not a crash loop
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
JITTER = 0.2  # actors that died of one cause do not all restart at once
SETTINGS_ERROR = 2
LOST_LINEAGE = 3
ENGINE_DIED = 4
ENGINE_NOT_STARTED = 5
MEMORY_DELAY_S = 10.0  # a process that died on a card holds its memory for seconds


class Action(StrEnum):
    """Consequence of the end of a process."""

    RESTART = "restart"
    LEAVE = "leave"
    FINISH = "finish"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Decision:
    """Action after the end of a process, with its reason and delay."""

    action: Action
    reason: str
    delay_s: float = 0.0


class RestartPolicy:
    """Decides for all processes of a run; remembers the restarts of each.

    Example:
        policy = RestartPolicy(max_restarts=10)
        decision = policy.decide("actor-0", "actor", -9, is_finished=False)
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        exit_when_told: int = 0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._max_restarts = max_restarts
        self._drained = {0, exit_when_told}
        self._clock = clock
        self._jitter = jitter
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._not_started: set[str] = set()
        """Processes whose engine did not start at their last start."""

    def decide(self, name: str, role: str, code: int, *, is_finished: bool) -> Decision:
        """Decide about the process `name`, which ended with `code`; a restart counts at once.

        Args:
            name: Unique, such as `actor-0`.
            role: `redis`, `broker`, `learner`, `actor`, `teacher` or `agents`.
            code: Exit code; minus the signal if one ended it.
            is_finished: The learner has written its summary.
        """
        how = describe_end(code)
        if role == "learner" and code == 0:
            if is_finished:
                return Decision(Action.FINISH, "the last batch is trained")
            return Decision(Action.FAIL, f"{name} was stopped from outside before the last batch")
        if role in {"actor", "teacher", "agents"} and code in self._drained:
            return Decision(Action.LEAVE, f"{name} has drained")
        if code == SETTINGS_ERROR:
            return Decision(Action.FAIL, f"{name} needs something changed first")
        if code == LOST_LINEAGE:
            return Decision(Action.FAIL, f"{name} has lost the run to another learner")
        if code != ENGINE_NOT_STARTED:
            self._not_started.discard(name)
        elif name in self._not_started:
            return Decision(Action.FAIL, f"{name} {how} twice")
        else:
            self._not_started.add(name)
        recent = self._recent_restarts(name)
        if len(recent) >= self._max_restarts:
            times = f"{len(recent)} restarts within {WINDOW_S / 60:.0f} minutes"
            return Decision(Action.FAIL, f"{name} {how} again after {times}")
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** len(recent))
        if code == ENGINE_NOT_STARTED:
            delay_s = max(delay_s, MEMORY_DELAY_S)
        delay_s *= 1.0 + JITTER * self._jitter()
        recent.append(self._clock())
        return Decision(Action.RESTART, f"{name} {how}; it starts again", delay_s)

    def _recent_restarts(self, name: str) -> deque[float]:
        restarts = self._restarts[name]
        while restarts and restarts[0] <= self._clock() - WINDOW_S:
            restarts.popleft()
        return restarts


def describe_end(code: int) -> str:
    """Describe the end of a process by its exit code."""
    if code == ENGINE_DIED:
        return "lost its engine"
    if code == ENGINE_NOT_STARTED:
        return "could not start its engine"
    if code >= 0:
        return f"ended with code {code}"
    # The kernel gives no reason when it kills a process for lack of memory.
    return f"was killed by signal {-code}" + " (out of memory?)" * (code == -signal.SIGKILL)


NO_ROOM = {os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)}


def cause_of_end(error: str | None, folder: Path) -> str | None:
    """Return why a process ended: the error in its log, or a full disk, which prevents logging.

    Args:
        error: The newest error in its log; None = there is none.
        folder: Folder of the run.
    """
    full = full_disk(folder)
    if full is not None:
        return f"{full} ({error})" if error else full
    if error is not None and any(reason in error for reason in NO_ROOM):
        return f"{error}; {FREE_SPACE.format(folder=folder)}"
    return error


# --------------------------------------------------------------------------------------------------
# Supervisor of the processes of a run: started at once, restarted on failure, stopped in order.

STOP_ORDER = (("actor", "teacher", "agents", "learner"), ("broker",), ("redis",))
"""Actors drain while the broker can still take their leases back, and hosts of agents while it can
take the ends of conversations. The learner saves while Redis can still commit."""

POLL_S = 0.05
SAVE_S = 8.0
"""Time for a learner that is saving when the user presses Ctrl-C again; a third time ends it."""
SUPERVISE_EVERY_S = 0.1  # at most how late the end of a process is noticed


class StopRequest(KeyboardInterrupt):
    """Raised by the first Ctrl-C, SIGTERM or SIGHUP."""


class StopSignals:
    """Handlers of Ctrl-C, SIGTERM and the end of the terminal while a `with` statement runs.

    The first signal raises `StopRequest`. Later signals do not interrupt the stop: Ctrl-C is
    counted, for `Supervisor.stop`, and any other is ignored, as a shutdown of the machine, a
    scheduler and a shell each send several signals for one request.
    """

    def __init__(self) -> None:
        self.times_urged = 0
        """Number of times that Ctrl-C was pressed after the first request."""
        self._is_asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Set the handlers; signals that this process ignores (under `nohup`, say) stay ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Raise `StopRequest` for the first signal; count later Ctrl-C."""
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._is_asked:
            self._is_asked = True
            raise StopRequest
        self.times_urged += number == signal.SIGINT


def _leave_terminal() -> None:
    """Send output for a closed terminal to `/dev/null`: an error would interrupt the stop."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How and why a run ended."""

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
        """Start all processes that do not run yet; `tick` starts those that cannot start at once.

        No process waits for another.
        """
        for process in self._processes:
            if process.poll() is not None:
                self._due[process.name] = self._clock()
        self.tick()

    def tick(self) -> RunOutcome | None:
        """Look at every process once, and restart those that are due.

        Returns:
            How the run has ended; None = it goes on. Other processes still run: call `stop`.
        """
        for process in self._processes:
            if process.name in self._left or process.poll() is None:
                continue
            outcome = self._look_at(process)
            if outcome is not None:
                return outcome
        return None

    @property
    def is_over(self) -> bool:
        """True once every process has ended and none is to be restarted."""
        return len(self._left) == len(self._processes)

    def running(self, role: str) -> int:
        """Count the processes of a role that run now."""
        return sum(p.role == role and p.poll() is None for p in self._processes)

    def waiting(self) -> list[str]:
        """Return the names of processes that are due and cannot start yet."""
        return [p.name for p in self._processes if p.name in self._due and not p.can_start]

    def stop(self, *, timeout_s: float, times_urged: Callable[[], int] = lambda: 0) -> list[str]:
        """Stop in order; return the names of processes that had to be killed.

        Args:
            timeout_s: Time limit for each step of the order.
            times_urged: How often the user has asked for a faster stop. Once: all are killed but a
                learner, which has `SAVE_S` to save. More often: all are killed.
        """
        killed: list[str] = []
        for roles in STOP_ORDER:
            members = [process for process in self._processes if process.role in roles]
            for process in members:
                process.ask_to_stop()
            killed += self._wait_or_kill(members, timeout_s, times_urged)
        return killed

    def _look_at(self, process: Supervised) -> RunOutcome | None:
        """Decide once about a process that has ended; start it when its pause is over."""
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
                self._log(
                    f"{decision.reason} in {decision.delay_s:.1f} s{self._logged_error(process)}"
                )
                self._due[process.name] = self._clock() + decision.delay_s
            case Action.LEAVE:
                self._log(decision.reason)
                self._left.add(process.name)
            case Action.FINISH:
                return RunOutcome(True, decision.reason, process.name)
            case Action.FAIL:
                error = self._last_error(process.name)
                return RunOutcome(False, decision.reason, process.name, error, code)
        return None

    def _logged_error(self, process: Supervised) -> str:
        error = self._last_error(process.name)
        return f": {error}" if error else ""

    def _wait_or_kill(
        self, members: Sequence[Supervised], timeout_s: float, times_urged: Callable[[], int]
    ) -> list[str]:
        deadline, urged_at = self._clock() + timeout_s, math.inf
        killed: list[str] = []
        while running := [process for process in members if process.poll() is None]:
            urged = times_urged()
            if urged:
                urged_at = min(urged_at, self._clock())
            for process in running:
                may_save = process.role == "learner" and urged == 1
                end = urged_at + SAVE_S if may_save else -math.inf if urged else deadline
                if self._clock() >= min(deadline, end):
                    process.kill()
                    killed.append(process.name)
            self._sleep(POLL_S)
        return killed
