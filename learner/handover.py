"""Handing weights over while the next batch is claimed and packed, which need no model.

    step k ─▶ begin ──────────── gather, probe, seal, announce ───────────▶ │ wait ─▶ step k + 1
                    └─▶ write down, claim batch k + 1, read and pack it ──▶ │

One thread, on every rank: what ranks say to each other there goes over the group of the model's
mesh, which nobody else uses meanwhile. Between `begin` and `wait` the model belongs to it.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from configs.errors import DeadlineError

DEADLINE_S = 1200.0
"""Twice that of a collective: whatever hangs in there has said so before."""


class Handover:
    """Runs one publication at a time in a thread of its own.

    Example:
        handover = Handover(ranks.device)
        handover.begin(lambda: publisher.publish(model, version))
        batch = claim()
        waited_s = handover.wait()
        handover.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "handover", initializer=lambda: _compute_on(device))
        self._publication: Future[object] | None = None

    def begin(self, publish: Callable[[], object]) -> None:
        """Have this done; the last one must have been waited for."""
        assert self._publication is None, "a publication must be waited for before the next"
        context = contextvars.copy_context()  # whose words our log lines carry
        self._publication = self._thread.submit(context.run, publish)

    def wait(self) -> float:
        """Wait until the model is free again; returns for how long, in seconds.

        Raises:
            DeadlineError: the publication hangs.
            Exception: whatever ended it, such as `LostLineage`.
        """
        publication, self._publication = self._publication, None
        if publication is None:
            return 0.0
        began = time.monotonic()
        try:
            publication.result(DEADLINE_S)
        except TimeoutError as error:
            if publication.done():
                raise
            raise DeadlineError(
                f"weights must be handed over within {DEADLINE_S:.0f} s, and were not; look at "
                "the other ranks' logs"
            ) from error
        return time.monotonic() - began

    def close(self) -> None:
        """Let what has begun end; its outcome no longer matters to anybody."""
        self._thread.shutdown()


def _compute_on(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread begins with the first
