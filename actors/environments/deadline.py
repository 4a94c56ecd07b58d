"""Foreign code under a deadline.

A thread cannot be killed, but it can be left behind: a daemon thread does not keep the process from
ending. That is enough for start-up checks (the process ends with an error) and, with a count, for
items that hang.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from configs.errors import DeadlineError
from configs.worker import Worker

T = TypeVar("T")


def call_within(timeout_s: float, function: Callable[[], T], *, what: str) -> T:
    """Return what `function` returns, or raise what it raises.

    Raises:
        DeadlineError: It did not end within `timeout_s`; its thread is left behind.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.set_exception(error)

    Worker(call, name=f"deadline-{what}").start().join(timeout_s)
    if not outcome.done():
        raise DeadlineError(
            f"{what} must end within {timeout_s:g} s, got no end; "
            "settings of some generators make them search for ever"
        )
    return outcome.result()
