"""Handing weights over while the next batch is claimed and packed, which need no model.

    step k ─▶ begin ───────── gather, probe ─────────────▶ free ── digest, seal, announce ─▶ settled
                    └─▶ write down, claim and pack k + 1 ─▶ │ wait ─▶ step k + 1 ───────────▶ begin

In a thread, on every rank: what ranks say to each other there goes over the group of the model's
mesh, which nobody else uses meanwhile. Between `begin` and `wait` the model belongs to it.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from configs.errors import DeadlineError

SWITCH_S = 5e-5
"""How soon the interpreter passes from claiming to publishing, which asks for it anew after each of
some five hundred short operations: at Python's 5 ms the learner waits three times as long."""
DEADLINE_S = 1200.0
"""Twice that of a collective: whatever hangs in there has said so before."""


class Handover:
    """Runs one publication at a time in a thread of its own.

    Example:
        handover = Handover(ranks.device)
        handover.begin(lambda free: publisher.publish(model, version, free=free))
        batch = claim()
        waited_s = handover.wait()
        handover.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._publication: _Publication | None = None
        self._waited_s = 0.0

    def begin(self, publish: Callable[[Callable[[], None]], object]) -> None:
        """Have this done, when the last one is; it calls its argument when the model is free.

        Raises:
            Exception: as `settle`.
        """
        began = time.monotonic()
        self.settle()
        self._waited_s += time.monotonic() - began
        self._publication = publication = _Publication()
        context = contextvars.copy_context()  # whose words our log lines carry
        # A daemon: one that hangs must not keep a process from ending that has given it up.
        threading.Thread(
            target=context.run,
            args=(self._carry_out, publish, publication),
            name="handover",
            daemon=True,
        ).start()

    def wait(self) -> float:
        """Wait until the model is free again; returns how long this and `begin` took, in seconds.

        Raises:
            DeadlineError: the publication hangs.
            Exception: as `settle`, if it has ended.
        """
        publication, began = self._publication, time.monotonic()
        if publication is not None:
            if not publication.is_free.wait(DEADLINE_S):
                self._publication = None  # nor is it waited for again
            _in_time(publication.is_free.is_set())
            if publication.end.done():
                self.settle()
        waited_s, self._waited_s = self._waited_s + time.monotonic() - began, 0.0
        return waited_s

    def settle(self) -> None:
        """Wait until the weights can be had.

        Raises:
            DeadlineError: the publication hangs.
            Exception: whatever ended it, such as `LostLineage`.
        """
        publication, self._publication = self._publication, None
        if publication is None:
            return
        _in_time(bool(wait([publication.end], DEADLINE_S).done))
        publication.end.result()

    def close(self) -> None:
        """Let what has begun end; its outcome no longer matters to anybody."""
        if self._publication is not None:
            wait([self._publication.end], DEADLINE_S)

    def _carry_out(
        self, publish: Callable[[Callable[[], None]], object], publication: _Publication
    ) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread begins with the first
            publish(publication.free)
        except BaseException as error:  # noqa: BLE001 - the main thread's to raise
            publication.end.set_exception(error)
        else:
            publication.end.set_result(None)
        finally:
            publication.free()


class _Publication:
    """One that is under way; until the model is free, its thread is served sooner."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.end: Future[None] = Future()
        self._usual_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)

    def free(self) -> None:
        """Say that the model may change; again does nothing."""
        if not self.is_free.is_set():
            sys.setswitchinterval(self._usual_s)
            self.is_free.set()


def _in_time(is_done: bool) -> None:
    if not is_done:
        raise DeadlineError(
            f"weights must be handed over within {DEADLINE_S:.0f} s, and were not; look at the "
            "other ranks' logs"
        )
