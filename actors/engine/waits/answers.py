"""Answers of an engine's thread to the event loop, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from configs.errors import DeadlineError, EngineError

T = TypeVar("T")


class Answers:
    """The answers that the loop waits for; the engine's death ends all of them.

    Args:
        on_late: Called when one does not come in time: the engine hangs.
    """

    def __init__(self, on_late: Callable[[], None] = lambda: None) -> None:
        self._on_late = on_late
        self._waited_for: set[Future[Any]] = set()

    async def within(self, answer: Future[T], seconds: float, what: str) -> T:
        """Wait for an answer.

        Raises:
            EngineError: the engine died.
            DeadlineError: it took longer.
        """
        self._waited_for.add(answer)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError as error:
            self._on_late()
            raise DeadlineError(
                f"the engine must {what} within {seconds} s, got no answer; its log says "
                "what it was doing"
            ) from error
        finally:
            self._waited_for.discard(answer)

    def fail(self, error: EngineError) -> None:
        """End every wait."""
        for answer in self._waited_for:
            if not answer.done():
                answer.set_exception(error)
