"""Waits for an engine's thread: answers with a deadline, and a limit on its silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from configs.errors import DeadlineError, EngineError

# --------------------------------------------------------------------------------------------------
# Answers of an engine's thread to the event loop, each with a deadline.

T = TypeVar("T")


def settle(answer: Future[T], value: T) -> None:
    """Set the result of an answer, unless its wait has ended already."""
    with suppress(InvalidStateError):
        answer.set_result(value)


def settle_with_error(answer: Future[Any], error: Exception) -> None:
    """Set the error of an answer, unless its wait has ended already."""
    with suppress(InvalidStateError):
        answer.set_exception(error)


class Answers:
    """The answers that the loop waits for; the engine's death ends all of them.

    Args:
        on_late: Called when an answer does not come in time: the engine hangs.
    """

    def __init__(self, on_late: Callable[[], None] = lambda: None) -> None:
        self._on_late = on_late
        self._waited_for: set[Future[Any]] = set()

    async def within(
        self,
        answer: Future[T],
        seconds: float,
        what: str,
        *,
        moves: Callable[[], int] = lambda: 0,
    ) -> T:
        """Wait for an answer.

        Args:
            answer: What is waited for.
            seconds: Limit, from the last move on.
            what: What the engine must do, as a verb for the error.
            moves: Counts signs of progress; without this, the limit is for the whole wait.

        Raises:
            EngineError: the engine died.
            DeadlineError: it took longer.
        """
        self._waited_for.add(answer)
        waiting, seen = asyncio.wrap_future(answer), -1
        try:
            while (count := moves()) > seen:
                seen = count
                await asyncio.wait({waiting}, timeout=seconds)
                if waiting.done():
                    return waiting.result()
            self._on_late()
            raise DeadlineError(
                f"the engine must {what} within {seconds:g} s, got no answer; look at its log, "
                "and check whether other work keeps this machine busy"
            )
        finally:
            waiting.cancel()
            self._waited_for.discard(answer)

    def fail(self, error: EngineError) -> None:
        """End every wait with this error."""
        for answer in self._waited_for:
            settle_with_error(answer, error)


# --------------------------------------------------------------------------------------------------
# Silence of an engine that has requests: how long it may last. Pure, with an injected clock.
#
# An engine can hang without dying: a collective that waits for a lost GPU, a driver that never
# answers. Only time in which the caller ran counts: an actor that was stopped and woken has not
# seen its engine hang.

LOOK_S = 1.0
"""Pause between two checks of an engine that hands nothing over."""
LONGEST_LOOK_S = 2 * LOOK_S
SILENT_S = 60.0
FIRST_S = 600.0
"""Longest silence before the first token: kernels compile, and a long prompt takes its time."""
SLACK = 8.0
"""Factor on the longest silence so far: steps of a large model on a CPU take minutes."""


class StallWatch:
    """Decides when an engine has been silent for too long."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._silent_s = 0.0
        self._longest_s = 0.0
        self._moves = 0
        self._seen_moves = 0

    def moved(self) -> None:
        """Note that the engine made something; called by its own thread."""
        self._moves += 1

    @property
    def moves(self) -> int:
        """How often the engine made something."""
        return self._moves

    def detect_stall(self, *, num_wanted: int, has_begun: bool) -> bool:
        """Return whether the engine has been silent for too long; called about once a second.

        The limit is `limit_s`, or 600 s before the first token.

        Args:
            num_wanted: Requests that it has not finished.
            has_begun: One of these requests has had a token.
        """
        now, moves = self._clock(), self._moves
        passed_s = min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        if moves != self._seen_moves or not num_wanted:
            self._longest_s = max(self._longest_s, self._silent_s)
            self._seen_moves, self._silent_s = moves, 0.0
            return False
        self._silent_s += passed_s
        return self._silent_s >= (self.limit_s if has_begun else FIRST_S)

    @property
    def limit_s(self) -> float:
        """Longest silence between two tokens, for this engine."""
        return min(FIRST_S, max(SILENT_S, SLACK * self._longest_s))
