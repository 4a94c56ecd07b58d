"""Run foreign code under a deadline.

A thread cannot be killed, but it can be left behind: a daemon thread does not keep the process from
ending. That is enough for start-up checks (the process ends with an error) and, with a count, for
items that hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from configs.errors import DeadlineError

T = TypeVar("T")


def call_within(timeout_s: float, function: Callable[[], T], *, what: str) -> T:
    """Return what `function` returns, or raise what it raises.

    Raises:
        DeadlineError: It did not end within `timeout_s`; its thread is left behind.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=call, name=f"deadline-{what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    if not outcome:
        raise DeadlineError(
            f"{what} must end within {timeout_s:g} s, got no end; "
            "settings of some generators make them search for ever"
        )
    return outcome[0]
