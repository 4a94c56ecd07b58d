"""Restart policy of processes that ended: whether, and after which pause. Pure, with a given clock.

Exit codes of every role: 0 finished or drained (`actors.exit_when_told` for an actor that was told
to), 2 a person has to change something, 3 another learner owns the run, 4 an actor lost its engine,
5 its engine could not start, anything else a crash.

    ended -> RESTART after a growing pause -> running
    ended -> LEAVE   an actor that drained: the run goes on without it
    ended -> FINISH  the learner has trained the last batch
    ended -> FAIL    starting it again cannot help, or has not helped: an engine that does not
                     start once, anything else `max_restarts` times
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

WINDOW_S = 600.0  # older restarts count no longer: a crash an hour is a nuisance, not a loop
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
JITTER = 0.2  # actors that died of one cause do not all come back in one moment
SETTINGS_ERROR = 2
LOST_LINEAGE = 3
ENGINE_DIED = 4
ENGINE_NOT_STARTED = 5


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
        """Processes whose engine did not start the last time."""

    def decide(self, name: str, role: str, code: int, *, is_finished: bool) -> Decision:
        """Decide about the process `name`, which ended with `code`.

        Args:
            name: Unique, such as `actor-0`.
            role: `redis`, `broker`, `learner` or `actor`.
            code: Exit code; minus the signal if one ended it.
            is_finished: The learner has written its summary.
        """
        how = describe_end(code)
        if role == "learner" and code == 0:
            if is_finished:
                return Decision(Action.FINISH, "the last batch is trained")
            return Decision(Action.FAIL, f"{name} was stopped from outside before the last batch")
        if role == "actor" and code in self._drained:
            return Decision(Action.LEAVE, f"{name} has drained")
        if code == SETTINGS_ERROR:
            return Decision(Action.FAIL, f"{name} needs other settings")
        if code == LOST_LINEAGE:
            return Decision(Action.FAIL, f"{name} has lost the run to another learner")
        if code != ENGINE_NOT_STARTED:
            self._not_started.discard(name)
        elif name in self._not_started:
            return Decision(Action.FAIL, f"{name} {how} twice")
        else:
            self._not_started.add(name)
        recent = self._recent(name)
        if len(recent) >= self._max_restarts:
            times = f"{len(recent)} restarts within {WINDOW_S / 60:.0f} minutes"
            return Decision(Action.FAIL, f"{name} {how} again after {times}")
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** len(recent))
        delay_s *= 1.0 + JITTER * self._jitter()
        recent.append(self._clock())
        return Decision(Action.RESTART, f"{name} {how}; it starts again", delay_s)

    def _recent(self, name: str) -> deque[float]:
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
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
