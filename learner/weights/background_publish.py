"""Publishing weights in the background, while the next batch is claimed and packed.

    step k ─▶ start ───────── gather, probe ─────────────▶ free ── digest, seal, announce ─▶ joined
                    └─▶ write down, claim and pack k + 1 ─▶ │ wait ─▶ step k + 1 ───────────▶ start

The upper line is the thread's, the lower one the loop's. Runs on every rank in a thread of its own,
whose collectives use the process group of the model's mesh, which is idle meanwhile. Between
`start` and `wait` the model must not change.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable

import torch

from configs.errors import DeadlineError
from configs.worker import Worker

DEADLINE_S = 1200.0
"""Twice the timeout of a collective: one that hangs has raised its own error by then."""


class BackgroundPublisher:
    """Publishes one version at a time in a thread of its own.

    Example:
        background = BackgroundPublisher(ranks.device)
        background.start(lambda free: publisher.publish(model, version, free=free))
        batch = claim()
        background.wait()
        background.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current: _Publish | None = None

    def start(self, publish: Callable[[Callable[[], None]], object]) -> None:
        """Publish in the background once the previous publish has ended.

        Args:
            publish: Does it; calls its argument when the model may change again.

        Raises:
            DeadlineError: The previous publish hangs.
            Exception: The error that ended the previous publish.
        """
        self.join()
        self._current = _Publish(publish, self._device)

    def wait(self) -> None:
        """Wait until the model may change.

        Raises:
            DeadlineError: The publish has not got so far within `DEADLINE_S`.
            Exception: The error that ended the publish, if it has ended.
        """
        current = self._current
        if current is None:
            return
        if not current.is_free.wait(DEADLINE_S):
            self._current = None  # `close` does not wait for it again
            raise _hangs()
        if current.has_failed:
            self.join()

    def join(self) -> None:
        """Wait until actors can fetch the weights.

        Raises:
            DeadlineError: The publish has not ended within `DEADLINE_S`.
            Exception: The error that ended the publish, such as `LostLineage`.
        """
        current, self._current = self._current, None
        if current is None:
            return
        current.worker.join(DEADLINE_S)
        if current.worker.is_alive:
            raise _hangs()

    def close(self) -> None:
        """Wait for the end of a publish under way, `DEADLINE_S` at most; its error is dropped."""
        with contextlib.suppress(Exception):  # the loop has ended, so an error has no use
            self.join()


class _Publish:
    """One publish under way."""

    def __init__(
        self, publish: Callable[[Callable[[], None]], object], device: torch.device
    ) -> None:
        self._publish = publish
        self._device = device
        self.is_free = threading.Event()
        """The model may change again, or the publish has ended."""
        self.has_failed = False
        context = contextvars.copy_context()  # its log lines carry the caller's fields
        self.worker = Worker(lambda: context.run(self._run), name="publish").start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread uses the first device
            self._publish(self.is_free.set)
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self.is_free.set()


def _hangs() -> DeadlineError:
    return DeadlineError(
        f"weights must be handed over within {DEADLINE_S:.0f} s, got an unfinished publication; "
        "look for the cause in the logs of all ranks, and start the learner again"
    )
