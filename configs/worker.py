"""Threads that cannot die silently: a worker keeps the exception that ended it.

Every thread of ours is a `Worker`. Its owner calls `raise_if_failed` wherever it would otherwise
wait for the thread's product, and `join` when it is done with the thread; both raise what ended it.

Example:
    feeder = Worker(feed, name="feeder").start()
    while not batch_is_complete():
        feeder.raise_if_failed()  # raises what `feed` raised
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import structlog

from .errors import NyalaError

log = structlog.get_logger()


class Worker:
    """One daemon thread that runs one function once."""

    def __init__(self, target: Callable[[], object], *, name: str) -> None:
        self._target = target
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread; at most once."""
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        """True from `start` until the function has returned or raised."""
        return self._thread.is_alive()

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the thread, if there is one.

        Raises:
            BaseException: The exception that the function raised.
        """
        if self._error is not None:
            raise self._error

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread, at most `timeout_s`, then `raise_if_failed`.

        Returns normally when the time is over: `is_alive` tells. Does not wait for a thread that
        was never started, or for the one that calls this.
        """
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self.raise_if_failed()

    def _run(self) -> None:
        try:
            self._target()
        except BaseException as error:  # kept for `raise_if_failed`, whatever it is
            self._error = error
            name = self._thread.name
            if isinstance(error, NyalaError):
                # Its text is written for people; the traceback would only bury it.
                log.error("a thread ended", thread=name, reason=str(error))
            else:
                log.error("a thread died of an unexpected error", thread=name, exc_info=error)
