"""A save in the background: one at a time, in a thread of its own, waited for with a deadline."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable

from configs.errors import DeadlineError
from configs.worker import Worker
from learner.model.ranks import BACKGROUND_TIMEOUT

DEADLINE_S = 1.1 * BACKGROUND_TIMEOUT.total_seconds()
"""A collective that hangs has raised its own error by then."""


class BackgroundSave:
    """Runs one save after the other."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, save: Callable[[], object]) -> None:
        """Save in the background; the save before has been waited for."""
        assert self._worker is None, "a save is under way, and its copies are being written"
        context = contextvars.copy_context()  # its log lines carry the caller's fields
        self._worker = Worker(lambda: context.run(save), name="checkpoint").start()

    @property
    def is_under_way(self) -> bool:
        """Whether a save has not ended yet."""
        return self._worker is not None and self._worker.is_alive

    def check(self) -> None:
        """Raise what ended the last save, if anything did.

        Raises:
            BaseException: As the save raised it.
        """
        if self._worker is not None:
            self._worker.check()

    def wait(self) -> None:
        """Wait until the last save has ended.

        Raises:
            DeadlineError: It hangs.
            BaseException: As `check`.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.join(DEADLINE_S)
        if worker.is_alive:
            raise DeadlineError(
                f"a checkpoint must be written within {DEADLINE_S:.0f} s, and was not; look at the "
                "disk of the run's folder and at the other ranks' logs"
            )

    def close(self) -> None:
        """Wait for the end of a save under way, whatever it is."""
        with contextlib.suppress(Exception):  # the loop has ended, and with it the use of an error
            self.wait()
